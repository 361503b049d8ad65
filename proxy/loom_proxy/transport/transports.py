"""The ways to a gateway, and the choice between them."""

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
"""Seconds without a word after which the other side is asked for one, and after which the connection is lost."""

_told: set[str] = set()
"""URLs for which a fallback has been logged."""

_OPENERS: dict[str, Callable[[str, str | None, float, str | None], Transport]] = {
    "websocket": WebSocketTransport.open,
    "http": HttpTransport.open,
}


class Transport(Wire, Protocol):
    """Frames in and out. One thread may receive while another sends."""

    @property
    def kind(self) -> str:
        """Its name for `open_transport`."""

    def fileno(self) -> int:
        """What to wait for with `select`; -1 if that does not tell whether something has come."""

    def receive(self, wait: bool = True) -> list[bytes] | None:
        """The frames that have come, perhaps none; None when the connection is over."""

    @property
    def heard(self) -> float:
        """When the other side last said anything, by `time.monotonic`."""

    def ping(self) -> None:
        """Have the other side say something."""

    def send_control(self, data: bytes) -> None:
        """Send protocol bytes from the receiving thread; replaced by the owner to take its turn among senders."""

    def close(self) -> None:
        """End the connection."""


def open_transport(kind: str, url: str, token: str | None, timeout: float, ca: str | None = None) -> Transport:
    """Connect to a gateway.

    Args:
        kind: ``websocket``, ``http``, or ``auto``: HTTP where there is no WebSocket but a gateway over HTTP.
        url: of the gateway's WebSocket.
        timeout: seconds for each attempt.
        ca: as `loom.tls.client_context`.

    Raises:
        UnknownTransport: ``kind`` is none of these.
        GatewayUnreachable, NotAGateway, UntrustedGateway, AuthenticationError: as `WebSocketTransport.open`.
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
    """Connect over HTTP where there was no WebSocket; raise the error that said so if that does not work either."""
    try:
        transport = HttpTransport.open(url, token, timeout, ca)
    except LoomError:
        raise error from None
    if url not in _told:
        _told.add(url)
        logger.warning("no WebSocket to the gateway, so it is HTTP, which is slower: %s", error)
    return transport
