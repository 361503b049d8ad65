"""The agent of one process: a separate program beside it, which holds its end of the line to the driver.

The agent carries the process's output to the driver (`loom_gateway.driver.output.pump`). When the process ends,
even by SIGKILL, the agent reports that at once: so the driver need not take a broken connection for a dead process.
When the connection breaks, the agent connects again, while the process computes on. The agent kills the process
when the driver is gone: its machine refuses connections, it does not know the process any more, or it cannot be
reached for as long as the user has patience. The agent is a process and not a thread, because native code may hold
the interpreter's lock for long.

The process starts it as ``python -I -S -c …`` with the import path as arguments, which takes some 40 ms, and writes
its `Setup` to the agent's standard input: others could read the key in the arguments.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import NoReturn

from loom.control.process_end import ProcessEnd, last_lines
from loom.errors import ProtocolMismatch
from loom.process.exit_status import MemoryKills, exit_status
from loom.process.host_notices import leaving_reason
from loom.wire.bodies import HostLeaving, LineHeld, OutputFlushed, ProcessEnded, TellEnd, Tie, Tied, Untied
from loom.wire.messages import Kind
from loom_gateway.driver.output.pump import Pump
from loom_gateway.driver.process_link.link import ATTEMPT, RETRY, Introduction, LinkEnd, Refusals, break_after

LOOK_EVERY = 0.2  # seconds between two looks at the process on a machine that cannot report its end

LEAVING_EVERY = 2.0  # seconds between two looks whether the host is about to be left

_CONNECTING = (errno.EINPROGRESS, errno.EWOULDBLOCK)


@dataclass(frozen=True)
class Setup:
    """A process's message to its agent. Descriptors are inherited."""

    host: str
    port: int
    key: str
    name: str
    patience: float
    procs: int
    rank: int
    pid: int
    connection: int  # descriptor of the connection that the process has made
    pipes: tuple[int, int] | None  # descriptors of what was its standard output and error, if they are captured
    process: int | None = None  # descriptor of the process itself; None on a machine that has none


class _Process:
    """The process, which is the agent's parent."""

    def __init__(self, pid: int, descriptor: int | None) -> None:
        self._pid = pid
        self.descriptor = descriptor
        """Readable when the process has ended, which may be before this program ran: the process has opened it."""
        self.ended = False
        self.look()

    @property
    def watched(self) -> bool:
        """True if the end of the process has to be looked for."""
        return self.descriptor is None and not self.ended

    def look(self) -> None:
        if os.getppid() != self._pid:
            self.ended = True

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.descriptor is not None:
                signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)
            elif os.getppid() == self._pid:
                os.kill(self._pid, signal.SIGKILL)


class Agent:
    """One process's end of the line to its driver."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._line = LinkEnd()
        self._poll = select.poll()
        self._process = _Process(setup.pid, setup.process)
        self._memory_kills = MemoryKills()
        self._tells_end = False  # whether the driver takes reports of how the process ended
        self._tells_leaving = False  # whether the driver takes reports that the host is left
        self._leaving = ""  # why the host is about to be left, as last reported
        self._look_for_leaving = 0.0  # the time of the next look at that
        self._reported = False  # whether the end of the process is on the line
        self._given_up = False  # whether the driver is gone
        self._unsent = b""  # bytes that the socket has not taken
        self._introduction: Introduction[Tied | Untied] | None = None  # until the driver has answered
        self._connecting = False
        self._refusals = Refusals(setup.host)
        self._gone_since: float | None = None  # the time since which no connection holds
        self._next_step = 0.0  # the time at which an attempt ends, or the next one begins, while none holds
        if self._process.descriptor is not None:
            self._poll.register(self._process.descriptor, select.POLLIN)
        self._pump = None if setup.pipes is None else Pump(setup.pipes, self._poll, self._line.put, self._waiting)
        self._socket: socket.socket | None = socket.socket(fileno=setup.connection)
        self._hold(self._socket)
        self._line.put(LineHeld().message())

    def _waiting(self) -> int:
        return 0 if self._given_up else self._line.kept_bytes

    def _hold(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        break_after(sock, self._setup.patience / 3)
        self._line.connected(0)
        self._poll.register(sock, select.POLLIN)

    def run(self) -> None:
        """Serve until the process has ended and the driver has everything, or is gone."""
        if self._process.ended:  # before this program had begun: nothing else may ever wake it
            self._report_end()
        while not self._over:
            self._send()
            for descriptor, events in self._poll.poll(self._timeout()):
                if self._socket is not None and descriptor == self._socket.fileno():
                    self._serve(self._socket, events)
                elif descriptor == self._process.descriptor:
                    self._process.ended = True
                    self._poll.unregister(descriptor)
                elif self._pump is not None:
                    self._pump.read(descriptor)
            if self._process.watched:
                self._process.look()
            if not self._process.ended:
                self._memory_kills.look()
                if self._tells_leaving and time.monotonic() >= self._look_for_leaving:
                    self._report_leaving()
            if self._pump is not None:
                self._pump.resume()
            if self._process.ended and not self._reported:
                self._report_end()
            if self._gone_since is not None and not self._given_up:
                self._seek(self._gone_since)

    @property
    def _over(self) -> bool:
        return self._reported and not self._pump and (self._given_up or self._line.settled)

    def _timeout(self) -> float:
        """Return the milliseconds after which something has to be done, whatever happens."""
        now = time.monotonic()
        waits = [LOOK_EVERY] if self._process.watched else [LEAVING_EVERY]
        if self._gone_since is not None and not self._given_up:
            waits.append(self._next_step - now)
        if self._pump is not None and (resume := self._pump.timeout()) is not None:
            waits.append(resume)
        return max(0.0, min(waits)) * 1000 + 1

    def _report_end(self) -> None:
        if self._pump is not None:
            self._pump.drain()
        for descriptor, events in self._poll.poll(0):  # the driver's `TellEnd` may be unread
            if self._socket is not None and descriptor == self._socket.fileno():
                self._serve(self._socket, events)
        if self._tells_leaving:  # the process may have ended because its worker ends
            self._report_leaving()
        self._line.put(ProcessEnded(self._end().to_row() if self._tells_end else None).message())
        self._reported = True

    def _report_leaving(self) -> None:
        self._look_for_leaving = time.monotonic() + LEAVING_EVERY
        if (reason := leaving_reason()) != self._leaving:
            self._leaving = reason
            self._line.put(HostLeaving(reason).message())

    def _end(self) -> ProcessEnd:
        number, code = exit_status(self._setup.pid, self._process.descriptor)
        memory = number == signal.SIGKILL and not self._given_up and self._memory_kills.more()
        return ProcessEnd(number, code, memory, last_lines(b"" if self._pump is None else self._pump.last_errors))

    def _send(self, acknowledge: bool = False) -> None:
        """Send what the socket takes."""
        sock = self._socket
        if sock is None or self._connecting:
            return
        if self._introduction is None:
            self._unsent += self._line.to_send(acknowledge)
        try:
            while self._unsent:
                self._unsent = self._unsent[sock.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._disconnected()
            return
        self._poll.modify(sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))

    def _serve(self, sock: socket.socket, events: int) -> None:
        try:
            if self._connecting:
                self._connected(sock)
                return
            if not events & ~select.POLLOUT:
                return  # there is room to send
            data = sock.recv(64 << 10)
            if not data:
                self._disconnected(clean=True)
            elif self._introduction is not None:
                self._introduce(self._introduction, data)
            else:
                self._received(data)
        except BlockingIOError:
            pass
        except ConnectionRefusedError:
            self._attempt_failed(refused=True)
        except TimeoutError:
            self._disconnected(silent=self._setup.patience / 3)
        except (OSError, ProtocolMismatch):
            self._disconnected()

    def _received(self, data: bytes) -> None:
        for message in self._line.feed(data):
            if message.kind == Kind.FLUSH_OUTPUT:
                if self._pump is not None:
                    self._pump.drain()
                self._line.put(OutputFlushed().message())
            elif message.kind == Kind.TELL_END:
                self._tells_end = True
                self._tells_leaving = TellEnd.from_body(message.body).leaving
        self._send(acknowledge=True)

    def _disconnected(self, clean: bool = False, silent: float = 0.0) -> None:
        """Note that the connection, or an attempt to make one, is over.

        ``clean``: the driver's machine closed it in order. ``silent``: seconds for which nothing had come before.
        """
        if self._gone_since is not None:
            self._attempt_failed(refused=False)
            return
        self._close()
        self._next_step = time.monotonic()
        self._gone_since = self._next_step - silent
        self._refusals = Refusals(self._setup.host, clean)

    def _close(self) -> None:
        if self._socket is not None:
            self._poll.unregister(self._socket)
            self._socket.close()
        self._socket = None
        self._introduction, self._connecting, self._unsent = None, False, b""

    def _attempt_failed(self, refused: bool) -> None:
        self._close()
        now = time.monotonic()
        self._next_step = now + RETRY
        if not refused:
            self._refusals.other()
        elif self._refusals.refused(now):
            self._give_up()

    def _seek(self, since: float) -> None:
        """Make the next attempt to reach the driver, if it is time, or give it up."""
        now = time.monotonic()
        if now - since >= self._setup.patience:
            self._give_up()
        elif now >= self._next_step:
            if self._socket is not None:
                self._attempt_failed(refused=False)
            else:
                self._attempt(now)

    def _attempt(self, now: float) -> None:
        family = socket.AF_INET6 if ":" in self._setup.host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._connecting = True
        self._next_step = now + ATTEMPT
        self._poll.register(self._socket, select.POLLOUT)
        failed = self._socket.connect_ex((self._setup.host, self._setup.port))
        if failed and failed not in _CONNECTING:
            self._attempt_failed(refused=failed == errno.ECONNREFUSED)

    def _connected(self, sock: socket.socket) -> None:
        failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            raise OSError(failed, os.strerror(failed))  # of the class for this number
        self._connecting = False
        break_after(sock, self._setup.patience / 3)
        self._introduction = introduction(self._setup, again=True, received=self._line.received)
        self._poll.modify(sock, select.POLLIN)

    def _introduce(self, introduced: Introduction[Tied | Untied], data: bytes) -> None:
        self._unsent += introduced.feed(data)
        if introduced.answer is None:
            self._send()
        elif isinstance(introduced.answer, Untied):
            self._give_up()
        else:
            self._introduction, self._gone_since = None, None
            self._line.connected(introduced.answer.received)
            self._received(introduced.rest)

    def _give_up(self) -> None:
        """End the process, whose driver is gone. Its orphans' output still needs a reader."""
        self._close()
        self._given_up = True
        if not self._process.ended:
            self._process.kill()


def introduction(
    setup: Setup, again: bool, received: int = 0, master: str | None = None
) -> Introduction[Tied | Untied]:
    """Return the beginning of a process's end on a connection."""
    return Introduction(setup.key, Tie("", "", setup.name, setup.procs, setup.rank, again, received, master))


def main() -> NoReturn:
    """Serve the process whose `Setup` comes on standard input, until it has ended."""
    # These signals end the process. Its output ends then, and with it this program.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    setup = json.loads(sys.stdin.buffer.readline())
    pipes = setup.pop("pipes")
    Agent(Setup(**setup, pipes=None if pipes is None else (pipes[0], pipes[1]))).run()
    os._exit(0)  # faster than to unload
