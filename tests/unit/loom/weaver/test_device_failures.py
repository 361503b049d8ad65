"""What follows when a device fails, for each group."""

from __future__ import annotations

import pytest

from loom.errors import WrongArguments
from loom.weaver.device_failures import Action, Policy


def test_replicas_are_only_told_unless_something_else_was_chosen() -> None:
    assert Policy().action("trainers") is Action.NOTIFY


def test_a_group_has_its_own_action_and_else_that_of_the_newest_glob() -> None:
    policy = Policy()
    policy.set("*", "pause")
    policy.set("train*", "stop")
    policy.set("trainers", "respawn")

    assert [policy.action(group) for group in ("trainers", "train_2", "eval")] == ["respawn", "stop", "pause"]


def test_a_glob_that_is_chosen_again_is_the_newest() -> None:
    policy = Policy()
    policy.set("train*", "stop")
    policy.set("*", "pause")
    before = policy.action("trainers")

    policy.set("train*", "stop")

    assert (before, policy.action("trainers")) == ("pause", "stop")


def test_an_action_that_there_is_not_is_refused() -> None:
    with pytest.raises(WrongArguments, match="no action 'dance'; choose one of notify, pause, stop, respawn"):
        Policy().set("trainers", "dance")
