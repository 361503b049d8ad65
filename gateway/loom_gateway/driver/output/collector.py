"""The collection of a session's output, as lines, for the client and for the session's log."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import functools
import logging
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgpack

from loom.errors import ProtocolMismatch
from loom.wire.bodies import FlushOutput, LogLines, OutputSkipped, ProcessOutput, SetLogOptions
from loom.wire.messages import Kind, Message
from loom_gateway.driver.output.pump import BURST as PROCESS_BURST
from loom_gateway.driver.output.pump import RATE as PROCESS_RATE
from loom_gateway.driver.output.pump import STDERR, STDOUT, ByteBudget
from loom_gateway.driver.output.spool import LogSpool
from loom_gateway.driver.process_link.server import ProcessLink
from loom_gateway.driver.session.context import SessionContext
from loom_gateway.driver.session.replies import Handler

LONGEST_LINE = 16 << 10  # characters of the longest line; the rest of a longer one becomes the next line


class LineSplitter:
    """Splits one stream of bytes into lines. Bytes that are not UTF-8 become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""  # the unfinished line

    @property
    def has_rest(self) -> bool:
        return bool(self._rest)

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that end in ``data``."""
        lines = (self._rest + self._decoder.decode(data)).split("\n")
        # A progress bar overwrites itself with carriage returns. Keep only what a terminal would show last.
        self._rest = _after_returns(lines.pop())
        whole = [piece for line in lines for piece in _pieces(_after_returns(line).rstrip("\r"))]
        while len(self._rest) > LONGEST_LINE:
            whole.append(self._rest[:LONGEST_LINE])
            self._rest = self._rest[LONGEST_LINE:]
        return whole

    def flush(self) -> list[str]:
        """Return the unfinished line, if any, as a line."""
        rest, self._rest = self._rest.rstrip("\r"), ""
        return [rest] if rest.strip() else []


def _after_returns(line: str) -> str:
    return line[line.rfind("\r", 0, max(0, len(line) - 1)) + 1 :]


def _pieces(line: str) -> Sequence[str]:
    if len(line) <= LONGEST_LINE:
        return (line,)
    return [line[start : start + LONGEST_LINE] for start in range(0, len(line), LONGEST_LINE)]


@dataclass
class Aggregate:
    """One line, and the ranks that printed it."""

    time: float  # time of its first appearance, in seconds since the epoch
    stream: str
    text: str
    count: int = 0
    ranks: list[int] = field(default_factory=list)  # without repetition, in the order of their first lines


class Aggregator:
    """Merges equal lines of several ranks, and consecutive equal lines of one rank.

    Lines come in the order in which they first appeared. Two equal lines of a rank with others between them stay
    apart, so that the traceback of eight ranks becomes one complete traceback.
    """

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str, int], Aggregate] = {}
        self._last: dict[tuple[int, str], tuple[str, str, int]] = {}  # the last line of each rank and stream
        self._seen: Counter[tuple[int, str, str]] = Counter()  # how often each rank has printed a line

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, time: float, rank: int, stream: str, text: str) -> None:
        last = self._last.get((rank, stream))
        if last is not None and last[1] == text:
            self._lines[last].count += 1
            return
        seen = (rank, stream, text)
        key = (stream, text, self._seen[seen])
        self._seen[seen] += 1
        self._last[rank, stream] = key
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Aggregate(time, stream, text)
        line.count += 1
        line.ranks.append(rank)

    def take(self) -> list[Aggregate]:
        """Return the lines so far in the order of their first appearance, and start anew."""
        lines = list(self._lines.values())
        self._lines, self._last, self._seen = {}, {}, Counter()
        return lines


WINDOW = 0.5  # seconds over which identical lines are aggregated, unless ``logging_option`` says otherwise
PARTIAL_AFTER = 1.0  # seconds after which an unfinished line is sent

RATE, BURST = 1 << 20, 4 << 20
"""Limits of what is sent to the client for all processes together: bytes a second in the long run, and bytes at
once."""

MARK_TIMEOUT = 5.0  # seconds that a process's pump has to send what was printed
END_TIMEOUT = 2.0  # seconds after a process's end in which its last lines have to arrive
_BATCH = 128 << 10  # approximate bytes of text in a message, far below the size at which it is sent in chunks
_MOST_LINES = 10_000  # maximum number of different lines that are held for aggregation

_RUNS = "driver"  # see `loom_gateway.sessions.logs.RUNS`

_STREAMS = {STDOUT: "stdout", STDERR: "stderr"}


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
    """One process, or one writer of a source, with its two streams.

    ``about`` is added to what the session's log has of each line.
    """

    def __init__(self, source: _Source, rank: int, about: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.source = source
        self.rank = rank
        self.about = about
        self.splitters = {"stdout": LineSplitter(), "stderr": LineSplitter()}
        self.timer: asyncio.TimerHandle | None = None
        self.left_out = 0


class ProcessPrinter(_Printer):
    """The output of one process, as its process link brings it."""

    def __init__(self, collector: LogCollector, source: _Source, line: ProcessLink) -> None:
        super().__init__(source, line.rank)
        self._collector = collector
        self.line = line
        self.marks: list[asyncio.Future[None]] = []  # flushes that the process has not carried out

    def take(self, message: Message) -> None:
        """Take a message about the process's output."""
        self._collector.take(self, message)

    def close(self) -> None:
        """Note that nothing more will come."""
        self._collector.close(self)


class LogCollector:
    """Passes lines on by the options of their mesh. On the event loop, except for `of_run` and the handlers."""

    def __init__(self, context: SessionContext, spool: LogSpool) -> None:
        self._context = context
        self._loop = context.loop
        self._spool = spool
        self._sources: dict[int, _Source] = {}
        self._options: dict[int, _Options] = {}
        self._processes: dict[tuple[int, int], ProcessPrinter] = {}  # by proc mesh and rank
        self._source_of_runs = _Source(_RUNS, options=_Options(stream=False))
        self._runs: weakref.WeakSet[_Printer] = weakref.WeakSet()  # held by the functions whose output they take
        self._runs_budget = ByteBudget(PROCESS_RATE, PROCESS_BURST)
        self._none_left = asyncio.Event()  # set while no process is connected
        self._none_left.set()
        self._budget = ByteBudget(RATE, BURST)
        self._unsent = 0  # lines that were skipped since the last note
        self._levels: dict[int, int] = {}  # of the processes' loggers, by proc mesh
        self.handlers: dict[int, Handler] = {Kind.LOG_OPTIONS: self._set_options, Kind.FLUSH_LOGS: self._flush_all}
        context.on_retired.append(self._forget_stopped)
        spool.tell = self._tell

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

    def of_run(self, ident: int, name: str) -> Callable[[str, str], None]:
        """Return a function that takes what a function in the driver prints: its stream, and text of any length.

        The session's log gets it, and the client in other ways. Safe on any thread; the function is for the loop.
        """
        printer = _Printer(self._source_of_runs, 0, {"run": ident, "run_name": name})
        self._loop.call_soon_threadsafe(self._runs.add, printer)
        return functools.partial(self._add, printer)

    def _add(self, printer: _Printer, stream: str, text: str) -> None:
        self._spool.add_processes(_RUNS, 1)
        if not self._runs_budget.take(len(text)):
            printer.left_out += len(text)
            return
        if printer.left_out:
            note = f"… {printer.left_out} characters were left out: more than {_rate_text()} …"
            self._lines(printer, stream, [*printer.splitters[stream].flush(), note], time.time())
            printer.left_out = 0
        self._feed(printer, stream, text.encode(errors="replace"), time.time())

    def printer(self, line: ProcessLink) -> ProcessPrinter:
        """Return what takes the output of a process."""
        printer = ProcessPrinter(self, self._source(line.procs), line)
        self._processes[line.procs, line.rank] = printer
        self._none_left.clear()
        return printer

    def close(self, printer: ProcessPrinter) -> None:
        """Note that a process will print nothing more.

        Its last lines wait for at most `WINDOW`, in which those of processes that end with it may come.
        """
        self._flush_partial(printer)
        if printer.source.aggregator:
            self._flush_window_within(printer.source, WINDOW)
        key = (printer.line.procs, printer.line.rank)
        if self._processes.get(key) is printer:
            del self._processes[key]
        for mark in printer.marks:
            _resolve(mark)
        self._forget_stopped(printer.line.procs)
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

    def take(self, printer: ProcessPrinter, message: Message) -> None:
        """Take a message about the output of a process."""
        if message.kind == Kind.OUTPUT_FLUSHED:
            if printer.marks:
                _resolve(printer.marks.pop(0))
        elif message.kind == Kind.OUTPUT_SKIPPED:
            skipped = OutputSkipped.from_body(message.body)
            stream = _stream(skipped.stream)
            note = (
                f"… {skipped.lines} lines ({skipped.size} bytes) were left out: this process printed more than "
                f"{_rate_text()} …"
            )
            self._lines(printer, stream, [*printer.splitters[stream].flush(), note], skipped.time)
        elif message.kind == Kind.PROCESS_OUTPUT:
            output = ProcessOutput.from_body(message.body)
            self._feed(printer, _stream(output.stream), b"".join(message.parts), output.time)
        else:
            raise ProtocolMismatch(f"a process sent a message {message.kind}, which is not its to send")

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
        common = {
            "time": when,
            "mesh": source.name,
            "rank": rank,
            "place": place,
            "stream": stream,
            **printer.about,
        }
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
            self._flush_window_within(source, source.options.window)

    def _flush_window_within(self, source: _Source, seconds: float) -> None:
        if source.timer is not None and source.timer.when() <= self._loop.time() + seconds:
            return
        if source.timer is not None:
            source.timer.cancel()
        source.timer = self._loop.call_later(seconds, self._flush_window, source)

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
        self._tell(note)

    def _tell(self, note: str) -> None:
        """Send the client a line of Loom's own."""
        self._send_batch([(time.time(), "loom", "", [0], "stderr", note, 1)])

    def _send_batch(self, batch: Iterable[tuple[Any, ...]]) -> None:
        self._context.send(LogLines().message(parts=[msgpack.packb(list(batch), unicode_errors="replace")]))

    async def flush(self, procs: int | None = None) -> None:
        """Send what one proc mesh or all have printed, by pumps that answer within `MARK_TIMEOUT` seconds."""
        printers = [printer for (ident, _), printer in self._processes.items() if procs in (None, ident)]
        marks = [self._ask(printer) for printer in printers]
        if marks:
            await asyncio.wait(marks, timeout=MARK_TIMEOUT)
        for printer in [*printers, *(self._runs if procs is None else ())]:
            self._flush_printer(printer)

    def _ask(self, printer: ProcessPrinter) -> asyncio.Future[None]:
        mark: asyncio.Future[None] = self._loop.create_future()
        printer.marks.append(mark)
        printer.line.send(FlushOutput().message())
        return mark

    def _flush_printer(self, printer: _Printer) -> None:
        self._flush_partial(printer)
        self._flush_window(printer.source)

    async def end(self) -> None:
        """Wait up to `END_TIMEOUT` seconds for the last lines of stopped processes, and send everything."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._none_left.wait(), END_TIMEOUT)
        for printer in [*self._processes.values(), *self._runs]:
            self._flush_printer(printer)
        for source in self._sources.values():
            self._flush_window(source)


async def _until(setting: Any) -> None:
    await setting


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _stream(number: int) -> str:
    if number not in _STREAMS:
        raise ProtocolMismatch(f"a process prints on stream 1 or 2, not {number}")
    return _STREAMS[number]


def _rate_text() -> str:
    return f"{PROCESS_RATE >> 10} KiB a second"
