"""Frames: the layout of messages as bytes.

A frame is the length of its header (4 bytes, big endian), the header (msgpack) and the payload bytes of all its
messages, back to back::

    u32 length │ [seq, ack, [[kind, id, body, [part length, …]], …]] │ part │ part │ …

A frame of the bulk lane, whose messages are all chunks, has a fourth element in its header, which is 1; see
`loom.wire.stream`. ``seq`` numbers the frames of one direction and lane from 1; 0 is a frame outside the numbered
stream, such as the handshake. ``ack`` is the highest ``seq`` that the sender has received from the other side.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack

from loom.errors import ProtocolMismatch
from loom.wire.messages import Buffer, Message, new_message

MAX_FRAME = 4 << 20
"""Bytes of the largest frame that a peer must accept. Larger messages travel in chunks."""

MAX_HEADER = 1 << 20

_LENGTH = struct.Struct(">I")

# `packb` makes a packer with a buffer of 256 KiB for each frame, which takes as long as the rest of a frame.
# Threads may share one packer only if it is the one in C, which runs no Python code between its steps.
_pack = msgpack.Packer().pack if msgpack.Packer.__module__ == "msgpack._cmsgpack" else msgpack.packb


class Frame(NamedTuple):
    """A decoded frame. The parts of its messages are views of the received bytes."""

    seq: int
    ack: int
    messages: list[Message]
    lane: int = 0


def encode_frame(seq: int, ack: int, messages: Sequence[Message], lane: int = 0) -> list[Buffer]:
    """Return a frame as buffers to write one after the other. Payload is not copied."""
    heads: list[tuple[int, int, Sequence[Any], Sequence[int]]] = []
    buffers: list[Buffer] = [b""]
    for kind, ident, body, parts in messages:
        if parts:
            heads.append((kind, ident, body, [len(part) for part in parts]))
            buffers.extend(parts)
        else:
            heads.append((kind, ident, body, ()))
    header: bytes = _pack((seq, ack, heads, lane) if lane else (seq, ack, heads))
    buffers[0] = _LENGTH.pack(len(header)) + header
    return buffers


def decode_frame(data: Buffer) -> Frame:
    """Decode a frame; raise `ProtocolMismatch` for other bytes, or if their lengths do not add up."""
    view = memoryview(data)
    try:
        (length,) = _LENGTH.unpack_from(view)
        if length > MAX_HEADER:
            raise ValueError(f"its header claims {length} bytes, over the limit of {MAX_HEADER}")
        position = _LENGTH.size + length
        if position > len(view):
            raise ValueError(f"its header claims {length} bytes of {len(view) - _LENGTH.size}")
        header = msgpack.unpackb(view[_LENGTH.size : position], use_list=False, strict_map_key=False)
        lane = 0
        if len(header) == 4:
            *header, lane = header
            if type(lane) is not int or lane != 1:
                raise ValueError(f"it is of lane {lane!r:.40}")
        seq, ack, heads = header
        _check_counts(seq, ack)
        messages = []
        size_of_all = len(view)
        for kind, ident, body, lengths in heads:
            # Checked inline first: a function call for each number would double the cost of a small message.
            if type(kind) is not int or type(ident) is not int or kind < 0 or ident < 0:
                _check_counts(kind, ident)
            if type(body) is not tuple:
                raise ValueError(f"a message body is {type(body).__name__}, not a list")
            parts: list[Buffer] = []
            for size in lengths:
                if type(size) is not int or size < 0:
                    _check_counts(size)
                end = position + size
                if end > size_of_all:
                    raise ValueError("a payload is longer than the frame")
                parts.append(view[position:end])
                position = end
            messages.append(new_message(Message, (kind, ident, body, parts)))
    except (ValueError, TypeError, struct.error, msgpack.UnpackException) as error:
        raise ProtocolMismatch(f"not a frame of Loom's protocol: {error}") from error
    if position != len(view):
        raise ProtocolMismatch(f"not a frame of Loom's protocol: {len(view) - position} bytes left over")
    return Frame(seq, ack, messages, lane)


def _check_counts(*values: Any) -> None:
    for value in values:
        if type(value) is not int or value < 0:
            raise ValueError(f"expected a count, found {value!r:.40}")
