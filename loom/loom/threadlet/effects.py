"""The effects of commands that only the training loop itself can bring about: it waits, it stops, it leaves.

A threadlet that has applied a pause, a stop or a drain cannot know whether the loop looks. So it acknowledges the
command when the loop shows that it does, and refuses it when the loop has gone on without looking.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from loom.control.commands import Change, Command, CommandKind
from loom.threadlet.handlers import Deferred

_POLLS = 2
"""Times that a loop asks between two statuses whether it is paused, after which it counts as one that waits so."""


@dataclass
class Application:
    """The application of a command so far."""

    command: Command
    reason: str | None = None  # why the whole command is refused
    changes: dict[str, Change] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    deferred: dict[str, tuple[Any, Deferred]] = field(default_factory=dict)  # not settled yet
    evidence: Mapping[str, object] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)  # keys that the program took, and no function here has applied
    awaited: bool = False  # whether the loop has to show its effect
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
        """Whether the loop has called what waits during a pause."""
        self.asks = False
        """Whether the loop has asked whether to stop. A loop that has done so is taken at its word."""
        self._polled = (-1, 0)  # the number of the last status when the loop polled, and how often it did so since

    def __bool__(self) -> bool:
        return bool(self._awaited)

    def add(self, made: Application, published: int) -> None:
        """Await the effect of a command."""
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
