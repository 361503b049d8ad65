"""The weaver's server: threadlets connect over TCP; gateways and drivers do, too, or over a unix socket.

Nobody is believed before it has shown a key.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import socket
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from loom.control.frame import MAX_FRAME, pack_around, unpack
from loom.control.handshake import MAX_KEY, FirstFrame
from loom.control.operations import (
    INTERNAL,
    OPERATIONS,
    AsJson,
    HoldSessions,
    NoteReached,
    Operation,
    Reach,
    ReadAudit,
    TakeSessions,
    WatchFully,
    find_operation,
    known_operation,
)
from loom.errors import AuthenticationError, Denied, LoomError, ProtocolMismatch
from loom.process import tasks
from loom.process.listen import notice_loss
from loom.weaver.connection import SILENCE, FrameConnection
from loom.weaver.keys import EVERYONE, Grant
from loom.weaver.server.guests_and_admins import Asker, Everyone
from loom.weaver.server.threadlets import HELLO_WITHIN, IntakeSource, Peers, ThreadletLink
from loom.weaver.server.user_weaver import COMMIT_EVERY, UserWeaver
from loom.weaver.server.users import Users
from loom.weaver.views import to_json
from loom.wire.plain import exact_json

MAX_UNREAD_BY_WATCHER = 8 << 20
"""Bytes that may wait for a watcher in addition to its snapshot."""

MAX_ASK = 4 << 20
"""Bytes of a session's largest frame: its driver is asked by frames of that size."""

_MAX_REQUEST_HELLO = MAX_KEY + 64
"""Bytes of the first frame of a connection for requests."""


class RequestConnection(FrameConnection, IntakeSource):
    """The connection of the gateway, or of a session's driver. Its first frame is ``["hello", key]``."""

    def __init__(self, users: Users, peers: Peers) -> None:
        super().__init__()
        self._users = users
        self._peers = peers
        self._everyone = Everyone(users.items)
        self._grant: Grant | None = None
        """The key's grant; None before the key has come."""
        self._first = FirstFrame(_MAX_REQUEST_HELLO, users.keys.read)
        self._introduced = False
        """True if the first frame, whose key was taken, is handled."""
        self._ended = False
        """True if the connection was closed because of what it sent."""
        self._watched: set[UserWeaver] = set()
        self._watches_full = False
        self._as_json: set[int] = set()
        """The numbers of the questions whose answers are written as JSON."""
        self._snapshot = 0
        """Bytes of the snapshot that the watcher has not read yet; they do not count against it."""
        self._hello_timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if (sock := transport.get_extra_info("socket")).family != socket.AF_UNIX:
            notice_loss(sock, SILENCE)
        self._peers.callers.add(self)
        self._peers.callers_without_key.add(self)
        self._hello_timer = asyncio.get_running_loop().call_later(HELLO_WITHIN, self.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._hello_timer.cancel()
        self._peers.callers.discard(self)
        self._peers.callers_without_key.discard(self)
        self._peers.intake.finish(self, self._unwatch)

    def data_received(self, data: bytes) -> None:
        if self._grant is None:
            try:
                first = self._first.feed(data)
                if first is None:
                    return
                self._take_grant(first[0])
            except ProtocolMismatch as error:
                return self._end(error)
            except AuthenticationError as error:
                self.send(["refuse", error.code, str(error)])
                return self.close()
            data = first[1]
        self._peers.intake.take(self, data)

    def handle(self, data: bytes) -> Iterator[None]:
        assert self._grant is not None
        if self._ended:
            return
        try:
            for number, body in enumerate(self.splitter.feed(data)):
                if number:
                    yield
                self._receive(unpack(body), self._grant)
        except ProtocolMismatch as error:
            self._end(error)

    def begin(self, number: int, snapshot: bytes) -> None:
        """Send the packed snapshot of a watch of this connection."""
        try:
            self.write(pack_around(["snapshot", number], snapshot))
        except LoomError as error:
            self.send(["error", number, error.code, str(error)])
        self._snapshot = self.transport.get_write_buffer_size()

    def push(self, number: int, update: bytes) -> None:
        """Send a packed update for a watch of this connection; disconnect a watcher that does not read."""
        if self.transport.is_closing():
            return
        self.write(pack_around(["event", number], update))
        waiting = self.transport.get_write_buffer_size()
        self._snapshot = min(self._snapshot, waiting)
        if waiting > MAX_UNREAD_BY_WATCHER + self._snapshot:
            _log.warning("a watcher is disconnected: it has left %d bytes unread", waiting)
            self.transport.abort()

    def _unwatch(self) -> None:
        for user in self._watched:
            user.unwatch(self)

    def _end(self, error: ProtocolMismatch) -> None:
        _log.warning("a client of the weaver is disconnected: %s", error)
        self._ended = True
        self.close()

    def _take_grant(self, grant: Grant) -> None:
        """Take what the key of the first frame grants."""
        if not grant.is_gateway and grant.session is None:
            raise AuthenticationError("the key is one for threadlets: only the gateway and sessions ask the weaver")
        self._hello_timer.cancel()
        self._peers.callers_without_key.discard(self)
        self.splitter.limit = MAX_FRAME if grant.is_gateway else MAX_ASK
        self._grant = grant
        self.user = grant.user or ""

    def _receive(self, frame: Sequence[Any], grant: Grant) -> None:
        match frame:
            case ["hello", _] if not self._introduced:
                self._introduced = True
            case ["ask", int(number), (str() | None) as user, str(operation), dict(arguments)]:
                try:
                    self._handle(number, grant, user, operation, arguments)
                except LoomError as error:
                    self._send_answer(["error", number, error.code, str(error)])
                except sqlite3.Error:
                    raise  # the store is broken, so the weaver has to end
                except Exception as error:  # noqa: BLE001 - a bug of Loom, and the gateway waits for an answer
                    _log.exception("%s cannot be answered", operation)
                    self._send_answer(["error", number, LoomError.code, f"the weaver failed: {error!r}"])
            case ["watch", int(number), (str() | None) as user]:
                self._watch(number, grant, user)
            case _:
                raise ProtocolMismatch(f"not a question: {frame!r:.80}")

    def _handle(
        self, number: int, grant: Grant, user: str | None, operation: str, arguments: Mapping[str, Any]
    ) -> None:
        of, asker = _user(grant, user), Asker.read(arguments)
        if operation == AsJson.name and AsJson.name in INTERNAL:
            self._as_json.add(number)
            inner = AsJson.read(arguments)
            operation, arguments = inner.do, inner.arguments
            asker = Asker.read(arguments)
        if grant.session is not None:
            asker = Asker(grant.session, grant.session)
            arguments = self._of_session(of, grant.session, operation, arguments)
        asked = find_operation(operation).read(arguments)
        match asked:
            case WatchFully():
                self._watches_full = True
                self._send_answer(["answer", number, None])
            case NoteReached():
                self._send_answer(["answer", number, None])
            case ReadAudit():
                self._answer_in_time(number, None, self._users.audit.after(asked.trail or "", asked.last, 20.0))
            case HoldSessions():
                self._send_answer(["answer", number, self._users.leases.hold(asked)])
            case TakeSessions():
                self._send_answer(["answer", number, self._users.leases.take(asked)])
            case _ if of == EVERYONE:
                self._send_answer(["answer", number, to_json(self._everyone.do(asked, asker))])
            case _:
                self._answer(number, self._users.of(of), asked, asker)

    def _of_session(
        self, user: str, session: str, operation: str, arguments: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return a session's arguments. It may ask for what users do with their replicas, and about itself."""
        found = known_operation(operation)
        if found is None or (operation in INTERNAL and Reach.SESSION not in found.reach):
            raise Denied(f"a session cannot ask the weaver for {operation!r:.80}")
        if found is NoteReached:
            self._users.audit.add(user, session, str(arguments.get("does")), arguments, self._users.clock())
        elif operation in OPERATIONS and not found.reads():
            self._users.audit.add(user, session, operation, arguments, self._users.clock())
        return {**arguments, "session": session}

    def _answer(self, number: int, user: UserWeaver, asked: Operation, asker: Asker) -> None:
        answer = user.requests.do(asked, asker)
        if inspect.isawaitable(answer):
            self._answer_in_time(number, user, answer)
        else:
            body = to_json(answer)
            user.answer(lambda: self._send_answer(["answer", number, body]), asked.reads())
        user.plan_commit()

    def _answer_in_time(self, number: int, user: UserWeaver | None, answer: Awaitable[Any]) -> None:
        self._users.tasks.run("answer a request", self._answer_later(number, user, answer))

    async def _answer_later(self, number: int, user: UserWeaver | None, waiting: Awaitable[Any]) -> None:
        try:
            answer = ["answer", number, to_json(await waiting)]
        except LoomError as error:
            answer = ["error", number, error.code, str(error)]
        except Exception as error:  # noqa: BLE001 - a bug of Loom, and the gateway waits for an answer
            _log.exception("a request cannot be answered")
            answer = ["error", number, LoomError.code, f"the weaver failed: {error!r}"]
        if user is None:
            self._send_answer(answer)
        else:
            user.answer(lambda: self._send_answer(answer), reads=True)

    def _watch(self, number: int, grant: Grant, user: str | None) -> None:
        if self.transport.is_closing():  # nobody would unwatch
            return
        try:
            watched = self._users.of(_user(grant, user, everyone=False))
        except LoomError as error:
            return self._send_answer(["error", number, error.code, str(error)])
        self._watched.add(watched)
        watched.watch(self, number, self._watches_full)
        watched.plan_commit()

    def _send_answer(self, answer: list[Any]) -> None:
        if answer[1] in self._as_json:
            self._as_json.discard(answer[1])
            if answer[0] == "answer":
                answer = [*answer[:2], exact_json(answer[2]).encode(errors="replace")]
        try:
            self.send(answer)
        except LoomError as error:
            self.send(["error", answer[1], error.code, str(error)])


def _user(grant: Grant, user: str | None, everyone: bool = True) -> str:
    """Return the user that a request is for, if its sender may act for that one."""
    if grant.user is not None:
        if user not in (None, grant.user):
            raise Denied("a session acts for its own user only")
        return grant.user
    if not user or (user == EVERYONE and not everyone):
        raise Denied("the gateway has to name the user that it acts for")
    return user


_log = logging.getLogger(__name__)


class Server:
    """A server of the users' weavers.

    The server ends by itself after ``linger`` seconds without a gateway, a driver or a threadlet.
    """

    def __init__(self, users: Users, linger: float = math.inf) -> None:
        self.users = users
        self.peers = Peers()
        self._linger = linger
        self._last_peer_at = users.clock()
        self._listeners: list[asyncio.AbstractServer] = []

    async def start(self, tcp: socket.socket, unix: socket.socket | None) -> None:
        """Serve on listening sockets. With ``unix``, requests come over that one only, else over ``tcp``."""
        loop = asyncio.get_running_loop()
        users, peers = self.users, self.peers

        def requests() -> RequestConnection:
            return RequestConnection(users, peers)

        over_tcp = None if unix is not None else requests
        tcp_server = loop.create_server(lambda: ThreadletLink(users, peers, over_tcp), sock=tcp, backlog=4096)
        self._listeners.append(await tcp_server)
        if unix is not None:
            self._listeners.append(await loop.create_unix_server(requests, sock=unix))
        users.tick(users.clock())
        users.tasks.add(tasks.keep_running("tick", self._run_ticks))

    async def stop(self) -> None:
        """Commit what has come in, and close everything."""
        for listener in self._listeners:
            listener.close()
        self.users.close()
        self.users.tasks.cancel()
        self.peers.close()
        self.users.ended.set()

    async def _run_ticks(self) -> None:
        before = self.users.clock()
        while True:
            await asyncio.sleep(COMMIT_EVERY)
            now = self.users.clock()
            # An event loop runs timers that are due before it reads what has come while its process was halted.
            if (late := now - before - 2 * COMMIT_EVERY) > 0:
                self.users.note_held_up(late, now)
            before = now
            self.users.tick(now)
            if self.peers:
                self._last_peer_at = now
            elif now > self._last_peer_at + self._linger:
                _log.info("nobody has been here for %g s", self._linger)
                self.users.ended.set()


def monotonic_clock() -> Callable[[], float]:
    """Return a clock of seconds since the epoch that changes of the system's time do not affect."""
    start = time.time() - time.monotonic()
    return lambda: start + time.monotonic()
