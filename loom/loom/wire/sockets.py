"""Sockets: queues in the kernel as short as the network allows, and a waker of threads that wait."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from typing import Any

NEAR = 0.002  # seconds of round trip up to which a peer counts as near

QUEUE = 256 << 10
"""Bytes that a socket to a near peer queues each way, enough for 1 Gbit/s at `NEAR`. Linux takes twice as many."""

_RTT_AT = 68  # offset of tcpi_rtt, in microseconds, in Linux' struct tcp_info


def round_trip(sock: Any) -> float | None:
    """Return the kernel's measure of a TCP connection's round trip, in seconds; None if there is none."""
    if sys.platform != "linux":
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT_AT + 4)
    except OSError:  # not TCP
        return None
    (microseconds,) = struct.unpack_from("=I", info, _RTT_AT)
    return float(microseconds) / 1e6


def keep_queues_short(sock: Any) -> None:
    """Shorten the queues of a connection to a near peer, so that a small answer waits for little before it.

    Linux lets both ends queue tens of megabytes, which keep a far peer busy. To a near peer they only delay the
    next message: by 20 ms on the way to a laptop that takes 500 MB/s.
    """
    seconds = round_trip(sock)
    if seconds is not None and seconds <= NEAR:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, QUEUE)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, QUEUE)


def let_go(descriptor: int) -> None:
    """Let go of a descriptor that this forked child shares with its parent. A negative one is none.

    The number stays taken, by nothing: an inherited object may close it when it is freed, and it would be another
    file by then.
    """
    if descriptor >= 0:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)


class Waker:
    """A file descriptor to `select.poll` together with a socket; another thread makes it readable."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        os.set_blocking(self._out, False)
        os.set_blocking(self._in, False)
        self.woken = False
        """True if `wake` was called since the last `clear`; set a moment after `fileno` is readable."""

    def fileno(self) -> int:
        return self._out

    def wake(self) -> None:
        """Wake the thread that polls. For one thread at a time."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full: the thread is being woken anyway
            os.write(self._in, b"\0")
        self.woken = True

    def clear(self) -> None:
        """Make `fileno` unreadable until the next `wake`. The polling thread calls it before it looks for work."""
        self.woken = False
        with contextlib.suppress(BlockingIOError):
            os.read(self._out, 4096)

    def let_go(self) -> None:
        """Wake nobody any more: this is a forked child of the process that polls."""
        let_go(self._out)
        let_go(self._in)

    def __del__(self) -> None:
        os.close(self._out)
        os.close(self._in)
