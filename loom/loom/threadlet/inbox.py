"""Commands on their way to a step boundary, and commands whose effect the loop has to show.

Only the training loop itself can wait, stop or leave. A threadlet that has applied a pause, a stop or a drain
cannot know whether the loop looks. So it acknowledges the command when the loop shows that it does, and refuses it
when the loop has gone on without looking.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from loom.control.commands import Acknowledged, Change, CohortVerdict, Command, CommandKind
from loom.control.handshake import MAX_APPLIED
from loom.threadlet.handlers import Deferred


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


_POLLS = 2
"""A loop that asks this often between two statuses whether it is paused counts as waiting by that."""


@dataclass
class Application:
    """The application of a command so far."""

    command: Command
    reason: str | None = None  # why the whole command is refused
    changes: dict[str, Change] = field(default_factory=dict)
    undo: dict[str, Callable[[], object]] = field(default_factory=dict)  # brings the state before back, by key
    refused: dict[str, str] = field(default_factory=dict)
    deferred: dict[str, tuple[Any, Deferred]] = field(default_factory=dict)  # not settled yet
    evidence: Mapping[str, object] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)  # keys that the program took, and no function here has applied
    awaited: bool = False  # whether the loop has to show its effect
    verdict: CohortVerdict | None = None  # of all ranks of the cohort, if it is refused
    step: int | None = None  # the step at which a deferred value takes effect; None for the current step


class AwaitedEffects:
    """The pauses, stops and drains that are applied and whose effect the loop has not shown. The caller locks.

    ``acknowledge`` acknowledges a command, or refuses it if its application has a reason.
    """

    def __init__(self, acknowledge: Callable[[Application], None]) -> None:
        self._acknowledge = acknowledge
        self._awaited: list[tuple[Application, int]] = []
        """Each command with the number of the last status before it was applied."""
        self.waits = False
        """True if the loop has called what waits during a pause."""
        self.asks = False
        """True if the loop has asked whether to stop. A loop that has done so is taken at its word."""
        self._polled = (-1, 0)  # the number of the last status when the loop polled, and how often it did so since

    def __bool__(self) -> bool:
        return bool(self._awaited)

    def add(self, made: Application, published: int) -> None:
        self._awaited.append((made, published))
        self._polled = (-1, 0)

    def shown(self, *kinds: CommandKind) -> None:
        """Acknowledge the commands of these kinds: the loop has shown their effect."""
        self.end(kinds, None)

    def end(self, kinds: tuple[CommandKind, ...], reason: str | None) -> None:
        """Refuse the commands of these kinds for a reason, or acknowledge them without one."""
        ended = [made for made, _ in self._awaited if made.command.kind in kinds]
        self._awaited = [one for one in self._awaited if one[0].command.kind not in kinds]
        for made in ended:
            made.reason = reason
            self._acknowledge(made)

    def passed(self, published: int, rounds: int) -> set[CommandKind]:
        """Return the kinds of commands that the loop has passed over: it has made a round since without looking.

        Args:
            published: the number of the last status.
            rounds: statuses that the loop publishes from one boundary to the next look at `should_stop`.
        """
        return {
            made.command.kind
            for made, before in self._awaited
            if published - before >= rounds + (made.command.kind is CommandKind.DRAIN)
        }

    def polls(self, published: int) -> bool:
        """Note that the loop asks whether it is paused; return whether it waits by asking again and again."""
        before, count = self._polled
        self._polled = published, count + 1 if before == published else 1
        return self._polled[1] >= _POLLS

    def polls_at(self, published: int) -> bool:
        """Return whether the loop has published no status since it asked last whether it is paused."""
        return self._polled[0] == published
