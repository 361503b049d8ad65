"""Sockets whose queues in the kernel are as short as the network allows."""

from __future__ import annotations

import socket
import struct
import sys
from typing import Any

NEAR = 0.002
"""Seconds of round trip up to which the other side is near."""

QUEUE = 256 << 10
"""Bytes that a near socket queues each way, enough for 1 Gbit/s at that distance. Linux takes twice as many."""

_RTT_AT = 68  # of tcpi_rtt in Linux' struct tcp_info, in microseconds


def round_trip(sock: Any) -> float | None:
    """Seconds of round trip of a TCP connection, as the kernel measured it; None where it does not tell."""
    if sys.platform != "linux":
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT_AT + 4)
    except OSError:  # not TCP
        return None
    (microseconds,) = struct.unpack_from("=I", info, _RTT_AT)
    return float(microseconds) / 1e6


def keep_queues_short(sock: Any) -> None:
    """Have a connection to a near peer queue little, so that a small answer has little before it.

    Linux lets both ends queue tens of megabytes, which a far peer needs to be kept busy. To a near one they are so
    much that is ahead of whatever is sent next: 20 ms of it on the way to a laptop that takes 500 MB/s.
    """
    seconds = round_trip(sock)
    if seconds is not None and seconds <= NEAR:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, QUEUE)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, QUEUE)
