"""The framing of the weaver's link: bytes cut anywhere give the frames that were sent, nonsense gives an error."""

from __future__ import annotations

import struct

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loom.control.frame import MAX_FRAME, pack, unpack_all
from loom.errors import ProtocolMismatch, TooLarge
from loom.wire.length_prefix import FrameSplitter

texts = st.text("a\0é€😀", max_size=40)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
frames = st.lists(values, max_size=4).flatmap(lambda rest: texts.map(lambda kind: [kind, *rest]))


def raw(value: object) -> bytes:
    body = msgpack.packb(value)
    return struct.pack(">I", len(body)) + body


@given(st.lists(frames, max_size=5), st.data())
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(sent: list[list], data: st.DataObject) -> None:
    stream = b"".join(map(pack, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    splitter = FrameSplitter(MAX_FRAME)

    got = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += unpack_all(splitter.feed(stream[start:end]))

    assert got == sent


@given(st.binary(max_size=200))
def test_any_bytes_give_frames_or_an_error_of_the_protocol(noise: bytes) -> None:
    splitter = FrameSplitter(limit=1000)

    try:
        got = unpack_all(splitter.feed(noise))
    except ProtocolMismatch:
        return
    assert all(type(frame) is list and type(frame[0]) is str for frame in got)


@pytest.mark.parametrize(
    "value", [[], {}, "hello", None, [1, 2], [b"hello"], {"kind": 1}, ["x", msgpack.ExtType(5, b"")], ["x", {1: 2}]]
)
def test_what_is_no_list_that_begins_with_its_kind_is_refused(value: object) -> None:
    with pytest.raises(ProtocolMismatch, match="not a frame"):
        unpack_all(FrameSplitter(MAX_FRAME).feed(raw(value)))


def test_a_frame_over_the_limit_is_refused_before_it_has_come() -> None:
    splitter = FrameSplitter(limit=100)

    with pytest.raises(ProtocolMismatch, match="claims 101 bytes; the limit is 100"):
        unpack_all(splitter.feed(struct.pack(">I", 101)))


def test_the_limit_can_be_raised_once_a_peer_is_known() -> None:
    splitter = FrameSplitter(limit=16)
    unpack_all(splitter.feed(pack(["hello"])))
    splitter.limit = MAX_FRAME

    assert unpack_all(splitter.feed(pack(["status", "x" * 1000]))) == [["status", "x" * 1000]]


def test_a_frame_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(TooLarge, match=f"a 'status' frame has .* the limit is {MAX_FRAME}"):
        pack(["status", b"x" * MAX_FRAME])


def test_lists_in_lists_without_end_are_refused() -> None:
    body = b"\x91" * 100_000

    with pytest.raises(ProtocolMismatch):
        unpack_all(FrameSplitter(MAX_FRAME).feed(struct.pack(">I", len(body)) + body))


def test_text_that_is_no_unicode_loses_what_is_not() -> None:
    assert unpack_all(FrameSplitter(MAX_FRAME).feed(pack(["bye", "a\udc80b"]))) == [["bye", "a?b"]]
