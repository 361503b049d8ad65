"""Frames: the layout of messages, and of texts in their payload, as bytes.

A frame is the length of its header (4 bytes, big endian), the header (msgpack) and the payload bytes of all its
messages, back to back::

    u32 length │ [seq, ack, [[kind, id, body, [part length, …]], …]] │ part │ part │ …

A frame of the bulk lane, whose messages are all chunks, has a fourth element in its header, which is 1; see
`loom.wire.stream`. ``seq`` numbers the frames of one direction and lane from 1; 0 is a frame outside the numbered
stream, such as the handshake. ``ack`` is the highest ``seq`` that the sender has received from the other side.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgpack

from loom.errors import ProtocolMismatch, TooLarge
from loom.wire.body import BODIES
from loom.wire.length_prefix import LENGTH
from loom.wire.messages import Buffer, Kind, Message, new_message
from loom.wire.plain import plain

LONGEST = 64 << 10  # characters that are kept of a longer text: half of them from its start, half from its end


def pack_texts(texts: Mapping[str, Any]) -> bytes:
    """Pack a map of texts and numbers as one part of a payload. Texts over `LONGEST` lose their middle."""
    shortened = {name: _shortened(value) for name, value in texts.items()}
    packed: bytes = msgpack.packb(shortened, default=repr, unicode_errors="replace")
    return packed


def _shortened(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if len(value) > LONGEST:
        left_out = len(value) - LONGEST
        value = f"{value[: LONGEST // 2]}\n… {left_out} characters left out …\n{value[-LONGEST // 2 :]}"
    return value.encode(errors="replace").decode()  # lone surrogates cannot travel


def unpack_texts(part: Buffer) -> Mapping[str, Any]:
    """Unpack a part that `pack_texts` packed; raise `ProtocolMismatch` for another."""
    try:
        texts = msgpack.unpackb(part)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolMismatch(f"not a map of texts: {error}") from error
    if not isinstance(texts, dict):
        raise ProtocolMismatch(f"not a map of texts but a {type(texts).__name__}")
    return texts


MAX_HEADER = 1 << 20  # bytes of the largest header that a peer must accept
MAX_HEAD = MAX_HEADER - (4 << 10)  # bytes that one message may have in a header, besides the payload's bytes
_PART_LENGTH = 6  # bytes of the length of a part, and of the mark whether it is read-only, in a header

# `packb` makes a packer with a buffer of 256 KiB for each frame, which takes as long as the rest of a frame.
# Threads may share one packer only if it is the one in C, which runs no Python code between its steps.
_pack = msgpack.Packer().pack if msgpack.Packer.__module__ == "msgpack._cmsgpack" else msgpack.packb


def sealed(message: Message) -> Message:
    """Return a message that can be encoded at any later time, whatever happens to the values of its body.

    Values that msgpack does not know get their plain form (`loom.wire.plain`); lists and dicts are copied.

    Raises:
        WrongArguments: a value of the body has no plain form. The error names the field, and the path in it.
        TooLarge: the body is too large for a header, or the payload has too many parts.
    """
    body = message.body
    try:
        packed = _pack(body)
    except Exception:  # noqa: BLE001 - also whatever a user's object raises when it is looked at
        body = _plain_body(message)
        message, packed = message._replace(body=body), _pack(body)
    size = len(packed) + _PART_LENGTH * len(message.parts)
    if size > MAX_HEAD:
        raise _too_large(message, packed)
    for value in body:
        if isinstance(value, (list, dict)):
            return message._replace(body=msgpack.unpackb(packed, use_list=False, strict_map_key=False))
    return message


def _named_values(message: Message) -> list[tuple[str, Any]]:
    """Return the values of a body with the names of their fields, or with their places if it has no class."""
    names: Sequence[str] = BODIES[Kind(message.kind)].__match_args__ if message.kind in BODIES else ()
    if len(names) < len(message.body):
        # A handshake's only value is a map of all fields.
        names = [""] if len(message.body) == 1 else [f"[{place}]" for place in range(len(message.body))]
    return list(zip(names, message.body, strict=False))


def _plain_body(message: Message) -> list[Any]:
    return [value if type(value) is bytes else plain(value, name) for name, value in _named_values(message)]


def _too_large(message: Message, packed: bytes) -> TooLarge:
    if len(packed) < MAX_HEAD // 2:
        return TooLarge(
            f"an object of {len(message.parts):,} large buffers cannot be sent: {MAX_HEAD // _PART_LENGTH:,} are "
            f"the most. Put its arrays together, with numpy.stack or torch.stack, or send it in several calls"
        )
    size, name = max((len(_pack(value)), name) for name, value in _named_values(message))
    return TooLarge(
        f"{name or 'a value'} has {size:,} bytes; {MAX_HEAD:,} are the most for names, configurations and other "
        f"values outside of a call's arguments. Send large data as an argument of a call"
    )


class WireFrame(NamedTuple):
    """A decoded frame. The parts of its messages are views of the received bytes."""

    seq: int
    ack: int
    messages: list[Message]
    lane: int = 0


def encode_frame(seq: int, ack: int, messages: Sequence[Message], lane: int = 0) -> list[Buffer]:
    """Return a frame as buffers to write one after the other. Payload is not copied.

    Raises:
        TooLarge: the header has more than `MAX_HEADER` bytes.
    """
    heads: list[tuple[int, int, Sequence[Any], Sequence[int]]] = []
    buffers: list[Buffer] = [b""]
    for kind, ident, body, parts in messages:
        if parts:
            heads.append((kind, ident, body, [len(part) for part in parts]))
            buffers.extend(parts)
        else:
            heads.append((kind, ident, body, ()))
    header: bytes = _pack((seq, ack, heads, lane) if lane else (seq, ack, heads))
    if len(header) > MAX_HEADER:
        raise TooLarge(f"a header has {len(header)} bytes; {MAX_HEADER} are the most")
    buffers[0] = LENGTH.pack(len(header)) + header
    return buffers


def decode_frame(data: Buffer) -> WireFrame:
    """Decode a frame; raise `ProtocolMismatch` for other bytes, or if their lengths do not add up."""
    view = memoryview(data)
    try:
        (length,) = LENGTH.unpack_from(view)
        if length > MAX_HEADER:
            raise ValueError(f"its header claims {length} bytes, over the limit of {MAX_HEADER}")
        position = LENGTH.size + length
        if position > len(view):
            raise ValueError(f"its header claims {length} bytes of {len(view) - LENGTH.size}")
        header = msgpack.unpackb(view[LENGTH.size : position], use_list=False, strict_map_key=False)
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
    return WireFrame(seq, ack, messages, lane)


def _check_counts(*values: Any) -> None:
    for value in values:
        if type(value) is not int or value < 0:
            raise ValueError(f"expected a count, found {value!r:.40}")
