"""The weaver's server: threadlets connect over TCP, the gateway over a unix socket.

Input goes to `loom.weaver.weaver.Weaver` at once. Output leaves after a commit, which happens every 100 ms while
there is something to store, and right away if a peer or a caller waits for it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import socket
import sqlite3
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil

from loom.control.frame import MAX_FRAME, MAX_HELLO, Frame, Splitter, pack
from loom.errors import LoomError, ProtocolMismatch
from loom.process import tasks
from loom.weaver.outbox import Output, Peer
from loom.weaver.replicas import Replica
from loom.weaver.serving.connection import Connection
from loom.weaver.serving.processes import find_process, is_alive, py_spy
from loom.weaver.serving.requests import RequestHandler
from loom.weaver.weaver import Weaver

_log = logging.getLogger(__name__)

COMMIT_EVERY = 0.1
SOONEST_COMMIT = 0.005  # seconds between two commits at least, so that many urgent changes share one

STACK_WITHIN = 15.0

CHANGES_EVERY = 0.5  # seconds between two pushes of replicas' reports to watchers
MAX_UNREAD_BY_WATCHER = 8 << 20  # bytes that may wait for a watcher in addition to its snapshot
HELLO_WITHIN = 10.0  # seconds that a threadlet has to send its hello with the key


class Server:
    """A server of a weaver on two listening sockets.

    Its clock returns the seconds since the epoch, and never goes back. The server ends by itself after ``linger``
    seconds without a gateway, a driver or a threadlet.
    """

    def __init__(
        self,
        weaver: Weaver,
        clock: Callable[[], float],
        address: str = "",
        linger: float = math.inf,
    ) -> None:
        self.weaver = weaver
        self.clock = clock
        self.requests = RequestHandler(weaver, clock, address)
        self.ended = asyncio.Event()
        """Set when the store is broken, nothing has been connected for ``linger`` seconds, or `stop` was called."""
        self.failure: Exception | None = None
        """The error that ended the server; None if it ended as requested."""
        self.links: set[ThreadletLink] = set()
        self.callers: set[RequestConnection] = set()
        self.watchers: set[RequestConnection] = set()
        self._linger = linger
        self._last_peer_at = clock()
        self._listeners: list[asyncio.AbstractServer] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._committed = 0.0  # when the last commit was, by the event loop's clock
        self._planned: asyncio.TimerHandle | None = None
        self._planned_soon = False
        self._py_spies = asyncio.Semaphore(2)

    async def start(self, tcp: socket.socket, unix: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._listeners = [
            await loop.create_server(lambda: ThreadletLink(self), sock=tcp, backlog=4096),
            await loop.create_unix_server(lambda: RequestConnection(self), sock=unix),
        ]
        self._keep(tasks.keep_running("tick", self._run_ticks))
        self.plan_commit()

    async def stop(self) -> None:
        """Commit what has come in, and close everything."""
        for listener in self._listeners:
            listener.close()
        if self.failure is None:
            self.commit()
        for task in list(self._tasks):
            task.cancel()
        for connection in [*self.links, *self.callers]:
            connection.close()
        self.ended.set()

    def run(self, work: Any) -> None:
        self._keep(tasks.run("answer a request", work))

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def plan_commit(self) -> None:
        """Plan a commit: soon if a peer or a caller waits for it, else in the usual time."""
        urgent = self.weaver.urgent
        if self._planned is not None:
            if self._planned_soon or not urgent:
                return
            self._planned.cancel()
        self._planned_soon = urgent
        loop = asyncio.get_running_loop()
        at = self._committed + (SOONEST_COMMIT if urgent else COMMIT_EVERY)
        self._planned = loop.call_at(max(at, loop.time()), self.commit)

    def commit(self) -> None:
        if self._planned is not None:
            self._planned.cancel()
            self._planned = None
        if self.failure is not None:
            return
        self._committed = asyncio.get_running_loop().time()
        try:
            output = self.weaver.commit(self.clock())
        except sqlite3.Error as error:
            # Without a store no report can be acknowledged. Threadlets keep unstored reports for the next weaver.
            _log.error("cannot store what replicas report: %s", error)
            self.failure = error
            self.ended.set()
            return
        self._send_output(output)
        if self.weaver.urgent:
            self.plan_commit()

    def lost(self, link: ThreadletLink) -> None:
        """Note that a link is lost; check whether its process is gone too, if the process is on this host."""
        self.links.discard(link)
        replica = link.replica
        self.weaver.lost(link, self.clock())
        if replica is not None and link.process is not None:
            self.run(self._report_if_dead(replica, replica.instance, link.process))
        self.plan_commit()

    def _send_output(self, output: Output) -> None:
        last: Frame | None = None
        data = b""
        for peer, frame in output.frames:
            assert isinstance(peer, ThreadletLink)
            if frame is None:
                peer.close()
                continue
            if frame is not last:
                last, data = frame, pack(frame.to_body())
            peer.write(data)
        self.requests.notify(output)
        for id, replica in output.stacks:
            self.run(self._get_stack(id, replica))
        if output.events and self.watchers:
            for event in output.events:
                self._push({"event": event.to_body()})
        for caller in list(self.callers):
            caller.flush()

    def _push(self, update: dict[str, Any]) -> None:
        for watcher in list(self.watchers):
            watcher.push(update)

    async def _get_stack(self, id: str, replica: Replica) -> None:
        link = replica.link
        text = None
        if isinstance(link, ThreadletLink) and link.process is not None and is_alive(link.process):
            async with self._py_spies:
                text = await py_spy(replica.pid)
        if text is None and self.weaver.stacks.ask_threadlet(id):
            self.plan_commit()
            await asyncio.sleep(STACK_WITHIN)
            text = "its threadlet did not answer: the interpreter may be held by native code"
        self.weaver.stacks.take(id, text or "it is not connected")
        self.plan_commit()

    async def _report_if_dead(self, replica: Replica, instance: str, process: psutil.Process) -> None:
        """Report a process's death; check several times, because a process closes its sockets before it is gone."""
        for wait in (0.0, 0.02, 0.1, 0.3, 0.5):
            await asyncio.sleep(wait)
            if not is_alive(process):
                self.weaver.died(replica, instance, f"its process {process.pid} is gone", self.clock())
                self.plan_commit()
                return

    async def _run_ticks(self) -> None:
        changed = 0.0
        while True:
            await asyncio.sleep(COMMIT_EVERY)
            now = self.clock()
            self.weaver.tick(now)
            self.weaver.known.watching = bool(self.watchers)
            if self.watchers and now >= changed + CHANGES_EVERY:
                changed = now
                changes = self.weaver.known.take_changes()
                if any(changes.values()):
                    self._push({"changes": changes})
            self.plan_commit()
            if self.callers or self.links:
                self._last_peer_at = now
            elif now > self._last_peer_at + self._linger:
                _log.info("nobody has been here for %g s", self._linger)
                self.ended.set()


class RequestConnection(Connection):
    """The connection of the gateway, or of another client that can open the socket."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server = server
        self._answers: list[list[Any]] = []  # answers that wait for the next commit
        self._watches: set[int] = set()
        self._snapshot = 0  # bytes of the snapshot that the watcher has not read yet; they do not count against it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.server.callers.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.callers.discard(self)
        self.server.watchers.discard(self)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self.splitter.feed(data):
                self._receive(frame)
        except ProtocolMismatch as error:
            _log.warning("a client of the weaver is disconnected: %s", error)
            self.close()
        self.server.plan_commit()

    def flush(self) -> None:
        answers, self._answers = self._answers, []
        for answer in answers:
            self._send_answer(answer)

    def push(self, update: dict[str, Any]) -> None:
        """Send an update for each watch of this connection; disconnect a watcher that does not read."""
        if self.transport.is_closing():
            return
        for number in self._watches:
            self.send(["event", number, update])
        waiting = self.transport.get_write_buffer_size()
        self._snapshot = min(self._snapshot, waiting)
        if waiting > MAX_UNREAD_BY_WATCHER + self._snapshot:
            _log.warning("a watcher is disconnected: it has left %d bytes unread", waiting)
            self.transport.abort()

    def _receive(self, frame: list[Any]) -> None:
        match frame:
            case ["ask", int(number), str(operation), dict(arguments)]:
                self._handle(number, operation, arguments)
            case ["watch", int(number)]:
                self._watch(number)
            case _:
                raise ProtocolMismatch(f"not a question: {frame!r:.80}")

    def _handle(self, number: int, operation: str, arguments: dict[str, Any]) -> None:
        try:
            answer = self.server.requests.answer(operation, arguments)
            if inspect.isawaitable(answer):
                self.server.run(self._answer_later(number, answer))
            else:
                self._answer("answer", number, answer)
        except LoomError as error:
            self._answer("error", number, error.code, str(error))
        except sqlite3.Error:
            raise  # the store is broken, so the weaver has to end
        except Exception as error:  # noqa: BLE001 - a bug of Loom, and the gateway waits for an answer
            _log.exception("%s cannot be answered", operation)
            self._answer("error", number, LoomError.code, f"the weaver failed: {error!r}")

    async def _answer_later(self, number: int, waiting: Awaitable[Any]) -> None:
        try:
            self._answer("answer", number, await waiting)
        except LoomError as error:
            self._answer("error", number, error.code, str(error))

    def _answer(self, *answer: Any) -> None:
        """Send an answer, after the next commit if it reports something that is not stored yet."""
        self._answers.append([*answer])
        if not self.server.weaver.urgent:
            self.flush()

    def _watch(self, number: int) -> None:
        self.flush()
        self._send_answer(["snapshot", number, self.server.requests.snapshot()])
        self._snapshot = self.transport.get_write_buffer_size()
        self._watches.add(number)
        self.server.watchers.add(self)
        self.server.weaver.known.watching = True

    def _send_answer(self, answer: list[Any]) -> None:
        try:
            self.send(answer)
        except LoomError as error:
            self.send(["error", answer[1], error.code, str(error)])


class ThreadletLink(Connection, Peer):
    """The connection of a threadlet."""

    def __init__(self, server: Server) -> None:
        super().__init__(MAX_HELLO)
        self.server = server
        self.process: psutil.Process | None = None
        """The process at the other end, if it is on this host."""
        self._introduced: Replica | None = None  # the replica of the hello, which `_introduce` handles once
        self._hello_timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.server.links.add(self)
        self._hello_timer = asyncio.get_running_loop().call_later(HELLO_WITHIN, self.close)

    def data_received(self, data: bytes) -> None:
        server = self.server
        try:
            frames = self.splitter.feed(data)
            if frames:
                server.weaver.receive(self, frames, server.clock())
        except ProtocolMismatch as error:
            server.weaver.outbox.refuse(self, error.code, str(error))
            self.splitter = Splitter(0)
            self.transport.pause_reading()
        if self._introduced is None and self.replica is not None:
            self._introduce(self.replica)
        server.plan_commit()

    def connection_lost(self, exc: Exception | None) -> None:
        self._hello_timer.cancel()
        self.server.lost(self)

    def _introduce(self, replica: Replica) -> None:
        self._introduced = replica
        self.splitter.limit = MAX_FRAME
        self._hello_timer.cancel()
        ours, theirs = self.transport.get_extra_info("sockname"), self.transport.get_extra_info("peername")
        if ours and theirs and ours[0] == theirs[0]:
            self.process = find_process(replica.pid)


def monotonic_clock() -> Callable[[], float]:
    """Return a clock of seconds since the epoch that changes of the system's time do not affect."""
    start = time.time() - time.monotonic()
    return lambda: start + time.monotonic()
