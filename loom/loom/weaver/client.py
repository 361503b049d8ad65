"""`WeaverClient`: the client of the weaver's unix socket, for the gateway and the drivers.

A request made while the weaver is away waits a moment, because a weaver that died is restarted at once. A read
whose answer was lost is sent again. A command is not, because it might be given twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from loom.control.frame import pack
from loom.errors import LoomError, ProtocolMismatch, WeaverUnavailable, WrongArguments, error_for_code
from loom.weaver.serving.connection import Connection
from loom.weaver.serving.operations import OPERATIONS, takes

_COMMANDS = frozenset(("command", "inject", "remove_fault"))
"""Operations that give a command and return the command's state."""

_READS = frozenset(("numbers", *(name for name, operation in OPERATIONS.items() if operation.method == "GET")))

BETWEEN_ATTEMPTS = 0.02  # seconds between two attempts to connect to a weaver that its supervisor says is up
PATIENCE = 3.0  # seconds that a request waits for a weaver that is away

ANSWER_TIMEOUT = 30.0
"""Seconds that the weaver has to answer, in addition to those that the caller asked it to wait."""


class WeaverClient:
    """A client of the weaver, with one connection for requests, which wait until `came`, and one for each watch."""

    def __init__(self, path: str, patience: float = PATIENCE) -> None:
        self._path = path
        self._patience = patience
        self._closed = False
        self._up = asyncio.Event()
        self._why_away = "it has not come up yet"
        self._connecting = asyncio.Lock()
        self._link: _Link | None = None  # the connection for requests; a lost one is replaced by the next request
        self._watching: set[_Link] = set()

    def came(self) -> None:
        self._up.set()

    def went(self, why: str) -> None:
        self._up.clear()
        self._why_away = why

    def close(self) -> None:
        """Close every connection and refuse further requests."""
        self._closed = True
        self.went("the gateway is ending")
        for link in [*self._watching, *([self._link] if self._link else [])]:
            link.transport.abort()

    async def do(self, operation: str, by: str, /, **arguments: Any) -> Any:
        """Do one of `OPERATIONS` for a user, and return its result, as `Ask` describes it."""
        if operation not in OPERATIONS:
            raise WrongArguments(
                f"the weaver knows no operation {operation!r:.80}; it knows {', '.join(OPERATIONS)}"
            )
        timeout = ANSWER_TIMEOUT + takes(operation, arguments)
        wait = arguments.pop("wait", 0.0)
        if operation in _COMMANDS:
            given = await self.ask(operation, by=by, **arguments)
            operation, arguments = "command_state", {"id": given["id"]}
        if operation == "command_state":
            arguments["timeout"] = wait
        return await self.ask(operation, timeout, by=by, **arguments)

    async def ask(self, operation: str, within: float = ANSWER_TIMEOUT, /, **arguments: Any) -> Any:
        """Return the result of an operation. A weaver that goes away before it answers may have done it."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience
        while True:
            link = await self._connected()
            try:
                return await asyncio.wait_for(link.ask(operation, arguments), within)
            except asyncio.TimeoutError:
                raise WeaverUnavailable(f"the weaver did not answer within {within:g} s") from None
            except WeaverUnavailable:
                if self._closed or operation not in _READS or loop.time() > until:
                    raise
                await asyncio.sleep(BETWEEN_ATTEMPTS)

    async def watch(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield the current state as ``("snapshot", …)``, and then ``("event", …)`` for each push."""
        link = await self._open()
        self._watching.add(link)
        try:
            async for push in link.watch():
                yield push
        finally:
            self._watching.discard(link)
            link.transport.abort()

    async def available(self) -> None:
        await self._up.wait()

    async def _available(self) -> None:
        if self._up.is_set():
            return
        try:
            await asyncio.wait_for(self._up.wait(), self._patience)
        except asyncio.TimeoutError:
            raise WeaverUnavailable(
                f"the weaver is away: {self._why_away}. It is started again by itself; replicas go on meanwhile"
            ) from None

    async def _connected(self) -> _Link:
        async with self._connecting:
            if self._link is None or self._link.lost:
                self._link = await self._open()
            return self._link

    async def _open(self) -> _Link:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience
        while True:
            await self._available()
            try:
                _, link = await loop.create_unix_connection(_Link, self._path)
                return link
            except OSError as error:
                if loop.time() > until:
                    raise WeaverUnavailable(f"the weaver is away: {error.strerror or error}") from error
                await asyncio.sleep(BETWEEN_ATTEMPTS)  # the weaver died, and its supervisor will notice soon


class _Link(Connection):
    """A connection to the weaver."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = False
        self._number = 0
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._pushes: asyncio.Queue[tuple[str, dict[str, Any]] | None] = asyncio.Queue()
        """Pushes that the watcher has not read; None after the last."""

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self.splitter.feed(data):
                self._take(frame)
        except ProtocolMismatch:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        asked, self._pending = self._pending, {}
        text = "the weaver went away before it had answered; it may have done it all the same"
        for future in asked.values():
            if not future.done():
                future.set_exception(WeaverUnavailable(text))
        self._pushes.put_nowait(None)

    async def ask(self, operation: str, arguments: dict[str, Any]) -> Any:
        self._number += 1
        number = self._number
        self.send(["ask", number, operation, arguments])
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            return await answer
        finally:
            self._pending.pop(number, None)

    async def watch(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        self.send(["watch", 1])
        while (push := await self._pushes.get()) is not None:
            yield push
        raise WeaverUnavailable("the weaver went away")

    def send(self, frame: list[Any]) -> None:
        if self.lost:
            raise WeaverUnavailable("the weaver went away")
        try:
            self.transport.write(pack(frame))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            if isinstance(error, LoomError):
                raise
            raise WrongArguments(f"the weaver cannot be told of this: {error}") from error

    def _take(self, frame: list[Any]) -> None:
        match frame:
            case ["answer", int(number), value]:
                future = self._pending.get(number)
                if future is not None and not future.done():  # the caller may have given up
                    future.set_result(value)
            case ["error", int(number), str(code), str(text)]:
                future = self._pending.get(number)
                if future is not None and not future.done():
                    future.set_exception(error_for_code(code, text))
            case ["snapshot" | "event" as kind, int(), dict(body)]:
                self._pushes.put_nowait((kind, body))
            case _:
                raise ProtocolMismatch(f"not an answer of the weaver: {frame!r:.80}")
