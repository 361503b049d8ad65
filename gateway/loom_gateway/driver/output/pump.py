"""The pump of one process's output: a separate program, ``python -I -S pump.py OUT ERR DRIVER``.

The pump reads the pipes that are the process's standard output and error (descriptors ``OUT`` and ``ERR``). It
sends what arrives to the driver over the connected socket ``DRIVER``. It also copies it to its own standard output
and error, which are those with which the process was started.

The pump is a process and not a thread, for two reasons. What was printed before a SIGKILL is still in the pipe and
is sent. And native code that prints while it holds the interpreter's lock would wait for a reader that waits for
the lock. The pump costs no time while nothing is printed. It imports nothing of Loom, so that it starts in 20 ms.

Output above `RATE` is counted and not sent, so that a process that prints without end neither stops nor floods the
session. The last `TAIL` bytes before a pause or the end are sent. The driver gets frames: `HEADER` (kind, seconds
since the epoch, length), then ``length`` bytes. Each byte from the driver requests that all output so far is sent,
followed by a `MARK`.
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
DROPPED = struct.Struct(">QQ")  # payload of ``DROPPED_…``: the number of bytes and of line ends that were not sent
RATE = 256 << 10  # bytes a second that are sent of one process in the long run
BURST = 2 << 20  # bytes that are sent of one process at once, after a quiet time
TAIL = 8 << 10  # last bytes of skipped output that are sent all the same
BACKLOG = 1 << 20  # bytes that may wait for a driver that does not read; above it, output is only counted
FAREWELL_TIMEOUT = 5.0  # seconds that the driver has to take the last output

_READ = 64 << 10
_DRAIN = 4 << 20  # bytes to read from one pipe for one `MARK`: a process may print faster than the pump reads
_ATOMIC = 4096  # bytes that a pipe takes whole if it takes any


class Budget:
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


class Source:
    """Standard output or standard error of the process."""

    def __init__(self, pipe: int, kind: int, copy: int) -> None:
        self.pipe = pipe
        self.kind = kind
        self.copy = copy
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
    """Carries the output of a process from its pipes to the driver."""

    def __init__(self, out: int, err: int, driver: int) -> None:
        self._sources = {out: Source(out, STDOUT, 1), err: Source(err, STDERR, 2)}
        self._driver = driver
        self._connected = True  # whether the driver's end is open
        self._budget = Budget(RATE, BURST)
        self._backlog = bytearray()  # what waits to be sent to the driver
        for descriptor in (out, err, driver):
            os.set_blocking(descriptor, False)
        self._poll = select.poll()
        for pipe in self._sources:
            self._poll.register(pipe, select.POLLIN)
        self._poll.register(driver, select.POLLIN)

    def run(self) -> None:
        """Pump until every writer has closed its end of both pipes."""
        while self._sources:
            for descriptor, _ in self._poll.poll(self._timeout()):
                if descriptor == self._driver:
                    self._serve_driver()
                elif descriptor in self._sources:
                    self._read(self._sources[descriptor])
            self._resume()
        self._send_rest()

    def _timeout(self) -> int | None:
        dropping = any(source.dropping for source in self._sources.values())
        if not dropping or len(self._backlog) >= BACKLOG:  # a full backlog drains when the driver reads
            return None
        return int(self._budget.seconds_until_worth_it() * 1000) + 1

    def _resume(self) -> None:
        dropping = [source for source in self._sources.values() if source.dropping]
        if dropping and len(self._backlog) < BACKLOG and self._budget.seconds_until_worth_it() == 0:
            for source in dropping:
                self._settle(source)

    def _read(self, source: Source) -> int:
        """Read once. Return the number of bytes read; -1 if nothing is there now; 0 at the end."""
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
                del self._backlog[: os.write(self._driver, self._backlog)]
        except BlockingIOError:
            self._poll.modify(self._driver, select.POLLIN | select.POLLOUT)
        except OSError:
            self._disconnected()
        else:
            self._poll.modify(self._driver, select.POLLIN)

    def _serve_driver(self) -> None:
        try:
            asked = os.read(self._driver, 64)
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
        # The driver is gone and the process will end. Until then its pipes must not fill.
        if self._connected:
            self._connected = False
            self._poll.unregister(self._driver)
            self._backlog.clear()

    def _send_rest(self) -> None:
        until = time.monotonic() + FAREWELL_TIMEOUT
        while self._connected and self._backlog and (left := until - time.monotonic()) > 0:
            self._poll.poll(left * 1000)
            self._write()


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


def main() -> None:
    """Run the pump until all ends of its pipes are closed."""
    # These signals end the printing processes. Their output ends then, and with it this program.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    Pump(*map(int, sys.argv[1:4])).run()


if __name__ == "__main__":
    main()
