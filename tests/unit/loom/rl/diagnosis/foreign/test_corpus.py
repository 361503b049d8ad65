"""Labelled runs of six frameworks: most are diagnosed right, and nothing is found where nothing is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from loom.rl.diagnosis import Analysis, analyze
from loom.rl.diagnosis.signals import RunSide
from loom.rl.diagnosis.symptoms import WAITS
from tests.unit.loom.rl.diagnosis.foreign.corpus import HEALTHY, LABELLED, LabelledRun
from tests.unit.loom.rl.diagnosis.foreign.formats import write
from tests.unit.loom.rl.diagnosis.foreign.simulation import simulate

RIGHT = 48
HANGING = {"engines hang": WAITS[RunSide.TRAINERS], "trainers hang": WAITS[RunSide.GENERATORS]}
"""What has to be said about the side that waits."""


def analysed(run: LabelledRun, folder: Path) -> Analysis:
    simulated = simulate(run.cause, run.seed, asynchronous=run.asynchronous)
    return analyze(write(simulated, run.framework, folder / f"{run.framework}-{run.seed}".replace("/", "-")))


def is_right(run: LabelledRun, found: Analysis) -> bool:
    if (found.framework, found.primary) != (run.framework, run.label):
        return False
    first = found.findings[0]
    return bool(first.evidence) and (run.cause not in HANGING or first.details[0] == HANGING[run.cause])


@pytest.mark.guarantees("diagnosis", "At least 48 of 54 labelled runs of six other frameworks are diagnosed right")
def test_most_labelled_runs_are_diagnosed_right(tmp_path: Path) -> None:
    assert len(LABELLED) == 54
    wrong = {}
    for run in LABELLED:
        found = analysed(run, tmp_path)
        if not is_right(run, found):
            wrong[run] = found.primary

    assert len(LABELLED) - len(wrong) >= RIGHT, wrong


@pytest.mark.guarantees("diagnosis", "Nothing is found in 12 healthy runs of six other frameworks")
def test_nothing_is_found_in_healthy_runs(tmp_path: Path) -> None:
    assert len(HEALTHY) == 12
    for run in HEALTHY:
        found = analysed(run, tmp_path)
        assert (found.framework, found.primary) == (run.framework, "none")
        assert not [finding for finding in found.findings if finding.over_bound]
