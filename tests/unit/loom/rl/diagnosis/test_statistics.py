"""Statistics in bounded memory are those of all values."""

from __future__ import annotations

import random
import statistics

import pytest

from loom.rl.diagnosis.evidence import Evidence, Largest
from loom.rl.diagnosis.statistics import EvenSample, Series


def in_batches(values: list[float], series: Series) -> Series:
    chance = random.Random(1)
    while values:
        cut = chance.randint(1, 5000)
        series.extend(values[:cut])
        values = values[cut:]
    return series


@pytest.mark.parametrize("distinct", [100_000, 100])
def test_they_are_those_of_all_values(distinct: int) -> None:
    chance = random.Random(0)
    values = [round(chance.lognormvariate(5, 1), 1) for _ in range(30_000)]

    series = in_batches(values, Series(distinct))
    stats = series.stats()

    assert stats is not None
    assert series.exact == (distinct > 100)
    assert stats.count == len(values)
    assert stats.mean == pytest.approx(statistics.fmean(values), rel=1e-12)
    assert stats.stddev == pytest.approx(statistics.pstdev(values), rel=1e-9)
    assert (stats.min, stats.max) == (min(values), max(values))
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for percent, found in ((50, stats.p50), (90, stats.p90), (95, stats.p95), (99, stats.p99)):
        assert found == pytest.approx(cuts[percent - 1], rel=1e-9 if series.exact else 0.006)


def test_the_deviation_is_exact_far_from_zero() -> None:
    values = [1e9 + one for one in (1.0, 2.0, 3.0, 4.0)]

    assert in_batches(values, Series()).stddev == pytest.approx(statistics.pstdev([1, 2, 3, 4]))


def test_no_values_have_no_statistics() -> None:
    assert Series().stats() is None


def test_a_slow_start_is_left_out_of_the_steady_total() -> None:
    slow, even, few = Series(), Series(), Series()
    slow.extend([50.0, 1.0, 1.0, 1.0, 1.0])
    even.extend([1.0, 1.0, 50.0, 1.0, 1.0])
    few.extend([50.0, 1.0])

    assert (slow.steady_total, slow.steady_count) == (4.0, 4)
    assert (even.steady_total, few.steady_total) == (54.0, 51.0)


def test_a_sample_is_even_and_bounded() -> None:
    sample = EvenSample(100)
    for begin in range(0, 10_000, 7):
        sample.extend([float(value) for value in range(begin, min(begin + 7, 10_000))])

    assert len(sample.values) <= 100
    assert sample.values == [float(value) for value in range(0, 10_000, sample.stride)]


def test_the_largest_values_are_kept_with_their_lines() -> None:
    chance = random.Random(3)
    values = [chance.random() for _ in range(1000)]
    largest = Largest(5)
    for begin in range(0, 1000, 10):
        largest.extend(values[begin : begin + 10], lambda index, begin=begin: Evidence("x", begin + index, ""))  # type: ignore[misc]

    expected = sorted(range(1000), key=lambda index: values[index], reverse=True)[:5]
    assert [line.line for line in largest.lines()] == expected
