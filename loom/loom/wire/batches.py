"""Batches: the frames of one HTTP body, each behind its length (4 bytes, big endian), as on a driver's socket."""

from __future__ import annotations

from collections.abc import Iterator

from loom.errors import ProtocolMismatch
from loom.wire.frames import MAX_FRAME
from loom.wire.lane import LENGTH
from loom.wire.messages import Buffer

TUNNELS = "/api/v1/tunnel"

CONTENT_TYPE = "application/vnd.loom.frames"  # content type of a batch, which tells it from a middlebox's page
ENDED_HEADER = "Loom-Ended"  # header of the gateway's last answer in a tunnel
MAX_BATCH = LENGTH.size + MAX_FRAME  # bytes of the largest batch: one frame of the largest size


def split_batch(data: Buffer) -> Iterator[memoryview]:
    """Yield the frames of a batch, as views; raise `ProtocolMismatch` where the lengths do not add up."""
    view = memoryview(data)
    position = 0
    while position < len(view):
        begin = position + LENGTH.size
        if begin > len(view):
            raise ProtocolMismatch(f"a batch of frames ends with {len(view) - position} bytes left over")
        (length,) = LENGTH.unpack_from(view, position)
        position = begin + length
        if position > len(view):
            raise ProtocolMismatch(f"a batch of frames has {len(view) - begin} bytes of a frame of {length}")
        yield view[begin:position]
