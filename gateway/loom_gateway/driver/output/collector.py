"""The collection of a session's output, for the client and for the session's log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from loom.wire.bodies import LogLines, SetLogOptions
from loom.wire.messages import Kind, Message
from loom_gateway.driver.output import pump as log_pump
from loom_gateway.driver.output.lines import Aggregate, Aggregator, LineSplitter
from loom_gateway.driver.output.pump import Budget
from loom_gateway.driver.output.spool import LogSpool
from loom_gateway.driver.session.context import Context
from loom_gateway.driver.session.replies import Handler

WINDOW = 0.5  # seconds over which identical lines are aggregated, unless ``logging_option`` says otherwise
PARTIAL_AFTER = 1.0  # seconds after which an unfinished line is sent

RATE, BURST = 1 << 20, 4 << 20
"""Limits of what is sent to the client for all processes together: bytes a second in the long run, and bytes at
once."""

MARK_TIMEOUT = 5.0  # seconds that a process's pump has to send what was printed
END_TIMEOUT = 2.0  # seconds after a process's end in which its last lines have to arrive
_BATCH = 128 << 10  # approximate bytes of text in a message, far below the size at which it is sent in chunks
_MOST_LINES = 10_000  # maximum number of different lines that are held for aggregation

_STREAMS = {
    log_pump.STDOUT: "stdout",
    log_pump.DROPPED_STDOUT: "stdout",
    log_pump.STDERR: "stderr",
    log_pump.DROPPED_STDERR: "stderr",
}


@dataclass
class _Options:
    """The client's options for the output of a mesh; see `ProcMeshProxy.logging_option`."""

    stream: bool = True
    window: float | None = WINDOW


@dataclass
class _Source:
    """A proc mesh, or another origin of output."""

    name: str
    labels: Sequence[str] = ()
    sizes: Sequence[int] = ()
    options: _Options = field(default_factory=_Options)
    aggregator: Aggregator = field(default_factory=Aggregator)
    timer: asyncio.TimerHandle | None = None

    def place(self, rank: int) -> str:
        """Return the coordinates of a rank, such as ``hosts=0,gpus=1``."""
        coordinates: list[str] = []
        for label, size in zip(reversed(self.labels), reversed(self.sizes), strict=True):
            coordinates.insert(0, f"{label}={rank % size}")
            rank //= size
        return ",".join(coordinates)


class _Printer:
    """One process, or one writer of a source, with its two streams."""

    def __init__(self, source: _Source, rank: int) -> None:
        self.source = source
        self.rank = rank
        self.splitters = {"stdout": LineSplitter(), "stderr": LineSplitter()}
        self.timer: asyncio.TimerHandle | None = None
        self.marks: list[asyncio.Future[None]] = []
        self.writer: asyncio.StreamWriter | None = None
        self.budget: Budget | None = None
        self.left_out = 0


class LogCollector:
    """Passes lines on by the options of their mesh. On the event loop, except for `add` and the handlers."""

    def __init__(self, context: Context, spool: LogSpool) -> None:
        self._context = context
        self._loop = context.loop
        self._spool = spool
        self._sources: dict[int | str, _Source] = {}
        self._options: dict[int, _Options] = {}
        self._processes: dict[tuple[int, int], _Printer] = {}  # by proc mesh and rank
        self._others: dict[str, _Printer] = {}  # the driver and other sources without processes
        self._none_left = asyncio.Event()  # set while no process is connected
        self._none_left.set()
        self._budget = Budget(RATE, BURST)
        self._unsent = 0  # lines that were skipped since the last note
        self._levels: dict[int, int] = {}  # of the processes' loggers, by proc mesh
        self.handlers: dict[int, Handler] = {Kind.LOG_OPTIONS: self._set_options, Kind.FLUSH_LOGS: self._flush_all}
        context.on_retired.append(self._forget_stopped)

    def _set_options(self, message: Message, started: float) -> None:
        options = SetLogOptions.from_body(message.body)
        procs, level = options.procs, options.level
        entry = self._context.meshes.entry(procs)
        self._loop.call_soon_threadsafe(self._change, procs, _Options(options.stream, options.window))
        if level == self._levels.get(procs, logging.INFO):
            self._context.replies.succeed(message.id, started, None)
            return
        self._levels[procs] = level
        # Monarch sets the level in the processes, but forwards nothing: the driver does that.
        setting = entry.mesh.logging_option(stream_to_client=False, aggregate_window_sec=None, level=level)
        self._context.replies.answer_with(message, started, _until(setting))

    def _flush_all(self, message: Message, started: float) -> None:
        self._context.replies.answer_with(message, started, self.flush())

    def _change(self, procs: int, options: _Options) -> None:
        """Set the client's options for a proc mesh. Lines that are held back leave by the earlier options."""
        self._options[procs] = options
        source = self._sources.get(procs)
        if source is not None:
            self._flush_window(source)
            source.options = options

    def add(self, source: str, stream: str, text: str) -> None:
        """Add output that is not of a mesh's process, such as that of ``driver``. Safe on any thread.

        The session's log gets it, and the client in other ways. ``text`` need not be whole lines.
        """
        self._loop.call_soon_threadsafe(self._add, source, stream, text)

    def _add(self, name: str, stream: str, text: str) -> None:
        printer = self._others.get(name)
        if printer is None:
            source = self._sources[name] = _Source(name, options=_Options(stream=False))
            printer = self._others[name] = _Printer(source, 0)
            printer.budget = Budget(log_pump.RATE, log_pump.BURST)
            self._spool.add_processes(name, 1)
        if printer.budget is not None and not printer.budget.take(len(text)):
            printer.left_out += len(text)
            return
        if printer.left_out:
            note = f"… {printer.left_out} characters were left out: more than {_rate_text()} …"
            self._lines(printer, stream, [*printer.splitters[stream].flush(), note], time.time())
            printer.left_out = 0
        self._feed(printer, stream, text.encode(errors="replace"), time.time())

    async def serve(
        self, procs: int, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Collect what the pump of one process sends, until the process ends."""
        printer = _Printer(self._source(procs), rank)
        printer.writer = writer
        self._processes[procs, rank] = printer
        self._none_left.clear()
        try:
            while True:
                kind, when, length = log_pump.HEADER.unpack(await reader.readexactly(log_pump.HEADER.size))
                self._take(printer, kind, when, await reader.readexactly(length) if length else b"")
        except (asyncio.IncompleteReadError, OSError):
            pass  # the process has ended, or its machine is gone
        finally:
            writer.close()
            self._flush_printer(printer)
            self._processes.pop((procs, rank), None)
            for mark in printer.marks:
                _resolve(mark)
            self._forget_stopped(procs)
            if not self._processes:
                self._none_left.set()

    def _forget_stopped(self, procs: int) -> None:
        """Forget a proc mesh that was stopped, once the output of all its processes is here."""
        entry = self._context.meshes.known(procs)
        stopped = entry is None or (entry.stopped and entry.failure is not None)
        if stopped and not any(ident == procs for ident, _ in self._processes):
            source = self._sources.pop(procs, None)
            self._options.pop(procs, None)
            self._levels.pop(procs, None)
            if source is not None:
                self._flush_window(source)
                if not any(other.name == source.name for other in self._sources.values()):
                    self._spool.forget_processes(source.name)

    def _source(self, procs: int) -> _Source:
        source = self._sources.get(procs)
        if source is None:
            source = self._sources[procs] = self._describe(procs)
            source.options = self._options.get(procs, source.options)
            self._spool.add_processes(source.name, math.prod(source.sizes))
        return source

    def _describe(self, procs: int) -> _Source:
        entry = self._context.meshes.known(procs)
        if entry is None or entry.failure is not None:
            return _Source(f"mesh {procs}")  # the client has dropped its proxy
        labels, _, sizes, _ = self._context.meshes.shape(entry)
        return _Source(entry.name, labels, sizes)

    def _take(self, printer: _Printer, kind: int, when: float, data: bytes) -> None:
        if kind == log_pump.MARK:
            _resolve(printer.marks.pop(0))
            return
        stream = _STREAMS[kind]
        if kind in (log_pump.STDOUT, log_pump.STDERR):
            self._feed(printer, stream, data, when)
            return
        size, lines = log_pump.DROPPED.unpack(data)
        note = f"… {lines} lines ({size} bytes) were left out: this process printed more than {_rate_text()} …"
        self._lines(printer, stream, [*printer.splitters[stream].flush(), note], when)

    def _feed(self, printer: _Printer, stream: str, data: bytes, when: float) -> None:
        splitter = printer.splitters[stream]
        lines = splitter.feed(data)
        if lines:
            self._lines(printer, stream, lines, when)
        if splitter.has_rest and printer.timer is None:
            printer.timer = self._loop.call_later(PARTIAL_AFTER, self._flush_partial, printer)

    def _flush_partial(self, printer: _Printer) -> None:
        if printer.timer is not None:
            printer.timer.cancel()
            printer.timer = None
        for stream, splitter in printer.splitters.items():
            if lines := splitter.flush():
                self._lines(printer, stream, lines, time.time())

    def _lines(self, printer: _Printer, stream: str, lines: list[str], when: float) -> None:
        source, rank = printer.source, printer.rank
        place = source.place(rank)
        common = {"time": when, "mesh": source.name, "rank": rank, "place": place, "stream": stream}
        self._spool.append({**common, "text": line} for line in lines)
        if not source.options.stream:
            return
        if source.options.window is None:
            self._pass_on(source, [Aggregate(when, stream, line, 1, [rank]) for line in lines])
            return
        for line in lines:
            source.aggregator.add(when, rank, stream, line)
        if len(source.aggregator) > _MOST_LINES:
            self._flush_window(source)
        elif source.timer is None:
            source.timer = self._loop.call_later(source.options.window, self._flush_window, source)

    def _flush_window(self, source: _Source) -> None:
        if source.timer is not None:
            source.timer.cancel()
            source.timer = None
        self._pass_on(source, source.aggregator.take())

    def _pass_on(self, source: _Source, lines: list[Aggregate]) -> None:
        """Send lines to the client, within the limits."""
        batch: list[tuple[Any, ...]] = []
        size = 0
        for line in lines:
            if not self._context.has_room() or not self._budget.take(len(line.text) + 100):
                self._leave_out()
                continue
            place = source.place(line.ranks[0])
            batch.append((line.time, source.name, place, line.ranks, line.stream, line.text, line.count))
            size += len(line.text) + 100
            if size > _BATCH:
                self._send_batch(batch)
                batch, size = [], 0
        if batch:
            self._send_batch(batch)

    def _leave_out(self) -> None:
        if not self._unsent:
            self._loop.call_later(1.0, self._send_left_out_note)
        self._unsent += 1

    def _send_left_out_note(self) -> None:
        note = f"… {self._unsent} lines were not sent: the session printed too many; `loom logs` has the newest …"
        self._unsent = 0
        self._send_batch([(time.time(), "loom", "", [0], "stderr", note, 1)])

    def _send_batch(self, batch: Iterable[tuple[Any, ...]]) -> None:
        self._context.send(LogLines().message(parts=[msgpack.packb(list(batch))]))

    async def flush(self, procs: int | None = None) -> None:
        """Send what one proc mesh or all have printed, by pumps that answer within `MARK_TIMEOUT` seconds."""
        printers = [printer for (ident, _), printer in self._processes.items() if procs in (None, ident)]
        marks = [self._ask(printer) for printer in printers]
        if marks:
            await asyncio.wait(marks, timeout=MARK_TIMEOUT)
        for printer in [*printers, *(self._others.values() if procs is None else ())]:
            self._flush_printer(printer)

    def _ask(self, printer: _Printer) -> asyncio.Future[None]:
        assert printer.writer is not None
        mark: asyncio.Future[None] = self._loop.create_future()
        printer.marks.append(mark)
        printer.writer.write(b"f")
        return mark

    def _flush_printer(self, printer: _Printer) -> None:
        self._flush_partial(printer)
        self._flush_window(printer.source)

    async def end(self) -> None:
        """Wait up to `END_TIMEOUT` seconds for the last lines of stopped processes, and send everything."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._none_left.wait(), END_TIMEOUT)
        for printer in [*self._processes.values(), *self._others.values()]:
            self._flush_printer(printer)
        for source in self._sources.values():
            self._flush_window(source)


async def _until(setting: Any) -> None:
    await setting


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _rate_text() -> str:
    return f"{log_pump.RATE >> 10} KiB a second"
