"""One end of a process link, whatever carries it: bytes in, messages out, and back, across lost connections.

Also how long a connection may be silent before the kernel breaks it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import NamedTuple

from loom.errors import ProtocolMismatch
from loom.process.listen import is_loopback
from loom.wire.frames import decode_frame
from loom.wire.framing import FrameSplitter, behind_length
from loom.wire.messages import Buffer, Message
from loom.wire.stream import Stream, unnumbered_frame

MAX_FRAME = 1 << 20  # bytes of the largest frame of a process link
MAX_GREETING = 4096  # bytes of the largest frame from a peer that has not shown the key
MOST_WATCHED = 10_000  # proc meshes that a process watches; beyond it, the first ones are forgotten
PATIENCE = 60.0  # default of ``--worker-patience``: seconds without network that processes survive
ATTEMPT = 2.0  # seconds that one attempt to connect again, with its greeting, may take
RETRY = 0.2  # seconds between two attempts

REFUSED_FOR = 10.0
"""Seconds of refused connections after which a peer is gone, if its connection was reset before.

The kernel of a peer that has ended closes its connections in order, and refuses new ones: such a peer is gone at
the first refusal. After a reset, a firewall may refuse in the peer's name for some time, but none does within one
machine.
"""


class ProcessLinkAddress(NamedTuple):
    """What a process needs to know to tie itself to its driver. It reaches the process with its bootstrap."""

    host: str
    port: int
    key: str  # secret of the driver: only processes that it has started know it
    patience: float  # seconds without network after which either end gives up the other


class LinkEnd:
    """One end of a process link: the numbered messages of both directions, on one connection after the other."""

    def __init__(self) -> None:
        self._stream = Stream(MAX_FRAME)
        self._splitter = FrameSplitter(MAX_FRAME)

    @property
    def received(self) -> int:
        """The number of the last frame that has come, which the next connection begins with."""
        return self._stream.received

    def connected(self, received: int) -> None:
        """Begin on a new connection, whose other side has received the frames up to a number."""
        self._splitter = FrameSplitter(MAX_FRAME)
        self._stream.resume(received)

    def put(self, message: Message) -> None:
        """Queue a message. It arrives once, in order, if the ends meet again."""
        self._stream.put(message)

    @property
    def settled(self) -> bool:
        """Whether the other side has acknowledged everything."""
        return not self._stream.outbox and not self._stream.kept

    @property
    def kept_bytes(self) -> int:
        """The bytes that wait to be sent or acknowledged."""
        return self._stream.kept_bytes + self._stream.outbox.pending_bytes

    def to_send(self, acknowledge: bool = False) -> bytes:
        """Take the bytes to send on the connection; with ``acknowledge``, tell the other side what has come."""
        frames = list(iter(self._stream.next_frame, None))
        if acknowledge and self._stream.untold:
            frames.append(self._stream.acknowledgement())
        return b"".join(frames)

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that the bytes complete; raise `ProtocolMismatch` for other bytes."""
        for frame in self._splitter.feed(data):
            yield from self._stream.receive(frame)


def greeting(message: Message) -> bytes:
    """Return the bytes of a message before a connection carries numbered ones."""
    return behind_length(unnumbered_frame(message))


def read_greeting(frame: Buffer) -> Message:
    """Return the message of such a frame, which has passed no check yet."""
    seq, _, messages, lane = decode_frame(frame)
    if seq or lane or len(messages) != 1:
        raise ProtocolMismatch("a process link begins with one message outside the numbered stream")
    return messages[0]


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
