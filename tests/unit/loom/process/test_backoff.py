"""`loom.process.backoff`: waits that grow."""

from __future__ import annotations

import itertools

from loom.process.backoff import Backoff


def test_each_wait_is_twice_the_one_before_up_to_the_limit() -> None:
    assert list(itertools.islice(Backoff(0.5, 3.0), 5)) == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_the_first_attempt_may_come_at_once() -> None:
    assert list(itertools.islice(Backoff(0.5, 3.0, at_once=True), 3)) == [0.0, 0.5, 1.0]


def test_jitter_shortens_each_wait_by_no_more_than_its_part() -> None:
    waits = list(itertools.islice(Backoff(1.0, 4.0, jitter=0.5), 20))

    for wait, bound in zip(waits, [1.0, 2.0, *[4.0] * 18], strict=True):
        assert bound / 2 <= wait <= bound
    assert len(set(waits)) == 20


def test_a_new_iterator_begins_with_short_waits_again() -> None:
    backoff = Backoff(0.5, 3.0)
    waits = iter(backoff)
    assert [next(waits), next(waits)] == [0.5, 1.0]

    assert next(iter(backoff)) == 0.5


def test_waits_go_on_for_any_number_of_attempts() -> None:
    assert Backoff(0.5, 3.0).wait(100_000) == 3.0
