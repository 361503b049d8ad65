"""The verdict on whether replicas agree, from the hashes that they report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loom.chaos.runs.verdicts import _agree

Points = dict[str, list[tuple[float, int, float]]]
"""Time, step and hash, by replica."""


def agreed(points: Points, alone: dict[str, set[int]] | None = None) -> tuple[bool, str]:
    """The verdict.

    Args:
        points: what each replica reports.
        alone: steps that each made without another group; it has made the others with one.
    """
    history = {
        (replica, metric): [
            SimpleNamespace(time=time, step=step, value=of(step, value)) for time, step, value in told
        ]
        for replica, told in points.items()
        for metric, of in (
            ("params_hash", lambda step, value: value),
            ("participants", lambda step, value, by=replica: 1.0 if step in (alone or {}).get(by, ()) else 2.0),
        )
    }
    run: Any = SimpleNamespace(
        watched=lambda: [SimpleNamespace(id=replica) for replica in points],
        observer=SimpleNamespace(history=lambda replica, metric, since: history[replica, metric]),
        began=0.0,
    )
    expected: Any = None
    return _agree(run, expected)


def test_replicas_with_other_hashes_at_a_step_do_not_agree() -> None:
    assert agreed({"a": [(1, 1, 0.1), (2, 2, 0.2)], "b": [(1, 1, 0.1), (2, 2, 0.3)]}) == (
        False,
        "at 1 of 2 steps they do not: first at 2",
    )


@pytest.mark.guarantees(
    "chaos", '"replicas agree" compares the steps of one lineage, but not one that a group made alone and gave up'
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


CUT_OFF: Points = {
    "a": [(1, 1, 0.1), (2, 2, 0.2), (9, 4, 0.4)],
    "b": [(1.1, 1, 0.1), (3, 2, 0.25), (4, 3, 0.3), (9.1, 4, 0.4)],
}
"""Step 2 is made by a and b together, but b does not learn of it, and makes it again; a takes over its state."""


@pytest.mark.guarantees(
    "chaos", '"replicas agree" compares the steps of one lineage, but not one that a group made alone and gave up'
)
def test_a_step_that_one_made_alone_and_that_was_given_up_is_no_difference() -> None:
    assert agreed(CUT_OFF, alone={"b": {2, 3}}) == (
        True,
        "at all of 3 steps but 1, which one made alone and gave up",
    )


def test_a_difference_of_groups_that_made_the_step_together_stays_one() -> None:
    assert agreed(CUT_OFF) == (False, "at 1 of 3 steps they do not: first at 2")


def test_those_that_stay_apart_do_not_agree() -> None:
    points: Points = {
        "a": [(1, 1, 0.1), (2, 2, 0.2), (3, 3, 0.3)],
        "b": [(1.1, 1, 0.1), (2.1, 2, 0.25), (3.1, 3, 0.35)],
    }

    assert agreed(points, alone={"a": {2, 3}, "b": {2, 3}}) == (False, "at 2 of 3 steps they do not: first at 2")


def test_one_that_differs_from_two_that_are_together_has_to_join_them() -> None:
    points: Points = {
        name: [(time, 1, 0.1), (time + 1, 2, 0.25 if name == "c" else 0.2)]
        for time, name in ((1.0, "a"), (1.1, "b"), (1.2, "c"))
    }

    assert not agreed(points, alone={"c": {2}})[0]
    for each in points.values():
        each.append((9.0, 5, 0.5))
    assert agreed(points, alone={"c": {2}})[0]
