"""Groups that are told of changes at different steps apply them at the same one."""

from __future__ import annotations

import random

import pytest

from loom.threadlet.handlers import Deferred, Settlement
from loom.train.loop.agreement import Agreement


def exchange(groups: list[Agreement], step: int = 1) -> list[dict[str, float]]:
    rows = [group.row() for group in groups]
    return [group.settle(rows, step) for group in groups]


@pytest.fixture
def groups() -> list[Agreement]:
    return [Agreement({"rate": 0.1, "clip": 0.0}) for _ in range(3)]


def test_what_one_group_proposes_all_take_in_the_same_exchange(groups: list[Agreement]) -> None:
    groups[1].propose("rate", 0.5)

    assert exchange(groups) == [{"rate": 0.5}] * 3
    assert exchange(groups) == [{}] * 3
    assert [group["rate"] for group in groups] == [0.5] * 3


def test_a_proposal_waits_for_an_exchange_that_counts(groups: list[Agreement]) -> None:
    groups[0].propose("rate", 0.5)

    groups[0].row()  # the step was not applied

    assert groups[0]["rate"] == 0.1
    assert exchange(groups) == [{"rate": 0.5}] * 3


def test_a_group_that_hears_of_a_change_later_changes_nothing(groups: list[Agreement]) -> None:
    groups[0].propose("rate", 0.5)
    exchange(groups)
    groups[1].propose("rate", 0.5)

    assert exchange(groups) == [{}] * 3


def test_changes_of_different_keys_at_once_are_all_taken(groups: list[Agreement]) -> None:
    groups[0].propose("rate", 0.5)
    groups[2].propose("clip", 1.0)

    assert exchange(groups) == [{"rate": 0.5, "clip": 1.0}] * 3


def test_a_group_that_joins_has_what_the_others_agreed_on(groups: list[Agreement]) -> None:
    groups[0].propose("rate", 0.5)
    exchange(groups)
    joining = Agreement({"rate": 0.1, "clip": 0.0})

    joining.load(groups[1].state())

    assert joining["rate"] == 0.5
    assert exchange([*groups, joining]) == [{}] * 4


def test_a_change_is_decided_when_it_is_adopted_with_that_step(groups: list[Agreement]) -> None:
    change = groups[0].propose("rate", 0.5)
    groups[0].row()  # the step was not applied
    assert change.verdict is None

    exchange(groups, step=7)

    assert change.verdict == Settlement(7)


def test_a_group_that_hears_of_a_change_later_tells_the_same_step(groups: list[Agreement]) -> None:
    groups[0].propose("rate", 0.5)
    exchange(groups, step=7)
    exchange(groups, step=8)

    assert groups[1].propose("rate", 0.5).verdict == Settlement(7)


def test_a_group_that_takes_the_state_over_tells_the_same_step(groups: list[Agreement]) -> None:
    groups[0].propose("rate", 0.5)
    exchange(groups[:2], step=7)
    behind = groups[2].propose("rate", 0.5)

    groups[2].load(groups[0].state())

    assert behind.verdict == Settlement(7)


def test_of_two_values_at_once_one_is_adopted_and_the_other_refused(groups: list[Agreement]) -> None:
    changes = [groups[0].propose("rate", 0.5), groups[1].propose("rate", 0.6)]

    assert exchange(groups, step=7) == [{"rate": 0.6}] * 3

    assert [change.verdict for change in changes] == [
        Settlement(None, "the groups adopted another value for step 7"),
        Settlement(7),
    ]


def test_a_change_whose_place_a_later_one_took_is_refused(groups: list[Agreement]) -> None:
    first, back = groups[0].propose("rate", 0.5), groups[0].propose("rate", 0.1)

    assert exchange(groups, step=7) == [{}] * 3

    assert first.verdict == Settlement(None, "a later change took its place before the groups adopted it")
    assert back.verdict == Settlement(0)  # as it has been from the beginning


def test_a_group_that_was_alone_with_another_value_takes_that_of_the_others(groups: list[Agreement]) -> None:
    alone, others = groups[0], groups[1:]
    alone.propose("rate", 0.9)
    exchange([alone], step=7)
    others[0].propose("rate", 0.5)
    exchange(others, step=7)

    assert exchange(groups, step=8) == [{}, {"rate": 0.9}, {"rate": 0.9}]
    assert [group["rate"] for group in groups] == [0.9] * 3


def test_a_state_without_steps_can_be_loaded(groups: list[Agreement]) -> None:
    groups[0].load({"rate": [3.0, 0.7], "clip": [0.0, 0.0]})

    assert groups[0]["rate"] == 0.7
    assert groups[0].propose("rate", 0.7).verdict == Settlement(0)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_proposed_when_all_always_agree(groups: list[Agreement], seed: int) -> None:
    dice = random.Random(seed)
    changes_made: list[Deferred] = []
    for step in range(200):
        for group in groups:
            if dice.random() < 0.3:
                changes_made.append(group.propose(dice.choice(["rate", "clip"]), dice.choice([0.1, 0.2, 0.3])))
        present = [group for group in groups if dice.random() < 0.8]  # the others fail, and take the state over
        if present:
            changes = exchange(present, step)
            assert all(change == changes[0] for change in changes)
            for group in groups:
                if group not in present:
                    group.load(present[0].state())
        assert len({(group["rate"], group["clip"]) for group in groups}) == 1
    exchange(groups, step=200)
    assert all(change.verdict is not None for change in changes_made)
