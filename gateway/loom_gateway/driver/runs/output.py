"""What functions that run in the driver print: told apart by who prints, and kept for the client.

`sys.stdout` and `sys.stderr` are shared by everything in the driver. `route_output` puts in their place streams
that pass each text to the run in whose context it is written: its thread, its asyncio tasks, and threads that it
starts. What other processes or C code write to the file descriptors is not seen here; it stays in the driver's own
output.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import itertools
import logging
import operator
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TextIO

KEPT_OUTPUT = 1 << 20
"""Characters of a run's output that are kept; the oldest go first."""

_PIECE = 4096

STDOUT = 1
STDERR = 2

_current: ContextVar[RunOutput | None] = ContextVar("loom_run_output", default=None)


class RunOutput:
    """What one run has printed.

    `write` may be called by any thread, and be interrupted anywhere; everything else on the event loop.

    Args:
        loop: the driver's event loop.
        changed: called on it when there is more.
        log: called on it with each text, and ``stdout`` or ``stderr`` before it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        changed: Callable[[], None],
        log: Callable[[str, str], None] | None = None,
    ) -> None:
        self._loop = loop
        self._changed = changed
        self._log = log
        # A lock would be lost if the run were cancelled inside it.
        self._incoming: deque[tuple[int, str]] = deque()
        self._told = False
        self._pieces: deque[tuple[int, str]] = deque()
        self._dropped = 0
        self._kept = 0

    def write(self, stream: int, text: str) -> None:
        """Add a text; ``stream`` is 1 for stdout and 2 for stderr."""
        self._incoming.append((stream, text))
        if not self._told:
            self._told = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: the session is over
                self._loop.call_soon_threadsafe(self._take_in_and_tell)

    def _take_in_and_tell(self) -> None:
        self._told = False  # before the queue is looked at, so that nothing stays in it
        self._take_in()
        self._changed()

    def _take_in(self) -> None:
        # As many as there are now: a function that prints without a pause always has one more.
        texts = [self._incoming.popleft() for _ in range(len(self._incoming))]
        for stream, together in itertools.groupby(texts, operator.itemgetter(0)):
            text = "".join(text for _, text in together)
            self._add(stream, text)
            if self._log is not None:
                self._log("stdout" if stream == STDOUT else "stderr", text)

    def _add(self, stream: int, text: str) -> None:
        self._kept += len(text)
        if self._pieces and self._pieces[-1][0] == stream and len(self._pieces[-1][1]) < _PIECE:
            text = self._pieces.pop()[1] + text
        self._pieces.append((stream, text))
        while self._kept > KEPT_OUTPUT:
            oldest_stream, oldest = self._pieces.popleft()
            surplus = self._kept - KEPT_OUTPUT
            if len(oldest) > surplus:
                self._pieces.appendleft((oldest_stream, oldest[surplus:]))
            dropped = min(surplus, len(oldest))
            self._dropped += dropped
            self._kept -= dropped

    @property
    def end(self) -> int:
        """Characters that have been printed."""
        self._take_in()
        return self._dropped + self._kept

    def since(self, position: int) -> list[tuple[int, str]]:
        """What was printed from there to the `end` that was last asked for; a line says if some is missing."""
        pieces: list[tuple[int, str]] = []
        if position < self._dropped:
            pieces.append((STDERR, f"… {self._dropped - position} characters of output dropped …\n"))
        start = self._dropped
        for stream, text in self._pieces:
            if start + len(text) > position:
                pieces.append((stream, text[max(0, position - start) :]))
            start += len(text)
        return pieces


@contextlib.contextmanager
def printing_to(output: RunOutput) -> Iterator[None]:
    """Have what is printed in this context belong to a run."""
    token = _current.set(output)
    try:
        yield
    finally:
        _current.reset(token)


class _RoutedBytes(io.RawIOBase):
    """``sys.stdout.buffer`` of a run."""

    def __init__(self, output: RunOutput, stream: int) -> None:
        self._output = output
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        text = bytes(data).decode(errors="replace")
        self._output.write(self._stream, text)
        return len(data)


class _RoutedStream(io.TextIOBase):
    """``sys.stdout`` or ``sys.stderr`` of everybody."""

    def __init__(self, own: TextIO, stream: int) -> None:
        self._own = own
        self._stream = stream

    def write(self, text: str) -> int:
        output = _current.get()
        if output is None:
            return self._own.write(text)
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if text:
            output.write(self._stream, text)
            self._own.write(text)  # the last words of a driver that dies
        return len(text)

    def flush(self) -> None:
        self._own.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._own.fileno()

    @property
    def buffer(self) -> Any:
        output = _current.get()
        return self._own.buffer if output is None else _RoutedBytes(output, self._stream)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "replace"


def route_output() -> None:
    """Replace ``sys.stdout`` and ``sys.stderr``, and have threads print to the run that started them. Once."""
    if isinstance(sys.stdout, _RoutedStream):
        return
    own = sys.stderr
    sys.stdout = _RoutedStream(sys.stdout, STDOUT)
    sys.stderr = _RoutedStream(sys.stderr, STDERR)
    for handler in logging.root.handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is own:
            handler.setStream(sys.stderr)
    threading.Thread.start = _passing_on(threading.Thread.start)  # type: ignore[assignment,method-assign]


def _passing_on(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """`threading.Thread.start`, but the thread prints to the run that starts it; threads inherit no context."""

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
