"""What the death of a replica costs: the steps that the process after it makes again."""

from __future__ import annotations

from typing import Any, cast

import pytest

from loom.chaos.plans import parse_plan
from loom.chaos.runs.observer import Life, Observer
from loom.chaos.runs.tracker import Struck, Tracker, Victim
from loom.weaver.states import ReplicaState
from loom.weaver.views import MetricPoint, ReplicaInfo

STRUCK = 100.0


class History:
    """Stands in for a weaver that has these points of every metric."""

    def __init__(self, points: list[MetricPoint]) -> None:
        self._points = points

    def history(self, replica: str, metric: str, *, since: float, points: int) -> list[MetricPoint]:
        return [one for one in self._points if one.time >= since]


def recovered(points: list[MetricPoint], seen: int | None) -> Struck:
    """Return the outcome for a replica that was killed at `STRUCK`, and whose next process has these points.

    Args:
        points: the loss, those of the killed process first.
        seen: the last step of that process that was seen; None: it was seen in no step.
    """
    (planned,) = parse_plan("faults:\n  - {fault: sigkill, when: {step: 1}, target: {mesh: train}}\n").faults
    observer = Observer(cast("Any", History(points)))
    observer.replicas = {
        "r": ReplicaInfo(
            "r", ReplicaState.RUNNING, "train", step=0, reported=102.0, registered=101.0, metrics={"loss": 1.0}
        )
    }
    observer.lives = {"r": [Life("r", 1.0, seen, seen), Life("r", 101.0)]}
    struck = Struck(planned, STRUCK, ["r"], [Victim("r", "train", 1.0, seen)], groups=frozenset({"train"}))
    Tracker(observer, patience=60.0, report=lambda line: None).follow(struck)
    return struck


AGAIN = [MetricPoint(102.0, 6, 0.5), MetricPoint(103.0, 7, 0.4)]


@pytest.mark.parametrize(
    ("before", "seen", "lost"),
    [
        ([MetricPoint(98.0, 8, 0.7), MetricPoint(99.0, 9, 0.6)], 8, 4),
        ([], 8, 3),  # it died before a point of its first steps came
        ([], None, None),
    ],
)
def test_the_steps_that_are_made_again_are_counted(
    before: list[MetricPoint], seen: int | None, lost: int | None
) -> None:
    struck = recovered([*before, *AGAIN], seen)

    assert struck.recovered == pytest.approx(2.0)
    assert struck.steps_lost == lost
