"""Framing: frames behind their lengths (4 bytes, big endian), for carriers that do not keep messages apart.

They are a driver's socket, the links of processes and threadlets, and an HTTP body, which is a batch of frames.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from loom.errors import ProtocolMismatch
from loom.wire.messages import Buffer

LENGTH = struct.Struct(">I")

D = TypeVar("D", bytes, memoryview)

MAX_FRAME = 4 << 20
"""Bytes of the largest frame that a peer must accept. Larger messages travel in chunks."""

TUNNELS = "/api/v1/tunnel"

CONTENT_TYPE = "application/vnd.loom.frames"  # content type of a batch, which tells it from a middlebox's page
ENDED_HEADER = "Loom-Ended"  # header of the gateway's last answer in a tunnel
MAX_BATCH = LENGTH.size + MAX_FRAME  # bytes of the largest batch: one frame of the largest size
SLOWEST_BATCH = 4 << 10
"""Bytes a second at which a batch has to come to the gateway, at least: a laptop may have a slow line."""


def behind_length(frame: Sequence[Buffer]) -> bytes:
    """Return a frame, given as buffers, behind its length."""
    return b"".join([LENGTH.pack(sum(map(len, frame))), *frame])


class FrameSplitter:
    """A splitter of a stream of bytes into frames of at most ``limit`` bytes, however the stream is cut.

    Args:
        frame: words for a frame, for the error.
    """

    def __init__(self, limit: int, frame: str = "a frame on the link") -> None:
        self.limit = limit
        self._frame = frame
        self._begun: bytes | bytearray = b""
        self._needed = 0  # bytes of `_begun`, if there are any, with which there is something to split

    @property
    def rest(self) -> bytes:
        """The bytes after the last frame."""
        return bytes(self._begun)

    def whole(self, data: bytes) -> bytes | None:
        """Return the frame if the bytes are exactly one, in less time than `feed` takes; None if they are not."""
        size = len(data) - LENGTH.size
        if self._begun or size > self.limit or int.from_bytes(data[: LENGTH.size], "big") != size:
            return None
        return data[LENGTH.size :]

    def feed(self, data: D) -> Iterator[D]:
        """Yield the frames that the bytes complete, as parts of ``data`` if they lie in it whole.

        Raises:
            ProtocolMismatch: a frame is over the limit. The rest of the stream is unreadable.
        """
        whole: Any = data
        if self._begun:
            self._begun += data
            if len(self._begun) < self._needed:
                return
            whole, self._begun = bytes(self._begun), b""
        position, end, size = 0, len(whole), LENGTH.size
        needed = size
        try:
            while end - position >= size:
                (length,) = LENGTH.unpack_from(whole, position)
                if length > self.limit:
                    raise ProtocolMismatch(f"{self._frame} claims {length} bytes; the limit is {self.limit}")
                begin = position + size
                after = begin + length
                if after > end:
                    needed = after - position
                    break
                position = after
                yield whole[begin:after]
        finally:  # also if the caller takes no further frame
            if position < end:
                self._begun, self._needed = bytearray(memoryview(whole)[position:]), needed


def split_batch(data: Buffer) -> Iterator[memoryview]:
    """Yield the frames of a batch, as views; raise `ProtocolMismatch` if the lengths do not add up."""
    splitter = FrameSplitter(MAX_FRAME, "a frame of a batch")
    yield from splitter.feed(memoryview(data))
    if splitter.rest:
        raise ProtocolMismatch(f"a batch of frames ends with {len(splitter.rest)} bytes that are no whole frame")
