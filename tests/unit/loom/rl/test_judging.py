"""`Judge`: which completions become rollouts, and with what advantage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from loom.errors import WrongArguments
from loom.rl.arithmetic import Characters, arithmetic_model
from loom.rl.generation.completions import Completion
from loom.rl.judging import Judge, rollouts_of
from loom.rl.prompts import Prompt
from loom.rl.rewards.functions import RewardFunction, reward_functions
from loom.rl.samples import Sample
from loom.rl.settings import Generators, RunSpec, Trainers
from loom.rl.task import Task


class Sums(Task):
    def rewards(self) -> Sequence[RewardFunction]:
        # Inside, so that the process that judges does not import this module, and torch with it.
        def share(completion: str, answer: str) -> float:
            if completion == "?":
                raise ValueError("unreadable")
            return float(completion == answer)

        def short(completions: Sequence[str]) -> list[float | None]:
            return [None if one == "10" else 1.0 for one in completions]

        return reward_functions([share, short])

    def weights(self) -> Sequence[float]:
        return [1.0, 0.5]


@contextmanager
def judge(**settings: int) -> Iterator[Judge]:
    spec = RunSpec(
        Sums(),
        Generators(arithmetic_model, Characters()),
        Trainers(arithmetic_model, Characters()),
        folder="unused",
        steps=1,
        batch=4,
        group=2,
        **{"reward_processes": 1, **settings},  # type: ignore[arg-type]
    )
    made = Judge(spec)
    try:
        yield made
    finally:
        made.close()


def completions(*texts: str) -> list[Sample]:
    return [Sample.of(Completion("", text, [1, 2], [0], [-0.5, -0.5], False, 3)) for text in texts]


def turn(prompt: list[int], tokens: list[int], weights_step: int = 3) -> Completion:
    return Completion("", "", tokens, prompt, [-0.5] * len(tokens), False, weights_step)


ANSWERS = [
    ("5.0", Prompt("a", {"answer": "7"}), completions("7", "?", "8")),
    ("5.1", Prompt("b", {"answer": "7"}), completions("7", "7")),
    ("5.2", Prompt("c", {"answer": "7"}), completions("?", "?")),
    ("5.3", Prompt("d", {"answer": "10"}), completions("10", "9")),
]


def test_completions_without_a_reward_are_counted_and_left_out() -> None:
    with judge() as made:
        found = made.judge(ANSWERS, [1.0, 0.5])

    assert found.failed == 3
    assert found.failure == "share raised ValueError: unreadable"
    assert [one.id for one in found.rollouts] == ["5.0.0", "5.0.2", "5.1.0", "5.1.1", "5.3.0", "5.3.1"]
    assert [one.reward for one in found.rollouts] == found.rewards == [1.5, 0.5, 1.5, 1.5, 1.0, 0.5]
    assert [one.advantage for one in found.rollouts] == pytest.approx([1.0, -1.0, 0.0, 0.0, 1.0, -1.0])
    assert {one.weights_step for one in found.rollouts} == {3}
    assert found.means == {"share": pytest.approx(4 / 6), "short": 1.0}
    assert found.flat == 1


def test_groups_without_an_advantage_are_left_out_unless_nothing_would_be_left() -> None:
    with judge(filter_groups=True) as made:
        found = made.judge(ANSWERS, [1.0, 0.5])
        alike = made.judge([ANSWERS[1]], [1.0, 0.5])
        none = made.judge([ANSWERS[2]], [1.0, 0.5])

    assert [one.id for one in found.rollouts] == ["5.0.0", "5.0.2", "5.3.0", "5.3.1"]
    assert len(found.rewards) == 6
    assert [one.id for one in alike.rollouts] == ["5.1.0", "5.1.1"]
    assert (none.rewards, none.rollouts, none.failed) == ([], [], 2)
    assert "share" not in none.means, "no number is reported, which would look like a diverged metric"


@pytest.mark.parametrize("wrong", [{"reward_timeout": 0}, {"reward_processes": 0}, {"evaluate_every": -1}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(WrongArguments, match=next(iter(wrong))), judge(**wrong):
        pass


def test_turns_that_go_on_are_one_rollout_in_which_what_stands_between_them_is_masked() -> None:
    (found,) = rollouts_of("5.0.1", [turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 9, 9], [5], 2)], 1.0, 0.5)

    assert (found.id, found.prompt_tokens, found.tokens) == ("5.0.1", [1, 2], [3, 4, 9, 9, 5])
    assert found.mask == [True, True, False, False, True]
    assert found.logprobs == [-0.5, -0.5, 0.0, 0.0, -0.5]
    assert (found.weights_step, found.sampled) == (2, 3)


def test_a_turn_that_drops_what_was_before_begins_a_rollout_of_its_own() -> None:
    found = rollouts_of("5.0.1", [turn([1, 2], [3, 4]), turn([1, 2, 4], [5]), turn([1, 2, 4, 5, 6], [7])], 1.0, 0.5)

    assert [(one.id, one.prompt_tokens, one.tokens) for one in found] == [
        ("5.0.1", [1, 2], [3, 4]),
        ("5.0.1.1", [1, 2, 4], [5, 6, 7]),
    ]
    assert {(one.reward, one.advantage) for one in found} == {(1.0, 0.5)}


def test_an_answer_that_failed_is_not_judged() -> None:
    failed = Sample("", (turn([1], [2]),), "rollout raised ValueError: no tool")
    with judge() as made:
        found = made.judge([("5.0", Prompt("a", {"answer": "7"}), [failed, *completions("7", "8")])], [1.0, 0.5])

    assert (found.failed, found.failure) == (1, "rollout raised ValueError: no tool")
    assert [one.id for one in found.rollouts] == ["5.0.1", "5.0.2"]
