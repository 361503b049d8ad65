"""The driver's end of the process links of its processes.

A peer has to prove that it knows the driver's key before anything else that it sends is believed. When a
connection of a process breaks, the process counts as living until its agent reports its end, its host is lost, or
nothing has come for as long as the user has patience.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

from loom.control.process_end import ProcessEnd
from loom.errors import ProtocolMismatch
from loom.mutual_auth import Exchange, new_nonce
from loom.process.listen import Strangers
from loom.tracing import clock
from loom.wire.bodies import Challenge, HostLeaving, ProcessEnded, TellEnd, Tie, Tied, Untied, Watch
from loom.wire.length_prefix import LENGTH
from loom.wire.messages import Kind, Message
from loom_gateway.driver.process_link.deaths import Watchers
from loom_gateway.driver.process_link.link import (
    MAX_GREETING,
    PATIENCE,
    LinkEnd,
    ProcessLinkAddress,
    answer_of,
    asked_of,
    break_after,
    greeting,
)

STRANGER_TIMEOUT = 5.0  # seconds that a connection has to show the key

START_GRACE = 5.0
"""Seconds that a process's agent has to come back if the connection was closed before the agent had taken it over.
A process that ends in between reports nothing."""

MOST_STRANGERS = 256
"""The maximum number of connections that have not shown the key. Beyond it, the oldest is cut off."""

MOST_ENDS = 1000
"""Ends of processes that are remembered, the last ones."""

MOST_LOST = 1000
"""Proc meshes without their first process that are remembered, the last ones, for processes that start late."""

_READ = 64 << 10

logger = logging.getLogger(__name__)


class Printer(Protocol):
    """Takes what one process prints. Raises `ProtocolMismatch` for any other message."""

    def take(self, message: Message) -> None:
        """Take a message about the process's output."""

    def close(self) -> None:
        """Note that nothing more will come."""


class ProcessLink:
    """The driver's end of one process's line, on one connection after the other."""

    def __init__(self, name: str, procs: int, rank: int) -> None:
        self.name = name
        self.procs = procs
        self.rank = rank
        self.master: str | None = None  # where the mesh's processes may meet, if this is the first of them
        self.line = LinkEnd()
        self.line.put(TellEnd(leaving=True).message())
        self.writer: asyncio.StreamWriter | None = None
        self.timer: asyncio.TimerHandle | None = None  # until the process is given up, while no connection holds
        self.ended = False  # whether the process is known to have ended
        self.printer: Printer | None = None

    def send(self, message: Message) -> None:
        """Send a message, once the process can be reached."""
        self.line.put(message)
        self.flush()

    def flush(self, acknowledge: bool = False) -> None:
        if self.writer is not None and (data := self.line.to_send(acknowledge)):
            self.writer.write(data)

    def carry_by(self, writer: asyncio.StreamWriter | None) -> None:
        """Replace the connection, and wait for the process no longer."""
        if self.writer is not None:
            self.writer.close()
        if self.timer is not None:
            self.timer.cancel()
        self.writer, self.timer = writer, None


async def _no_weaver() -> str:
    return ""


class ProcessLinkServer:
    """Accepts the connections of processes at ``host``, and reports when a process has ended. On the event loop.

    Args:
        patience: seconds without network after which a process is given up.
        watchers: answers processes that watch others.
    """

    def __init__(self, host: str, patience: float = PATIENCE, watchers: Watchers | None = None) -> None:
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port: int = self._socket.getsockname()[1]
        self.address = ProcessLinkAddress(host, port, secrets.token_hex(16), patience)
        self._patience = patience
        self._watchers = watchers or Watchers()
        self._lines: dict[tuple[int, int], ProcessLink] = {}  # by proc mesh and rank
        self._first_known: dict[int, asyncio.Event] = {}
        """For each proc mesh whose processes wait for its first one, what is set when that comes or is gone."""
        self._ends: dict[tuple[int, int], ProcessEnd] = {}  # as agents have reported them, by proc mesh and rank
        self._lost_first: dict[int, None] = {}  # the last proc meshes whose first process is gone
        self._strangers: Strangers[asyncio.StreamWriter] = Strangers(
            MOST_STRANGERS, lambda writer: writer.transport.abort()
        )
        self._server: asyncio.Server

    async def start(
        self,
        gone: Callable[[int, int], object],
        started: Callable[[int, int], object] = lambda procs, rank: None,
        printer: Callable[[ProcessLink], Printer | None] = lambda line: None,
        weaver: Callable[[], Awaitable[str]] = _no_weaver,
        stopped: Callable[[int, int], bool] = lambda procs, rank: False,
        leaving: Callable[[int, int, str], object] = lambda procs, rank, reason: None,
    ) -> None:
        """Accept connections. Processes are reported by their proc mesh's id and rank.

        Args:
            printer: returns what takes the output of a process; None if there is none to take.
            weaver: returns the weaver's address, which a process gets before it does anything else.
            stopped: returns whether a process was stopped, so that no other of its mesh will come.
            leaving: is told why a process's host is about to be left; nothing if it is not any more.
        """
        self._gone, self._started, self._printer, self._weaver = gone, started, printer, weaver
        self._stopped, self._leaving = stopped, leaving
        self._loop = asyncio.get_running_loop()
        self._server = await asyncio.start_server(self._serve, sock=self._socket, limit=_READ // 2)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._server.is_serving():  # it came just before the end
            writer.transport.abort()
            return
        try:
            with self._as_stranger(writer):
                challenge = new_nonce()
                writer.write(greeting(Challenge(challenge, clock.now()).message()))
                frame = await asyncio.wait_for(_read_greeting(reader), STRANGER_TIMEOUT)
                asked, exchange = asked_of(frame, self.address.key, challenge)
            if isinstance(asked, Watch):
                break_after(writer.get_extra_info("socket"), self._patience / 3)
                await self._watchers.serve(asked, exchange, reader, writer)
                return
            held = self._find(asked)
            if held is None:
                writer.write(answer_of(exchange, Untied("")))
            else:
                await self._hold(held, asked, exchange, reader, writer)
        except (OSError, EOFError, asyncio.TimeoutError, ProtocolMismatch) as error:
            logger.info("a connection to the process links' port is cut off: %s", error)
        finally:
            writer.close()

    @contextlib.contextmanager
    def _as_stranger(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        self._strangers.add(writer)
        try:
            yield
        finally:
            self._strangers.discard(writer)

    def _find(self, tie: Tie) -> ProcessLink | None:
        """Return the line that a process's end belongs to; None if the process was given up."""
        key = (tie.procs, tie.rank)
        held = self._lines.get(key)
        if held is not None and held.name == tie.name:
            return held
        if tie.again and held is None:
            return None
        new = self._lines[key] = ProcessLink(tie.name, *key)
        if held is not None:
            self._end(held)  # its agent was killed, and the process has started another
        new.printer = self._printer(new)
        if held is None:
            self._started(*key)
        if tie.rank == 0:
            new.master = tie.master
            self._wake_waiting(tie.procs)
        return new

    async def _master(self, tie: Tie) -> str | None:
        """Return where the processes of a mesh may meet, once its first process has come; None if it is gone."""
        if tie.master is None or tie.again:
            return None
        first = (tie.procs, 0)
        if first not in self._lines and tie.procs not in self._lost_first:
            await self._first_known.setdefault(tie.procs, asyncio.Event()).wait()
        held = self._lines.get(first)
        return None if held is None else held.master

    def _lose_first(self, procs: int) -> None:
        """Note that the first process of a mesh is gone, for which the others no longer wait."""
        if not self._stopped(procs, 0):
            self._lost_first[procs] = None
        if len(self._lost_first) > MOST_LOST:
            del self._lost_first[next(iter(self._lost_first))]
        self._wake_waiting(procs)

    def _wake_waiting(self, procs: int) -> None:
        if (known := self._first_known.pop(procs, None)) is not None:
            known.set()

    async def _hold(
        self,
        held: ProcessLink,
        tie: Tie,
        exchange: Exchange,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        held.carry_by(writer)
        silent, clean = 0.0, False
        try:
            break_after(writer.get_extra_info("socket"), self._patience / 3)  # may be closed already
            master, weaver = await self._master(tie), await self._weaver()
            if held.writer is not writer:  # the process did not wait so long, and has connected again
                return
            writer.write(answer_of(exchange, Tied("", held.line.received, weaver, master)))
            held.line.connected(tie.received)
            held.flush()
            while data := await reader.read(_READ):
                for message in held.line.feed(data):
                    self._take(held, message)
                held.flush(acknowledge=held.ended)
            clean = True
        except TimeoutError:
            silent = self._patience / 3
        finally:
            if held.writer is writer:  # else another connection has taken its place
                self._cut(held, clean, silent)

    def _take(self, held: ProcessLink, message: Message) -> None:
        if message.kind == Kind.PROCESS_ENDED:
            seen = ProcessEnded.from_body(message.body).end
            if seen is not None and not held.ended:
                self._ends[held.procs, held.rank] = ProcessEnd.from_row(seen)
                if len(self._ends) > MOST_ENDS:
                    del self._ends[next(iter(self._ends))]
            self._note_end(held)
        elif message.kind == Kind.HOST_LEAVING:
            self._leaving(held.procs, held.rank, HostLeaving.from_body(message.body).reason)
        elif message.kind == Kind.LINE_HELD:
            pass  # that it has come is enough
        elif held.printer is not None:
            held.printer.take(message)

    def _note_end(self, held: ProcessLink) -> None:
        if not held.ended:
            held.ended = True
            if self._lines.get((held.procs, held.rank)) is held:
                self._gone(held.procs, held.rank)

    def _cut(self, held: ProcessLink, clean: bool, silent: float) -> None:
        """Note that the connection of a process is gone: closed in order, or broken after some silent seconds."""
        held.carry_by(None)
        if held.ended and clean:  # the agent has sent everything
            self._forget(held)
            return
        patience = min(START_GRACE, self._patience) if clean and not held.line.received else self._patience
        held.timer = self._loop.call_later(max(0.0, patience - silent), self._forget, held)

    def _forget(self, held: ProcessLink) -> None:
        """Give up a process that has ended or was silent for too long."""
        self._note_end(held)
        if self._lines.get((held.procs, held.rank)) is held:
            del self._lines[held.procs, held.rank]
            if held.rank == 0:
                self._lose_first(held.procs)
        self._end(held)

    def _end(self, held: ProcessLink) -> None:
        held.carry_by(None)
        if held.printer is not None:
            held.printer.close()
            held.printer = None

    def end_of(self, procs: int, rank: int) -> ProcessEnd | None:
        """Return how a process has ended, by its proc mesh and rank; None if its agent has not reported that."""
        return self._ends.get((procs, rank))

    def close(self) -> None:
        """Stop listening and cut every connection."""
        self._server.close()
        self._strangers.cut_all()
        self._watchers.close()
        for held in self._lines.values():
            held.carry_by(None)

    def connected(self) -> list[tuple[int, int]]:
        """Return the processes, by proc mesh and rank, of which a connection holds."""
        return [key for key, held in self._lines.items() if held.writer is not None and not held.ended]

    def give_up(self, procs: int, rank: int) -> None:
        """Give up a process whose host is lost. If it lives all the same, it ends when it comes back."""
        held = self._lines.get((procs, rank))
        if held is None and rank == 0:
            self._lose_first(procs)
        if held is not None and not held.ended:
            held.ended = True
            self._forget(held)


async def _read_greeting(reader: asyncio.StreamReader) -> bytes:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > MAX_GREETING:
        raise ProtocolMismatch(f"a greeting of {length} bytes is over the limit of {MAX_GREETING}")
    return await reader.readexactly(length)
