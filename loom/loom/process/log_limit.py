"""A bound for the lines of a process's log, so that nobody who makes it complain fills it, or the disk behind it.

Each kind of line, told apart by the place in the code that writes it, has `BURST` lines at once and one every
`EVERY` seconds after that. The next line of the kind says how many were left out.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

BURST = 30
"""Lines of one kind at once."""

EVERY = 2.0
"""Seconds between two lines of one kind, when it has had its burst."""

_KINDS = 1000  # kinds that are remembered; the one that was written longest ago is forgotten first


@dataclass
class _Kind:
    left: float
    at: float
    left_out: int = 0


class LogLimit(logging.Filter):
    """A filter that lets through so many lines of each kind.

    Args:
        clock: seconds, which never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: OrderedDict[tuple[str, int], _Kind] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        place = (record.pathname, record.lineno)
        kind = self._kinds.setdefault(place, _Kind(BURST, now))
        self._kinds.move_to_end(place)
        if len(self._kinds) > _KINDS:
            self._kinds.popitem(last=False)
        kind.left = min(kind.left + (now - kind.at) / EVERY, BURST)
        kind.at = now
        if kind.left < 1:
            kind.left_out += 1
            return False
        kind.left -= 1
        if kind.left_out:
            record.msg = f"{record.getMessage()} ({kind.left_out} more such lines were left out)"
            record.args = None
            kind.left_out = 0
        return True


def limit_log(*more: str) -> None:
    """Bound the lines of the process's log, and of further loggers with handlers of their own, given by name."""
    limit = LogLimit()
    for handler in logging.getLogger().handlers:
        handler.addFilter(limit)
    for name in more:
        logging.getLogger(name).addFilter(limit)
