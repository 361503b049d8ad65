"""The time accounting of a training process, from which the weaver computes goodput.

The training thread adds to it, mostly in `loom.threadlet.step.Step` itself, which has no time for a call. Another
thread reads it for each heartbeat. A concurrent read is wrong by one block at most, and the next is right, because
everything is a sum since the beginning.
"""

from __future__ import annotations

import math
from time import monotonic
from typing import Any

from loom.control.frame import MAX_COUNT
from loom.control.reports import MAX_REASON_NAME, MAX_REASONS, OTHER, RESERVED_REASONS, TimeAccount
from loom.errors import WrongArguments


class TimeAccounting:
    """The seconds since the process began, by reason."""

    __slots__ = ("_before", "_blocks", "_by_reason", "_first", "_first_at", "_start", "began", "compute", "highest",
                 "lost", "named")  # fmt: skip

    def __init__(self) -> None:
        self._start = monotonic()
        self.named = 0.0  # seconds in finished blocks with a reason
        self._by_reason: dict[str, float] = {}
        self._blocks: list[tuple[str, float]] = []
        """The open blocks, the innermost last, and when each began by a clock that stops during finished blocks."""
        self.began = 0.0  # when the current step began, plus the blocks with a reason that have ended since
        self.compute = 0.0  # seconds in finished steps that count
        self.lost = 0.0  # seconds in steps that were repeated, that raised, or that did not count
        self.highest: float = math.inf  # the highest finished step; infinity makes the first take `odd_step`
        self._first: int | None = None
        self._first_at: float | None = None
        self._before = 0.0  # seconds before the first step, not counting blocks with a reason

    def odd_step(self, number: Any, took: float, made: bool) -> None:
        """Count a step that raised, or whose number is not simply higher than all before."""
        if self._first_at is None:
            self._begin(monotonic() - took)
        if made and self.highest == math.inf and type(number) is int:
            self._first = self.highest = number
            self.compute += took
        elif made and type(number) is not int:
            self.compute += took
        else:
            self.lost += took

    def discard(self) -> None:
        """Count the current step's time so far as lost."""
        now = monotonic()
        now -= self._with_open_blocks(now)[1]
        if self._first_at is not None:  # the time before the first step counts as a wait for it
            self.lost += max(0.0, now - self.began)
        self.began = now

    def account(self, in_step: bool, uses_steps: bool, step: int | None) -> TimeAccount:
        """Return the account for the weaver; ``step`` is the last reported step.

        If a loop does not mark its steps, everything from its first report on counts as steps, except the blocks.
        """
        now = monotonic()
        spent, inside = self._with_open_blocks(now)
        if not uses_steps and step is not None and self._first_at is None:
            self._first = step
            self._begin(now)
        open = max(0.0, now - inside - self.began) if in_step else 0.0
        unnamed = now - self._start - sum(spent.values())
        before = unnamed - open if self._first_at is None else self._before
        compute, highest = self.compute, self.highest
        if not uses_steps and self._first is not None:
            compute, highest = unnamed - before, self._first if step is None else max(self._first, step)
        spent["waiting"] = spent.get("waiting", 0.0) + max(0.0, before)
        spent["compute"], spent["lost"] = max(0.0, compute), self.lost
        first_at = now - open - inside - self._start if self._first_at is None and in_step else self._first_at
        return TimeAccount(now - self._start, first_at, _count(self._first), _count(highest), open, spent)

    def _begin(self, first_step: float) -> None:
        self._first_at = first_step - self._start
        self._before = self._first_at - self.named

    def _with_open_blocks(self, now: float) -> tuple[dict[str, float], float]:
        """Return the seconds by reason, open blocks included, and the sum of the open blocks alone."""
        spent = dict(self._by_reason)
        inside = 0.0
        for reason, began in reversed(tuple(self._blocks)):
            own = max(0.0, now - self.named - began - inside)
            spent[reason] = spent.get(reason, 0.0) + own
            inside += own
        return spent, inside


class TimedBlock:
    """A ``with`` block with a reason, whose first ``beyond`` seconds do not count; see `loom.Threadlet.spent`."""

    __slots__ = ("_accounting", "_beyond", "_reason")

    def __init__(self, accounting: TimeAccounting, reason: str, beyond: float = 0.0) -> None:
        if not isinstance(reason, str) or not 0 < len(reason) <= MAX_REASON_NAME or not reason.isprintable():
            raise WrongArguments(
                f"a reason is a text of 1 to {MAX_REASON_NAME} printable characters, not {reason!r:.80}"
            )
        if reason in RESERVED_REASONS:
            raise WrongArguments(
                f"{reason!r} is found out by itself; name another, such as 'checkpoint' or 'waiting'"
            )
        if isinstance(beyond, bool) or not isinstance(beyond, int | float) or not 0 <= beyond < math.inf:
            raise WrongArguments(f"beyond is a number of seconds, 0 or more, not {beyond!r:.80}")
        self._accounting = accounting
        self._reason = reason
        self._beyond = beyond

    def __enter__(self) -> None:
        accounting = self._accounting
        accounting._blocks.append((self._reason, monotonic() - accounting.named + self._beyond))

    def __exit__(self, *_: object) -> None:
        accounting = self._accounting
        reason, began = accounting._blocks[-1]
        took = max(0.0, monotonic() - accounting.named - began)
        by_reason = accounting._by_reason
        if reason not in by_reason and len(by_reason) >= MAX_REASONS:
            reason = OTHER
        by_reason[reason] = by_reason.get(reason, 0.0) + took
        accounting.named += took
        accounting.began += took
        accounting._blocks.pop()


def _count(number: float | None) -> int | None:
    return int(number) if number is not None and 0 <= number < MAX_COUNT else None
