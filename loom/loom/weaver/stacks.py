"""Stacks of training processes: who wants one, and what it is added to."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from loom.control.reports import Stack, StackRequest
from loom.weaver.outbox import Outbox
from loom.weaver.registry import Registry
from loom.weaver.replicas import Replica

__all__ = ["Stacks"]

_LONGEST = 1 << 16
"""Characters of a stack that are kept."""


class Stacks:
    """Stacks that are wanted."""

    def __init__(self, known: Registry, outbox: Outbox) -> None:
        self._known = known
        self._outbox = outbox
        self._wanted: dict[str, tuple[str, int | None]] = {}
        self._waiters: dict[str, list[Callable[[str], None]]] = {}

    def __len__(self) -> int:
        return len(self._wanted)

    def want(self, replica: Replica, event: int | None = None, tell: Callable[[str], None] | None = None) -> str:
        """Order the stack of a replica's process; return the id to give to `take`.

        Args:
            replica: whose process.
            event: the event that the stack is added to.
            tell: called with the stack.
        """
        id = uuid.uuid4().hex
        if tell is not None:
            self._waiters[id] = [tell]
        self._wanted[id] = replica.id, event
        self._outbox.output.stacks.append((id, replica))
        self._outbox.urgent = True
        return id

    def ask_threadlet(self, id: str) -> bool:
        """Ask the threadlet itself for a stack; False if it is not connected."""
        replica = self._known.replicas.get(self._wanted[id][0]) if id in self._wanted else None
        if replica is None or replica.link is None:
            return False
        self._outbox.send(replica, StackRequest(id))
        self._outbox.urgent = True
        return True

    def take(self, id: str, text: str) -> None:
        """Take a stack, and add it to the event that it was got for."""
        text = text[:_LONGEST]
        _, event = self._wanted.pop(id, (None, None))
        if event is not None:
            self._known.events.amend(event, stack=text)
            self._outbox.urgent = True
        for tell in self._waiters.pop(id, ()):
            tell(text)

    def take_from(self, replica: Replica, frame: list[Any], now: float) -> None:
        """Take what a threadlet sent, unless nobody wants it of this replica."""
        stack = Stack.from_body(frame)
        if self._wanted.get(stack.id, (None,))[0] == replica.id:
            self.take(stack.id, stack.text)
