"""Commands on their way: from the weaver to the step boundary at which they apply, once each."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

from loom.weaver.link import MAX_APPLIED

__all__ = ["Ack", "Command", "Inbox"]

Ack = list[Any]
"""``["ack", command id, step, answer]``"""


class Command(NamedTuple):
    """What the weaver asks of this process."""

    id: Any
    kind: str
    params: dict[str, Any]


class Inbox:
    """Commands that wait for a step boundary, and the answers to those that have applied. Any thread may call.

    The weaver sends a command again until it has the answer, over one connection after the other; here each is
    applied once, and what was answered is answered again.

    Args:
        remembered: answers that are kept at most.
    """

    def __init__(self, remembered: int = MAX_APPLIED) -> None:
        self.pending: deque[Command] = deque()
        """Those that wait, in order. For a look without the lock."""
        self.at_once: Callable[[Command], bool] | None = None
        """Called with each new command; whether it sees to it, so that the command waits for no step boundary."""
        self._remembered = remembered
        self._changed = threading.Condition()
        self._begun: set[Any] = set()
        self._acks: OrderedDict[Any, Ack] = OrderedDict()
        self._arrived = 0
        self._closed = False

    def receive(self, command: Command) -> Ack | None:
        """Take a command from the weaver; return the answer if it has applied before."""
        with self._changed:
            if (ack := self._acks.get(command.id)) is not None:
                return ack
            if command.id not in self._begun:
                self._begun.add(command.id)
                if self.at_once is not None and self.at_once(command):
                    return None
                self.pending.append(command)
                self._arrived += 1
                self._changed.notify_all()
            return None

    def take(self, updates: bool = True) -> Command | None:
        """The next command to apply, which `finish` has to follow; None if there is none.

        Args:
            updates: whether to take ``update_config`` too, or to leave those where they are.
        """
        with self._changed:
            for place, command in enumerate(self.pending):
                if updates or command.kind != "update_config":
                    del self.pending[place]
                    return command
            return None

    def finish(self, command: Command, ack: Ack) -> None:
        """Remember the answer to a command that was taken."""
        with self._changed:
            self._begun.discard(command.id)
            self._acks[command.id] = ack
            while len(self._acks) > self._remembered:
                self._acks.popitem(last=False)

    def applied(self) -> list[Any]:
        """The ids of the commands that are remembered, the oldest first."""
        with self._changed:
            return list(self._acks)

    @property
    def arrived(self) -> int:
        """How many commands have come, for `wait`."""
        return self._arrived

    def wait(self, arrived: int) -> bool:
        """Wait until more commands have come than so many; False once the inbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived > arrived or self._closed)
            return not self._closed

    def close(self) -> None:
        """End every wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
