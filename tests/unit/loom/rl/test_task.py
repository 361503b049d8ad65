"""`Task.advantages`, and the shipped task."""

from __future__ import annotations

import pytest

from loom.rl.arithmetic import Arithmetic, Characters
from loom.rl.task import Task


def test_advantages_are_distances_from_the_mean_of_the_prompt_in_its_standard_deviations() -> None:
    first, second = Task().advantages([[0.0, 1.0], [1.0, 2.0, 3.0, 6.0]])

    assert first == pytest.approx([-1.0, 1.0])
    # The mean is 3, the variance (4 + 1 + 0 + 9) / 4 = 3.5.
    assert second == pytest.approx([-2 / 3.5**0.5, -1 / 3.5**0.5, 0.0, 3 / 3.5**0.5])


def test_equally_good_completions_have_no_advantage() -> None:
    assert Task().advantages([[0.3, 0.3, 0.3], [1.0]]) == [[0.0, 0.0, 0.0], [0.0]]


def test_a_task_without_prompts_says_what_is_missing() -> None:
    with pytest.raises(NotImplementedError, match=r"Task has to give prompts"):
        Task().prompts(0, 1)


@pytest.mark.parametrize(
    ("prompt", "completion", "reward"),
    [("r38=", "83", 1.0), ("r38=", "38", 0.0), ("r38=", "8", 0.5), ("r38=", "834", 2 / 3), ("r38=", "", 0.0)],
)
def test_a_reversal_is_judged_by_its_characters(prompt: str, completion: str, reward: float) -> None:
    assert Arithmetic().reward(prompt, completion) == pytest.approx(reward)


def test_sums_have_the_right_answer() -> None:
    task = Arithmetic(largest=9)

    assert task.answer("8+5=") == "13"
    assert task.reward("8+5=", "13") == 1.0
    assert task.reward("8+5=", "12") == 0.5
    assert task.max_tokens == 3


def test_prompts_depend_on_the_step_alone() -> None:
    task = Arithmetic()

    assert task.prompts(3, 32) == Arithmetic().prompts(3, 32)
    assert task.prompts(3, 32) != task.prompts(4, 32)
    assert {prompt[0] == "r" for prompt in task.prompts(0, 64)} == {True, False}


def test_the_tokenizer_reads_what_it_wrote_and_leaves_ends_out() -> None:
    characters = Characters()

    assert characters.decode([*characters.encode("r38=83"), characters.eos, characters.pad]) == "r38=83"
    assert max(characters.eos, characters.pad) < characters.size
