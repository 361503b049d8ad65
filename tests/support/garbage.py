"""What a neighbour sends who means no good: seeded garbage for any port, and connections that stay."""

from __future__ import annotations

import contextlib
import pickle
import random
import socket
import struct
from collections.abc import Iterator

from tests.support.listeners import Listener

__all__ = ["held", "pieces", "send"]

BOUND = 2.0
"""Seconds that a port has to take a piece, and again to answer or close."""


def pieces(seed: int) -> list[bytes]:
    """Noise, half frames, lengths that nobody has, and the first words of other protocols."""
    chance = random.Random(seed)
    return [
        b"",
        b"\0",
        *(chance.randbytes(size) for size in (1, 7, 100, 5_000, 200_000)),
        *(
            struct.pack(form, number)
            for form in (">I", "<I", ">Q", "<Q")
            for number in (0, 12, 1 << 31, 0xFFFFFFFF)
        ),
        *(struct.pack(form, (1 << 63) - 1) + chance.randbytes(64) for form in (">Q", "<Q")),
        struct.pack(">I", 1000) + chance.randbytes(10),
        struct.pack("<Q", 1000) + chance.randbytes(10),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(508),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n" + bytes(1000),
        b"GET /" + b"x" * 100_000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + chance.randbytes(200),
        b"SSH-2.0-x\r\n",
        pickle.dumps({"a": [1, 2, 3]}),
        b"\x93" + chance.randbytes(100),
    ]


def connect(listener: Listener) -> socket.socket:
    """A connection to a socket on which a process listens."""
    if listener.kind == "TCP":
        host, port = listener.place.split(" ")
        return socket.create_connection((host, int(port)), BOUND)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(BOUND)
    sock.connect(listener.place.replace("@", "\0", 1) if listener.kind == "abstract" else listener.place)
    return sock


def send(listener: Listener, piece: bytes, slowly: bool = False) -> None:
    """Send a piece on a connection of its own, and close it: in order, or with a reset if it was not taken."""
    with contextlib.suppress(OSError), connect(listener) as sock:
        for start in range(0, len(piece), 1 if slowly else 1 << 20):
            sock.sendall(piece[start : start + 1] if slowly else piece[start:])
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(0.05)
        sock.recv(4096)


@contextlib.contextmanager
def held(listener: Listener, count: int, piece: bytes = b"") -> Iterator[list[socket.socket]]:
    """Hold connections on which a piece was sent. Fewer if the port does not take so many."""
    with contextlib.ExitStack() as opened:
        socks = []
        for _ in range(count):
            with contextlib.suppress(OSError):
                sock = opened.enter_context(connect(listener))
                sock.sendall(piece)
                socks.append(sock)
        yield socks
