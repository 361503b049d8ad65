"""What a threadlet tells of how its process spends its time; goodput is made of it.

An account is cumulative: the newest is all that is needed, and one that is lost does no harm. On the link::

    ["spent", [seconds, first_at|None, first|None, highest|None, open, {reason: seconds}]]
"""

from __future__ import annotations

from typing import Any, NamedTuple

from loom.errors import ProtocolMismatch

__all__ = ["MAX_REASON", "MAX_REASONS", "OTHER", "REASONS", "TOLD_BY_WEAVER", "Account", "read_account"]

REASONS = ("compute", "lost", "checkpoint", "waiting", "detection", "respawn", "idle")
"""What time is spent on; a training may name more.

compute: steps that count. lost: steps that were made again, that raised, or that died with their process. waiting:
between the start and the first step, for a pause, for peers. detection: from the last sign of a process to the
weaver's knowing that it is dead. respawn: from then until another has its place. idle: everything else.
"""

TOLD_BY_WEAVER = frozenset(("compute", "lost", "detection", "respawn", "idle"))
"""Reasons that a training cannot name: they are found out."""

OTHER = "other"
"""What is spent on more reasons than a process may name."""

MAX_REASONS = 16
"""That one process may name."""

MAX_REASON = 40
"""Characters in one."""

_LONGEST = 1e10
_MAX_STEP = 1 << 53


class Account(NamedTuple):
    """Since a process began, in seconds of its own clock."""

    seconds: float
    """All of them. What is in none of the others was spent idle."""
    first_at: float | None
    """After which its first step began; later by what was spent with reasons in that step."""
    first: int | None
    """The number of the first step that it made."""
    highest: int | None
    """The highest number of a step that it made."""
    open: float
    """In the step that it is making."""
    spent: dict[str, float]
    """By reason."""


def read_account(frame: list[Any]) -> Account:
    """Read a frame with an account.

    Raises:
        ProtocolMismatch: it is none.
    """
    # For every replica every second: loops, as generators take twice the time.
    try:
        _, (seconds, first_at, first, highest, open, spent) = frame
        for time in (seconds, open, 0.0 if first_at is None else first_at, *spent.values()):
            if type(time) is not float or not 0.0 <= time <= _LONGEST:
                raise ValueError(f"{time!r:.40} is no time")
        for step in (first, highest):
            if step is not None and (type(step) is not int or not 0 <= step < _MAX_STEP):
                raise ValueError(f"{step!r:.40} is no step")
        if len(spent) > MAX_REASONS + len(REASONS) + 1:
            raise ValueError(f"{len(spent)} reasons")
        for name in spent:
            if type(name) is not str or not 0 < len(name) <= MAX_REASON or not name.isprintable():
                raise ValueError(f"{name!r:.80} is no reason")
    except (TypeError, ValueError, AttributeError) as error:
        raise ProtocolMismatch(f"not an account of time: {frame!r:.80}: {error}") from error
    return Account(seconds, first_at, first, highest, open, spent)
