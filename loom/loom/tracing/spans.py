"""Events and spans: what happened, when, and how long it took."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, MutableMapping, Sequence
from contextvars import Context, ContextVar, Token, copy_context
from itertools import count, groupby
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from loom.tracing import clock, encoding, files, otlp
from loom.tracing.encoding import PLAIN
from loom.tracing.files import HOST, EventFile, Writer, who
from loom.tracing.lines import FORMS, format_line
from loom.tracing.trace_ids import TRACE_HEADER, checked_trace, reset, trace, trace_here

Record = dict[str, object]
Sink = Callable[[Record], None]
Ended = tuple[float, int, object]
"""The end of a span: its milliseconds, its id, and `_around` at its begin."""
Entry = tuple[str, float, str | None, Record, Context | None, Ended | None]
"""A waiting entry: name, time by this host's clock, trace id, fields, and the run that owns the line."""
Written = tuple[str | None, str | None, Context | None]
"""The line of a file, that of a log, and whose this one is."""

_around: ContextVar[tuple[int, int] | None] = ContextVar("loom_span", default=None)
"""The ids of the span around what runs now, and of the outermost one."""


_RESERVED = frozenset({"name", "time", "host", "pid", "trace"})
"""Keys of a record that no field replaces: a field of such a name gets a ``_`` behind it."""
_SPECIAL = _RESERVED | {"t", "role"}
"""Keys of a record."""


class _Recorder:
    """The destination of this process's events. Nothing is built while ``sinks`` is empty."""

    def __init__(self) -> None:
        self.sinks: tuple[Sink, ...] = ()
        self.file: EventFile | None = None
        self.listeners: list[Sink] = []
        url = otlp.endpoint(os.environ)
        self.exporter = otlp.Exporter(url) if url else None
        self.pid = 0
        self._writer = Writer(self._write)
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
        self.spans = count(random.SystemRandom().getrandbits(63))
        self._writer.after_fork()

    def span_id(self) -> str:
        return _hex(next(self.spans))

    def set_folder(self, folder: str | os.PathLike[str] | None) -> None:
        self.flush()
        if self.file:
            self.file.close()
        self.file = EventFile(folder) if folder else None
        self.refresh()

    def refresh(self) -> None:
        sinks: list[Sink] = [self._take] if self.file or self.lines else []
        if self.exporter:
            sinks.append(self.exporter.put)
        self.sinks = (*sinks, *self.listeners)
        self._direct = not self.exporter and not self.listeners
        self._routed = self.lines and hasattr(sys.stdout, "here")
        self._who = who(self.pid, self.role)

    def flush(self) -> None:
        self._writer.flush()

    def record(
        self, name: str, start: float, trace: str | None, fields: Record, ended: Ended | None = None
    ) -> None:
        """Give an event or a span to the sinks. The fields are the recorder's from then on."""
        if self._direct:
            for value in fields.values():
                if value.__class__ not in PLAIN:
                    break
            else:  # nearly all events
                self._writer.put((name, start, trace, fields, copy_context() if self._routed else None, ended))
                return
        if ended is not None:
            fields = _with(fields, ended, trace)
        unix = time.time() - clock.monotonic() + start
        record = self._record(name, _micro(start + clock.offset().seconds), unix, trace, fields)
        for sink in self.sinks:
            sink(record)

    def _record(self, name: str, t: float, unix: float, trace: str | None, fields: Record) -> Record:
        if not _RESERVED.isdisjoint(fields):
            fields = {f"{key}_" if key in _RESERVED else key: value for key, value in fields.items()}
        return {
            "name": name, "t": t, "time": _micro(unix), "host": HOST, "pid": self.pid,
            "role": self.role, "trace": trace, **fields,
        }  # fmt: skip

    def _take(self, record: Record) -> None:
        """Have a record written as it is now: what it holds may change."""
        line = self._encoded(record) if self.file else None
        text = format_line(str(record["name"]), record["trace"], record) if self.lines else None
        self._writer.put((line, text, copy_context()))

    def _write(self, entries: Sequence[Entry | Written]) -> None:
        offset, unix = clock.offset().seconds, time.time() - clock.monotonic()
        lines: list[str] = []
        texts: list[str] = []
        contexts: list[Context | None] = []
        for entry in entries:
            try:
                line, text, context = entry if len(entry) == 3 else self._written(entry, offset, unix)
            except Exception as error:  # noqa: BLE001 - a name that is no text, or whatever else a program gives
                if self.file:
                    self.file.leave_out(error)
                continue
            if line is not None:
                lines.append(line)
            if text is not None:
                texts.append(text)
                contexts.append(context)
        if lines and self.file:
            self.file.append(lines)
        for stream, some in _by_stream(texts, contexts):
            try:
                stream.write("\n".join([*some, ""]))
                stream.flush()
            except Exception:  # noqa: BLE001 - it is closed, full, in use, or a program's own: the work goes on
                self.lines = False
                self.refresh()

    def _written(self, entry: Entry, offset: float, unix: float) -> Written:
        name, start, trace, fields, context, ended = entry
        if ended is not None:
            fields = _with(fields, ended, trace)
        t = start + offset
        if "t" in fields:
            given = fields["t"]
            if isinstance(given, float) and 0 <= given < _LATEST:
                t = given
                del fields["t"]
        says = self.lines and name in FORMS
        if self.file and _SPECIAL.isdisjoint(fields):
            lines = encoding.encode(name, t, start + unix, self._who, trace, fields, says)
            if lines is not None:
                return *lines, context
        line = self._encoded(self._record(name, _micro(t), start + unix, trace, fields)) if self.file else None
        if not says:
            return line, None, None
        if "t" not in fields:
            fields["t"] = t
        return line, format_line(name, trace, fields), context

    def _encoded(self, record: Record) -> str | None:
        try:
            return files.encode(record)
        except (TypeError, ValueError, RecursionError) as error:
            if self.file:
                self.file.leave_out(error)
            return None


def _with(fields: Record, ended: Ended, trace: str | None) -> Record:
    dur_ms, id, around = ended
    fields = {"dur_ms": round(dur_ms, 4), **fields, "span": _hex(id), "parent": None}
    if isinstance(around, tuple):
        parent, root = around
        fields["parent"] = _hex(parent)
        if trace is None:
            fields["root"] = _hex(root)
    return fields


def _hex(id: int) -> str:
    return f"{id & 0xFFFFFFFFFFFFFFFF:016x}"


def _by_stream(texts: Sequence[str], contexts: Sequence[Context | None]) -> Iterable[tuple[TextIO, Iterable[str]]]:
    """Return the texts by where `sys.stdout` writes in their contexts: the driver's writes to the caller's run."""
    if not texts:
        return []
    stream = sys.stdout
    here = getattr(stream, "here", None)
    if here is None:
        return [(stream, texts)]
    streams = [stream if context is None else context.run(here) for context in contexts]
    groups = groupby(zip(streams, texts, strict=True), lambda each: each[0])
    return ((found, [text for _, text in some]) for found, some in groups)


_LATEST = 1e12
"""Seconds, of which `_micro` makes an integer that a float holds."""


def _micro(seconds: float) -> float:
    """Round down to microseconds, in a quarter of the time of `round`."""
    return int(seconds * 1e6) / 1e6


recorder = _Recorder()
os.register_at_fork(after_in_child=recorder.after_fork)


def configure(*, folder: Path | None = None, lines: bool | None = None, role: str | None = None) -> None:
    """Say where the events of this process go. A setting that is None stays as it is.

    At first these are ``$LOOM_TIMING_DIR``, ``$LOOM_TIMING_LINES`` (``1``) and ``$LOOM_TIMING_ROLE``.

    Args:
        folder: the folder of ``HOST-PID.jsonl``, made for this user only if it does not exist.
        lines: whether events that have a log line are written to stdout, so that a session's logs have them.
        role: what this process is: ``orchestrator``, ``trainer``, ``generator``, …
    """
    recorder.flush()
    if role is not None:
        recorder.role = role
    if lines is not None:
        recorder.lines = lines
    if folder is not None:
        recorder.set_folder(folder)
    else:
        recorder.refresh()


def flush() -> None:
    """Write what this process has recorded. It happens by itself within a second, and when a process ends.

    A process that ends by ``os._exit`` calls it before.
    """
    recorder.flush()


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
        fields: what JSON can hold. ``t`` replaces the time of the event, in seconds of `loom.tracing.now`.
    """
    if recorder.sinks:
        recorder.record(name, clock.monotonic(), (trace and checked_trace(trace)) or trace_here(), fields)


class span:  # noqa: N801 - it reads as a function, like Monarch's
    """Record how long a block took. An exception is recorded by its type, as the field ``error``, and raised.

    Example:
        >>> with span("load", path="/data") as load:
        ...     load.set(rows=3)
        >>> load.dur_ms is not None
        True
    """

    __slots__ = ("_began", "_id", "_token", "dur_ms", "fields", "name", "trace")

    def __init__(self, name: str, /, **fields: object) -> None:
        self.name = name
        self.fields = fields
        self.trace: str | None = None
        """The trace id in which the block began."""
        self.dur_ms: float | None = None
        """The milliseconds of the block, when it has ended."""
        self._token: Token[tuple[int, int] | None] | None = None

    def set(self, **fields: object) -> None:
        """Add fields, or replace them."""
        self.fields.update(fields)

    def __enter__(self) -> Span:
        self.trace = trace_here()
        if recorder.sinks:
            self._id = id = next(recorder.spans)
            around = _around.get()
            self._token = _around.set((id, around[1] if around else id))
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
        token = self._token
        if token is None:
            return
        reset(_around, token)
        if kind is not None:
            self.fields["error"] = kind.__name__
        ended = (self.dur_ms, self._id, token.old_value)
        recorder.record(self.name, self._began, self.trace, self.fields.copy(), ended)


Span = span


def record_call(name: str, started: float, ended: float, trace: str | None, **fields: object) -> None:
    """Record a call between two times of `time.perf_counter`, if it has a trace id or `loom trace` wants all."""
    if trace is not None or recorder.listeners:
        fields = {
            "dur_ms": round((ended - started) * 1000, 4), "span": recorder.span_id(), "parent": None, **fields
        }  # fmt: skip
        # It ended a while ago, if this thread had to wait since.
        recorder.record(name, clock.monotonic() - (time.perf_counter() - started), trace, fields)


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

RECEIVED = "loom.received"
"""The key in a request's ASGI scope with the time at which it arrived, in seconds of `loom.tracing.now`."""

_HEADER = TRACE_HEADER.encode()


class FirstByte:
    """Serves each HTTP request in the trace of its header ``x-trace-id``, if that has one.

    The server calls a middleware when it has read the request's headers, before its body; time in the accept queue
    and, on a busy event loop, until that loop comes to it, has passed by then.

    Args:
        app: the application.
        paths: for requests to these paths there is an event.
        name: the event's name; its fields are ``path`` and ``t``.
    """

    def __init__(self, app: App, paths: Collection[str] = (), name: str = "weights.server.recv") -> None:
        self._app = app
        self._paths = frozenset(paths)
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or anything else as it is."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope[RECEIVED] = received = clock.now()
        id = next((_trace_of(value) for name, value in scope["headers"] if name == _HEADER), None)
        if id is None:
            if scope["path"] in self._paths:
                event(self._name, path=scope["path"], t=received)
            return await self._app(scope, receive, send)
        with trace(id):
            if scope["path"] in self._paths:
                event(self._name, path=scope["path"], t=received)
            if not recorder.sinks:
                return await self._app(scope, receive, send)
            with span("http", method=scope["method"], path=scope["path"]):
                await self._app(scope, receive, send)


def _trace_of(value: bytes) -> str | None:
    return checked_trace(value.decode("latin-1"))
