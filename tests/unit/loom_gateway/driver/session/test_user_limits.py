"""Limits that hold for all sessions of a user together."""

from __future__ import annotations

from pathlib import Path

import pytest

from loom.wire.messages import Kind, Message
from loom_gateway.driver.clients.unread_results import StoredResults
from loom_gateway.driver.weaver_link import UserLimits


def result(size: int) -> Message:
    return Message(Kind.RESULT, 1, (0.0, None), [b"r" * size])


@pytest.mark.guarantees(
    "users", "Operations in flight, and bytes of results that are kept, count in all sessions of a user"
)
def test_what_other_sessions_use_counts_here(tmp_path: Path) -> None:
    results = StoredResults(str(tmp_path), limit=100_000)
    limits = UserLimits(10, results, lambda: 3)
    kept = results.keep(result(40_000))

    limits.take({"in_flight": 8, "kept": 50_000})

    assert limits.used() == (3, 40_000)
    assert limits.in_flight_left == 2
    assert results.keep(result(20_000)) is None
    assert results.keep(result(5_000)) is not None
    assert kept is not None  # what is kept is not dropped for others


def test_other_sessions_that_use_everything_leave_nothing(tmp_path: Path) -> None:
    results = StoredResults(str(tmp_path), limit=100_000)
    limits = UserLimits(10, results, lambda: 0)

    limits.take({"in_flight": 25, "kept": 200_000})

    assert limits.in_flight_left == 0
    assert results.keep(result(10)) is None


def test_while_nobody_says_what_others_use_a_session_counts_alone(tmp_path: Path) -> None:
    results = StoredResults(str(tmp_path), limit=100_000)
    limits = UserLimits(10, results, lambda: 0)
    limits.take({"in_flight": 25, "kept": 200_000})

    limits.take(None)

    assert limits.in_flight_left == 10
    assert results.keep(result(90_000)) is not None


def test_no_limit_is_none_whatever_others_use(tmp_path: Path) -> None:
    results = StoredResults(str(tmp_path))
    limits = UserLimits(0, results, lambda: 0)

    limits.take({"in_flight": 25, "kept": 200_000})

    assert limits.max_in_flight == 0
    assert results.keep(result(90_000)) is not None
