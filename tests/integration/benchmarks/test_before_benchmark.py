"""The rows of Loom beside an earlier Loom add up; how fast anything is, the benchmark says, and no test does."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from tests.benchmarks.calls import SUBJECTS, Measured, Plan, SubjectName
from tests.benchmarks.two_looms import before, before_ratios
from tests.integration.benchmarks.test_benchmarks import figures


def test_each_row_is_a_ratio_within_its_round() -> None:
    now = replace(figures(1.0, 4_000, 1.0, 2.0), pipelined_per_s={"one": 4_000, "many": 3_000, "mesh": 500})
    then = replace(figures(2.0, 2_000, 4.0, 2.0), pipelined_per_s={"one": 2_000, "many": 3_000, "mesh": 1_000})
    subjects = (SUBJECTS[SubjectName.LOOM], before(Path(sys.executable)))
    rounds = ({SubjectName.LOOM: now, SubjectName.LOOM_BEFORE: then},)

    lines = before_ratios(Measured(Plan(), subjects, rounds))

    assert lines[:4] == (
        "one call, p50: 0.50 times the one before (0.50 to 0.50)",
        "pipelined calls a second, one actor: 2.00 times the one before (2.00 to 2.00)",
        "pipelined calls a second, 100 actors: 1.00 times the one before (1.00 to 1.00)",
        "pipelined calls a second, mesh of 8: 0.50 times the one before (0.50 to 0.50)",
    )
    assert lines[-2:] == (
        "64 MiB echo, bytes: 0.25 times the one before (0.25 to 0.25)",
        "64 MiB echo, array: 1.00 times the one before (1.00 to 1.00)",
    )
