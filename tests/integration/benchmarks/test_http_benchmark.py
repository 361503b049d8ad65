"""The benchmark of HTTP runs and adds up; how fast anything is, it says, and no test does."""

from __future__ import annotations

import pytest

from tests.benchmarks import calls
from tests.benchmarks.calls import Measured, Plan, SubjectName
from tests.benchmarks.two_looms import HTTP_SUBJECTS, http_ratios
from tests.integration.benchmarks.test_benchmarks import TINY, figures


def test_ratios_are_taken_within_each_round() -> None:
    rounds = [
        {SubjectName.LOOM: figures(1.0, 4_000, 1.0), SubjectName.LOOM_HTTP: figures(5.0, 2_000, 3.0)},
        {SubjectName.LOOM: figures(2.0, 1_000, 2.0), SubjectName.LOOM_HTTP: figures(4.0, 1_000, 4.0)},
        {SubjectName.LOOM: figures(1.0, 4_000, 1.0), SubjectName.LOOM_HTTP: figures(4.0, 3_000, 1.0)},
    ]
    assert http_ratios(Measured(Plan(), HTTP_SUBJECTS, tuple(rounds))) == (
        "one call, p50: 4.00 times the WebSocket's (2.00 to 5.00)",
        "pipelined calls a second: 0.75 times the WebSocket's (0.50 to 1.00)",
        "64 MiB echo: 2.00 times the WebSocket's (1.00 to 3.00)",
    )


@pytest.mark.slow
def test_it_measures_both() -> None:
    measured = calls.measure(HTTP_SUBJECTS, TINY)
    assert [set(each) for each in measured.rounds] == [{SubjectName.LOOM, SubjectName.LOOM_HTTP}] * 2
    assert all(each[name].p50_ms > 0 for each in measured.rounds for name in each)
