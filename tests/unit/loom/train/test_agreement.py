"""Groups that are told of changes at different steps apply them at the same one."""

from __future__ import annotations

import random

import pytest

from loom.train.agreement import Agreement


def exchange(groups: list[Agreement]) -> list[dict[str, float]]:
    rows = [group.row() for group in groups]
    return [group.settle(rows) for group in groups]


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


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_proposed_when_all_always_agree(groups: list[Agreement], seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(200):
        for group in groups:
            if dice.random() < 0.3:
                group.propose(dice.choice(["rate", "clip"]), dice.choice([0.1, 0.2, 0.3]))
        present = [group for group in groups if dice.random() < 0.8]  # the others fail, and take the state over
        if present:
            changes = exchange(present)
            assert all(change == changes[0] for change in changes)
            for group in groups:
                if group not in present:
                    group.load(present[0].state())
        assert len({(group["rate"], group["clip"]) for group in groups}) == 1
