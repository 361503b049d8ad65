"""Events and spans: what happened, when, and how long it took."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar, Token
from itertools import count
from pathlib import Path
from types import TracebackType

from loom.timing import clock, otlp
from loom.timing.files import HOST, EventFile, encode_flat, who
from loom.timing.lines import FORMS, format_line
from loom.timing.trace_ids import checked_trace, current_trace, reset

Record = dict[str, object]
Sink = Callable[[Record], None]

_around: ContextVar[tuple[str, str] | None] = ContextVar("loom_span", default=None)
"""The ids of the span around what runs now, and of the outermost one."""


_RESERVED = frozenset({"name", "time", "host", "pid", "trace"})
"""Keys of a record that no field replaces: a field of such a name gets a ``_`` behind it."""
_SPECIAL = _RESERVED | {"t", "role"}
"""Keys of a record."""


class _Recorder:
    """Where this process's events go. Nothing is built while ``sinks`` is empty."""

    def __init__(self) -> None:
        self.sinks: tuple[Sink, ...] = ()
        self.file: EventFile | None = None
        self.listeners: list[Sink] = []
        url = otlp.endpoint(os.environ)
        self.exporter = otlp.Exporter(url, os.environ) if url else None
        self.pid = 0
        self.read_environment()
        self.after_fork()

    def read_environment(self) -> None:
        self.role: str | None = os.environ.get("LOOM_TIMING_ROLE") or None
        self.lines = os.environ.get("LOOM_TIMING_LINES", "") not in ("", "0")
        self.set_folder(os.environ.get("LOOM_TIMING_DIR") or None)

    def after_fork(self) -> None:
        """Take what belongs to one process."""
        self.pid = os.getpid()
        self._who = who(self.pid, self.role)
        self._spans = count(random.SystemRandom().getrandbits(63))

    def span_id(self) -> str:
        return f"{next(self._spans) & 0xFFFFFFFFFFFFFFFF:016x}"

    def set_folder(self, folder: str | os.PathLike[str] | None) -> None:
        if self.file:
            self.file.close()
        self.file = EventFile(folder) if folder else None
        self.refresh()

    def refresh(self) -> None:
        sinks: list[Sink] = [self.file.write] if self.file else []
        if self.lines:
            sinks.append(self.write_line)
        if self.exporter:
            sinks.append(self.exporter.take)
        self.sinks = (*sinks, *self.listeners)
        self._direct = not self.exporter and not self.listeners
        self._who = who(self.pid, self.role)

    def record(self, name: str, start: float, unix: float, trace: str | None, fields: Record) -> None:
        """Give an event to the sinks. The fields are the recorder's from then on."""
        if self._direct and _SPECIAL.isdisjoint(fields):
            # Nearly all events, without a record. The code of an event is seldom in the processor's caches.
            t, file, line = _micro(start), self.file, None
            if file is not None:
                line = encode_flat(name, t, _micro(unix), self._who, trace, fields)
                if line is not None:
                    file.append(line)
            if file is None or line is not None:
                if self.lines and name in FORMS:
                    fields["t"] = t
                    self._write_line(name, trace, fields)
                return
        if not _RESERVED.isdisjoint(fields):
            fields = {f"{key}_" if key in _RESERVED else key: value for key, value in fields.items()}
        record: Record = {
            "name": name, "t": _micro(start), "time": _micro(unix), "host": HOST, "pid": self.pid,
            "role": self.role, "trace": trace, **fields,
        }  # fmt: skip
        for sink in self.sinks:
            sink(record)

    def write_line(self, record: Record) -> None:
        self._write_line(str(record["name"]), record["trace"], record)

    def _write_line(self, name: str, trace: object, fields: Record) -> None:
        try:
            line = format_line(name, trace, fields)
            if line is not None:
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
        except (OSError, ValueError):  # stdout is closed or full: the caller's work goes on
            self.lines = False
            self.refresh()


def _micro(seconds: float) -> float:
    """Cut off what is below a microsecond, in a quarter of the time of `round`."""
    return int(seconds * 1e6) / 1e6


recorder = _Recorder()
os.register_at_fork(after_in_child=recorder.after_fork)


def configure(*, folder: Path | None = None, lines: bool | None = None, role: str | None = None) -> None:
    """Say where the events of this process go. What is None stays as it is.

    At first these are ``$LOOM_TIMING_DIR``, ``$LOOM_TIMING_LINES`` (``1``) and ``$LOOM_TIMING_ROLE``.

    Args:
        folder: the folder of ``HOST-PID.jsonl``, made for this user only if it does not exist.
        lines: whether events that have a log line are written to stdout, so that a session's logs have them.
        role: what this process is: ``orchestrator``, ``trainer``, ``generator``, …
    """
    if role is not None:
        recorder.role = role
    if lines is not None:
        recorder.lines = lines
    if folder is not None:
        recorder.set_folder(folder)
    else:
        recorder.refresh()


def listen(sink: Sink) -> Callable[[], None]:
    """Give every event and span to a function as well, which must not raise. Return what ends that."""
    recorder.listeners.append(sink)
    recorder.refresh()

    def end() -> None:
        if sink in recorder.listeners:
            recorder.listeners.remove(sink)
            recorder.refresh()

    return end


def event(name: str, /, *, trace: str | None = None, **fields: object) -> None:
    """Record that something happened: a line of JSON, and a log line if the name has one.

    Args:
        name: such as ``ckpt.write.done``.
        trace: the trace id; the current one if None, or if it is not a trace id.
        fields: what JSON can hold. ``t`` replaces the time of the event, in seconds of `loom.timing.now`.
    """
    if recorder.sinks:
        recorder.record(name, clock.now(), time.time(), (trace and checked_trace(trace)) or current_trace(), fields)


class span:  # noqa: N801 - it reads as a function, like Monarch's
    """Record how long a block took. An exception is recorded by its type, as the field ``error``, and raised.

    Example:
        >>> with span("load", path="/data") as load:
        ...     load.set(rows=3)
        >>> load.dur_ms is not None
        True
    """

    __slots__ = ("_began", "_id", "_token", "_unix", "dur_ms", "fields", "name", "trace")

    def __init__(self, name: str, /, **fields: object) -> None:
        self.name = name
        self.fields = fields
        self.trace: str | None = None
        """The trace id in which the block began."""
        self.dur_ms: float | None = None
        """The milliseconds of the block, when it has ended."""
        self._token: Token[tuple[str, str] | None] | None = None

    def set(self, **fields: object) -> None:
        """Add fields, or replace them."""
        self.fields.update(fields)

    def __enter__(self) -> Span:
        self.trace = current_trace()
        if recorder.sinks:
            self._id = recorder.span_id()
            around = _around.get()
            self._token = _around.set((self._id, around[1] if around else self._id))
            self._unix = time.time()
        self._began = clock.monotonic()
        return self

    def drop(self) -> None:
        """End the block without a record."""
        if self._token is not None:
            reset(_around, self._token)
            self._token = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.dur_ms = (clock.monotonic() - self._began) * 1000
        if self._token is None:
            return
        around = self._token.old_value
        reset(_around, self._token)
        if kind is not None:
            self.fields["error"] = kind.__name__
        ids: Record = {"span": self._id, "parent": None}
        if isinstance(around, tuple):
            ids["parent"] = around[0]
            if self.trace is None:
                ids["root"] = around[1]
        fields: Record = {"dur_ms": round(self.dur_ms, 4), **self.fields, **ids}
        recorder.record(self.name, self._began + clock.offset().seconds, self._unix, self.trace, fields)


Span = span


def record_call(name: str, started: float, ended: float, trace: str | None, **fields: object) -> None:
    """Record a call between two times of `time.perf_counter`, if it has a trace id or `loom trace` wants all."""
    if trace is not None or recorder.listeners:
        fields = {
            "dur_ms": round((ended - started) * 1000, 4), "span": recorder.span_id(), "parent": None, **fields
        }  # fmt: skip
        # It ended a while ago, if this thread had to wait since.
        age, now, wall = time.perf_counter() - started, clock.now(), time.time()
        recorder.record(name, now - age, wall - age, trace, fields)
