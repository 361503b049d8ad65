"""The monotonic clock of this process, on the time line of its session.

Hosts start their monotonic clocks at different times. The session's time line is its driver's clock; every other
process learns by how much its own clock differs, from exchanges as in NTP (RFC 5905): it asks for the other
clock between two looks at its own, and believes the exchange that took the shortest time, which bounds the error.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

monotonic = time.monotonic
"""This host's clock."""


class Offset(NamedTuple):
    """The correction of this host's clock."""

    seconds: float
    error: float | None
    """By how many seconds that may be wrong; None if it was not measured."""


class ClockExchange(NamedTuple):
    """The time of another clock, and of this host's before it was asked for and after it was there."""

    before: float
    there: float
    after: float


_offset = Offset(0.0, None)


def now() -> float:
    """Return the seconds of the session's clock."""
    return monotonic() + _offset.seconds


def offset() -> Offset:
    """Return the correction of this host's clock."""
    return _offset


def measured(exchanges: Iterable[ClockExchange]) -> Offset:
    """Return the offset of the other clock from this host's, by the shortest exchange.

    It is 0 if the clocks may be the same, as those of two processes of one host are. The error has room for that.
    """
    before, there, after = min(exchanges, key=lambda each: each.after - each.before)
    seconds, error = there - (before + after) / 2, (after - before) / 2
    return Offset(0.0, error + abs(seconds)) if abs(seconds) <= error else Offset(seconds, error)


def adopt(found: Offset) -> None:
    """Put this process on the session's time line from now on."""
    global _offset
    _offset = found
