"""Cohorts: the replicas that are the ranks of one job, and take commands together.

A replica says which cohort it is in, at which rank (`loom.control.handshake.CohortPlace`). The weaver sends a
cohort one command at a time, and only while all of its ranks are connected. The ranks themselves decide at which
step they apply it (`loom.threadlet.cohort`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loom.control.commands import COHORT_COMMANDS, Acknowledgement, Command, CommandKind
from loom.control.handshake import ThreadletHello
from loom.weaver.commands import GivenCommand, not_offered
from loom.weaver.persistent_state import Registry
from loom.weaver.replicas import KeptValues, Replica
from loom.weaver.states import LIVING, ReplicaState
from loom.weaver.views import few


def cohort_of(replica: Replica) -> str | None:
    """Return the id of a replica's cohort; None if it takes commands by itself."""
    return None if replica.cohort is None else str(replica.cohort["id"])


class Cohorts:
    """The cohorts of the known replicas."""

    def __init__(self, known: Registry) -> None:
        self._known = known

    def ranks(self, cohort: str) -> dict[int, Replica]:
        """Return the replicas of a cohort by rank, also those that have ended."""
        there = [one for one in self._known.replicas.values() if cohort_of(one) == cohort]
        found: dict[int, Replica] = {}
        for one in sorted(there, key=lambda one: one.state in LIVING):
            assert one.cohort is not None
            found[one.cohort["rank"]] = one
        return dict(sorted(found.items()))

    def sort(
        self, kind: CommandKind, there: Sequence[Replica], now: float
    ) -> tuple[dict[str, str], dict[str, Acknowledgement]]:
        """Return the cohort of each replica that a command goes to together with others, and refusals by replica.

        A cohort is refused if the command names only some of its ranks, or if not all of them are connected, unless
        they may be at any moment (`waits`). A replica of the same group that is in no cohort may be the missing
        rank: what happens to the cohort happens to it, too.

        The ranks that wait in a pause in which another one has died are in no exchange with each other: a resume
        or a stop goes to each by itself.
        """
        cohorts: dict[str, str] = {}
        refused: dict[str, Acknowledgement] = {}
        if kind not in COHORT_COMMANDS:
            return cohorts, refused
        named: dict[str, list[Replica]] = {}
        for replica in there:
            if replica.state in LIVING and (cohort := cohort_of(replica)) is not None:
                named.setdefault(cohort, []).append(replica)
        for cohort, replicas in named.items():
            ranks = self.ranks(cohort)
            living = [one for one in ranks.values() if one.state in LIVING]
            groups = {one.group for one in replicas}
            alone = [one for one in self._known.replicas.values() if one.group in groups and _in_none(one)]
            missing = self.missing(ranks, now)
            if len(replicas) < len(living):
                reason = _name_all(living)
                refused |= {one.id: Acknowledgement.failed(reason) for one in replicas}
            elif missing is None:
                cohorts |= {one.id: cohort for one in replicas}
            elif kind not in _END_PAUSE or not _died_in_pause(ranks, len(alone)):
                meant = [*replicas, *(one for one in there if one in alone)]
                if self.waits([cohort], now, now):
                    cohorts |= {one.id: cohort for one in meant}
                else:
                    refused |= {one.id: Acknowledgement.failed(missing) for one in meant}
        return cohorts, refused

    def not_offered(
        self, command: Command, there: Sequence[Replica], cohorts: Mapping[str, str]
    ) -> dict[str, Acknowledgement]:
        """Return the refusals of a command that nothing carries out in a replica, or in a rank of its cohort."""
        refused: dict[str, Acknowledgement] = {}
        for one in there:
            cohort = cohorts.get(one.id)
            if one.connected and (made := not_offered(one, command, cohort is not None)) is not None:
                ranks = [one.id] if cohort is None else [id for id, at in cohorts.items() if at == cohort]
                for id in ranks:
                    refused.setdefault(id, made)
        return refused

    def whole(self, ids: Iterable[str]) -> list[str]:
        """Return the ids with those of the living ranks of their cohorts."""
        found: dict[str, None] = {}
        for id in ids:
            cohort = cohort_of(self._known.replicas[id])
            ranks = {} if cohort is None else self.ranks(cohort)
            found |= dict.fromkeys([id, *(one.id for one in ranks.values() if one.state in LIVING)])
        return list(found)

    def waits(self, cohorts: Iterable[str], since: float, now: float) -> bool:
        """Return whether a command goes on to wait: the ranks that are missing may be there at any moment.

        They may if their connections were lost just now, if ranks of a job that begins came just now, or if the job
        changes its ranks: some of them have left a cohort for another one, and some have not yet.
        """
        return now < since + MOVED_WITHIN and any(self._may_come(one, now) for one in cohorts)

    def _may_come(self, cohort: str, now: float) -> bool:
        ranks = self.ranks(cohort)
        if self._apart(cohort, ranks, now - MOVED_WITHIN):
            return True
        away = [one for one in ranks.values() if not one.connected]
        if any(one.state not in LIVING or one.leaving for one in away):
            return False
        since = [one.link_lost for one in away]
        if len(ranks) < _world(ranks):
            if any(cohort in one.left for one in self._known.replicas.values()):
                return False  # its job does not begin
            since.append(max(one.joined for one in ranks.values()))
        return now < min(since, default=-math.inf) + RECONNECT_WITHIN

    def _apart(self, cohort: str, ranks: Mapping[int, Replica], since: float = -math.inf) -> list[str]:
        """Return the replicas of its job with which a cohort has had ranks in common since then.

        They have left it for another one, or are still in the one that its ranks have left.
        """
        if ranks and len(ranks) == _world(ranks):
            return []
        before = {id for one in ranks.values() for id, left in one.left.items() if left > since}
        return [
            one.id
            for one in self._known.replicas.values()
            if (one.left.get(cohort, -math.inf) > since or cohort_of(one) in before)
            and (one.state in LIVING and cohort_of(one) not in (None, cohort))
        ]

    def missing(self, ranks: Mapping[int, Replica], now: float | None = None) -> str | None:
        """Return why not all ranks of a cohort can take a command now; None if they can."""
        world = _world(ranks)
        connected = [rank for rank, one in ranks.items() if one.connected and one.state in LIVING]
        absent = world - len(connected)
        if not absent:
            return None
        (cohort,) = {cohort_of(one) for one in ranks.values()}
        if cohort is not None and (apart := self._apart(cohort, ranks)):
            here = few([one.id for one in ranks.values()])
            return f"{here} and {few(apart)} are in two groups of ranks, as their job changes them: give it again"
        there = frozenset(connected)
        names = [
            ranks[rank].id if rank in ranks else f"rank {rank}"
            for rank in itertools.islice((rank for rank in range(world) if rank not in there), 6)
        ]
        more = f" and {absent - 5} more" if absent > 5 else ""
        are = "is" if absent == 1 else "are"
        lost = [
            one.link_lost for one in ranks.values() if not one.connected and one.state in LIVING and one.link_lost
        ]
        since = f" (since {now - min(lost):.1f} s)" if lost and now is not None else ""
        text = f"{', '.join(names[:5])}{more} {are} not connected{since}, and all {world} ranks change at one step"
        if len(ranks) == 1:
            text += (
                ": make a threadlet in each rank, or this one with cohort=False if the program tells the other "
                "ranks itself"
            )
        return text

    def next_of(self, cohort: str, replicas: Iterable[str]) -> GivenCommand | None:
        """Return the oldest command of a cohort that some of its replicas have not acknowledged."""
        first: list[GivenCommand] = []
        for id in replicas:
            waiting = self._known.commands.unacknowledged(id)
            first += itertools.islice((one for one in waiting if one.cohorts.get(id) == cohort), 1)
        return min(first, key=lambda given: given.event, default=None)


class Overrides:
    """The values that commands had set in processes that their launcher has started again."""

    def __init__(self, known: Registry, cohorts: Cohorts) -> None:
        self._known = known
        self._cohorts = cohorts

    def keep(self, replica: Replica, hello: ThreadletHello) -> None:
        """Keep the values of a replica's process before its next one takes over."""
        before, replica.kept, replica.restored = replica.kept, None, None
        if not hello.restarted or replica.group != hello.group:
            return
        values = {} if before is None else dict(before.values)  # which have not been given yet
        for given in self._known.commands:
            if given.kind is CommandKind.UPDATE_CONFIG and given.time >= replica.registered:
                made, later = given.acknowledgements.get(replica.id), {}
                if made is not None:
                    later = {key: change.new for key, change in made.changes.items()}
                elif replica.id in given.waiting and given.by == "weaver":  # kept from a process still before
                    later = dict(given.command.params)
                values = {key: value for key, value in values.items() if key not in later} | later
        if values:
            replica.kept = KeptValues(hello.restarted, values, replica.heard)

    def due(self, replica: Replica) -> tuple[list[str], dict[str, Any]] | None:
        """Return the replicas that get values now, and these, once all ranks that were started again are there.

        A cohort in which a rank has lived on, or has its own again, gets none: it has newer ones, which the others
        get from it.
        """
        cohort = cohort_of(replica)
        if cohort is None:
            alone = replica.kept is not None and replica.kept.restarted == 1
            return ([replica.id], self._take(replica)) if alone else None
        ranks = self._cohorts.ranks(cohort)
        heard = max((one.kept.heard for one in ranks.values() if one.kept is not None), default=None)
        if heard is None or self._cohorts.missing(ranks) is not None:
            return None
        lived_on = any(
            one.kept is None and (one.registered < heard or one.restored is not None) for one in ranks.values()
        )
        values: dict[str, Any] = {}
        for one in ranks.values():
            values |= self._take(one, given=not lived_on)
        return None if lived_on else ([one.id for one in ranks.values()], values)

    def give_back(self, replica: Replica) -> None:
        """Keep the values again that a replica was given, and has not taken because its job's ranks changed."""
        replica.kept, replica.restored = replica.restored, None
        self._known.save(replica)

    def _take(self, replica: Replica, given: bool = True) -> dict[str, Any]:
        kept, replica.kept = replica.kept, None
        if kept is not None:
            replica.restored = kept if given else None
        self._known.save(replica)
        return {} if kept is None else dict(kept.values)


RECONNECT_WITHIN = 2.0
"""Seconds that a command waits for ranks that have lost their connections, or have not come yet with the others."""

MOVED_WITHIN = 15.0
"""Seconds from giving a command in which it may go to other ranks, or for which it waits for those that change."""

_END_PAUSE = (CommandKind.RESUME, CommandKind.STOP)


def _in_none(replica: Replica) -> bool:
    """Return whether a process lives that may become a rank of a cohort."""
    return replica.cohort is None and replica.state in LIVING


def _died_in_pause(ranks: Mapping[int, Replica], alone: int) -> bool:
    """Return whether all ranks that live are paused, and all others have died, or were started ``alone`` again."""
    living = [one for one in ranks.values() if one.state in LIVING]
    paused = all(one.state is ReplicaState.PAUSED and one.connected for one in living)
    return paused and _world(ranks) - len(ranks) <= alone


def _world(ranks: Mapping[int, Replica]) -> int:
    return max((one.cohort["world"] for one in ranks.values() if one.cohort is not None), default=0)


def _name_all(living: list[Replica]) -> str:
    """Return the refusal of a command that names only some of a cohort's living ranks."""
    names = [one.id for one in living]
    all_of_them = f"{names[0]} … {names[-1]}" if len(names) > 2 else " and ".join(names)
    groups = {one.group for one in living}
    cure = f"name the group {groups.pop()!r}" if len(groups) == 1 else f"name all of them: {few(names)}"
    return f"the ranks {all_of_them} average gradients: {cure}"
