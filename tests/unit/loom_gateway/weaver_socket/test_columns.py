"""The encoding of columns: what a page reads is what was there."""

from __future__ import annotations

import math
import struct
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loom_gateway.weaver_socket.replica_columns import (
    NAN,
    NO_NUMBER,
    NO_STEP,
    TYPES,
    Column,
    encode_all,
    encode_changed,
    encode_frame,
)
from tests.support.page_frames import read_frame

VALUES: dict[Column, st.SearchStrategy[Any]] = {
    Column.STATE: st.integers(0, 255),
    Column.STEP: st.integers(0, NO_STEP),
    Column.LOSS: st.floats(width=32) | st.just(NO_NUMBER),
    Column.PACE: st.floats(width=32, min_value=0) | st.just(NO_NUMBER),
}


@st.composite
def columns(draw: st.DrawFn) -> tuple[Column, array[Any], list[int]]:
    """A column, its values, and some numbers."""
    column = draw(st.sampled_from(Column))
    values = array(TYPES[column], draw(st.lists(VALUES[column], max_size=40)))
    numbers = draw(st.sets(st.integers(0, len(values) - 1))) if values else set()
    return column, values, sorted(numbers)


def read(column: Column, value: float) -> str:
    """What a page makes of a value."""
    if column is Column.STATE:
        return repr(value)
    data = struct.pack("<" + TYPES[column], value)
    return repr(None if data == b"\xff\xff\xff\xff" else struct.unpack("<" + TYPES[column], data)[0])


@given(st.lists(columns(), max_size=5), st.integers(0, 1 << 60))
def test_a_frame_is_read_as_it_was_meant(parts: list[tuple[Column, array[Any], list[int]]], position: int) -> None:
    sections = [encode_changed(*part) for part in parts]
    found = read_frame(encode_frame(position, sections))

    assert found.position == position % (1 << 32)
    assert len(found.sections) == len(parts)
    for (column, values, numbers), section in zip(parts, found.sections, strict=True):
        assert section.column == column.name.lower()
        wanted = range(len(values)) if section.dense else numbers
        assert {number: repr(value) for number, value in section.values.items()} == {
            number: read(column, values[number]) for number in wanted
        }


def test_the_layout_with_fewer_bytes_is_taken() -> None:
    steps = array("I", range(100))

    few, many = (
        encode_changed(Column.STEP, steps, [5, 99]),
        encode_changed(Column.STEP, steps, list(range(51))),
    )

    assert len(few) == 8 + 2 * 8
    assert many == encode_all(Column.STEP, steps)
    (section,) = read_frame(encode_frame(1, [few])).sections
    assert (section.dense, section.values) == (False, {5: 5, 99: 99})


def test_no_number_is_told_from_a_loss_that_is_not_a_number() -> None:
    losses = array("f", [NO_NUMBER, NAN, math.inf])
    losses.append(losses[0])

    (section,) = read_frame(encode_frame(0, [encode_all(Column.LOSS, losses)])).sections

    assert section.values[0] is section.values[3] is None
    assert math.isnan(section.values[1] or 0.0)
    assert section.values[2] == math.inf


@pytest.mark.parametrize("count", range(6))
def test_sections_begin_at_multiples_of_four_bytes(count: int) -> None:
    states = encode_all(Column.STATE, array("B", [1] * count))

    assert len(states) % 4 == 0
    assert len(read_frame(encode_frame(0, [states, states])).sections[1].values) == count
