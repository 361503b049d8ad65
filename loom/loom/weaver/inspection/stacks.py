"""The stacks of training processes: requests for them, and their delivery."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from loom.control.reports import Stack, StackRequest
from loom.weaver.outbox import Outbox
from loom.weaver.registry import Registry
from loom.weaver.replicas import Replica

_LONGEST = 1 << 16  # characters of a stack that are kept


class _Wanted(NamedTuple):
    replica: Replica
    event: int | None
    """The event that the stack is added to."""
    tell: Callable[[str], None] | None


class Stacks:
    """The stacks that were requested and have not come yet."""

    def __init__(self, known: Registry, outbox: Outbox) -> None:
        self._known = known
        self._outbox = outbox
        self._wanted: dict[str, _Wanted] = {}

    def __len__(self) -> int:
        return len(self._wanted)

    def want(self, replica: Replica, event: int | None = None, tell: Callable[[str], None] | None = None) -> str:
        """Request the stack of a replica's process; return the id for `take`."""
        id = uuid.uuid4().hex
        self._wanted[id] = _Wanted(replica, event, tell)
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

    def take_from(self, replica: Replica, frame: list[Any], now: float) -> None:
        """Take a stack from a threadlet, unless it was not requested of this replica."""
        stack = Stack.from_body(frame)
        if stack.id in self._wanted and self._wanted[stack.id].replica is replica:
            self.take(stack.id, stack.text)
