"""Looks into training processes: requests for their stacks and profiles, and their delivery."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from loom.control.profiles import MAX_FOLDED, Profile, ProfileRequest
from loom.control.reports import Stack, StackRequest
from loom.errors import LimitReached, LoomError, ProfileFailed
from loom.weaver.commit_output import Outbox
from loom.weaver.persistent_state import Registry
from loom.weaver.replicas import Replica
from loom.weaver.views import ProfileInfo

_LONGEST = 1 << 16  # characters of a stack that are kept


class _WantedStack(NamedTuple):
    replica: Replica
    event: int | None
    """The event that the stack is added to."""
    tell: Callable[[str], None] | None


class Stacks:
    """The stacks that were requested and have not come yet."""

    def __init__(self, known: Registry, outbox: Outbox) -> None:
        self._known = known
        self._outbox = outbox
        self._wanted: dict[str, _WantedStack] = {}

    def __len__(self) -> int:
        return len(self._wanted)

    def want(self, replica: Replica, event: int | None = None, tell: Callable[[str], None] | None = None) -> str:
        """Request the stack of a replica's process; return the id for `take`."""
        id = uuid.uuid4().hex
        self._wanted[id] = _WantedStack(replica, event, tell)
        self._outbox.output.stacks.append((id, replica))
        self._outbox.urgent = True
        return id

    def ask_threadlet(self, id: str) -> bool:
        """Ask the threadlet itself for a stack; return False if the threadlet is not connected."""
        wanted = self._wanted.get(id)
        if wanted is None or wanted.replica.link is None:
            return False
        self._outbox.send(wanted.replica, StackRequest(id))
        self._outbox.urgent = True
        return True

    def take(self, id: str, text: str) -> None:
        """Take a stack, add it to its event and pass it to its caller."""
        wanted = self._wanted.pop(id, None)
        if wanted is None:
            return
        if wanted.event is not None:
            self._known.events.amend(wanted.event, stack=text[:_LONGEST])
            self._outbox.urgent = True
        if wanted.tell is not None:
            wanted.tell(text[:_LONGEST])

    def take_from(self, replica: Replica, stack: Stack, now: float) -> None:
        """Take a stack from a threadlet, unless it was not requested of this replica."""
        if stack.id in self._wanted and self._wanted[stack.id].replica is replica:
            self.take(stack.id, stack.text)


MAX_AT_ONCE = 2
"""Profiles of one user's replicas at a time."""

Tell = Callable[[ProfileInfo | LoomError], object]


@dataclass
class _Wanted:
    replica: Replica
    seconds: float
    tell: Tell
    over: Callable[[], object] | None = None
    """Called once the caller has an answer."""


class Profiles:
    """The profiles that were requested and have not come yet: one of each replica at a time."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._wanted: dict[str, _Wanted] = {}

    def want(self, replica: Replica, seconds: float, tell: Tell) -> str:
        """Request the profile of a replica's process; return the id for `take`.

        Raises:
            ProfileFailed: the replica has no connection, or a profile of it is being taken.
            LimitReached: as many profiles of the user's are being taken as may be.
        """
        if replica.link is None:
            raise ProfileFailed(f"replica {replica.id!r} is {replica.state.value} and not connected")
        if any(one.replica is replica for one in self._wanted.values()):
            raise ProfileFailed(f"a profile of replica {replica.id!r} is being taken: ask again when it is there")
        if len(self._wanted) >= MAX_AT_ONCE:
            raise LimitReached(f"{MAX_AT_ONCE} profiles are being taken already: ask again when one is there")
        id = uuid.uuid4().hex
        self._wanted[id] = _Wanted(replica, seconds, tell)
        self._outbox.output.profiles.append((id, replica, seconds))
        self._outbox.urgent = True
        return id

    def ask_threadlet(self, id: str, over: Callable[[], object]) -> bool:
        """Ask the threadlet itself for a profile; return False if nobody waits for it any more.

        ``over`` is called once the caller has an answer.
        """
        wanted = self._wanted.get(id)
        if wanted is None:
            return False
        wanted.over = over
        self._outbox.send(wanted.replica, ProfileRequest(id, wanted.seconds))
        self._outbox.urgent = True
        return True

    def take(self, id: str, folded: str, samples: int, left_out: int, sampler: str) -> None:
        """Take a profile and pass it to its caller, unless that has an answer already."""
        wanted = self._wanted.get(id)
        if wanted is not None:
            self._tell(id, ProfileInfo(wanted.replica.id, wanted.seconds, samples, left_out, sampler, folded))

    def fail(self, id: str, error: LoomError) -> None:
        """Tell the caller why there is no profile, unless that has an answer already."""
        if id in self._wanted:
            self._tell(id, error)

    def _tell(self, id: str, answer: ProfileInfo | LoomError) -> None:
        wanted = self._wanted.pop(id)
        wanted.tell(answer)
        if wanted.over is not None:
            wanted.over()

    def take_from(self, replica: Replica, profile: Profile, now: float) -> None:
        """Take a profile from a threadlet, unless it was not requested of this replica."""
        wanted = self._wanted.get(profile.id)
        if wanted is None or wanted.replica is not replica:
            return
        if profile.error:
            self.fail(profile.id, ProfileFailed(f"replica {replica.id!r}: {profile.error:.500}"))
        else:
            folded = profile.folded[: profile.folded.rfind("\n", 0, MAX_FOLDED) + 1]
            self.take(profile.id, folded, profile.samples, profile.left_out, "threadlet")

    def lost(self, replica: Replica) -> None:
        """Note that a replica's connection is lost: what its threadlet was asked for does not come."""
        for id in [id for id, one in self._wanted.items() if one.replica is replica and one.over is not None]:
            self.fail(id, ProfileFailed(f"the process of replica {replica.id!r} went away during the profile"))
