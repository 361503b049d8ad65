"""The checker of histories: it accepts what one counter can have told, and names what none can."""

from __future__ import annotations

import pytest

from tests.support.history import Added, contradiction, overlap


def call(start: float, end: float, answer: int | None) -> Added:
    return Added("client", start, end, answer)


@pytest.mark.parametrize(
    ("calls", "value"),
    [
        ([], 0),
        ([call(0, 1, 1), call(2, 3, 2)], 2),
        ([call(0, 3, 2), call(1, 2, 1)], 2),  # at the same time, in either order
        ([call(0, 1, 1), call(0, 9, None)], 1),  # the failed one was not carried out
        ([call(0, 1, None), call(8, 9, 2), call(2, 3, 1)], 3),  # after its failure, and after all others
        ([call(0, 1, None), call(2, 3, 2)], 2),
    ],
)
def test_what_one_counter_can_have_told_is_accepted(calls: list[Added], value: int) -> None:
    assert contradiction(calls, value) == ""


@pytest.mark.parametrize(
    ("calls", "value", "why"),
    [
        ([call(0, 1, 1), call(0, 1, 1)], 2, "the same answer"),
        ([call(0, 1, 1), call(2, 3, 3)], 3, "no call explains the value 2"),
        ([call(0, 1, 1)], 2, "no call explains the value 2"),
        ([call(0, 1, 2)], 1, "is 1 at the end"),
        ([call(0, 1, 0)], 1, "is 1 at the end"),
        ([call(0, 1, 2), call(2, 3, 1)], 2, "was made after"),
        ([call(0, 1, 3), call(0, 9, 2), call(2, 3, 1)], 3, "was made after"),
        ([call(0, 1, 2), call(5, 6, None)], 2, "no call that was made in time explains the value 1"),
        ([call(0, 9, None), call(0, 9, None)], 3, "no call explains the value 3"),
    ],
)
def test_what_no_counter_can_have_told_is_named(calls: list[Added], value: int, why: str) -> None:
    assert why in contradiction(calls, value)


def test_owners_follow_each_other() -> None:
    assert overlap([(0, "a"), (3, "b"), (1, "a"), (4, "b")]) == ""
    assert overlap([(0, "a"), (1, "b"), (2, "a")]) == "a acted at 2.000 after b had begun"
