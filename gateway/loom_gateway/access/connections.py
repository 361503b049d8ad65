"""The connections to the gateway's port, bounded in number and in the time without a good token.

A connection is *waiting* from its beginning until a request with a good token comes, and again after the response.
Only waiting connections are closed for newcomers, the oldest first: a client sends its token at once, so a flood of
silent connections closes itself. Sessions' clients are never closed for others.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterable, MutableMapping
from enum import Enum
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from loom_gateway.access.budgets import Budget, Budgets
from loom_gateway.access.rate_limits import address_key
from loom_gateway.relay.links import SLICE, RelayTurns
from loom_gateway.relay.websocket import RelaySocket

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT = 10.0
"""Seconds that a waiting connection has for a request, from its beginning and from the last response."""

KEPT_DESCRIPTORS = 200
"""Descriptors that connections never use: those of listeners, logs, the weaver, and drivers that start."""

_ACCEPTS = 4  # connections to accept before sessions' frames are relayed again
_WITHOUT_TURN = 4  # requests of a user at once that wait for no turn
_FULL_PAUSE = 0.1  # seconds before accepting again if the process or the machine has no descriptor left

CONNECTION = "loom.connection"
"""The key of a request's `PortConnection` in its scope."""


class Unheard(Enum):
    """Why a connection was closed on which no request with a good token had come."""

    ADDRESS_FULL = "too_many_of_address"
    FULL = "too_many_connections"
    MALFORMED = "no_http"
    NO_TLS = "no_tls"
    TIMEOUT = "no_token_in_time"


class PortConnection:
    """A connection to the gateway's port."""

    def __init__(self, all_of_them: Connections, sock: socket.socket, address: str) -> None:
        self.address = address
        self.turns = all_of_them.turns
        self._all = all_of_them
        self._sock = sock
        self._deadline: asyncio.TimerHandle | None = None
        self._over = False
        self._good = False  # whether a request with a good token has come
        self._user: str | None = None  # whose request, or WebSocket, is under way
        self.abort: Callable[[], object] = self._shut_down
        """Closes the connection without sending what waits. The TLS handshake has no transport for that."""
        self.when_read: Callable[[Callable[[], None]], None] = _at_once
        """Calls a function when the client has read what was sent to it, or is gone."""

    def admit(self, user: str) -> None:
        """Note that a request of a user with a good token has come.

        Raises:
            LimitReached: the user has too many connections with a request under way.
        """
        self._good = True
        if user and self._user is None:
            self._all.budget.take(user)
            self._user = user
        self._leave()

    @property
    def user(self) -> str:
        """The user whose request is under way; empty if there is none with a good token."""
        return self._user or ""

    async def turn(self) -> None:
        """Wait for a turn of the user, if the user has several requests under way."""
        if self._user is not None and self._all.budget.of(self._user) > _WITHOUT_TURN:
            await self.turns.turn(self._user)

    def _release(self) -> None:
        user, self._user = self._user, None
        if user is not None:
            self._all.budget.give_back(user)

    def _leave(self) -> None:
        """Wait no longer."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._all.admitted(self)

    def wait(self) -> None:
        """Note that the connection waits for a request. It has as long as `REQUEST_TIMEOUT`."""
        self._release()
        if self._deadline is not None:
            self._deadline.cancel()
        if not self._over:
            self._deadline = asyncio.get_running_loop().call_later(REQUEST_TIMEOUT, self.cut, Unheard.TIMEOUT)
            self._all.waits(self)

    def cut(self, why: Unheard) -> None:
        """Close the connection at once."""
        self.refused(why)
        self.abort()
        self.closed()

    def refused(self, why: Unheard) -> None:
        """Count that the connection is closed for a reason, unless a good token has come on it."""
        if not self._good and not self._over:
            self._all.refusals[why.value] += 1

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            self._sock.shutdown(socket.SHUT_RDWR)

    def closed(self) -> None:
        """Note that the connection is closed."""
        if not self._over:
            self._over = True
            self._release()
            self._leave()
            self._all.closed()


class Connections:
    """Counts the connections to the gateway's port, and closes waiting ones when there are too many.

    Args:
        most: the number of connections; 0: as many as the process has descriptors for, which always is a bound.
        most_of_address: the number of waiting connections of one address; 0: no limit.
        proxies: addresses and networks of trusted proxies, whose connections are those of many clients.
        refusals: counts the values of `Unheard`.
        budget: the connections of each user with a request under way; of one user at most half of ``most``.
    """

    def __init__(
        self,
        most: int = 0,
        most_of_address: int = 0,
        proxies: Iterable[str] = (),
        refusals: Counter[str] | None = None,
        budget: Budget | None = None,
    ) -> None:
        room = max((_descriptors() - KEPT_DESCRIPTORS) // 2, 16)  # each may need a second one, towards a driver
        self.most = min(most or room, room)
        self._most_of_address = most_of_address
        self._proxies = list(proxies)
        self.refusals: Counter[str] = Counter() if refusals is None else refusals
        self._count = 0
        self.turns = RelayTurns()
        self.budget = budget or Budgets.of().connections
        self.budget.of_user = min(self.budget.of_user or self.most, max(self.most // 2, 1))
        self._waiting: dict[PortConnection, None] = {}  # the oldest first
        self._by_address: dict[str, dict[PortConnection, None]] = {}

    def __len__(self) -> int:
        return self._count

    @property
    def waiting(self) -> int:
        """The number of connections without a request under way whose token is good."""
        return len(self._waiting)

    def add(self, sock: socket.socket, host: str) -> PortConnection | None:
        """Return a new connection, which waits; None if there are too many and none of them waits."""
        if self._count >= self.most:
            if not self._waiting:
                self.refusals[Unheard.FULL.value] += 1
                return None
            next(iter(self._waiting)).cut(Unheard.FULL)
        connection = PortConnection(self, sock, "" if _is_among(host, self._proxies) else address_key(host))
        of_address = self._by_address.get(connection.address, {})
        if connection.address and self._most_of_address and len(of_address) >= self._most_of_address:
            next(iter(of_address)).cut(Unheard.ADDRESS_FULL)
        self._count += 1
        connection.wait()
        return connection

    def waits(self, connection: PortConnection) -> None:
        self._waiting.setdefault(connection)
        self._by_address.setdefault(connection.address, {}).setdefault(connection)

    def admitted(self, connection: PortConnection) -> None:
        if connection in self._waiting:
            del self._waiting[connection]
            of_address = self._by_address[connection.address]
            del of_address[connection]
            if not of_address:
                del self._by_address[connection.address]

    def closed(self) -> None:
        self._count -= 1


class HttpProtocol(H11Protocol):
    """uvicorn's HTTP on a counted connection.

    uvicorn has a timeout between requests only, and any byte ends it, so slow connections would pile up.

    Args:
        shows_nothing: whether a request with these headers will be refused. It is then answered as a request, also
            if it asks for a WebSocket: to make one takes as long again.
    """

    def __init__(
        self,
        connection: PortConnection,
        shows_nothing: Callable[[list[tuple[bytes, bytes]]], bool],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._connection = connection
        self._unhandled = b""  # what has been read and waits for its turn
        self._going_on = False  # whether a turn is waited for
        self._unread: list[Callable[[], None]] = []  # what to call when the client has read the answers
        self._paced: PacedFlow
        self._upgraded = False
        self._shows_nothing = shows_nothing
        self.app = partial(_of_connection, self.app, connection)
        self.ws_protocol_class = partial(_upgrade, connection)  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connection.abort = transport.abort
        self._connection.when_read = self._when_read
        self.flow = self._paced = PacedFlow(transport, self._go_on_soon)

    def _when_read(self, read: Callable[[], None]) -> None:
        if self.flow.write_paused and not self.transport.is_closing():
            self._unread.append(read)
        else:
            read()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._note_read()

    def _note_read(self) -> None:
        unread, self._unread = self._unread, []
        for read in unread:
            read()

    def data_received(self, data: bytes) -> None:
        if self._unhandled:  # it was read before reading was paused
            self._unhandled = b"".join((self._unhandled, data))
            self._paced.hold()
        else:
            self._handle_some(data)

    def _handle_some(self, data: bytes) -> None:
        """Handle what has come. Heads and chunks are handled in slices: each byte of them can be an event."""
        while data and not self.transport.is_closing() and not self._upgraded:
            plain = self.conn.their_state is h11.SEND_BODY and not any(
                name == b"transfer-encoding" for name, _ in self.headers
            )
            size = len(data) if plain else SLICE
            super().data_received(data[:size])
            data = data[size:]
            if data and not plain and self.conn.their_state is h11.SEND_BODY:
                break
        self._unhandled = data
        if data:
            self._paced.hold()
            if not self.flow.read_paused:
                self._go_on_soon()

    def _go_on_soon(self) -> None:
        if not self._going_on:
            self._going_on = True
            self._connection.turns.wait(self._connection.user, self._go_on)

    def _go_on(self) -> None:
        self._going_on = False
        data, self._unhandled = self._unhandled, b""
        if not self.transport.is_closing():
            self._handle_some(data)
            if not self._unhandled:
                self._paced.release()

    def _should_upgrade(self) -> bool:
        return super()._should_upgrade() and not self._shows_nothing(self.headers)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._upgraded = True  # a client sends nothing more before the answer
        super().handle_websocket_upgrade(event)

    def send_400_response(self, msg: str) -> None:
        self._connection.refused(Unheard.MALFORMED)
        super().send_400_response(msg)

    def on_response_complete(self) -> None:
        self._connection.wait()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unhandled = b""
        self._note_read()
        self._connection.closed()


class PacedFlow(FlowControl):
    """uvicorn's flow control of a connection, which reads nothing while data waits for its turn.

    Args:
        resumed: called when the application reads on while data waits.
    """

    def __init__(self, transport: asyncio.Transport, resumed: Callable[[], None]) -> None:
        super().__init__(transport)
        self._held = False
        self._resumed = resumed

    def hold(self) -> None:
        """Read nothing more until `release`."""
        self._held = True
        self._transport.pause_reading()

    def release(self) -> None:
        """Read again, unless the application does not."""
        self._held = False
        if not self.read_paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def resume_reading(self) -> None:
        if self._held:
            self.read_paused = False
            self._resumed()
        else:
            super().resume_reading()


async def _of_connection(app: Any, connection: PortConnection, scope: Any, receive: Any, send: Any) -> None:
    scope[CONNECTION] = connection
    await app(scope, receive, send)


def _upgrade(connection: PortConnection, **options: Any) -> RelaySocket:
    protocol = RelaySocket(**options)
    protocol.turns = connection.turns
    protocol.app = partial(_of_connection, protocol.app, connection)
    protocol.gone.add_done_callback(lambda _: connection.closed())
    return protocol


async def admit(scope: MutableMapping[str, Any], user: str) -> None:
    """Note that a request's token is good; wait for the user's turn. Raise as `PortConnection.admit`."""
    connection: PortConnection | None = scope.get(CONNECTION)
    if connection is not None:
        connection.admit(user)
        await connection.turn()


def when_read(scope: MutableMapping[str, Any], read: Callable[[], None]) -> None:
    """Call a function when the client has read the answer to a request."""
    connection: PortConnection | None = scope.get(CONNECTION)
    (_at_once if connection is None else connection.when_read)(read)


def _at_once(read: Callable[[], None]) -> None:
    read()


class Acceptor:
    """Accepts connections of a listening socket, as an `asyncio.Server` that counts them.

    asyncio's own shows a connection only after the TLS handshake, so that half-open ones cannot be bounded.
    """

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        protocol: Callable[[PortConnection], asyncio.Protocol],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._connections = connections
        self._protocol = protocol
        self._tls = tls
        self._beginning: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                logger.error("the gateway cannot accept connections: %s", error)
                self._pause()
                return
            connection = self._connections.add(sock, str(address[0]))
            if connection is None:
                sock.close()
                continue
            sock.setblocking(False)
            task = self._loop.create_task(self._begin(sock, connection))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    def _pause(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(_FULL_PAUSE, self._resume)

    def _resume(self) -> None:
        if self._listener.fileno() != -1:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    async def _begin(self, sock: socket.socket, connection: PortConnection) -> None:
        timeout = {"ssl_handshake_timeout": REQUEST_TIMEOUT} if self._tls else {}
        protocol = partial(self._protocol, connection)
        try:
            await self._loop.connect_accepted_socket(protocol, sock, ssl=self._tls, **timeout)
        except (OSError, asyncio.TimeoutError):  # no TLS, or not in time
            connection.refused(Unheard.NO_TLS)
            connection.closed()
            sock.close()

    def close(self) -> None:
        """Stop accepting."""
        if self._listener.fileno() != -1:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()

    async def wait_closed(self) -> None:
        """Return at once: uvicorn waits for the connections itself."""


def _descriptors() -> int:
    """Return how many descriptors this process may have, after raising the limit as far as the machine allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return 1 << 20 if most == resource.RLIM_INFINITY else most


def _is_among(host: str, proxies: Iterable[str]) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    for proxy in proxies:
        with contextlib.suppress(ValueError):
            if proxy == "*" or address in ipaddress.ip_network(proxy, strict=False):
                return True
    return False
