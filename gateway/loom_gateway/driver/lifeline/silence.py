"""How long a connection may be silent before the kernel breaks it."""

from __future__ import annotations

import socket

from loom.process.listen import is_loopback

REFUSED_FOR = 10.0
"""Seconds of refused connections after which a peer is gone, if its connection was reset before.

The kernel of a peer that has ended closes its connections in order, and refuses new ones: such a peer is gone at
the first refusal. After a reset, a firewall may refuse in the peer's name for some time, but none does within one
machine.
"""

ATTEMPT = 2.0  # seconds that one attempt to connect again, with its greeting, may take
RETRY = 0.2  # seconds between two attempts


def break_after(sock: socket.socket, seconds: float) -> None:
    """Have the kernel break a connection when the peer has been silent for so many seconds, and little more."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        idle = max(1, round(seconds / 12))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(idle / 4)))
        # For data that is not acknowledged, and for the probes, instead of their number. The kernel counts from the
        # last that came, which may be ``idle`` seconds before the network went away.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round((seconds + idle) * 1000))


class Refusals:
    """Decides whether refused connections to a host mean that the peer is gone. ``clean``: it closed in order."""

    def __init__(self, host: str, clean: bool = False) -> None:
        self._believed = clean or is_loopback(host)
        self._since: float | None = None

    def refused(self, now: float) -> bool:
        """Note a refused attempt; return whether the peer is gone."""
        if self._since is None:
            self._since = now
        return self._believed or now - self._since >= REFUSED_FOR

    def other(self) -> None:
        """Note an attempt that failed in another way."""
        self._since = None
