"""Batches of frames: what goes in comes out, and nothing else is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loom.errors import ProtocolMismatch
from loom.wire.length_prefix import behind_length, split_batch


@given(st.lists(st.binary()))
def test_frames_come_out_as_they_went_in(frames: list[bytes]) -> None:
    assert [bytes(frame) for frame in split_batch(b"".join(behind_length([frame]) for frame in frames))] == frames


@given(st.lists(st.binary(), min_size=1), st.data())
def test_a_batch_that_was_cut_is_none_or_lacks_whole_frames(frames: list[bytes], data: st.DataObject) -> None:
    batch = b"".join(behind_length([frame]) for frame in frames)
    cut = batch[: data.draw(st.integers(0, len(batch) - 1))]
    try:
        found = list(split_batch(cut))
    except ProtocolMismatch:
        return
    assert [bytes(frame) for frame in found] == frames[: len(found)]


@given(st.binary())
def test_other_bytes_raise_nothing_else(data: bytes) -> None:
    try:
        frames = list(split_batch(data))
    except ProtocolMismatch:
        return
    assert sum(4 + len(frame) for frame in frames) == len(data)


@pytest.mark.parametrize("data", [b"\x00", b"\x00\x00\x00\x04abc", b"\xff\xff\xff\xff", b"\x00\x00\x00\x00\x01"])
def test_lengths_that_do_not_add_up(data: bytes) -> None:
    with pytest.raises(ProtocolMismatch, match="batch"):
        list(split_batch(data))
