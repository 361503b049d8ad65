"""The inbox of commands: from the weaver to the step boundary at which each applies once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from loom.control.commands import Acknowledged, Command, CommandKind
from loom.control.introduction import MAX_APPLIED


class CommandInbox:
    """Commands that wait for a step boundary, and the acknowledgements of the applied ones.

    The weaver sends a command again, over one connection after the other, until it is acknowledged. The inbox lets
    each command apply once, and repeats its acknowledgement. Any thread may call.
    """

    def __init__(self) -> None:
        self.pending: deque[Command] = deque()  # steps read it without the lock
        self.at_once: Callable[[Command], bool] | None = None
        """Called with each new command; returns True if it takes the command over from the step boundary."""
        self._changed = threading.Condition()
        self._begun: set[str] = set()  # the ids of commands that came and were not finished
        self._acknowledged: dict[str, Acknowledged] = {}  # the last ones by command id, the oldest first
        self.arrived = 0  # the number of commands that have come and of calls of `wake`, for `wait`
        self._closed = False

    def receive(self, command: Command) -> Acknowledged | None:
        """Take a command from the weaver; return its acknowledgement if it was applied before."""
        with self._changed:
            if (before := self._acknowledged.get(command.id)) is not None:
                return before
            if command.id not in self._begun:
                self._begun.add(command.id)
                if self.at_once is not None and self.at_once(command):
                    return None
                self.pending.append(command)
                self.arrived += 1
                self._changed.notify_all()
            return None

    def pop(self, updates: bool = True) -> Command | None:
        """Remove and return the next command, but no ``update_config`` unless ``updates``. Finish it."""
        with self._changed:
            for place, command in enumerate(self.pending):
                if updates or command.kind is not CommandKind.UPDATE_CONFIG:
                    del self.pending[place]
                    return command
            return None

    def finish(self, acknowledged: Acknowledged) -> None:
        with self._changed:
            self._begun.discard(acknowledged.command)
            self._acknowledged[acknowledged.command] = acknowledged
            while len(self._acknowledged) > MAX_APPLIED:
                del self._acknowledged[next(iter(self._acknowledged))]

    def applied(self) -> list[str]:
        """Return the ids of the remembered acknowledgements, the oldest first."""
        with self._changed:
            return list(self._acknowledged)

    def wait(self, arrived: int) -> bool:
        """Wait until more than ``arrived`` commands have come; return False once the inbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.arrived > arrived or self._closed)
            return not self._closed

    def wake(self) -> None:
        """End the waits as if a command had come."""
        with self._changed:
            self.arrived += 1
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
