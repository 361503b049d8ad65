"""The connection of a gateway or a driver: requests, and watches."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from loom.control.framing import MAX_FRAME
from loom.errors import LoomError, ProtocolMismatch
from loom.weaver.serving.connection import Connection
from loom.weaver.serving.requests import RequestHandler
from loom.weaver.weaver import Weaver

_log = logging.getLogger(__name__)

MAX_UNREAD_BY_WATCHER = 8 << 20
"""Bytes that may wait for a watcher in addition to its snapshot."""


class RequestServer(Protocol):
    """The part of the server that a `RequestConnection` uses."""

    weaver: Weaver
    clock: Callable[[], float]
    requests: RequestHandler
    waits: Mapping[str, Callable[[dict[str, Any]], Awaitable[Any]]]
    """The operations that wait, by their names."""
    callers: set[RequestConnection]
    watchers: set[RequestConnection]

    def run(self, work: Any) -> None: ...

    def plan_commit(self) -> None: ...


class RequestConnection(Connection):
    """The connection of the gateway, or of another client that can open the socket."""

    def __init__(self, server: RequestServer) -> None:
        super().__init__(MAX_FRAME)
        self.server = server
        self._answers: list[list[Any]] = []
        """Answers that wait for the next commit."""
        self._watches: set[int] = set()
        """The request numbers of the watches."""
        self._snapshot = 0
        """Bytes of the snapshot that the watcher has not read yet; they do not count against it."""

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
        """Send the answers that waited for a commit."""
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
        if (wait := self.server.waits.get(operation)) is not None:
            self.server.run(self._answer_later(number, wait(arguments)))
            return
        try:
            self._answer("answer", number, self.server.requests.answer(operation, arguments, self.server.clock()))
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
        self._send_answer(["snapshot", number, self.server.requests.snapshot(self.server.clock())])
        self._snapshot = self.transport.get_write_buffer_size()
        self._watches.add(number)
        self.server.watchers.add(self)
        self.server.weaver.known.watching = True

    def _send_answer(self, answer: list[Any]) -> None:
        try:
            self.send(answer)
        except LoomError as error:
            self.send(["error", answer[1], error.code, str(error)])
