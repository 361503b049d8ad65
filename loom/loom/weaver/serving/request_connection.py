"""The connection of a gateway or a driver: requests, and watching."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from typing import Any, Protocol

from loom.control.framing import MAX_FRAME
from loom.errors import LoomError, ProtocolMismatch, WrongArguments
from loom.weaver.replicas import Replica
from loom.weaver.serving.connection import Connection
from loom.weaver.serving.requests import RequestHandler
from loom.weaver.views import CommandState
from loom.weaver.weaver import Weaver

__all__ = ["RequestConnection", "RequestServer"]

_log = logging.getLogger(__name__)

MAX_UNREAD_BY_WATCHER = 8 << 20
"""Bytes that may wait for a watcher besides its snapshot."""

MAX_WAIT = 3600.0


class RequestServer(Protocol):
    """What such a connection needs of the server."""

    weaver: Weaver
    clock: Callable[[], float]
    requests: RequestHandler
    callers: set[RequestConnection]
    watchers: set[RequestConnection]

    def run(self, work: Any) -> None: ...

    def plan_commit(self) -> None: ...

    async def command_state(self, id: str, timeout: float) -> CommandState: ...

    async def replicas_in(self, arguments: dict[str, Any], timeout: float) -> list[tuple[int | None, str]]: ...

    async def stack(self, replica: Replica) -> str: ...


class RequestConnection(Connection):
    """The gateway, or whoever else may open the socket."""

    def __init__(self, server: RequestServer) -> None:
        super().__init__(MAX_FRAME)
        self.server = server
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
                self._receive(frame)
        except ProtocolMismatch as error:
            _log.warning("a client of the weaver is disconnected: %s", error)
            self.close()
        self.server.plan_commit()

    def flush(self) -> None:
        """Send the answers that had to wait for a commit."""
        answers, self._answers = self._answers, []
        for answer in answers:
            self._send_answer(answer)

    def push(self, update: dict[str, Any]) -> None:
        """Tell a watcher something, unless it does not listen."""
        if self.transport is None or self.transport.is_closing():
            return
        for number in self._watches:
            self.send(["event", number, update])
        waiting = self.transport.get_write_buffer_size() if self.transport is not None else 0
        self._snapshot = min(self._snapshot, waiting)
        if waiting > MAX_UNREAD_BY_WATCHER + self._snapshot and self.transport is not None:
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
        if operation in ("command_state", "replicas_in", "stacks"):
            self.server.run(self._answer_later(number, operation, arguments))
            return
        try:
            answer = self.server.requests.answer(operation, arguments, self.server.clock())
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
        self._send_answer(["snapshot", number, self.server.requests.snapshot(self.server.clock())])
        self._snapshot = self.transport.get_write_buffer_size() if self.transport is not None else 0
        self._watches.add(number)
        self.server.watchers.add(self)
        self.server.weaver.known.watching = True

    def _send_answer(self, answer: list[Any]) -> None:
        try:
            self.send(answer)
        except LoomError as error:
            self.send(["error", answer[1], error.code, str(error)])
