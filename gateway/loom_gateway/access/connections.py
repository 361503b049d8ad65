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

from uvicorn.protocols.http.h11_impl import H11Protocol

from loom_gateway.access.rate_limits import address_key
from loom_gateway.relay.turns import Turns
from loom_gateway.relay.websocket import RelaySocket

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT = 10.0
"""Seconds that a waiting connection has for a request, from its beginning and from the last response."""

KEPT_DESCRIPTORS = 200
"""Descriptors that connections never use: those of listeners, logs, the weaver, and drivers that start."""

_ACCEPTS = 4  # connections to accept before sessions' frames are relayed again
_FULL_PAUSE = 0.1  # seconds before accepting again if the process or the machine has no descriptor left

CONNECTION = "loom.connection"
"""The key of a request's `Connection` in its scope."""


class Unheard(Enum):
    """Why a connection was closed on which no request with a good token had come."""

    ADDRESS_FULL = "too_many_of_address"
    FULL = "too_many_connections"
    MALFORMED = "no_http"
    NO_TLS = "no_tls"
    TIMEOUT = "no_token_in_time"


class Connection:
    """A connection to the gateway's port."""

    def __init__(self, all_of_them: Connections, sock: socket.socket, address: str) -> None:
        self.address = address
        self.turns = all_of_them.turns
        self._all = all_of_them
        self._sock = sock
        self._deadline: asyncio.TimerHandle | None = None
        self._over = False
        self._good = False  # whether a request with a good token has come
        self.abort: Callable[[], object] = self._shut_down
        """Closes the connection without sending what waits. The TLS handshake has no transport for that."""

    def admit(self) -> None:
        """Note that a request with a good token has come."""
        self._good = True
        self._leave()

    def _leave(self) -> None:
        """Wait no longer."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._all.admitted(self)

    def wait(self) -> None:
        """Note that the connection waits for a request. It has as long as `Connections.timeout`."""
        if self._deadline is not None:
            self._deadline.cancel()
        if not self._over:
            self._deadline = asyncio.get_running_loop().call_later(self._all.timeout, self.cut, Unheard.TIMEOUT)
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
            self._leave()
            self._all.closed()


class Connections:
    """Counts the connections to the gateway's port, and closes waiting ones when there are too many.

    Args:
        most: the number of connections; 0: as many as the process has descriptors for, which always is a bound.
        most_of_address: the number of waiting connections of one address; 0: no limit.
        proxies: addresses and networks of trusted proxies, whose connections are those of many clients.
        timeout: seconds that a waiting connection has for a request; None: `REQUEST_TIMEOUT`.
        refusals: counts the values of `Unheard`.
    """

    def __init__(
        self,
        most: int = 0,
        most_of_address: int = 0,
        proxies: Iterable[str] = (),
        timeout: float | None = None,
        refusals: Counter[str] | None = None,
    ) -> None:
        room = max((_descriptors() - KEPT_DESCRIPTORS) // 2, 16)  # each may need a second one, towards a driver
        self.most = min(most or room, room)
        self._most_of_address = most_of_address
        self._proxies = list(proxies)
        self._timeout = timeout
        self.refusals: Counter[str] = Counter() if refusals is None else refusals
        self._count = 0
        self.turns = Turns()
        self._waiting: dict[Connection, None] = {}  # the oldest first
        self._by_address: dict[str, dict[Connection, None]] = {}

    def __len__(self) -> int:
        return self._count

    @property
    def timeout(self) -> float:
        """Seconds that a waiting connection has for a request."""
        return REQUEST_TIMEOUT if self._timeout is None else self._timeout

    @property
    def waiting(self) -> int:
        """The number of connections without a request under way whose token is good."""
        return len(self._waiting)

    def add(self, sock: socket.socket, host: str) -> Connection | None:
        """Return a new connection, which waits; None if there are too many and none of them waits."""
        if self._count >= self.most:
            if not self._waiting:
                self.refusals[Unheard.FULL.value] += 1
                return None
            next(iter(self._waiting)).cut(Unheard.FULL)
        connection = Connection(self, sock, "" if _is_among(host, self._proxies) else address_key(host))
        of_address = self._by_address.get(connection.address, {})
        if connection.address and self._most_of_address and len(of_address) >= self._most_of_address:
            next(iter(of_address)).cut(Unheard.ADDRESS_FULL)
        self._count += 1
        connection.wait()
        return connection

    def waits(self, connection: Connection) -> None:
        self._waiting.setdefault(connection)
        self._by_address.setdefault(connection.address, {}).setdefault(connection)

    def admitted(self, connection: Connection) -> None:
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
        connection: Connection,
        shows_nothing: Callable[[list[tuple[bytes, bytes]]], bool],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._connection = connection
        self._shows_nothing = shows_nothing
        self.app = partial(_of_connection, self.app, connection)
        self.ws_protocol_class = partial(_upgrade, connection)  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connection.abort = transport.abort

    def _should_upgrade(self) -> bool:
        return super()._should_upgrade() and not self._shows_nothing(self.headers)

    def send_400_response(self, msg: str) -> None:
        self._connection.refused(Unheard.MALFORMED)
        super().send_400_response(msg)

    def on_response_complete(self) -> None:
        self._connection.wait()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._connection.closed()


async def _of_connection(app: Any, connection: Connection, scope: Any, receive: Any, send: Any) -> None:
    scope[CONNECTION] = connection
    await app(scope, receive, send)


def _upgrade(connection: Connection, **options: Any) -> RelaySocket:
    protocol = RelaySocket(**options)
    protocol.turns = connection.turns
    protocol.app = partial(_of_connection, protocol.app, connection)
    protocol.gone.add_done_callback(lambda _: connection.closed())
    return protocol


def admit(scope: MutableMapping[str, Any]) -> None:
    """Note that the token of a request is good."""
    connection: Connection | None = scope.get(CONNECTION)
    if connection is not None:
        connection.admit()


class Acceptor:
    """Accepts connections of a listening socket, as an `asyncio.Server` that counts them.

    asyncio's own shows a connection only after the TLS handshake, so that half-open ones cannot be bounded.
    """

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        protocol: Callable[[Connection], asyncio.Protocol],
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

    async def _begin(self, sock: socket.socket, connection: Connection) -> None:
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
