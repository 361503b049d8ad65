"""Stacks of training processes: who wants one, and what it is added to."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from loom.control.reports import Stack, StackRequest
from loom.weaver.outbox import Outbox
from loom.weaver.registry import Registry
from loom.weaver.replicas import Replica

_LONGEST = 1 << 16
"""Characters of a stack that are kept."""


class _Wanted(NamedTuple):
    replica: Replica
    event: int | None
    """The event that the stack is added to."""
    tell: Callable[[str], None] | None


class Stacks:
    """Stacks that are wanted."""

    def __init__(self, known: Registry, outbox: Outbox) -> None:
        self._known = known
        self._outbox = outbox
        self._wanted: dict[str, _Wanted] = {}

    def __len__(self) -> int:
        return len(self._wanted)

    def want(self, replica: Replica, event: int | None = None, tell: Callable[[str], None] | None = None) -> str:
        """Order the stack of a replica's process; return the id to give to `take`."""
        id = uuid.uuid4().hex
        self._wanted[id] = _Wanted(replica, event, tell)
        self._outbox.output.stacks.append((id, replica))
        self._outbox.urgent = True
        return id

    def ask_threadlet(self, id: str) -> bool:
        """Ask the threadlet itself for a stack; False if it is not connected."""
        wanted = self._wanted.get(id)
        if wanted is None or wanted.replica.link is None:
            return False
        self._outbox.send(wanted.replica, StackRequest(id))
        self._outbox.urgent = True
        return True

    def take(self, id: str, text: str) -> None:
        """Take a stack, and add it to the event that it was got for."""
        wanted = self._wanted.pop(id, None)
        if wanted is None:
            return
        if wanted.event is not None:
            self._known.events.amend(wanted.event, stack=text[:_LONGEST])
            self._outbox.urgent = True
        if wanted.tell is not None:
            wanted.tell(text[:_LONGEST])

    def take_from(self, replica: Replica, frame: list[Any], now: float) -> None:
        """Take what a threadlet sent, unless nobody wants it of this replica."""
        stack = Stack.from_body(frame)
        if stack.id in self._wanted and self._wanted[stack.id].replica is replica:
            self.take(stack.id, stack.text)
