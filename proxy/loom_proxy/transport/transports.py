"""The transports to a gateway, and the choice between them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from loom.errors import Invalid, LoomError
from loom.wire.sender import Wire
from loom_proxy.transport.http import HttpTransport
from loom_proxy.transport.websocket import NoUpgrade, WebSocketTransport

logger = logging.getLogger("loom")

PING_AFTER, SILENCE = 5.0, 15.0
"""Seconds of silence after which the other side is pinged, and after which the connection counts as lost."""

_logged: set[str] = set()
"""URLs for which a fallback has been logged."""

_OPENERS: dict[str, Callable[[str, str | None, float, str | None], Transport]] = {
    "websocket": WebSocketTransport.open,
    "http": HttpTransport.open,
}


class Transport(Wire, Protocol):
    """A carrier of frames in both directions. One thread may receive while another sends."""

    @property
    def kind(self) -> str:
        """The transport's name for `open_transport`."""

    def fileno(self) -> int:
        """Return the descriptor to `select`; -1 if it does not show whether something has come."""

    def receive(self, wait: bool = True) -> list[bytes] | None:
        """Return the frames that have come, perhaps none; None when the connection is over."""

    @property
    def heard(self) -> float:
        """The `time.monotonic` of the last sign of life from the other side."""

    def ping(self) -> None:
        """Ask the other side for a sign of life."""

    def send_control(self, data: bytes) -> None:
        """Send protocol bytes from the receiving thread. The owner replaces it, to order it among its senders."""

    def close(self) -> None:
        """End the connection."""


def open_transport(kind: str, url: str, token: str | None, timeout: float, ca: str | None = None) -> Transport:
    """Connect to a gateway.

    Args:
        kind: ``websocket``, ``http``, or ``auto``: HTTP if there is no WebSocket but a gateway over HTTP.
        url: of the gateway's WebSocket.
        timeout: seconds for each attempt.
        ca: file of the authority that vouches for the gateway; see `loom.tls.client_context`.

    Raises:
        UnknownTransport: ``kind`` is none of these.
        GatewayUnreachable: no program answers at the URL.
        NotAGateway: the program that answers is not a gateway, or not in time.
        UntrustedGateway: no trusted authority vouches for the gateway's certificate.
        AuthenticationError: the gateway refused the token.
    """
    if kind != "auto":
        if kind not in _OPENERS:
            known = ", ".join(("auto", *_OPENERS))
            raise Invalid(
                f"no transport {kind!r} (transport=… or LOOM_TRANSPORT); there are: {known}",
                code="unknown_transport",
            )
        return _OPENERS[kind](url, token, timeout, ca)
    try:
        return WebSocketTransport.open(url, token, timeout, ca)
    except NoUpgrade as error:
        return open_http_instead(error, url, token, timeout, ca)


def open_http_instead(
    error: NoUpgrade, url: str, token: str | None, timeout: float, ca: str | None = None
) -> Transport:
    """Connect over HTTP after a WebSocket failed with ``error``; raise that error if HTTP fails, too."""
    try:
        transport = HttpTransport.open(url, token, timeout, ca)
    except LoomError:
        raise error from None
    if url not in _logged:
        _logged.add(url)
        logger.warning("no WebSocket to the gateway, so it is HTTP, which is slower: %s", error)
    return transport
