"""Connecting to a session: the transport and the first exchange on it, once or until it succeeds."""

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
"""What may be otherwise in a moment: the network is away, a gateway restarts or is busy, something else answers."""

_RECONNECT = Backoff(0.05, 5.0, jitter=0.5, at_once=True)


class Dialled(NamedTuple):
    """A connection on which the session is open."""

    transport: Transport
    welcome: Welcome
    frames: list[bytes]
    """What came right behind the welcome."""


def dial(
    url: str, token: str | None, hello: Hello, timeout: float, ca: str | None = None, transport_kind: str = "auto"
) -> Dialled:
    """Connect to a gateway and say hello.

    Args:
        url: as `loom_proxy.transport.websocket.normalise_url` gives it.
        timeout: seconds to wait for the gateway to accept the connection.
        ca: as `loom.tls.client_context`.
        transport_kind: as `loom_proxy.transport.transports.open_transport` takes it.

    Raises:
        GatewayUnreachable, NotAGateway, UntrustedGateway, AuthenticationError, UnknownTransport: as
            `loom_proxy.transport.transports.open_transport`. Also `NotAGateway` where a WebSocket brings nothing in
            `SILENCE` seconds, and there is no HTTP either.
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


def _say_hello(transport: Transport, url: str, hello: Hello) -> Dialled:
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
    return Dialled(transport, welcome, frames)


def _first_frames(transport: Transport, url: str) -> list[bytes]:
    """What comes first: to open a session takes a while, but a gateway answers pings meanwhile."""
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
    """What this program says of itself in a `Hello`."""
    return f"monarch-loom {__version__}"


def delays() -> Iterator[float]:
    """Return the seconds before each attempt to connect again."""
    return iter(_RECONNECT)
