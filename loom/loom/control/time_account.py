"""`TimeAccount`: a threadlet's account of its process's time, from which the weaver computes goodput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loom.control.frame import MAX_COUNT, Frame

REASONS = ("compute", "lost", "checkpoint", "waiting", "detection", "respawn", "idle")
"""The reasons for which time is spent; a training may name more.

compute: steps that count. lost: steps that were repeated, that raised, or that died with their process. waiting:
between the start and the first step, for a pause, for peers. detection: from the last sign of a process to the
weaver's notice of its death. respawn: from then until another process has its place. idle: everything else.
"""

RESERVED_REASONS = frozenset(("compute", "lost", "detection", "respawn", "idle"))
"""Reasons that a training cannot name, because Loom determines them."""

OTHER = "other"  # the reason for time under further reasons, once a process has named the maximum
MAX_REASONS = 16  # reasons that one process may name
MAX_REASON = 40  # characters in a reason

_LONGEST = 1e10


@dataclass(frozen=True, slots=True)
class TimeAccount(Frame, kind="spent"):
    """``["spent", [seconds, first_at or None, first or None, highest or None, open, {reason: seconds}]]``.

    From a threadlet whose weaver takes time accounts, with each heartbeat. Times are seconds since the process
    began, by its own clock. An account is cumulative: the newest is all that is needed, and one that is lost does
    no harm.
    """

    seconds: float
    """Seconds since the process began. Those neither in a reason nor open were spent idle."""
    first_at: float | None
    """When the first step began, plus the seconds spent with reasons in that step."""
    first: int | None
    """The number of the first step."""
    highest: int | None
    """The highest number of a finished step."""
    open: float
    """Seconds in the unfinished step."""
    by_reason: dict[str, float]

    def to_body(self) -> list[Any]:
        return [self.KIND, [self.seconds, self.first_at, self.first, self.highest, self.open, self.by_reason]]

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> TimeAccount:
        # This runs for every replica every second: loops, because generators take twice the time.
        try:
            _, (seconds, first_at, first, highest, open, by_reason) = body
            for time in (seconds, open, 0.0 if first_at is None else first_at, *by_reason.values()):
                if type(time) is not float or not 0.0 <= time <= _LONGEST:
                    raise ValueError(f"a time is from 0 to {_LONGEST:g} seconds, not {time!r:.40}")
            for step in (first, highest):
                if step is not None and (type(step) is not int or not 0 <= step < MAX_COUNT):
                    raise ValueError(f"a step is a count below {MAX_COUNT}, not {step!r:.40}")
            if len(by_reason) > MAX_REASONS + len(REASONS) + 1:
                raise ValueError(f"{len(by_reason)} reasons are more than {MAX_REASONS + len(REASONS) + 1}")
            for name in by_reason:
                if type(name) is not str or not 0 < len(name) <= MAX_REASON or not name.isprintable():
                    raise ValueError(f"a reason has 1 to {MAX_REASON} printable characters: {name!r:.80}")
        except (TypeError, ValueError, AttributeError) as error:
            raise cls.mismatch(body, str(error)) from error
        return cls(seconds, first_at, first, highest, open, by_reason)
