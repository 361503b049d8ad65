"""The pump of one process's output: it carries what arrives in the process's pipes to the line to the driver.

The pump runs in the process's agent (`loom_gateway.driver.process_link.agent`), not in a thread, for two reasons.
What was printed before a SIGKILL is still in the pipe and is sent. And native code that prints while it holds the
interpreter's lock would wait for a reader that waits for the lock. The pump also copies the output to the agent's
own standard output and error, which are those with which the process was started.

Output above `RATE` is counted and not sent, so that a process that prints without end neither stops nor floods the
session. The last `TAIL` bytes before a pause or the end are sent.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

from loom.control.process_end import KEPT_ERRORS
from loom.wire.bodies import OutputSkipped, ProcessOutput
from loom.wire.messages import Message

STDOUT, STDERR = 1, 2
RATE = 256 << 10  # bytes a second that are sent of one process in the long run
BURST = 2 << 20  # bytes that are sent of one process at once, after a quiet time
TAIL = 8 << 10  # last bytes of skipped output that are sent all the same

BACKLOG = 16 << 20
"""Bytes that may wait for a driver that does not read or cannot be reached: a minute at `RATE`. Above it, output is
counted and not kept."""

_READ = 64 << 10
_DRAIN = 4 << 20
"""The maximum number of bytes to read from one pipe for one flush: a process may print faster than the pump
reads."""
_ATOMIC = 4096  # bytes that a pipe takes whole if it takes any


class ByteBudget:
    """A token bucket of bytes: ``rate`` a second in the long run, ``burst`` at once."""

    def __init__(self, rate: int, burst: int) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = float(burst)
        self._filled = time.monotonic()

    def _fill(self) -> None:
        now = time.monotonic()
        self._tokens = min(self._burst, self._tokens + (now - self._filled) * self._rate)
        self._filled = now

    def take(self, size: int) -> bool:
        """Spend ``size`` bytes and return True; return False, without spending, if the bucket is overdrawn."""
        self._fill()
        if self._tokens < 0:
            return False
        self._tokens -= size
        return True

    def seconds_until_worth_it(self) -> float:
        """Return the seconds until a second's worth may be sent.

        A shorter pause would put a note after every few lines.
        """
        self._fill()
        return max(0.0, (self._rate - self._tokens) / self._rate)


class OutputSource:
    """Standard output or standard error of the process."""

    def __init__(self, pipe: int, kind: int) -> None:
        self.pipe = pipe
        self.kind = kind  # `STDOUT` or `STDERR`, which is also the descriptor of the original stream
        self.dropping = False
        self.dropped_bytes = 0
        self.dropped_lines = 0
        self.tail = b""

    def drop(self, data: bytes) -> None:
        """Count data as skipped, but keep its last `TAIL` bytes."""
        self.dropping = True
        data = self.tail + data
        cut = max(0, len(data) - TAIL)
        self.tail = data[cut:]
        self._count(data[:cut])

    def _count(self, data: bytes) -> None:
        self.dropped_bytes += len(data)
        self.dropped_lines += data.count(b"\n")

    def settle(self) -> tuple[int, int, bytes]:
        """End a gap. Return the lost bytes, the lost lines, and the tail, which begins with a whole line."""
        if self.dropped_bytes:
            start = self.tail.find(b"\n") + 1
            self._count(self.tail[:start])
            self.tail = self.tail[start:]
        settled = (self.dropped_bytes, self.dropped_lines, self.tail)
        self.dropping, self.dropped_bytes, self.dropped_lines, self.tail = False, 0, 0, b""
        return settled


class Pump:
    """Carries the output of a process from its pipes, standard output and error, to ``put``.

    Args:
        poll: the poll object of the agent, in which the pump registers its pipes.
        waiting: returns the bytes that wait for the driver.
    """

    def __init__(
        self,
        pipes: tuple[int, int],
        poll: select.poll,
        put: Callable[[Message], None],
        waiting: Callable[[], int],
    ) -> None:
        self._sources = {pipe: OutputSource(pipe, kind) for pipe, kind in zip(pipes, (STDOUT, STDERR), strict=True)}
        self._poll = poll
        self._put = put
        self._waiting = waiting
        self._budget = ByteBudget(RATE, BURST)
        self.last_errors = b""  # the end of what came from standard error, also of what was not sent
        for pipe in pipes:
            os.set_blocking(pipe, False)
            poll.register(pipe, select.POLLIN)

    def __bool__(self) -> bool:
        """Whether some writer still has its end of a pipe."""
        return bool(self._sources)

    def timeout(self) -> float | None:
        """Return the seconds after which `resume` may have something to do; None if not before a pipe has."""
        dropping = any(source.dropping for source in self._sources.values())
        if not dropping or self._is_full:  # a full backlog drains when the driver reads
            return None
        return self._budget.seconds_until_worth_it()

    @property
    def _is_full(self) -> bool:
        return self._waiting() >= BACKLOG

    def resume(self) -> None:
        """Go on sending after a pause, when it is worth it."""
        dropping = [source for source in self._sources.values() if source.dropping]
        if dropping and not self._is_full and self._budget.seconds_until_worth_it() == 0:
            for source in dropping:
                self._settle(source)

    def read(self, pipe: int) -> None:
        """Read once from a pipe that the poll object has reported, if it is one of the pump's."""
        source = self._sources.get(pipe)
        if source is not None:
            self._read(source)

    def drain(self) -> None:
        """Send what is in the pipes now."""
        for source in list(self._sources.values()):
            left = _DRAIN
            while left > 0 and (size := self._read(source)) > 0:
                left -= size
            self._settle(source)

    def _read(self, source: OutputSource) -> int:
        """Read once. Return the number of bytes read; -1 if nothing is there now; 0 at the end."""
        try:
            data = os.read(source.pipe, _READ)
        except BlockingIOError:
            return -1
        if source.kind == STDERR:
            self.last_errors = (self.last_errors + data)[-KEPT_ERRORS:]
        if not data:
            self._poll.unregister(source.pipe)
            self._settle(source)
            self._sources.pop(source.pipe)
        elif source.dropping or self._is_full or not self._budget.take(len(data)):
            source.drop(data)
        else:
            self._forward(source, data)
        return len(data)

    def _settle(self, source: OutputSource) -> None:
        lost, lines, tail = source.settle()
        if lost:
            self._put(OutputSkipped(source.kind, time.time(), lost, lines).message())
        if tail:
            self._budget.take(len(tail))
            self._forward(source, tail)

    def _forward(self, source: OutputSource, data: bytes) -> None:
        self._put(ProcessOutput(source.kind, time.time()).message(parts=[data]))
        _copy(source.kind, data)


def _copy(descriptor: int, data: bytes) -> None:
    """Write to the original stream, as much as it takes without waiting."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    try:
        for start in range(0, len(data), _ATOMIC):
            if not any(event & select.POLLOUT for _, event in poll.poll(0)):
                return
            os.write(descriptor, data[start : start + _ATOMIC])
    except OSError:
        return  # the original stream has no reader
