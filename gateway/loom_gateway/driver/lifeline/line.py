"""One end of a lifeline, whatever carries it: bytes in, messages out, and back, across lost connections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from loom.errors import ProtocolMismatch
from loom.wire.frames import decode_frame
from loom.wire.framing import FrameSplitter, behind_length
from loom.wire.messages import Buffer, Message
from loom.wire.stream import Stream, unnumbered_frame

MAX_FRAME = 1 << 20  # bytes of the largest frame of a lifeline
MAX_GREETING = 4096  # bytes of the largest frame from a peer that has not shown the key
MOST_WATCHED = 10_000  # proc meshes that a process watches; beyond it, the first ones are forgotten
PATIENCE = 60.0  # default of ``--worker-patience``: seconds without network that processes survive


class LifelineAddress(NamedTuple):
    """What a process needs to know to tie itself to its driver. It reaches the process with its bootstrap."""

    host: str
    port: int
    key: str  # secret of the driver: only processes that it has started know it
    patience: float  # seconds without network after which either end gives up the other


class MessageLine:
    """One end of a lifeline: the numbered messages of both directions, on one connection after the other."""

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
        raise ProtocolMismatch("a lifeline begins with one message outside the numbered stream")
    return messages[0]
