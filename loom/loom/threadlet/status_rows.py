"""The path of status reports, from what the training loop publishes to rows that the weaver has stored."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

from loom.control.frame import MAX_COUNT, MAX_NAME
from loom.control.reports import MAX_KEPT_REPORTS, Row

_log = logging.getLogger("loom")

LARGEST_INT = 2**64 - 1
SMALLEST_INT = -(2**63)

MAX_METRICS = 1000  # names of metrics that a process may send; the weaver takes no more


_steady: Callable[[], float] = time.monotonic
if hasattr(time, "CLOCK_BOOTTIME"):  # which goes on while the machine is asleep
    _steady = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
_began = time.time() - _steady()


def now_of_system() -> float:
    """Return seconds since the epoch. They go on from the start: a jump of the system's time does not move them."""
    return _began + _steady()


Given: TypeAlias = tuple[Any, ...]
"""A published report, quick to make: number, time, step, epoch, max_step, metrics, configuration.

The subject of the status follows if it was given.
"""


def number(value: Any) -> float:
    """Return a Python, numpy or torch scalar as a float, after waiting for the device that a tensor is on."""
    if type(value) is float:
        return value
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError("text is no number")
    item = getattr(value, "item", None)
    return float(value if item is None else item())


def plain(value: Any, depth: int = 8) -> Any:
    """Return a value in a form for JSON and msgpack; a value without one becomes its ``repr``, shortened."""
    try:
        return _plain(value, depth)
    except Exception:  # noqa: BLE001 - whatever the methods of a stranger's value raise
        return _cut(value)


def _plain(value: Any, depth: int) -> Any:
    if value is None or type(value) in (bool, float, str):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, int) and SMALLEST_INT <= value <= LARGEST_INT:
        return int(value)
    if isinstance(value, (float, str)):
        return float(value) if isinstance(value, float) else str(value)
    if depth and isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else _cut(key): plain(one, depth - 1) for key, one in list(value.items())
        }
    if depth and isinstance(value, (list, tuple, set, frozenset)):
        return [plain(one, depth - 1) for one in list(value)]
    if depth and callable(getattr(value, "item", None)):
        return plain(value.item(), 0)
    return _cut(value)


def _cut(value: Any) -> str:
    try:
        shown = repr(value)
    except Exception:  # noqa: BLE001 - whatever a stranger's __repr__ raises
        shown = f"<{type(value).__name__}>"
    return shown if len(shown) <= 200 else shown[:199] + "…"


def _text(value: Any) -> str:
    text = value if type(value) is str else str(plain(value))
    return text[:MAX_NAME]


class RowMaker:
    """A maker of rows from published reports, for one thread, which may have to wait for GPUs."""

    def __init__(self) -> None:
        self._taken = 0  # reports that came here
        self._highest = -1  # the highest number of them
        self._made = 0  # the sequence number of the last row
        self._names: set[str] = set()
        self._warned: set[str] = set()

    @property
    def missed(self) -> int:
        """Published reports that never came here, because too many were waiting."""
        return self._highest + 1 - self._taken

    def make(self, given: Given) -> Row:
        """Return a row with the next sequence number, without values that are no number."""
        # This runs for every step, while the training waits for the interpreter: common values take the short path.
        published, moment, step, epoch, max_step, metrics, config = given[:7]
        self._taken += 1
        if published > self._highest:
            self._highest = published
        if step is not None and not (type(step) is int and 0 <= step < MAX_COUNT):
            step = self._count("step", step)
        if epoch is not None:
            epoch = self._count("epoch", epoch)
        if max_step is not None:
            max_step = self._count("max_step", max_step)
        if config is not None:
            config = plain(config)
        if metrics is None:
            metrics = {}
        else:
            known = self._names
            for name, value in metrics.items():
                if type(value) is not float or type(name) is not str or name not in known:
                    metrics = self._measured(metrics)
                    break
        # Count last, so that a row that cannot be made leaves no gap in the numbers.
        self._made += 1
        row = [self._made, moment, step, epoch, max_step, metrics, config]
        if len(given) > 7:
            row.append(_text(given[7]))
        return row

    def _measured(self, metrics: Mapping[str, object]) -> dict[str, float]:
        made: dict[str, float] = {}
        for name, value in metrics.items():
            if self._is_known(name):
                try:
                    made[str.__str__(name)] = number(value)
                except Exception as error:  # noqa: BLE001 - whatever a stranger's __float__ raises
                    self._warn(name, f"the metric {name!r} is no number and is not sent: {error}")
        return made

    def _is_known(self, name: Any) -> bool:
        # By its type first: another object may be equal to a known text.
        if isinstance(name, str) and name in self._names:
            return True
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            self._warn("names", f"a metric's name is a text of 1 to {MAX_NAME} characters; not sent: {_cut(name)}")
            return False
        if len(self._names) >= MAX_METRICS:
            self._warn("too many", f"more than {MAX_METRICS} metrics are published; not sent: {name!r} and others")
            return False
        self._names.add(str.__str__(name))
        return True

    def _count(self, name: str, value: Any) -> int | None:
        if type(value) is int and 0 <= value < MAX_COUNT:
            return value
        try:
            count = int(value if type(value) is int else number(value))
            if not 0 <= count < MAX_COUNT:
                raise ValueError("it is out of range")
            return count
        except Exception as error:  # noqa: BLE001 - as above
            self._warn(f"{name}=", f"{name}={_cut(value)} is no count and is not sent: {error}")
            return None

    def _warn(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            _log.warning("%s", text)


class KeptReports:
    """Rows that the weaver has not stored. If there are too many, the oldest are dropped. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: deque[Row] = deque()
        self._sent = 0  # the sequence number of the last row sent on this connection
        self.dropped = 0
        self.last_step: int | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: Sequence[Row]) -> None:
        """Keep rows. Their sequence numbers have to continue those before without a gap."""
        last_step = next((row[2] for row in reversed(rows) if row[2] is not None), None)
        with self._lock:
            self._rows.extend(rows)
            if last_step is not None:
                self.last_step = last_step
            while len(self._rows) > MAX_KEPT_REPORTS:
                self._rows.popleft()
                self.dropped += 1

    @property
    def unanswered(self) -> bool:
        """True if rows were sent on this connection, or on one before, that are not stored."""
        with self._lock:
            return bool(self._rows) and self._rows[0][0] <= self._sent

    @property
    def unsent(self) -> bool:
        """True if there are rows that were not sent on this connection."""
        with self._lock:
            return bool(self._rows) and self._rows[-1][0] > self._sent

    def stored(self, seq: int) -> None:
        """Drop the rows up to a sequence number."""
        with self._lock:
            while self._rows and self._rows[0][0] <= seq:
                self._rows.popleft()

    def resume(self, seq: int) -> None:
        """Start again after a sequence number, on a new connection."""
        self.stored(seq)
        with self._lock:
            self._sent = seq

    def next_rows(self, count: int) -> list[Row]:
        """Return at most ``count`` rows to send next, and keep them until they are stored."""
        with self._lock:
            if not self._rows or self._rows[-1][0] <= self._sent:
                return []
            begin = max(0, self._sent + 1 - self._rows[0][0])
            rows = list(islice(self._rows, begin, begin + count))
            self._sent = rows[-1][0]
            return rows
