"""The pump of one process's output: a program of its own, ``python -I -S log_pump.py OUT ERR LINE``.

It reads the pipes that are the process's standard output and error (descriptors ``OUT`` and ``ERR``), sends what
comes to the driver over the connected socket ``LINE``, and copies it to its own standard output and error, which
are those that the process was started with.

Why a process and not a thread of the one it serves: what was printed before a SIGKILL is still in the pipe and is
sent; and native code that prints while it holds the interpreter's lock would wait for a reader that waits for
the lock. It costs no time while nothing is printed. It imports nothing of Loom, so that it starts in 20 ms.

More than `RATE` is not sent but counted, so that a process that prints without end neither stops nor floods the
session; the last `TAIL` bytes before a pause or the end are kept. To the driver go frames: `HEADER` (kind, seconds
since the epoch, length) and so many bytes. Each byte from the driver asks to send all that was printed so far, and
to say so with a `MARK`.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import sys
import time

HEADER = struct.Struct(">BdI")
STDOUT, STDERR, DROPPED_STDOUT, DROPPED_STDERR, MARK = 1, 2, 3, 4, 5
DROPPED = struct.Struct(">QQ")
"""Payload of ``DROPPED_…``: bytes and line ends that were not sent."""

RATE = 256 << 10
"""Bytes a second that are sent of one process for long."""

BURST = 2 << 20
"""Bytes that are sent of one process at once, after a quiet time."""

TAIL = 8 << 10
"""Last bytes of what was not sent that are sent after all."""

BACKLOG = 1 << 20
"""Bytes that wait for a driver that does not read; above it, output is counted and not kept."""

FAREWELL_TIMEOUT = 5.0
"""Seconds that the driver has to take the last output."""

_READ = 64 << 10
_DRAIN = 4 << 20
"""Bytes that are read of one pipe at most for one `MARK`: a process may print faster than it can be read."""
_ATOMIC = 4096
"""Bytes that a pipe takes whole once it takes any."""


class Budget:
    """A token bucket of bytes: ``rate`` a second for long, ``burst`` at once."""

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
        """Spend; False, and nothing is spent, where too much was spent already."""
        self._fill()
        if self._tokens < 0:
            return False
        self._tokens -= size
        return True

    def seconds_until_worth_it(self) -> float:
        """Seconds until a second's worth may be sent. Not less, or there would be a note every few lines."""
        self._fill()
        return max(0.0, (self._rate - self._tokens) / self._rate)


class Source:
    """One of the two streams."""

    def __init__(self, pipe: int, kind: int, copy: int) -> None:
        self.pipe = pipe
        self.kind = kind
        self.copy = copy
        self.dropping = False
        self.dropped_bytes = 0
        self.dropped_lines = 0
        self.tail = b""

    def drop(self, data: bytes) -> None:
        """Count what is not sent, but for its last `TAIL` bytes."""
        self.dropping = True
        data = self.tail + data
        cut = max(0, len(data) - TAIL)
        self.tail = data[cut:]
        self._count(data[:cut])

    def _count(self, data: bytes) -> None:
        self.dropped_bytes += len(data)
        self.dropped_lines += data.count(b"\n")

    def settle(self) -> tuple[int, int, bytes]:
        """End a gap: bytes and lines that are lost, and the tail, which begins with a whole line."""
        if self.dropped_bytes:
            start = self.tail.find(b"\n") + 1
            self._count(self.tail[:start])
            self.tail = self.tail[start:]
        settled = (self.dropped_bytes, self.dropped_lines, self.tail)
        self.dropping, self.dropped_bytes, self.dropped_lines, self.tail = False, 0, 0, b""
        return settled


class Pump:
    """Carries what processes print from their pipes to the driver, a line at a time."""

    def __init__(self, out: int, err: int, line: int) -> None:
        self._sources = {out: Source(out, STDOUT, 1), err: Source(err, STDERR, 2)}
        self._line = line
        self._connected = True
        self._budget = Budget(RATE, BURST)
        self._backlog = bytearray()
        for descriptor in (out, err, line):
            os.set_blocking(descriptor, False)
        self._poll = select.poll()
        for pipe in self._sources:
            self._poll.register(pipe, select.POLLIN)
        self._poll.register(line, select.POLLIN)

    def run(self) -> None:
        """Pump until both pipes are closed by everybody who writes to them."""
        while self._sources:
            for descriptor, _ in self._poll.poll(self._timeout()):
                if descriptor == self._line:
                    self._serve_line()
                elif descriptor in self._sources:
                    self._read(self._sources[descriptor])
            self._resume()
        self._say_farewell()

    def _timeout(self) -> int | None:
        dropping = any(source.dropping for source in self._sources.values())
        if not dropping or len(self._backlog) >= BACKLOG:  # in the latter case the line says when it goes on
            return None
        return int(self._budget.seconds_until_worth_it() * 1000) + 1

    def _resume(self) -> None:
        dropping = [source for source in self._sources.values() if source.dropping]
        if dropping and len(self._backlog) < BACKLOG and self._budget.seconds_until_worth_it() == 0:
            for source in dropping:
                self._settle(source)

    def _read(self, source: Source) -> int:
        """Read what is there, once; -1 when there is nothing now, 0 at the end."""
        try:
            data = os.read(source.pipe, _READ)
        except BlockingIOError:
            return -1
        if not data:
            self._poll.unregister(source.pipe)
            self._settle(source)
            self._sources.pop(source.pipe)
        elif source.dropping or len(self._backlog) >= BACKLOG or not self._budget.take(len(data)):
            source.drop(data)
        else:
            self._forward(source, data)
        return len(data)

    def _settle(self, source: Source) -> None:
        lost, lines, tail = source.settle()
        if lost:
            self._send(DROPPED_STDOUT if source.kind == STDOUT else DROPPED_STDERR, DROPPED.pack(lost, lines))
        if tail:
            self._budget.take(len(tail))
            self._forward(source, tail)

    def _forward(self, source: Source, data: bytes) -> None:
        self._send(source.kind, data)
        _copy(source.copy, data)

    def _send(self, kind: int, data: bytes = b"") -> None:
        if self._connected:
            self._backlog += HEADER.pack(kind, time.time(), len(data)) + data
            self._write()

    def _write(self) -> None:
        try:
            while self._backlog:
                del self._backlog[: os.write(self._line, self._backlog)]
        except BlockingIOError:
            self._poll.modify(self._line, select.POLLIN | select.POLLOUT)
        except OSError:
            self._disconnected()
        else:
            self._poll.modify(self._line, select.POLLIN)

    def _serve_line(self) -> None:
        try:
            asked = os.read(self._line, 64)
        except BlockingIOError:
            self._write()
            return
        except OSError:
            asked = b""
        if not asked:
            self._disconnected()
            return
        for source in list(self._sources.values()):
            left = _DRAIN
            while left > 0 and (size := self._read(source)) > 0:
                left -= size
            self._settle(source)
        for _ in asked:
            self._send(MARK)

    def _disconnected(self) -> None:
        # The driver is gone and the process will end. Until it has, its pipes must not fill.
        if self._connected:
            self._connected = False
            self._poll.unregister(self._line)
            self._backlog.clear()

    def _say_farewell(self) -> None:
        until = time.monotonic() + FAREWELL_TIMEOUT
        while self._connected and self._backlog and (left := until - time.monotonic()) > 0:
            self._poll.poll(left * 1000)
            self._write()


def _copy(descriptor: int, data: bytes) -> None:
    """Write to where the process used to print, as far as that takes it at once."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    try:
        for start in range(0, len(data), _ATOMIC):
            if not any(event & select.POLLOUT for _, event in poll.poll(0)):
                return
            os.write(descriptor, data[start : start + _ATOMIC])
    except OSError:
        return  # nobody is there to read it


def main() -> None:
    """Run the pump until all ends of its pipes are closed."""
    # The processes that print end by these signals. Their output ends then, and with it this program.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    Pump(*map(int, sys.argv[1:4])).run()


if __name__ == "__main__":
    main()
