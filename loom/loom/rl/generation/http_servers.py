"""`Serving`: the HTTP servers of a generator, on this host's address, and their token.

uvicorn speaks HTTP and ends idle connections. Its limit of connections answers 503, so a `Listener` accepts itself:
connections that are too many wait in the kernel's accept queue, and those without the token make room.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from loom.control.address import own_address
from loom.errors import LoomError
from loom.process.listen import listen
from loom.rl.generation.http_app import CONNECTION, GenerationService, create_app
from loom.rl.generation.weight_client import ServingState, url_with_token

if TYPE_CHECKING:
    from starlette.types import ASGIApp


_log = logging.getLogger("loom")

REQUEST_TIMEOUT = 10.0
"""Seconds that a connection has to show the token."""
IDLE_TIMEOUT = 75.0
"""Seconds between two requests, after that."""

IDLE_GRACE = 0.5
"""Seconds that a connection may be idle before it makes room for another. A new one is idle until it is read."""

_ACCEPTS = 16  # connections that are accepted before others are served again
_FULL_PAUSE = 0.1  # seconds before accepting again if the process has no descriptor left
_TICK = 0.1  # seconds between two looks at how late the event loop is
_TICKS = 10


class Listener:
    """A thread that serves an application.

    Connections that are too many wait in the kernel's accept queue. Idle ones make room, first those that have
    shown no token.

    Args:
        app: the application.
        sock: a listening socket.
        connections: how many connections are accepted at a time.
        name: of the thread.
    """

    def __init__(self, app: ASGIApp, sock: socket.socket, connections: int, name: str) -> None:
        self.port: int = sock.getsockname()[1]
        self._started = threading.Event()
        config = uvicorn.Config(
            app,
            http=H11Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # uvicorn warns of each malformed request, and an attack would fill the log
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(IDLE_TIMEOUT),
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config, sock, connections, self._started)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._started.wait()

    @property
    def connections(self) -> int:
        """The number of accepted connections."""
        return len(self._server.acceptor.open)

    @property
    def late_ms(self) -> float:
        """The greatest delay of the event loop in the last second, in milliseconds."""
        return self._server.lateness.worst_ms

    @property
    def accept_queue(self) -> int:
        """The number of connections that wait in the kernel to be accepted."""
        return accept_queue(self.port)

    def close(self) -> None:
        """Stop serving. Answers that are under way have a second."""
        self._server.should_exit = True
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._server.serve())
        finally:
            self._started.set()


class _Server(uvicorn.Server):
    acceptor: _Acceptor
    lateness: _Lateness

    def __init__(self, config: uvicorn.Config, sock: socket.socket, most: int, started: threading.Event) -> None:
        super().__init__(config)
        self._sock, self._most, self._ready = sock, most, started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self.acceptor = _Acceptor(self._sock, self._most, self._protocol)
        self.servers.append(self.acceptor)  # type: ignore[arg-type]
        self.lateness = _Lateness()
        self._ready.set()

    def _protocol(self) -> _Connection:
        return _Connection(
            self.acceptor, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )


class _Connection(H11Protocol):
    """uvicorn's HTTP. It ends unless the token is shown in time."""

    def __init__(self, acceptor: _Acceptor, **options: Any) -> None:
        super().__init__(**options)
        self.good = False
        """True if the token was shown."""
        self.idle_since: float | None = None
        """The loop's time since when no request is answered, or None."""
        self._acceptor = acceptor
        self.app = partial(self.answer, self.app)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._acceptor.open[self] = None
        self.idle_since = self.loop.time()
        self._deadline = self.loop.call_later(REQUEST_TIMEOUT, self._time_out)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        self._acceptor.closed(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self.idle_since = self.loop.time()
        super().on_response_complete()
        self._acceptor.resume()

    async def answer(self, app: Any, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request. If there is no room for another connection, this one ends after it."""

        async def send_last(message: Any) -> None:
            if message["type"] == "http.response.start" and self._acceptor.full:
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        scope[CONNECTION] = self
        self.idle_since = None
        await app(scope, receive, send_last)

    def make_room(self) -> None:
        """End, after sending what was answered."""
        if self.good:
            self.transport.close()
        else:
            self.transport.abort()

    def _time_out(self) -> None:
        if not self.good:
            self.transport.abort()


class _Acceptor:
    """Accepts connections while there are not too many, as an `asyncio.Server`."""

    def __init__(self, sock: socket.socket, most: int, protocol: Any) -> None:
        self.open: dict[_Connection, None] = {}  # the oldest first
        self._sock = sock
        self._most = most
        self._protocol = protocol
        self._beginning: set[asyncio.Task[None]] = set()
        self._later: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        self.resume()

    @property
    def full(self) -> bool:
        """True if no other connection is accepted before one ends."""
        return len(self.open) + len(self._beginning) >= self._most

    def closed(self, connection: _Connection) -> None:
        """Note that a connection is closed, so that another may come."""
        self.open.pop(connection, None)
        self.resume()

    def resume(self) -> None:
        """Accept again, if there is room or a connection is idle."""
        if self._sock.fileno() != -1:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def close(self) -> None:
        """Stop accepting."""
        if self._sock.fileno() != -1:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()

    async def wait_closed(self) -> None:
        """Return at once: uvicorn waits for the connections itself."""

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            if self.full:
                self._loop.remove_reader(self._sock.fileno())
                self._make_room()
                return
            try:
                sock, _address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                _log.error("the generator cannot accept connections: %s", error)
                self._loop.remove_reader(self._sock.fileno())
                self._loop.call_later(_FULL_PAUSE, self.resume)
                return
            sock.setblocking(False)
            task = self._loop.create_task(self._begin(sock))
            self._beginning.add(task)
            task.add_done_callback(self._begun)

    def _begun(self, task: asyncio.Task[None]) -> None:
        self._beginning.discard(task)
        self.resume()  # for a moment the connection was counted twice

    def _make_room(self) -> None:
        """End a connection that is idle: one that has shown no token before others, the longest idle one first."""
        if self._later is not None:
            self._later.cancel()
        idle = [(each.good, each.idle_since, each) for each in self.open if each.idle_since is not None]
        if not idle:
            return
        _, since, connection = min(idle, key=lambda one: one[:2])
        remaining = since + IDLE_GRACE - self._loop.time()
        if remaining > 0:
            self._later = self._loop.call_later(remaining, self.resume)
        else:
            connection.make_room()

    async def _begin(self, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, sock)
        except OSError:
            sock.close()


class _Lateness:
    """A monitor of an event loop's delay."""

    def __init__(self) -> None:
        self._late: deque[float] = deque([0.0], maxlen=_TICKS)
        self._loop = asyncio.get_running_loop()
        self._wait()

    @property
    def worst_ms(self) -> float:
        now_late = time.monotonic() - self._due
        return max(0.0, now_late, *self._late) * 1000

    def _wait(self) -> None:
        self._due = time.monotonic() + _TICK
        self._loop.call_later(_TICK, self._tick)

    def _tick(self) -> None:
        self._late.append(time.monotonic() - self._due)
        self._wait()


def accept_queue(port: int) -> int:
    """Return how many connections to a port of this host wait to be accepted, as the kernel counts them."""
    waiting = 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                _, local, _, state, queues = line.split()[:5]
                if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                    waiting += int(queues.rpartition(":")[2], 16)
    return waiting


CONNECTIONS = 4096


class Serving:
    """Servers for one engine.

    Args:
        service: what they serve; its token is made by `new_token`.
        port: of completions and administration; 0 picks one.
        admin_port: of a listener for administration alone, with a thread and an accept queue of its own; 0 picks
            one, None makes none.
        connections: how many connections each listener accepts at a time.

    Raises:
        PortInUse: something else listens on a port.
    """

    def __init__(
        self,
        service: GenerationService,
        port: int = 0,
        admin_port: int | None = None,
        connections: int = CONNECTIONS,
    ) -> None:
        host = own_address()
        sock = listen(host, port)
        try:
            admin_sock = None if admin_port is None else listen(host, admin_port)
        except LoomError:
            sock.close()
            raise
        self._main = Listener(create_app(service), sock, connections, "loom-generator-http")
        self.url = url_with_token(host, self._main.port, service.token)
        self.admin_url: str | None = None
        self._admin: Listener | None = None
        if admin_sock is not None:
            app = create_app(service, only_admin=True)
            self._admin = Listener(app, admin_sock, connections, "loom-generator-admin")
            self.admin_url = url_with_token(host, self._admin.port, service.token)

    @property
    def state(self) -> ServingState:
        """The place where requests to the first server wait."""
        return ServingState(self._main.connections, self._main.accept_queue, self._main.late_ms)

    def close(self) -> None:
        """Stop serving."""
        for listener in (self._main, self._admin):
            if listener is not None:
                listener.close()


def new_token() -> str:
    """Return a random token."""
    return secrets.token_urlsafe(32)
