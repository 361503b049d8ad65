"""What is counted of an endpoint's calls, over how long, and in how much memory."""

from __future__ import annotations

import random
import sys
import threading

import pytest

from loom_gateway.driver.monarch.call_statistics import PERIOD, PERIODS, EndpointCalls

WINDOW = PERIOD * PERIODS
BEGAN = 1000.0


def test_nothing_was_called() -> None:
    assert EndpointCalls(BEGAN).summary(BEGAN) == (0, 0, 0.0, None, None)


@pytest.mark.parametrize("scale", [2e-5, 1e-3, 0.7, 300.0])
def test_times_are_right_within_5_percent(scale: float) -> None:
    calls, chance = EndpointCalls(BEGAN), random.Random(7)
    times = sorted(scale * (1 + 9 * chance.random()) for _ in range(1000))
    for seconds in times:
        calls.answered(BEGAN, seconds, failed=False)

    _, _, _, p50, p99 = calls.summary(BEGAN)

    assert p50 == pytest.approx(times[499], rel=0.05)
    assert p99 == pytest.approx(times[989], rel=0.05)


def test_a_time_that_a_clock_cannot_tell_is_counted() -> None:
    calls = EndpointCalls(BEGAN)
    calls.answered(BEGAN, 0.0, failed=False)
    calls.answered(BEGAN, -0.001, failed=False)
    assert calls.summary(BEGAN).calls == 2
    assert calls.summary(BEGAN).p99 == pytest.approx(1e-5, rel=0.05)


def test_a_rate_is_that_of_the_last_minute_or_since_the_first_call() -> None:
    calls = EndpointCalls(BEGAN)
    for tick in range(200):
        calls.answered(BEGAN + tick / 10, 0.01, failed=False)
    assert calls.summary(BEGAN + 20.0).per_second == pytest.approx(10.0)

    for tick in range(200, 2000):
        calls.answered(BEGAN + tick / 10, 0.01, failed=False)
    assert calls.summary(BEGAN + 200.0).per_second == pytest.approx(10.0, rel=0.02)


def test_the_first_call_alone_is_no_thousand_a_second() -> None:
    calls = EndpointCalls(BEGAN)
    calls.answered(BEGAN, 0.01, failed=False)
    assert calls.summary(BEGAN + 0.001).per_second == 1.0


def test_after_a_minute_without_calls_only_the_counts_are_left() -> None:
    calls = EndpointCalls(BEGAN)
    calls.answered(BEGAN, 0.01, failed=True)
    calls.answered(BEGAN, 0.01, failed=False)
    assert calls.summary(BEGAN + WINDOW + PERIOD) == (2, 1, 0.0, None, None)


def test_calls_without_an_answer_have_a_rate_and_no_times() -> None:
    calls = EndpointCalls(BEGAN)
    for _ in range(10):
        calls.sent(BEGAN)
    assert calls.summary(BEGAN + 5.0) == (10, 0, 2.0, None, None)


def test_old_times_give_way_to_new_ones() -> None:
    calls = EndpointCalls(BEGAN)
    for _ in range(100):
        calls.answered(BEGAN, 10.0, failed=False)
    for second in range(120):
        calls.answered(BEGAN + second, 0.001, failed=False)
    assert calls.summary(BEGAN + 119.0).p99 == pytest.approx(0.001, rel=0.05)


def test_memory_does_not_grow_with_calls() -> None:
    calls, chance = EndpointCalls(BEGAN), random.Random(7)

    def size() -> int:
        return sum(sys.getsizeof(buckets) + 60 * len(buckets) for _, buckets in calls._periods)

    for number in range(50_000):
        calls.answered(BEGAN + number / 100, 10 ** chance.uniform(-7, 6), failed=False)
    before = size()
    for number in range(50_000, 100_000):
        calls.answered(BEGAN + number / 100, 10 ** chance.uniform(-7, 6), failed=False)

    assert size() <= before * 1.1
    assert size() < 250_000


def test_threads_lose_no_call() -> None:
    calls = EndpointCalls(BEGAN)

    def call() -> None:
        for number in range(20_000):
            calls.answered(BEGAN + number / 1000, 0.001, failed=number % 2 == 0)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert calls.summary(BEGAN + 20.0)[:2] == (80_000, 40_000)
