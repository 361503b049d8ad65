"""The weaver's sockets: threadlets over TCP, the gateway over a unix socket.

What comes in goes to `loom.weaver.weaver.Weaver` at once. What it has to say goes out after a commit, which happens
every 100 ms while there is something to store, and right away where somebody waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import sqlite3
import time
from collections.abc import Callable
from typing import Any, cast

from loom.control.commands import Acknowledgement
from loom.control.frame import Frame
from loom.control.framing import MAX_FRAME, MAX_HELLO, Splitter, pack
from loom.errors import LoomError, ProtocolMismatch, UnknownCommand, WrongArguments
from loom.weaver.commands import GivenCommand
from loom.weaver.outbox import Output, Peer
from loom.weaver.replicas import Replica
from loom.weaver.serving.processes import LocalProcess, py_spy
from loom.weaver.serving.requests import Asking
from loom.weaver.states import ReplicaState
from loom.weaver.views import CommandState
from loom.weaver.weaver import Weaver

__all__ = ["Server"]

_log = logging.getLogger(__name__)

COMMIT_EVERY = 0.1
SOONEST_COMMIT = 0.005
"""Seconds between two commits at least, so that many urgent things share one."""

HELLO_WITHIN = 10.0
"""Seconds in which a threadlet has to show its key."""

STACK_WITHIN = 15.0

MAX_UNREAD = 2 * MAX_FRAME
"""Bytes that may wait for somebody who does not read; a frame has to fit."""

MAX_UNREAD_BY_WATCHER = 8 << 20
"""Bytes that may wait for a watcher besides its snapshot."""

MAX_WAIT = 3600.0


class Server:
    """Serves a weaver on two listening sockets.

    Args:
        weaver: to serve.
        clock: gives the time, in seconds since the epoch, and never goes back.
        address: where threadlets find it, for those who ask.
        changes_every: seconds between two pushes of what replicas report to watchers.
        linger: seconds without a gateway, a driver or a threadlet after which it has ended.
    """

    def __init__(
        self,
        weaver: Weaver,
        clock: Callable[[], float],
        address: str = "",
        changes_every: float = 0.5,
        linger: float = math.inf,
    ) -> None:
        self.weaver = weaver
        self.clock = clock
        self.asking = Asking(weaver, address)
        self.ended = asyncio.Event()
        """Set when nothing can be stored any more, when nobody needs it any more, or `stop` was called."""
        self.failure: Exception | None = None
        """Why it ended; None where it was told to."""
        self.callers: set[Caller] = set()
        self.watchers: set[Caller] = set()
        self._changes_every = changes_every
        self._linger = linger
        self._last_company = clock()
        self._listeners: list[asyncio.AbstractServer] = []
        self._links: set[ThreadletLink] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_event: asyncio.Future[None] | None = None
        self._committed = 0.0
        self._planned: asyncio.TimerHandle | None = None
        self._soon = False
        self._py_spies = asyncio.Semaphore(2)

    async def start(self, tcp: socket.socket, unix: socket.socket) -> None:
        """Begin to serve."""
        loop = asyncio.get_running_loop()
        self._listeners = [
            await loop.create_server(lambda: ThreadletLink(self), sock=tcp, backlog=4096),
            await loop.create_unix_server(lambda: Caller(self), sock=unix),
        ]
        self.run(self._keep_time())
        self.plan_commit()

    async def stop(self) -> None:
        """Store what has come, and close everything."""
        for listener in self._listeners:
            listener.close()
        if self.failure is None:
            self.commit()
        for task in list(self._tasks):
            task.cancel()
        for connection in [*self._links, *self.callers]:
            connection.close()
        self.ended.set()

    def run(self, work: Any) -> None:
        """Run a coroutine until this server stops."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def plan_commit(self) -> None:
        """Have a commit happen: soon where somebody waits, else in its time."""
        urgent = self.weaver.urgent
        if self._planned is not None:
            if self._soon or not urgent:
                return
            self._planned.cancel()
        self._soon = urgent
        loop = asyncio.get_running_loop()
        at = self._committed + (SOONEST_COMMIT if urgent else COMMIT_EVERY)
        self._planned = loop.call_at(max(at, loop.time()), self.commit)

    def commit(self) -> None:
        """Store what has happened, and say what there is to say."""
        if self._planned is not None:
            self._planned.cancel()
            self._planned = None
        if self.failure is not None:
            return
        self._committed = asyncio.get_running_loop().time()
        try:
            output = self.weaver.commit(self.clock())
        except sqlite3.Error as error:
            # Nothing can be promised any more. Threadlets keep what is not stored for the next weaver.
            _log.error("cannot store what replicas report: %s", error)
            self.failure = error
            self.ended.set()
            return
        self._say(output)
        if self.weaver.urgent:
            self.plan_commit()

    def add_link(self, link: ThreadletLink) -> None:
        self._links.add(link)

    def drop_link(self, link: ThreadletLink, replica: Replica | None, process: LocalProcess | None) -> None:
        """Take note that a link is gone; see whether its process is, where that can be seen."""
        self._links.discard(link)
        self.weaver.lost(link, self.clock())
        if replica is not None and process is not None:
            self.run(self._see_whether_dead(replica, replica.instance, process))
        self.plan_commit()

    async def stack(self, replica: Replica) -> str:
        """The stack of a replica's process.

        Raises:
            LoomError: it could not be got in time.
        """
        came: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def tell(text: str) -> None:
            if not came.done():
                came.set_result(text)

        self.weaver.stacks.want(replica, tell=tell)
        self.plan_commit()
        return await came

    async def command_state(self, id: str, timeout: float) -> CommandState:
        """Return what each replica has made of a command, waiting ``timeout`` seconds at most until all have.

        Raises:
            UnknownCommand: there is no such command.
        """
        command = self.weaver.known.commands.get(id)
        if command is None:
            raise UnknownCommand(f"there is no command {id!r:.80}, or it was done long ago")
        if not command.done and timeout > 0:
            done = asyncio.Event()
            leave = self.weaver.known.commands.when_done(id, lambda command: done.set())
            try:
                await asyncio.wait_for(done.wait(), timeout)
            except asyncio.TimeoutError:
                pass
            finally:
                leave()
        known = command.acknowledgements | {
            name: Acknowledgement.failed(self._why_waiting(command, name), waiting=True) for name in command.waiting
        }
        return CommandState(id, tuple(known), command.done, known)

    async def replicas_in(self, arguments: dict[str, Any], timeout: float) -> list[tuple[int | None, str]]:
        """Return rank and id of the replicas in a mesh, once each of its ``ranks`` has one or the time is over."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        while True:
            found = self.asking.replicas_in(arguments)
            left = until - loop.time()
            if left <= 0 or {rank for rank, _ in found}.issuperset(arguments.get("ranks") or ()):
                return found
            if self._next_event is None:
                self._next_event = loop.create_future()
            await asyncio.wait((self._next_event,), timeout=left)

    def _why_waiting(self, command: GivenCommand, id: str) -> str:
        replica = self.weaver.known.replicas.get(id)
        state = "gone" if replica is None else replica.state.value
        since = self.clock() - command.time
        hint = "; it is told when it is connected again" if state == ReplicaState.RECOVERING else ""
        return f"replica {id!r} has not applied it in {since:.1f} s; it is {state}{hint}"

    def _say(self, output: Output) -> None:
        last: Frame | None = None
        data = b""
        for peer, frame in output.frames:
            if isinstance(peer, ThreadletLink):
                if frame is None:
                    peer.close()
                    continue
                if frame is not last:
                    last, data = frame, pack(frame.to_body())
                peer.write(data)
        for command in output.done:
            for tell in self.weaver.known.commands.take_waiters(command.id):
                tell(command)
        for id, replica in output.stacks:
            self.run(self._get_stack(id, replica))
        if output.events and self._next_event is not None:
            self._next_event.set_result(None)
            self._next_event = None
        if output.events and self.watchers:
            for event in output.events:
                self._push({"event": event.to_body()})
        for caller in list(self.callers):
            caller.flush()

    def _push(self, news: dict[str, Any]) -> None:
        for watcher in list(self.watchers):
            watcher.push(news)

    async def _get_stack(self, id: str, replica: Replica) -> None:
        link = replica.link
        text = None
        if isinstance(link, ThreadletLink) and link.process is not None and link.process.alive():
            async with self._py_spies:
                text = await py_spy(replica.pid)
        if text is None and self.weaver.stacks.ask_threadlet(id):
            self.plan_commit()
            await asyncio.sleep(STACK_WITHIN)
            text = "its threadlet did not answer: the interpreter may be held by native code"
        self.weaver.stacks.take(id, text or "it is not connected")
        self.plan_commit()

    async def _see_whether_dead(self, replica: Replica, instance: str, process: LocalProcess) -> None:
        """A process closes its sockets a moment before it is gone."""
        for wait in (0.0, 0.02, 0.1, 0.3, 0.5):
            await asyncio.sleep(wait)
            if not process.alive():
                self.weaver.died(replica, instance, f"its process {process.pid} is gone", self.clock())
                self.plan_commit()
                return

    async def _keep_time(self) -> None:
        changed = 0.0
        while True:
            await asyncio.sleep(COMMIT_EVERY)
            now = self.clock()
            self.weaver.tick(now)
            self.weaver.known.watching = bool(self.watchers)
            if self.watchers and now >= changed + self._changes_every:
                changed = now
                changes = self.weaver.known.take_changes()
                if any(changes.values()):
                    self._push({"changes": changes})
            self.plan_commit()
            if self.callers or self._links:
                self._last_company = now
            elif now > self._last_company + self._linger:
                _log.info("nobody has been here for %g s", self._linger)
                self.ended.set()


class _Connection(asyncio.Protocol):
    """Frames on a stream."""

    def __init__(self, server: Server, limit: int) -> None:
        self.server = server
        self.splitter = Splitter(limit)
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none of asyncio's

    def send(self, frame: list[Any]) -> None:
        self.write(pack(frame))

    def write(self, data: bytes) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        self.transport.write(data)
        if self.transport.get_write_buffer_size() > MAX_UNREAD:
            self.transport.abort()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()


class ThreadletLink(_Connection, Peer):
    """A threadlet."""

    def __init__(self, server: Server) -> None:
        super().__init__(server, MAX_HELLO)
        self.process: LocalProcess | None = None
        """The process at the other end, where it is on this host."""
        self._known: Replica | None = None
        self._impatience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.server.add_link(self)
        self._impatience = asyncio.get_running_loop().call_later(HELLO_WITHIN, self._be_impatient)

    def data_received(self, data: bytes) -> None:
        server = self.server
        try:
            frames = self.splitter.feed(data)
            if frames:
                server.weaver.receive(self, frames, server.clock())
        except ProtocolMismatch as error:
            server.weaver.refuse(self, error.code, str(error))
            self.splitter = Splitter(0)
            if self.transport is not None:
                self.transport.pause_reading()
        if self._known is None and self.replica is not None:
            self._know(self.replica)
        server.plan_commit()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._impatience is not None:
            self._impatience.cancel()
        self.server.drop_link(self, self.replica, self.process)
        self.transport = None

    def _know(self, replica: Replica) -> None:
        self._known = replica
        self.splitter.limit = MAX_FRAME
        if self._impatience is not None:
            self._impatience.cancel()
        if self.transport is not None:
            ours, theirs = self.transport.get_extra_info("sockname"), self.transport.get_extra_info("peername")
            if ours and theirs and ours[0] == theirs[0]:
                self.process = LocalProcess.find(replica.pid)

    def _be_impatient(self) -> None:
        if self.replica is None:
            self.close()


class Caller(_Connection):
    """The gateway, or whoever else may open the socket."""

    def __init__(self, server: Server) -> None:
        super().__init__(server, MAX_FRAME)
        self._answers: list[list[Any]] = []
        self._watches: set[int] = set()
        self._snapshot = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.server.callers.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.callers.discard(self)
        self.server.watchers.discard(self)
        self.transport = None

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self.splitter.feed(data):
                self._take(frame)
        except ProtocolMismatch as error:
            _log.warning("a caller is put out: %s", error)
            self.close()
        self.server.plan_commit()

    def flush(self) -> None:
        """Send the answers that had to wait for a commit."""
        answers, self._answers = self._answers, []
        for answer in answers:
            self._send_answer(answer)

    def push(self, news: dict[str, Any]) -> None:
        """Tell a watcher something, unless it does not listen."""
        if self.transport is None or self.transport.is_closing():
            return
        for number in self._watches:
            self.send(["event", number, news])
        waiting = self.transport.get_write_buffer_size() if self.transport is not None else 0
        self._snapshot = min(self._snapshot, waiting)
        if waiting > MAX_UNREAD_BY_WATCHER + self._snapshot and self.transport is not None:
            _log.warning("a watcher is put out: it has left %d bytes unread", waiting)
            self.transport.abort()

    def _take(self, frame: list[Any]) -> None:
        match frame:
            case ["ask", int(number), str(operation), dict(arguments)]:
                self._ask(number, operation, arguments)
            case ["watch", int(number)]:
                self._watch(number)
            case _:
                raise ProtocolMismatch(f"not a question: {frame!r:.80}")

    def _ask(self, number: int, operation: str, arguments: dict[str, Any]) -> None:
        if operation in ("command_state", "replicas_in", "stacks"):
            self.server.run(self._answer_later(number, operation, arguments))
            return
        try:
            answer = self.server.asking.answer(operation, arguments, self.server.clock())
        except LoomError as error:
            self._answers.append(["error", number, error.code, str(error)])
        except sqlite3.Error:
            raise  # nothing can be promised any more
        except Exception as error:  # noqa: BLE001 - of ours, and the gateway waits for an answer
            _log.exception("%s cannot be answered", operation)
            self._answers.append(["error", number, LoomError.code, f"the weaver failed: {error!r}"])
        else:
            self._answers.append(["answer", number, answer])
        if not self.server.weaver.urgent:
            self.flush()

    async def _answer_later(self, number: int, operation: str, arguments: dict[str, Any]) -> None:
        try:
            timeout = arguments.get("timeout", 10.0 if operation == "command_state" else 0.0)
            if type(timeout) not in (int, float) or not 0 <= timeout <= MAX_WAIT:
                raise WrongArguments(f"timeout is from 0 to {MAX_WAIT:g} seconds, not {timeout!r:.80}")
            if operation == "command_state":
                state = await self.server.command_state(str(arguments.get("id")), timeout)
                answer: Any = state.to_body()
            elif operation == "replicas_in":
                answer = await self.server.replicas_in(arguments, timeout)
            else:
                answer = await self.server.stack(self.server.weaver.known.replica(str(arguments.get("replica"))))
        except LoomError as error:
            self._answers.append(["error", number, error.code, str(error)])
        else:
            self._answers.append(["answer", number, answer])
        if not self.server.weaver.urgent:
            self.flush()

    def _watch(self, number: int) -> None:
        self.flush()
        self._send_answer(["snapshot", number, self.server.asking.snapshot(self.server.clock())])
        self._snapshot = self.transport.get_write_buffer_size() if self.transport is not None else 0
        self._watches.add(number)
        self.server.watchers.add(self)
        self.server.weaver.known.watching = True

    def _send_answer(self, answer: list[Any]) -> None:
        try:
            self.send(answer)
        except LoomError as error:
            self.send(["error", answer[1], error.code, str(error)])


def monotonic_clock() -> Callable[[], float]:
    """A clock that tells seconds since the epoch, and is not turned while it is used."""
    start = time.time() - time.monotonic()
    return lambda: start + time.monotonic()
