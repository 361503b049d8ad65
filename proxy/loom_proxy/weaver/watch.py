"""Watching the weaver over ``/ws/v1/weaver``, across lost connections; and `WeaverFeed`, which may also poll.

A lost connection reconnects by itself. If a program reads too slowly, the gateway ends the connection; the next one
begins with a snapshot, so that the program misses only the steps in between.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit, urlunsplit

from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus
from websockets.sync.client import connect

from loom.control.operations import Ask
from loom.errors import (
    GatewayUnreachable,
    LoomError,
    NotAGateway,
    RateLimited,
    TokenRevoked,
    WatcherTooSlow,
    WeaverUnavailable,
    error_for_code,
)
from loom.mutual_auth.over_http import check_proof, is_forwarded
from loom.rest_client import Route, TokenSource, route_to, safe_url, token_now
from loom.tls import client_context, tls_error
from loom.weaver.views import CHANGING_FIELDS, Away, Delta, Snapshot, WeaverEvent, WeaverUpdate, read_update
from loom_proxy.session.transport_and_handshake import RECONNECT
from loom_proxy.transport.tls import TlsSocket
from loom_proxy.transport.websocket import NoUpgrade, refused

V = TypeVar("V")

_silent = logging.getLogger(f"{__name__}.socket")
_silent.setLevel(logging.CRITICAL)
"""The logger for websockets. It is silent, since it would print a traceback for each lost connection."""

OPEN_TIMEOUT = 10.0  # seconds that a gateway has to accept the connection
_REFUSED = 4000  # WebSocket close code whose reason is the code of one of `loom.errors`
_TRANSIENT = (GatewayUnreachable, NotAGateway, RateLimited, WatcherTooSlow)


class _Attempts:
    """The attempts to connect, one after the other, until nothing has come for ``timeout`` seconds.

    ``renews``: whether a token that has expired has a successor.
    """

    def __init__(self, timeout: float | None, renews: bool) -> None:
        self._timeout = timeout
        self._renews = renews
        self._opened = False
        self.heard()

    def opened(self) -> None:
        self._opened = True
        self._waits = iter(RECONNECT)

    def heard(self) -> None:
        self._until = math.inf if self._timeout is None else time.monotonic() + self._timeout

    def left(self) -> float | None:
        return None if self._timeout is None else max(0.0, self._until - time.monotonic())

    def lost(self, error: Exception) -> tuple[Away | None, float]:
        """Return an `Away` and the seconds to wait; None in its place if there is no time for another attempt."""
        if isinstance(error, ConnectionClosed):
            error = _closed(error, self._renews)
        elif not self._opened:
            raise error
        wait = next(self._waits)
        return (None if time.monotonic() + wait > self._until else Away(str(error))), wait


class _Connect(connect_async):
    """`websockets`' connection, without following redirects: it would show the token to wherever one leads."""

    def process_redirect(self, exc: Exception) -> Exception:
        return exc


class _Tls:
    """What `websockets` takes for an `ssl.SSLContext`, for connections that one thread reads while another writes.

    With `ssl.SSLSocket`, one connection in some hundreds never opened: its reading thread took the session tickets
    that a server of TLS 1.3 sends first, while the other thread sent the request.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context

    def wrap_socket(self, sock: socket.socket, server_hostname: str) -> TlsSocket:
        return TlsSocket(sock, self._context, server_hostname)


class WeaverWatch:
    """A watch of the weaver of one gateway."""

    def __init__(
        self,
        url: str | Route,
        token: TokenSource,
        ca: str | None = None,
        insecure: bool = False,
        user: str | None = None,
    ) -> None:
        self._route = route_to(url)
        self._insecure = insecure or not isinstance(url, str)  # whoever has made a route has decided
        self._user = user
        self._context = client_context(ca) if self.url.startswith("wss:") else None
        self._token = token
        self._options: dict[str, Any] = {
            "open_timeout": OPEN_TIMEOUT,
            "max_size": None,  # a snapshot of many replicas is large
            "compression": None,
            "proxy": None,
            "logger": _silent,
        }

    @property
    def url(self) -> str:
        """The URL of the WebSocket at this moment."""
        parts = urlsplit(safe_url(self._route.url, self._insecure))
        query = "" if self._user is None else urlencode({"user": self._user})
        return urlunsplit(parts._replace(path=f"{parts.path}/weaver", query=query))

    def updates(self, timeout: float | None = None) -> Iterator[WeaverUpdate]:
        """Yield the present state, and then each change."""
        attempts = _Attempts(timeout, callable(self._token))
        while True:
            try:
                with self._open() as socket:
                    attempts.opened()
                    while True:
                        update = _read(socket.recv(attempts.left()))
                        attempts.heard()
                        if update is not None:
                            yield update
            except TimeoutError:
                return
            except (ConnectionClosed, *_TRANSIENT) as error:
                away, wait = attempts.lost(error)
            if away is None:
                return
            yield away
            time.sleep(wait)

    def updates_async(self, timeout: float | None = None) -> AsyncIterator[WeaverUpdate]:
        """Yield the present state, and then each change, on an event loop; see `updates`."""
        return self._watch(_read, timeout)

    async def messages_async(self) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the gateway's messages as they come, and one of type ``away`` when the connection is lost."""
        async for message in self._watch(_read_json):
            yield {"type": "away", "reason": message.reason} if isinstance(message, Away) else message

    async def _watch(
        self, read: Callable[[str | bytes], V | None], timeout: float | None = None
    ) -> AsyncIterator[V | Away]:
        attempts = _Attempts(timeout, callable(self._token))
        while True:
            try:
                async with await self._open_async() as socket:
                    attempts.opened()
                    while True:
                        update = read(await asyncio.wait_for(socket.recv(), attempts.left()))
                        attempts.heard()
                        if update is not None:
                            yield update
            except asyncio.TimeoutError:
                return
            except (ConnectionClosed, *_TRANSIENT) as error:
                away, wait = attempts.lost(error)
            if away is None:
                return
            yield away
            await asyncio.sleep(wait)

    def _connection(self, url: str) -> dict[str, Any]:
        """Return the options of one connection. It shows the present token, to a gateway that has proved itself."""
        token = token_now(self._token)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return {**self._options, "additional_headers": headers, "sock": _proven(url, token)}

    def _open(self) -> Any:
        tls: Any = None if self._context is None else _Tls(self._context)
        url = self.url
        try:
            return connect(url, ssl=tls, **self._connection(url))
        except LoomError as error:
            self._renew(error)
            raise
        except (OSError, InvalidHandshake, EOFError) as error:
            raise self._not_opened(url, error) from error

    async def _open_async(self) -> Any:
        url = self.url
        try:
            return await _Connect(url, ssl=self._context, **await asyncio.to_thread(self._connection, url))
        except LoomError as error:
            self._renew(error)
            raise
        except (OSError, InvalidHandshake, EOFError) as error:
            raise self._not_opened(url, error) from error

    def _renew(self, error: LoomError) -> None:
        if isinstance(error, NotAGateway):  # who answers by this route is not the gateway
            self._route.renew()

    def _not_opened(self, url: str, error: Exception) -> LoomError:
        if isinstance(error, InvalidStatus):
            response = error.response
            return refused(url, response.status_code, response.reason_phrase, response.body or b"")
        self._route.renew()
        if isinstance(error, (InvalidHandshake, InvalidMessage, EOFError)):
            return NoUpgrade(f"{url} is not a Loom gateway: {error or type(error).__name__}")
        if self._context is not None and not isinstance(error, (ConnectionError, TimeoutError)):
            assert isinstance(error, OSError)
            return tls_error(url, error)
        return GatewayUnreachable(f"no gateway at {url}: {error or type(error).__name__}")


def _proven(url: str, token: str | None) -> socket.socket | None:
    """Return a connection to a forwarded port, whose gateway has proved itself; None for other addresses."""
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None or not is_forwarded(parts.hostname, parts.port):
        return None
    sock = socket.create_connection((parts.hostname, parts.port), OPEN_TIMEOUT)
    try:
        check_proof(sock, url, token)
    except BaseException:
        sock.close()
        raise
    return sock


def _read(text: str | bytes) -> WeaverUpdate | None:
    try:
        return read_update(json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        raise NotAGateway(f"what comes from the gateway makes no sense: {error!r}") from error


def _read_json(text: str | bytes) -> Mapping[str, Any] | None:
    try:
        message = json.loads(text)
    except ValueError as error:
        raise NotAGateway(f"what comes from the gateway makes no sense: {error!r}") from error
    if not isinstance(message, dict) or "type" not in message:
        raise NotAGateway(f"what comes from the gateway makes no sense: {message!r:.80}")
    return message


def _closed(closed: ConnectionClosed, renews: bool) -> LoomError:
    """Return why the connection has ended; raise the error if it has ended for good."""
    came = closed.rcvd
    if came is None or came.code != _REFUSED:
        return GatewayUnreachable(f"the connection to the gateway is lost: {closed}")
    error = error_for_code(came.reason, f"the gateway has ended the connection: {came.reason}")
    if isinstance(error, _TRANSIENT) or (renews and isinstance(error, TokenRevoked)):
        return error
    raise error from closed


PAGE = 1000  # events that one request reads
EVERY = 1.0  # seconds between two requests without a WebSocket


class WeaverFeed:
    """The updates and the events of one weaver.

    Args:
        look: returns the state of all replicas and devices.
        transport: ``"websocket"``, ``"http"`` or ``"auto"``; see `loom_proxy.weaver.client.WeaverProxy`.
        socket: returns a watch over the weaver's WebSocket; None if there is none to try.
    """

    def __init__(
        self,
        transport: str,
        ask: Ask,
        look: Callable[[], Snapshot],
        socket: Callable[[], WeaverWatch] | None,
    ) -> None:
        self._transport = transport
        self._ask = ask
        self._look = look
        self._socket = None if transport == "http" else socket

    def watch(self, timeout: float | None) -> Iterator[WeaverUpdate]:
        if self._socket is not None:
            try:
                yield from self._socket().updates(timeout)
                return
            except NoUpgrade:  # only the first connection raises it, so nothing is read twice
                if self._transport != "auto":
                    raise
        yield from poll(self._look, self.after, timeout)

    async def watch_async(self, timeout: float | None) -> AsyncIterator[WeaverUpdate]:
        if self._socket is not None:
            try:
                async for update in self._socket().updates_async(timeout):
                    yield update
                return
            except NoUpgrade:
                if self._transport != "auto":
                    raise
        polled = poll(self._look, self.after, timeout)
        while (polled_update := await asyncio.to_thread(next, polled, None)) is not None:
            yield polled_update

    def events(self, after: int | None, follow: bool, *, limit: int, **wanted: Any) -> Iterator[WeaverEvent]:
        reader = _Reader(self, wanted)
        yield from reader.first(after, limit)
        if follow:
            for update in self.watch(None):
                yield from reader.new(update)

    async def events_async(
        self, after: int | None, follow: bool, *, limit: int, **wanted: str | None
    ) -> AsyncIterator[WeaverEvent]:
        reader = _Reader(self, wanted)
        for event in await asyncio.to_thread(list, reader.first(after, limit)):
            yield event
        if follow:
            async for update in self.watch_async(None):
                for event in await asyncio.to_thread(list, reader.new(update)):
                    yield event

    def page(self, **wanted: Any) -> list[WeaverEvent]:
        return [WeaverEvent.from_body(one) for one in self._ask("events", **wanted)]

    def after(self, after: int, **wanted: Any) -> Iterator[WeaverEvent]:
        while page := self.page(after=after, limit=PAGE, **wanted):
            yield from page
            after = page[-1].id
            if len(page) < PAGE:
                return


class _Reader:
    """A reader of events of a ``kind`` or a ``replica`` without a gap, first by requests and then from updates."""

    def __init__(self, feed: WeaverFeed, wanted: Mapping[str, Any]) -> None:
        self._feed = feed
        self._wanted = wanted
        self._last = 0

    def first(self, after: int | None, limit: int) -> Iterator[WeaverEvent]:
        """Read the events after the one with an id; for None, the newest ones."""
        if after is None:
            yield from self._noted(self._feed.page(after=None, limit=limit, **self._wanted))
        else:
            self._last = after
            yield from self._noted(self._feed.after(after, **self._wanted))

    def new(self, update: WeaverUpdate) -> Iterator[WeaverEvent]:
        if isinstance(update, Snapshot):  # a new connection begins: events may have been missed before it
            yield from self._noted(self._feed.after(self._last, **self._wanted))
        elif isinstance(update, WeaverEvent) and update.id > self._last:
            wanted = {name: self._wanted[name] for name in ("kind", "replica")}
            if all(value in (None, getattr(update, name)) for name, value in wanted.items()):
                yield update
            self._last = update.id

    def _noted(self, events: Iterable[WeaverEvent]) -> Iterator[WeaverEvent]:
        for event in events:
            self._last = event.id
            yield event


def poll(
    look: Callable[[], Snapshot],
    events: Callable[[int], Iterator[WeaverEvent]],
    timeout: float | None = None,
) -> Iterator[WeaverUpdate]:
    """Yield the present state, and then each change, until there was none for ``timeout`` seconds."""
    before: Snapshot | None = look()
    assert before is not None
    yield before
    last = int(before.status["event"])
    heard = time.monotonic()
    while timeout is None or time.monotonic() - heard < timeout:
        time.sleep(EVERY if timeout is None else min(EVERY, timeout))
        updates: list[WeaverUpdate] = []
        try:
            now = look()
            if before is None:
                updates.append(now)
            else:
                updates += events(last)
                updates += _differences(before, now)
        except (WeaverUnavailable, GatewayUnreachable, NotAGateway, RateLimited) as error:
            if before is None:
                continue
            now = None
            updates.append(Away(str(error)))
        for update in updates:
            if isinstance(update, WeaverEvent):
                last = update.id
            yield update
        if updates:
            heard = time.monotonic()
        if before is None and now is not None:
            last = int(now.status["event"])
        before = now


def _differences(before: Snapshot, now: Snapshot) -> Iterator[Delta]:
    replicas = {
        id: {name: getattr(one, name) for name in CHANGING_FIELDS}
        for id, one in now.replicas.items()
        if before.replicas.get(id) != one
    }
    devices = {
        uuid: one.status
        for uuid, one in now.devices.items()
        if one.status is not None and (uuid not in before.devices or before.devices[uuid].status != one.status)
    }
    if replicas or devices:
        yield Delta(replicas, devices)
