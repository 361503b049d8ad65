"""The verdict on whether replicas agree, from the hashes that they report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loom.chaos.runs.verdicts import _agree

Points = dict[str, list[tuple[float, int, float]]]
"""Time, step and hash, by replica."""


def agreed(points: Points) -> tuple[bool, str]:
    history = {
        replica: [SimpleNamespace(time=time, step=step, value=value) for time, step, value in of_one]
        for replica, of_one in points.items()
    }
    run: Any = SimpleNamespace(
        watched=lambda: [SimpleNamespace(id=replica) for replica in points],
        observer=SimpleNamespace(history=lambda replica, metric, since: history[replica]),
        began=0.0,
    )
    expected: Any = None
    return _agree(run, expected)


def test_replicas_with_other_hashes_at_a_step_do_not_agree() -> None:
    assert agreed({"a": [(1, 1, 0.1), (2, 2, 0.2)], "b": [(1, 1, 0.1), (2, 2, 0.3)]}) == (
        False,
        "at 1 of 2 steps they do not: first at 2",
    )


def test_steps_that_are_made_again_from_a_checkpoint_are_another_lineage() -> None:
    """All were lost after step 3; step 2 was made again by one group, which the other one joined."""
    points: Points = {
        "a": [(1, 1, 0.1), (2, 2, 0.2), (3, 3, 0.3), (10, 2, 0.25), (11, 3, 0.35), (12, 4, 0.45)],
        "b": [(1.1, 1, 0.1), (2.1, 2, 0.2), (3.1, 3, 0.3), (12.1, 4, 0.45)],
    }

    assert agreed(points) == (True, "at all of 4 steps")


@pytest.mark.parametrize("late", [0.0, 0.5])
def test_those_that_go_back_together_have_to_agree_again(late: float) -> None:
    points: Points = {
        "a": [(1, 1, 0.1), (2, 2, 0.2), (10, 2, 0.25), (11, 3, 0.35)],
        "b": [(1.1, 1, 0.1), (2.1, 2, 0.2), (10 + late, 2, 0.25), (11 + late, 3, 0.36)],
    }

    held, text = agreed(points)

    assert not held
    assert text.endswith("first at 3")


def test_the_last_hash_told_twice_begins_no_lineage() -> None:
    points: Points = {"a": [(1, 1, 0.1), (3, 1, 0.1)], "b": [(2, 1, 0.2)]}

    assert not agreed(points)[0]
