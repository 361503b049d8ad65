"""Listening on a port: the socket, its addresses, the announcement for the parent, and peers without a key."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import random
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from loom.errors import InvalidAddress, PortInUse

if TYPE_CHECKING:
    from torch.distributed import TCPStore


C = TypeVar("C")


class Strangers(Generic[C]):
    """The connections without a key, of which the oldest is cut off when there are too many.

    A peer with the key shows it at once, so whoever holds connections cuts off its own.

    Args:
        most: the number of connections.
        cut: closes a connection at once.
    """

    def __init__(self, most: int, cut: Callable[[C], object]) -> None:
        self._most = most
        self._cut = cut
        self._waiting: dict[C, None] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, connection: C) -> None:
        """Add a new connection, after cutting off the oldest if there are as many as there may be."""
        if len(self._waiting) >= self._most:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            self._cut(oldest)
        self._waiting[connection] = None

    def discard(self, connection: C) -> None:
        """Forget a connection, which has shown the key or is over."""
        self._waiting.pop(connection, None)

    def cut_all(self) -> None:
        """Cut off every connection."""
        for connection in list(self._waiting):
            self._cut(connection)


_ANY = ("0.0.0.0", "::")

_LOWEST = 16_384
_KUBERNETES = 30_000
"""The first port that Kubernetes gives to services of its nodes."""
_EPHEMERAL = 32_768
"""The first ephemeral port, where the system does not tell it."""


def listen(host: str, port: int, advice: str = "choose another (0 picks one)") -> socket.socket:
    """Listen on a TCP port of an address; return the socket. ``advice`` is for a port that is in use.

    Raises:
        PortInUse: something else listens there.
        InvalidAddress: the address is not of this machine, or is none.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(4096)
    except (OSError, OverflowError) as error:
        listener.close()
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise PortInUse(f"port {port} of {host} is in use: {advice}") from error
        reason = getattr(error, "strerror", None) or error
        hint = "; give an address of this machine" if getattr(error, "errno", None) == errno.EADDRNOTAVAIL else ""
        raise InvalidAddress(f"cannot listen on {host}:{port}: {reason}{hint}") from error
    return listener


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return different ports of an address of this machine on which nothing listens, for programs that will.

    The kernel gives its own, ephemeral ports to connections as well: one of them could be taken before the program
    listens. So these lie below its range, where there is room.
    """
    try:
        ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):  # not Linux
        ephemeral = _EPHEMERAL
    ours = range(_LOWEST, min(ephemeral, _KUBERNETES))
    candidates = random.SystemRandom().sample(ours, len(ours)) + [0] * count
    with contextlib.ExitStack() as held:
        found: list[int] = []
        for port in candidates:
            if len(found) == count:
                break
            sock = held.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            with contextlib.suppress(OSError):
                sock.bind((host, port))
                found.append(sock.getsockname()[1])
        return found


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to another machine, which can reach it there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        # Connecting a datagram socket sends nothing: it only asks the routing table.
        route.connect((host, port))
        here: str = route.getsockname()[0]
        return here


def bracketed(host: object) -> str:
    """Return a host in the form before a port: an IPv6 address in brackets."""
    text = str(host)
    return f"[{text}]" if ":" in text else text


def reachable(host: str, instead: str) -> str:
    """Return an address that reaches a listener on ``host``: ``instead`` if it listens on every address."""
    return instead if host in _ANY else host


def announce(event: str = "listening", **details: object) -> None:
    """Announce to the parent, in a line of JSON on standard output, that this process can be connected to."""
    print(json.dumps({"event": event, **details, "pid": os.getpid()}), flush=True)  # noqa: T201


def host_and_port(text: str, advice: str) -> tuple[str, int]:
    """Return the two parts of ``HOST:PORT``; raise `InvalidAddress` with the advice if the text is none."""
    match = re.fullmatch(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})", text)
    if match is None or int(match["port"]) > 65535:
        raise InvalidAddress(f"{text!r:.200} is not {advice}")
    return match["host"].strip("[]"), int(match["port"])


def notice_loss(sock: socket.socket, seconds: float) -> None:
    """Send small frames at once, and lose a peer that acknowledges no bytes for so long: its host may be gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    times = {"TCP_KEEPIDLE": seconds / 3, "TCP_KEEPINTVL": seconds / 6, "TCP_USER_TIMEOUT": seconds * 1000}
    for name, value in times.items():
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, max(1, int(value)))


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine itself."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_store(address: str) -> TCPStore:
    """Return a store that listens on one address of this machine; torch's own listens on all."""
    from torch.distributed import TCPStore

    listener = listen(address, 0)
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
