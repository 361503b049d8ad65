"""The output of functions that run in the driver, separated by run and kept for the client.

Everything in the driver shares `sys.stdout` and `sys.stderr`. `route_output` replaces them with streams that pass
each text to the run in whose context it is written: the run's thread, its asyncio tasks, and threads that it
starts. Processes that a run starts, and code that writes to the ``fileno`` of its streams, print to a pair of
pipes, the run's `OutputPipes`. The output of native code in the driver on descriptors 1 and 2 stays in the driver's
own output.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import functools
import io
import itertools
import operator
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TextIO

from loom.control.run_start import find_place_by
from loom.tracing.spans import recorder
from loom.wire.bodies import RECORD, STDERR, STDOUT
from loom_gateway.driver.output.pump import ByteBudget
from loom_gateway.driver.runs.started_processes import StartedProcesses, note_processes

RATE, BURST = 16 << 20, 32 << 20
"""Bytes a second, and at once, that are read of a run. A process that prints more waits: the event loop that reads
has other work."""

_READ = 64 << 10
_DRAIN = 1 << 20  # bytes to read from one pipe at the end: a process may print on and on

_free_numbers: deque[int] = deque()
"""Descriptors of runs that are over, which are the driver's own standard error until another run has them. None is
ever closed: native code that has kept the number, as `faulthandler` does, must not write to something else."""


class OutputPipes:
    """A pipe for standard output and one for standard error of a run, made when they are first needed.

    Args:
        received: called on the event loop with `STDOUT` or `STDERR` and each text.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, received: Callable[[int, str], None]) -> None:
        self._loop = loop
        self._received = received
        self._made: dict[str, tuple[_Pipe, _Pipe]] = {}
        self._over = False
        self._budget = ByteBudget(RATE, BURST)

    def ends(self) -> tuple[int, int] | None:
        """Return the descriptors to print to, output and error; None once the run is over. Safe on any thread."""
        if self._over:
            return None
        pipes = self._made.get("pipes") or self._make()
        return None if pipes is None else (pipes[0].end, pipes[1].end)

    def _make(self) -> tuple[_Pipe, _Pipe] | None:
        try:
            made = _Pipe(STDOUT), _Pipe(STDERR)
        except OSError:
            return None  # the process is over its limit of open files
        # Not under a lock: a run that is cancelled while it holds one would never release it.
        pipes = self._made.setdefault("pipes", made)
        if pipes is made:
            with contextlib.suppress(RuntimeError):  # the loop is closed because the session is over
                self._loop.call_soon_threadsafe(self._watch)
        else:
            for pipe in made:
                os.close(pipe.source)
                pipe.give_back()
        return pipes

    def _pipes(self) -> tuple[_Pipe, ...]:
        return self._made.get("pipes", ())

    def _watch(self) -> None:
        for pipe in self._pipes():
            if pipe.source >= 0:
                self._loop.add_reader(pipe.source, self._read, pipe)

    def _read(self, pipe: _Pipe) -> int:
        """Read once. Return the number of bytes; 0 if nothing is there now, or nothing will come any more."""
        try:
            data = os.read(pipe.source, _READ)
        except BlockingIOError:
            return 0
        if text := pipe.decoder.decode(data, final=not data):
            self._received(pipe.stream, text)
        if not data:
            self._loop.remove_reader(pipe.source)
            os.close(pipe.source)
            pipe.source = -1
        elif not self._budget.take(len(data)):
            for each in self._pipes():
                if each.source >= 0:
                    self._loop.remove_reader(each.source)
            self._loop.call_later(self._budget.seconds_until_worth_it(), self._watch)
        return len(data)

    def finish(self) -> None:
        """Read what is there, at the end of the run. Processes that outlive it may print on. On the event loop."""
        self._over = True
        for pipe in self._pipes():
            left = _DRAIN
            while left > 0 and pipe.source >= 0 and (size := self._read(pipe)):
                left -= size
            pipe.give_back()


class _Pipe:
    """One of the two pipes."""

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.source, self.end = os.pipe()
        """The descriptor to read from, -1 once it is closed; and the one to write to."""
        os.set_blocking(self.source, False)
        with contextlib.suppress(IndexError):
            number = _free_numbers.popleft()
            os.dup2(self.end, number, inheritable=False)
            os.close(self.end)
            self.end = number

    def give_back(self) -> None:
        """Close this process's end for writing. Its number goes to another run."""
        os.dup2(2, self.end, inheritable=False)
        _free_numbers.append(self.end)


KEPT_OUTPUT = 1 << 20  # characters of a run's text to keep; the oldest go first
KEPT_RECORDS = 16 << 20  # characters of a cell's displays to keep; the oldest go first

PAGE = 4 << 20  # characters to send at once, far below what may wait for a watching client

_PIECE = 4096

LINE_WITHIN = 0.1
"""Seconds that the beginning of a line waits for its end, so that no other text comes between the two."""

_NAMES = {STDOUT: "stdout", STDERR: "stderr"}

_Source = tuple[int, bool]
"""The stream of a text, and whether processes of the run or the run itself wrote it."""

_current: ContextVar[RecordedOutput | None] = ContextVar("loom_run_output", default=None)
_routed: dict[int, _RoutedStream] = {}
_own_output: tuple[int, int] | None = None  # device and inode of the driver's own output
_in_fork = False  # whether this process is a forked copy of the driver


class RecordedOutput:
    """The output of one run.

    Any thread may call `write`, and may be interrupted anywhere in it. Everything else runs on the event loop,
    including ``changed`` when there is more output, and ``log`` with ``stdout`` or ``stderr`` and each text.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        changed: Callable[[], None],
        log: Callable[[str, str], None] | None = None,
        place: str = "",
    ) -> None:
        self._loop = loop
        self._changed = changed
        self._log = log
        self.processes = StartedProcesses(place)
        self.pipes = OutputPipes(loop, functools.partial(self.write, of_processes=True))
        self.streams: dict[int, io.TextIOBase] = {}
        """Its writers, by the stream."""
        # A deque instead of a lock: a run that is cancelled while it holds a lock would never release it.
        self._incoming: deque[tuple[_Source, str]] = deque()
        self._begun: dict[_Source, str] = {}  # lines that have no end yet
        self._over = False  # whether nothing waits for the end of its line any more
        self._notified = False  # whether the loop will take what came in
        self._pieces: deque[tuple[int, str]] = deque()
        self._dropped = 0  # characters before the kept ones
        self._kept = 0  # characters in `_pieces`
        self._records = 0  # characters of records among them

    def write(self, stream: int, text: str, of_processes: bool = False) -> None:
        self._incoming.append(((stream, of_processes), text))
        if not self._notified:
            self._notified = True
            with contextlib.suppress(RuntimeError):  # the loop is closed because the session is over
                self._loop.call_soon_threadsafe(self._take_in_and_notify)

    def finish(self) -> None:
        """Take in what is there, at the end of the run."""
        self._over = True
        self.pipes.finish()
        self._take_in()
        self._end_lines()

    def _take_in_and_notify(self) -> None:
        self._notified = False  # reset before the queue is read, so that no text is left in it
        self._take_in()
        self._changed()

    def _take_in(self) -> None:
        # Take only the texts that are there now: a function that prints without a pause always adds one more.
        texts = [self._incoming.popleft() for _ in range(len(self._incoming))]
        for source, together in itertools.groupby(texts, operator.itemgetter(0)):
            if source[0] == RECORD:
                self._end_lines()
                for _, record in together:
                    self._add(RECORD, record)
            else:
                self._take_in_text(source, "".join(text for _, text in together))

    def _take_in_text(self, source: _Source, text: str) -> None:
        text = self._begun.pop(source, "") + text
        whole = len(text)
        if not self._over and whole < _PIECE:
            whole = max(text.rfind("\n"), text.rfind("\r")) + 1
        if whole < len(text):
            if not self._begun:
                self._loop.call_later(LINE_WITHIN, self._end_lines_and_notify)
            self._begun[source] = text[whole:]
        if whole:
            self._put(source, text[:whole])

    def _end_lines_and_notify(self) -> None:
        if self._begun:
            self._end_lines()
            self._changed()

    def _end_lines(self) -> None:
        """Pass on the lines that have no end yet."""
        begun, self._begun = self._begun, {}
        for source, text in begun.items():
            self._put(source, text)

    def _put(self, source: _Source, text: str) -> None:
        self._add(source[0], text)
        if self._log is not None:
            self._log(_NAMES[source[0]], text)

    def _add(self, stream: int, text: str) -> None:
        self._kept += len(text)
        if stream == RECORD:
            self._records += len(text)
        elif self._pieces and self._pieces[-1][0] == stream and len(self._pieces[-1][1]) < _PIECE:
            text = self._pieces.pop()[1] + text
        self._pieces.append((stream, text))
        while (surplus := self._kept - self._records - KEPT_OUTPUT) > 0 or self._records > KEPT_RECORDS:
            oldest_stream, oldest = self._pieces.popleft()
            dropped = len(oldest)
            if oldest_stream == RECORD:
                self._records -= dropped
            elif 0 < surplus < dropped:
                self._pieces.appendleft((oldest_stream, oldest[surplus:]))
                dropped = surplus
            self._dropped += dropped
            self._kept -= dropped

    @property
    def kept_records(self) -> int:
        """Characters of the records that are kept."""
        return self._records

    @property
    def end(self) -> int:
        self._take_in()
        return self._dropped + self._kept

    def since(self, position: int) -> tuple[int, list[tuple[int, str]]]:
        """Return the output from a position on, and the position after it. A line says how much was dropped.

        It is all output up to the last `end`; or, if records are long, the first `PAGE` characters of it, or one
        record.
        """
        pieces: list[tuple[int, str]] = []
        size = 0
        if position < self._dropped:
            pieces.append((STDERR, f"… {self._dropped - position} characters of output dropped …\n"))
        start = self._dropped
        for stream, text in self._pieces:
            if start >= position or (start + len(text) > position and stream != RECORD):
                part = text[max(0, position - start) :]
                if size and size + len(part) > PAGE:
                    break
                size += len(part)
                pieces.append((stream, part))
            start += len(text)
        return start, pieces


def show(record: str) -> None:
    """Add a record of `loom.notebook.displays` to the output of this context's run, if it has one."""
    output = _current.get()
    if output is not None:
        output.write(RECORD, record)


class printing_to:  # noqa: N801
    """Assign the output of this context to a run, within the block.

    `contextlib.contextmanager` sets the traceback of what the block raises, which a frozen class refuses.
    """

    def __init__(self, output: RecordedOutput) -> None:
        self._output = output

    def __enter__(self) -> None:
        self._token = _current.set(self._output)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


class _RunBytes(io.BufferedIOBase):
    """The ``sys.stdout.buffer`` or ``sys.stderr.buffer`` of a run."""

    def __init__(self, output: RecordedOutput, own: TextIO, stream: int) -> None:
        self._output = output
        self._own = own
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.name = f"<{_NAMES[stream]}>"
        self.mode = "wb"

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if _in_fork:
            return int(_routed[self._stream].own.buffer.write(data))
        size = memoryview(data).nbytes
        if text := self._decoder.decode(data):
            self._output.write(self._stream, text)
            self._own.write(text)  # so that the driver's own output has the last words if it dies
        return size

    def flush(self) -> None:
        self._own.flush()

    def fileno(self) -> int:
        ends = self._output.pipes.ends()
        return self._own.fileno() if ends is None else ends[self._stream - STDOUT]


def _text_stream(binary: Any) -> io.TextIOWrapper:
    stream = io.TextIOWrapper(
        binary, encoding="utf-8", errors="backslashreplace", line_buffering=True, write_through=True
    )
    stream.mode = "w"  # type: ignore[misc]  # as that of Python's own
    return stream


class _RoutedStream(io.TextIOWrapper):
    """The replacement of ``sys.stdout`` or ``sys.stderr`` for the whole process.

    Each context has a text stream of its own; this one passes everything on to it.
    """

    def __init__(self, own: TextIO, stream: int) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")
        self.own = own
        self.stream = stream

    def __reduce_ex__(self, protocol: Any) -> Any:  # since Python 3.12, `TextIOWrapper` has one that raises
        # A passed stdout of the laptop means the one of the process that gets it, as natively.
        return getattr, (sys, "stdout" if self.stream == 1 else "stderr")

    def here(self) -> Any:
        """Return the stream to which this one writes in this context."""
        output = None if _in_fork else _current.get()
        if output is None:
            return self.own
        found = output.streams.get(self.stream)
        if found is None:
            found = output.streams[self.stream] = _text_stream(_RunBytes(output, self.own, self.stream))
        return found


def _passed_on(name: str) -> Any:
    """Return the method or property of a `_RoutedStream` that is the one of the context's own stream."""

    def call(self: _RoutedStream, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.here(), name)(*args, **kwargs)

    def get(self: _RoutedStream) -> Any:
        return getattr(self.here(), name)

    def set_(self: _RoutedStream, value: Any) -> None:
        setattr(self.here(), name, value)

    return functools.wraps(getattr(io.TextIOWrapper, name))(call) if name in _METHODS else property(get, set_)


_METHODS = (
    *("write", "writelines", "flush", "close", "detach", "reconfigure", "fileno", "isatty", "readable", "writable"),
    *("seekable", "read", "readline", "readlines", "seek", "tell", "truncate", "__repr__"),
)
_PROPERTIES = (
    "buffer",
    "closed",
    "encoding",
    "errors",
    "line_buffering",
    "mode",
    "name",
    "newlines",
    "write_through",
)

for _name in (*_METHODS, *_PROPERTIES):
    setattr(_RoutedStream, _name, _passed_on(_name))


def current_run() -> object:
    """Return an object of this context's run; None outside of runs."""
    return _current.get()


def current_ends() -> tuple[int, int] | None:
    """Return the descriptors to which processes of this context's run print; None outside of runs."""
    output = None if _in_fork else _current.get()
    return None if output is None else output.pipes.ends()


def print_to_descriptors(ends: tuple[int, int] | None) -> None:
    """Print to the standard descriptors from now on, in a forked child of this process.

    They become ``ends``, unless something else than the driver's own output is there already, such as a terminal.
    """
    global _in_fork
    _in_fork = True
    for stream, end in zip((STDOUT, STDERR), ends or (-1, -1), strict=True):
        if end >= 0 and _what(stream) == _own_output:
            os.dup2(end, stream)
        routed = _routed[stream]
        # A print to the stream of a closed loop, or half a line of it, is the parent's.
        routed.own = _text_stream(open(stream, "wb", closefd=False))  # noqa: SIM115


def _write_of_run(write: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
    """Return an `os.write` or `os.writev` whose text to the standard descriptors belongs to the run that calls it.

    The driver's own output, to which they lead, has it too if it can: it may be on a full disk.
    """

    @functools.wraps(write)
    def write_of_run(descriptor: int, data: Any, /) -> int:
        if descriptor in _NAMES and (ends := current_ends()) is not None and _what(descriptor) == _own_output:
            written = write(ends[descriptor - STDOUT], data)
            with contextlib.suppress(OSError):
                write(descriptor, data)  # as the last words if the driver dies
            return written
        return write(descriptor, data)

    return write_of_run


def _what(descriptor: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def route_output() -> None:
    """Replace ``sys.stdout`` and ``sys.stderr``, and make threads and processes print to their starter's run.

    Idempotent. Call it before logging is set up.
    """
    global _own_output
    if _routed:
        return
    _own_output = _what(STDERR)
    sys.stdout = _routed[STDOUT] = _RoutedStream(sys.stdout, STDOUT)
    sys.stderr = _routed[STDERR] = _RoutedStream(sys.stderr, STDERR)
    threading.Thread.start = _passing_on(threading.Thread.start)  # type: ignore[assignment,method-assign]
    os.write, os.writev = _write_of_run(os.write), _write_of_run(os.writev)
    note_processes(current_processes, current_ends)
    find_place_by(_current_place)
    recorder.refresh()


def current_processes() -> StartedProcesses | None:
    """Return the processes of this context's run; None outside of runs."""
    output = _current.get()
    return None if output is None else output.processes


def _current_place() -> str | None:
    processes = current_processes()
    return None if processes is None else processes.place


def _passing_on(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """Return a `Thread.start` whose threads print to their starter's run: threads inherit no context."""

    @functools.wraps(start)
    def start_printing(thread: threading.Thread) -> None:
        output = _current.get()
        if output is not None:
            run = thread.run

            def run_printing() -> None:
                _current.set(output)
                run()

            thread.run = run_printing  # type: ignore[method-assign]
        start(thread)

    return start_printing
