"""The connection to a session: its transport and the handshake on it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from loom._version import __version__
from loom.errors import ConnectionLost, GatewayUnreachable, NotAGateway, ProtocolMismatch, RateLimited
from loom.process.backoff import Backoff
from loom.wire.handshake import Hello, Welcome, check_protocol, error_from_refusal
from loom.wire.lane import behind_length
from loom.wire.messages import Kind
from loom.wire.stream import Stream, unnumbered_frame
from loom_proxy.transport.transports import PING_AFTER, SILENCE, Transport, open_http_instead, open_transport
from loom_proxy.transport.websocket import NoUpgrade

TRANSIENT = (GatewayUnreachable, NotAGateway, ConnectionLost, RateLimited)
"""Errors that another attempt may not meet: the network is away, or a gateway restarts or is busy.

`NotAGateway` is one of them, because a proxy may answer in place of a gateway that restarts.
"""

_RECONNECT = Backoff(0.05, 5.0, jitter=0.5, at_once=True)


class Handshake(NamedTuple):
    """A connection on which the session is open."""

    transport: Transport
    welcome: Welcome
    frames: list[bytes]
    """Frames that came together with the welcome, behind it."""


def connect(
    url: str, token: str | None, hello: Hello, timeout: float, ca: str | None = None, transport_kind: str = "auto"
) -> Handshake:
    """Connect to a gateway and perform the handshake.

    Args:
        url: the WebSocket's URL, which `loom_proxy.transport.websocket.normalise_url` returns.
        timeout: seconds to wait for the gateway to accept the connection.
        ca: file of the authority that vouches for the gateway; see `loom.tls.client_context`.
        transport_kind: a kind that `loom_proxy.transport.transports.open_transport` takes.

    Raises:
        GatewayUnreachable, NotAGateway, UntrustedGateway, AuthenticationError, UnknownTransport: see
            `loom_proxy.transport.transports.open_transport`. Also `NotAGateway` if a WebSocket brings nothing in
            `SILENCE` seconds, and HTTP does not work either.
        ConnectionLost: the connection broke before there was an answer.
        UnknownSession, SessionInUse: the session does not live, or has a client.
        WorkerUnreachable: the gateway's workers do not answer.
        ProtocolMismatch: the gateway speaks another major version.
    """
    transport = open_transport(transport_kind, url, token, timeout, ca)
    try:
        return _say_hello(transport, url, hello)
    except NoUpgrade as error:
        if transport_kind != "auto":
            raise
        transport = open_http_instead(error, url, token, timeout, ca)
    return _say_hello(transport, url, hello)


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
    pinged = False
    while (frames := transport.receive()) is not None:
        if frames:
            return frames
        silence = time.monotonic() - transport.heard
        if silence > SILENCE:
            raise NoUpgrade(
                f"{url} gave a WebSocket, but in {silence:.0f} s nothing came through it: something on the way "
                f"keeps what WebSockets carry"
            )
        if silence > PING_AFTER and not pinged:
            pinged = True
            transport.ping()
    raise ConnectionLost(f"{url} closed the connection during the handshake")


def client_name() -> str:
    """Return the name and version that this program gives in a `Hello`."""
    return f"monarch-loom {__version__}"


def delays() -> Iterator[float]:
    """Return the seconds before each attempt to connect again."""
    return iter(_RECONNECT)
