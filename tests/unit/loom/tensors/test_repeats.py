"""Sequences of commands: what is shortened is made whole again, and what repeats is short."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loom.tensors.sending import repeats
from loom.tensors.sending.repeats import Repeats, whole


class Pair:
    """Both sides."""

    def __init__(self, history: int = repeats.HISTORY) -> None:
        self.repeats = Repeats(history)
        self.history = history
        self.past: list[int] = []

    def travel(self, sequence: list[int]) -> int:
        """Send a sequence, and check what arrives; return how many numbers travelled."""
        short = self.repeats.shorten(sequence)
        assert whole(self.past, short, self.history) == sequence
        return len(short)


BODIES = st.lists(st.integers(0, 5), max_size=30)


@given(st.lists(st.tuples(BODIES, st.integers(1, 12)), max_size=12), st.integers(1, 40))
def test_what_is_shortened_is_made_whole_again(parts: list[tuple[list[int], int]], batch: int) -> None:
    pair = Pair(40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeats, "LONG_COPY", 8)
        everything = [number for body, times in parts for number in body * times]
        for at in range(0, len(everything), batch):
            pair.travel(everything[at : at + batch])


@pytest.mark.parametrize("period", [5, 8, 40, 300, 3000])
def test_a_loop_is_a_copy_of_each_batch_whatever_its_length(period: int) -> None:
    body = random.Random(period).choices(range(200), k=period)
    rounds = body * (20_000 // period)
    pair = Pair()
    sizes = [pair.travel(rounds[at : at + 512]) for at in range(0, len(rounds) - 512, 512)]
    assert max(sizes[len(sizes) // 2 :]) <= 4


def test_a_loop_stays_short_when_its_first_rounds_are_forgotten() -> None:
    source = random.Random(0)
    body = source.choices(range(200), k=400)
    pair = Pair(4000)
    sizes = []
    for round_ in range(300):
        sizes.append(pair.travel(body))
        if round_ % 3 == 2:
            pair.travel(source.choices(range(200, 400), k=100))
    assert max(sizes[2:]) <= 8


def test_what_is_remembered_is_bounded() -> None:
    source = random.Random(0)
    pair = Pair(100)
    for _ in range(200):
        pair.travel(source.choices(range(1000), k=50))
        assert len(pair.repeats._past) <= 2 * 100
        assert len(pair.repeats._places) <= 4 * 100
