"""Frames: what is laid out is read back, and whatever else arrives is refused with one exception."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loom.errors import ProtocolMismatch
from loom.wire.frames import MAX_HEADER, WireFrame, decode_frame, encode_frame
from loom.wire.messages import Buffer, Kind, Message

repeatable = settings(derandomize=True, deadline=None, max_examples=70)

counts = st.integers(0, 2**32)
numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
scalars = st.none() | st.booleans() | numbers | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner), max_leaves=6
)
bodies = st.lists(values, max_size=5)
messages = st.builds(Message, st.integers(0, 255), counts, bodies, st.lists(st.binary(max_size=40), max_size=4))


def joined(buffers: list[Buffer]) -> bytes:
    return b"".join(buffers)


def frame_of(header: Any, payload: bytes = b"") -> bytes:
    packed = msgpack.packb(header)
    return struct.pack(">I", len(packed)) + packed + payload


def as_lists(value: Any) -> Any:
    """Msgpack has one kind of sequence: a tuple and a list are the same on the wire."""
    if isinstance(value, (list, tuple)):
        return [as_lists(item) for item in value]
    if isinstance(value, dict):
        return {key: as_lists(item) for key, item in value.items()}
    return value


def plain(message: Message) -> tuple[Any, ...]:
    return message.kind, message.id, as_lists(message.body), [bytes(part) for part in message.parts]


def decode_or_refuse(data: bytes) -> WireFrame | None:
    """Read a frame; the only exception that may come of any bytes is ProtocolMismatch."""
    try:
        return decode_frame(data)
    except ProtocolMismatch:
        return None


@repeatable
@given(counts, counts, st.lists(messages, max_size=5))
def test_what_is_laid_out_is_read_back(seq: int, ack: int, sent: list[Message]) -> None:
    frame = decode_frame(joined(encode_frame(seq, ack, sent)))

    assert (frame.seq, frame.ack) == (seq, ack)
    assert [plain(message) for message in frame.messages] == [plain(message) for message in sent]


def test_payload_is_not_copied_when_a_frame_is_laid_out() -> None:
    payload = bytearray(b"payload")

    _, part = encode_frame(1, 0, [Message(32, 1, [0, "add"], [payload])])

    assert part is payload


def test_parts_are_views_of_the_bytes_that_were_decoded() -> None:
    data = bytearray(joined(encode_frame(1, 0, [Message(32, 1, [0, "add"], [b"payload"])])))

    (part,) = decode_frame(data).messages[0].parts
    data[-7:] = b"PAYLOAD"

    assert bytes(part) == b"PAYLOAD"


@repeatable
@given(st.binary(max_size=200))
def test_random_bytes_are_a_frame_or_a_protocol_mismatch(data: bytes) -> None:
    decode_or_refuse(data)


@repeatable
@given(st.binary(max_size=100), st.binary(max_size=20))
def test_a_random_header_is_a_frame_or_a_protocol_mismatch(header: bytes, payload: bytes) -> None:
    decode_or_refuse(struct.pack(">I", len(header)) + header + payload)


@repeatable
@given(st.recursive(scalars | st.binary(max_size=8), lambda inner: st.lists(inner, max_size=5), max_leaves=20))
def test_any_msgpack_as_a_header_is_a_frame_or_a_protocol_mismatch(header: Any) -> None:
    decode_or_refuse(frame_of(header))


@repeatable
@given(counts, counts, st.lists(messages, min_size=1, max_size=3), st.data())
def test_a_frame_with_changed_bytes_is_a_frame_or_a_protocol_mismatch(
    seq: int, ack: int, sent: list[Message], data: st.DataObject
) -> None:
    frame = bytearray(joined(encode_frame(seq, ack, sent)))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))

    decode_or_refuse(bytes(frame))


@repeatable
@given(counts, counts, st.lists(messages, min_size=1, max_size=3), st.data())
def test_a_truncated_frame_is_refused(seq: int, ack: int, sent: list[Message], data: st.DataObject) -> None:
    frame = joined(encode_frame(seq, ack, sent))
    cut = data.draw(st.integers(0, len(frame) - 1))

    with pytest.raises(ProtocolMismatch):
        decode_frame(frame[:cut])


@repeatable
@given(counts, counts, st.lists(messages, max_size=3), st.binary(min_size=1, max_size=20))
def test_bytes_left_over_are_refused(seq: int, ack: int, sent: list[Message], rest: bytes) -> None:
    with pytest.raises(ProtocolMismatch, match="not a frame of Loom's protocol"):
        decode_frame(joined(encode_frame(seq, ack, sent)) + rest)


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack(">I", 2**32 - 1) + b"\x93",
        struct.pack(">I", MAX_HEADER + 1) + bytes(MAX_HEADER + 1),
        struct.pack(">I", 100) + msgpack.packb((1, 0, ())),
        struct.pack(">I", 0),
        frame_of((1, 0, [(32, 1, [], [10])]), b"short"),
        frame_of((1, 0, [(32, 1, [], [2**63])]), b"short"),
        frame_of((1, 0, [(32, 1, [], [-1, 6])]), b"short"),
        frame_of((1, 0, [(32, 1, [], [5, 1])]), b"short"),
        frame_of((1, 0, [(32, 1, [], [3])]), b"short"),
        frame_of((1, 0, [(32, 1, [], [5.0])]), b"short"),
        frame_of((1, 0, [(32, 1, [], [True])]), b"s"),
    ],
)
def test_a_length_that_lies_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolMismatch, match="not a frame of Loom's protocol"):
        decode_frame(frame)


@pytest.mark.parametrize(
    "header",
    [
        None,
        7,
        [],
        (1, 0),
        (-1, 0, []),
        (1, -1, []),
        ("1", 0, []),
        (True, 0, []),
        (1, 0, None),
        (1, 0, [None]),
        (1, 0, [(32, 1, [])]),
        (1, 0, [(-1, 1, [], [])]),
        (1, 0, [(32, "1", [], [])]),
        (1, 0, [(32, 1, "body", [])]),
        (1, 0, [(32, 1, {}, [])]),
        (1, 0, [(32, 1, None, [])]),
        (1, 0, [(32, 1, [], None)]),
        msgpack.ExtType(1, b"extension"),
        msgpack.Timestamp(1),
        {"seq": 1, "ack": 0, "messages": []},
    ],
)
def test_a_header_of_another_shape_is_refused(header: Any) -> None:
    with pytest.raises(ProtocolMismatch, match="not a frame of Loom's protocol"):
        decode_frame(frame_of(header))


@pytest.mark.parametrize("claim", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
def test_a_header_that_claims_more_items_than_it_has_is_refused(claim: bytes) -> None:
    with pytest.raises(ProtocolMismatch):
        decode_frame(struct.pack(">I", len(claim)) + claim)


def test_a_malformed_extension_in_a_header_is_refused() -> None:
    timestamp_of_three_bytes = b"\xc7\x03\xff\x00\x00\x00"

    with pytest.raises(ProtocolMismatch):
        decode_frame(struct.pack(">I", len(timestamp_of_three_bytes)) + timestamp_of_three_bytes)


def test_a_header_nested_too_deeply_is_refused() -> None:
    deep = b"\x91" * 100_000

    with pytest.raises(ProtocolMismatch):
        decode_frame(struct.pack(">I", len(deep)) + deep)


def test_frames_that_several_threads_encode_at_once_do_not_mix() -> None:
    def mixed(number: int) -> list[int]:
        body = [number, "x" * number * 50]
        frames = [b"".join(encode_frame(seq, number, [Message(Kind.RESULT, seq, body)])) for seq in range(1, 500)]
        decoded = map(decode_frame, frames)
        return [frame.seq for frame in decoded if (frame.ack, frame.messages[0].body) != (number, tuple(body))]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(mixed, range(8))) == [[]] * 8


def test_a_body_that_cannot_be_packed_leaves_nothing_behind() -> None:
    with pytest.raises(TypeError):
        encode_frame(1, 0, [Message(Kind.RESULT, 1, ["begun", object()])])
    assert decode_frame(b"".join(encode_frame(2, 0, []))) == (2, 0, [], 0)
