"""No message overtakes the one that makes what it is about, whatever its size and the traffic around."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loom.wire.length_prefix import LENGTH
from loom.wire.messages import Kind, Message
from loom.wire.mux import BARRIER, CHUNK_SIZE, After, OrderKey
from loom.wire.stream import Stream

SIZES = (0, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 1 << 20, 3 * CHUNK_SIZE)

Put = tuple[int, OrderKey, int]
"""A message's id, order key and size."""


def arrivals(puts: list[Put], lanes: bool, turns: Iterator[int]) -> list[int]:
    """Return the ids of messages in the order in which they arrive; ``turns`` choose which end or lane moves."""
    ours, theirs = Stream(lanes=lanes), Stream(lanes=lanes)
    ours.apart = theirs.apart = lanes
    found: list[int] = []
    waiting = list(puts)
    while len(found) < len(puts):
        turn = next(turns, 0)
        if waiting:
            ident, key, size = waiting.pop(0)
            ours.put(Message(Kind.RUN, ident, (), [bytes(size)] if size else ()), key)
            if turn == 1:
                continue
        if turn != 2 and (frame := ours.next_frame()) is not None:
            found += [message.id for message in theirs.receive(frame[LENGTH.size :])]
        if turn != 3 and lanes and (frame := ours.next_bulk_frame()) is not None:
            theirs.receive_bulk(frame[LENGTH.size :])
        found += [message.id for message in theirs.arrived()]
        while (frame := theirs.next_frame()) is not None:
            ours.receive(frame[LENGTH.size :])
    return found


@pytest.mark.parametrize("lanes", [True, False], ids=["two connections", "one connection"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("before", [None, BARRIER, 7], ids=["nothing before", "a spawn before", "a call before"])
def test_a_request_about_a_run_does_not_overtake_its_start(before: int | None, size: int, lanes: bool) -> None:
    puts: list[Put] = [] if before is None else [(1, before, 1 << 20)]
    puts += [(2, BARRIER, size), (3, After(2), 0), (4, After(2), 0)]

    order = arrivals(puts, lanes, iter([1] * len(puts)))

    assert order.index(2) < order.index(3) < order.index(4)


@pytest.mark.parametrize("lanes", [True, False], ids=["two connections", "one connection"])
def test_a_request_about_another_run_does_not_wait_for_a_large_start(lanes: bool) -> None:
    order = arrivals([(2, BARRIER, 8 << 20), (3, After(1), 0)], lanes, iter([1, 1]))

    assert order == [3, 2]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.booleans(),
    st.lists(
        st.tuples(st.sampled_from([None, BARRIER, 1000, 1001, "after"]), st.sampled_from(SIZES), st.integers(0, 9)),
        min_size=2,
        max_size=10,
    ),
    st.lists(st.integers(0, 3), max_size=60),
)
def test_in_any_traffic_nothing_overtakes_what_it_must_not(
    lanes: bool, wanted: list[tuple[int | str | None, int, int]], turns: list[int]
) -> None:
    puts: list[Put] = []
    for ident, (kind, size, of) in enumerate(wanted, 1):
        makers = [other for other, key, _ in puts if key == BARRIER and not isinstance(key, After)]
        if kind == "after":
            puts.append((ident, After(makers[of % len(makers)]) if makers else None, 0))
        else:
            assert not isinstance(kind, str)
            puts.append((ident, kind, size))

    order = arrivals(puts, lanes, iter(turns))

    assert sorted(order) == [ident for ident, _, _ in puts]
    for place, (ident, key, _) in enumerate(puts):
        for other, earlier, _ in puts[:place]:
            ordered = None not in (key, earlier) and not isinstance(earlier, After)
            if isinstance(key, After):
                ordered = other == int(key)
            elif ordered:
                ordered = key == earlier or BARRIER in (key, earlier)
            if ordered:
                assert order.index(other) < order.index(ident), (puts, order)
