"""The connection to a session: its transport and the handshake on it."""

from __future__ import annotations

import logging
from typing import NamedTuple

from loom._version import __version__
from loom.errors import (
    ConnectionLost,
    GatewayUnreachable,
    Invalid,
    LoomError,
    NotAGateway,
    ProtocolMismatch,
    RateLimited,
)
from loom.process.backoff import Backoff
from loom.rest_client import TokenSource, token_now
from loom.wire.handshake import Hello, Welcome, check_protocol, error_from_refusal
from loom.wire.length_prefix import behind_length
from loom.wire.messages import Kind
from loom.wire.stream import Stream, unnumbered_frame
from loom_proxy.transport.base import SILENCE, Transport
from loom_proxy.transport.http import HttpTransport
from loom_proxy.transport.websocket import NoUpgrade, UpgradeCut, WebSocketTransport

logger = logging.getLogger("loom")

TRANSIENT = (GatewayUnreachable, NotAGateway, ConnectionLost, RateLimited)
"""Errors that another attempt may not meet. A proxy may answer in place of a gateway that restarts."""

RECONNECT = Backoff(0.05, 5.0, jitter=0.5, at_once=True)

CLIENT = f"monarch-loom {__version__}"

TRANSPORTS = ("auto", "websocket", "http")
"""Kinds of transport; ``auto``: HTTP if there is no WebSocket but a gateway over HTTP."""

_logged: set[str] = set()  # URLs for which a fallback to HTTP has been logged


class Address(NamedTuple):
    """The address of a session's gateway, and how to connect to it."""

    url: str
    """The WebSocket's URL, which `loom.rest_client.normalise_url` returns."""
    token: TokenSource
    patience: float | None = None
    """Seconds of attempts to reconnect; None for as long as the session can live."""
    ca: str | None = None
    """File of the authority that vouches for the gateway; see `loom.tls.client_context`."""
    transport: str = "auto"
    """One of `TRANSPORTS`. ``auto`` is decided at each attempt, since the network may have changed."""


class Handshake(NamedTuple):
    """A connection on which the session is open."""

    transport: Transport
    welcome: Welcome
    frames: list[bytes]
    """Frames that came together with the welcome, behind it."""


def connect(to: Address, hello: Hello, timeout: float, kind: str | None = None) -> Handshake:
    """Connect to a gateway, ``timeout`` seconds for each attempt, and perform the handshake.

    Raises:
        GatewayUnreachable, NotAGateway, UntrustedGateway, AuthenticationError: there is no way to the gateway. Also
            `NotAGateway` if a WebSocket brings nothing in `SILENCE` seconds, and HTTP does not work either.
        ConnectionLost: the connection broke before there was an answer.
        LoomError: the session cannot be opened, or the gateway speaks another major version.
    """
    kind = kind or to.transport
    if kind not in TRANSPORTS:
        raise Invalid(
            f"no transport {kind!r} (transport=… or LOOM_TRANSPORT); there are: {', '.join(TRANSPORTS)}",
            code="unknown_transport",
        )
    if kind == "http":
        return _say_hello(HttpTransport.open(to.url, token_now(to.token), timeout, to.ca), to.url, hello)
    try:
        return _say_hello(_open_websocket(to, timeout), to.url, hello)
    except NoUpgrade as error:
        if kind == "websocket":
            raise
        no_websocket = error
    try:
        transport = HttpTransport.open(to.url, token_now(to.token), timeout, to.ca)
    except LoomError:
        raise no_websocket from None
    if to.url not in _logged:
        _logged.add(to.url)
        logger.warning("no WebSocket to the gateway, so it is HTTP, which is slower: %s", no_websocket)
    return _say_hello(transport, to.url, hello)


def _open_websocket(to: Address, timeout: float) -> WebSocketTransport:
    """Return a WebSocket. One cut may be the network's; only after another, something breaks WebSockets."""
    try:
        return WebSocketTransport.open(to.url, token_now(to.token), timeout, to.ca)
    except UpgradeCut:
        return WebSocketTransport.open(to.url, token_now(to.token), timeout, to.ca)


def _say_hello(transport: Transport, url: str, hello: Hello) -> Handshake:
    try:
        try:
            transport.send_all(transport.encode(behind_length(unnumbered_frame(hello.message()))))
        except OSError as error:
            raise ConnectionLost(f"{url} closed the connection during the handshake: {error}") from error
        frames = _first_frames(transport, url)
        (answer,) = Stream().receive(frames.pop(0))
        if answer.kind == Kind.REFUSE:
            raise error_from_refusal(answer)
        if answer.kind != Kind.WELCOME:
            raise ProtocolMismatch(f"{url} answered the hello with message {answer.kind}")
        welcome = Welcome.from_body(answer.body)
        check_protocol(welcome.protocol, ours="client", theirs="cluster")
    except BaseException:
        transport.close()
        raise
    return Handshake(transport, welcome, frames)


def _first_frames(transport: Transport, url: str) -> list[bytes]:
    """Return the first frames. Opening a session takes a while, but a gateway answers pings meanwhile."""
    while (frames := transport.receive()) is not None:
        if frames:
            return frames
        if not transport.is_alive():
            raise NoUpgrade(
                f"{url} gave a WebSocket, but in {SILENCE:.0f} s nothing came through it: something on the way "
                f"keeps what WebSockets carry"
            )
    raise ConnectionLost(f"{url} closed the connection during the handshake")
