"""Pipes for what the processes of a run print, and for the descriptors of the run's standard streams."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
from collections import deque
from collections.abc import Callable

from loom.wire.bodies.runs import STDERR, STDOUT
from loom_gateway.driver.output.pump import Budget

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
        self._budget = Budget(RATE, BURST)

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
