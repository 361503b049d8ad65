"""Reward functions in their forms, in processes of their own, and what those that fail cost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import pytest

from loom.errors import LoomError, WrongArguments
from loom.rl.generation.completions import Completion
from loom.rl.prompts import Prompt
from loom.rl.rewards.functions import RewardFunction, reward_functions
from loom.rl.rewards.pool import Reward, RewardPool
from loom.rl.samples import Sample
from tests.support.processes import still_there

TEXT = Prompt("3+4=", {"answer": "7"})
CHAT = Prompt([{"role": "user", "content": "3+4?"}], {"answer": "7", "level": 2})


def completion(text: str) -> Sample:
    return Sample.of(Completion("", text, [1, 2], [0], [-0.5, -0.5], False, 0))


def judged(
    functions: Sequence[Callable[..., Any]] | Sequence[RewardFunction],
    texts: Sequence[str],
    prompt: Prompt = TEXT,
    *,
    seconds: float = 30.0,
    processes: int = 1,
    weights: Sequence[float] | None = None,
) -> list[Reward]:
    known = [one for one in functions if isinstance(one, RewardFunction)] or reward_functions(functions)
    pool = RewardPool(known, processes, seconds)
    try:
        (found,) = pool.judge([prompt], [[completion(one) for one in texts]], weights or [1.0] * len(known))
    finally:
        pool.close()
    return found


def exact(completion: str, answer: str) -> float:
    return float(completion == answer)


async def near(completion: Any, answer: str, **rest: Any) -> float:
    await asyncio.sleep(0)
    text = completion if isinstance(completion, str) else completion[0]["content"]
    return 0.5 if text.startswith(answer[:1]) else 0.0


def lengths(completions: Sequence[Any], level: Sequence[int] = (), **columns: Any) -> list[float | None]:
    assert len(columns["prompts"]) == len(completions) == len(columns["completion_ids"])
    return [None if one == "" else float(len(one)) + sum(level) for one in completions]


def picky(completion: str) -> Any:
    if completion == "raise":
        raise KeyError("missing")
    if completion == "exit":
        os._exit(3)
    if completion == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "600.25"])
        time.sleep(600)
    return {"text": "good", "nan": float("nan"), "none": None}.get(completion, 1)


async def slow(completion: str) -> float:
    if completion == "hang":
        await asyncio.sleep(600)
    if completion == "block":
        time.sleep(600)  # noqa: ASYNC251 - as users' code does
    return 1.0


def test_functions_of_all_forms_are_added_up_by_their_weights() -> None:
    found = judged([exact, near, lengths], ["7", "8", "77"], weights=[1.0, 2.0, 0.1])

    assert [one.parts for one in found] == [
        {"exact": 1.0, "near": 0.5, "lengths": 1.0},
        {"exact": 0.0, "near": 0.0, "lengths": 1.0},
        {"exact": 0.0, "near": 0.5, "lengths": 2.0},
    ]
    assert [one.value for one in found] == pytest.approx([2.1, 0.1, 1.2])


def test_a_chat_is_judged_by_its_messages_and_a_column_reaches_each_function() -> None:
    found = judged([near, lengths], ["7!", "8"], CHAT)

    assert [one.parts for one in found] == [{"near": 0.5, "lengths": 5.0}, {"near": 0.0, "lengths": 5.0}]


def test_a_tasks_own_reward_gets_texts_whatever_its_parameters_are_called() -> None:
    plain = RewardFunction("reward", lambda p, c: float(p == "3+4?" and c == "7"), plain=True)

    assert [one.value for one in judged([plain], ["7", "8"], CHAT)] == [1.0, 0.0]


def test_a_function_without_an_opinion_does_not_count_and_without_any_there_is_no_reward() -> None:
    first, second = judged([lengths], ["", "77"])

    assert (first.value, first.failure) == (None, "no function has an opinion")
    assert second.value == 2.0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise", "picky raised KeyError: 'missing'"),
        ("text", "picky returned 'good', which is no number"),
        ("nan", "picky returned nan, which is no finite number"),
        ("exit", "picky ended its process with exit code 3"),
    ],
)
def test_a_failure_is_no_reward_and_costs_no_other_completion(text: str, why: str) -> None:
    found = judged([picky], ["a", text, "b", text, "c"])

    assert [one.value for one in found] == [1.0, None, 1.0, None, 1.0]
    assert found[1].failure == why


def test_a_function_that_hangs_is_killed_with_what_it_started() -> None:
    before = {one.pid for one in psutil.process_iter()}
    found = judged([picky], ["a", "hang", "b"], seconds=2.0)

    assert [one.value for one in found] == [1.0, None, 1.0]
    assert found[1].failure == "picky took longer than 2 s"
    left = [
        one
        for one in psutil.process_iter(["cmdline"])
        if one.pid not in before and "600.25" in (one.info["cmdline"] or ())
    ]
    assert not left


@pytest.mark.slow
def test_coroutines_wait_together_and_one_that_hangs_or_blocks_costs_no_other() -> None:
    found = judged([slow], ["a", "hang", "b"], seconds=2.0)
    assert [one.value for one in found] == [1.0, None, 1.0]
    assert found[1].failure == "slow took longer than 2 s"

    found = judged([slow], ["a", "block", "b"], seconds=2.0)
    assert [one.value for one in found] == [1.0, None, 1.0]
    assert found[1].failure == "slow took longer than 2 s"


def test_no_signal_goes_to_a_process_that_has_been_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = RewardPool(reward_functions([exact]), 1, 60.0)
    pool.start()
    (worker,) = pool._workers
    os.kill(worker._process.pid, signal.SIGKILL)
    assert not worker.receive()
    while not worker.gone:
        worker.receive()
    monkeypatch.setattr(os, "killpg", lambda *given: pytest.fail(f"signals {given}"))
    pool.close()


def test_a_list_of_another_length_is_a_failure_of_all() -> None:
    def two(completions: Sequence[str]) -> list[float]:
        return [1.0, 2.0]

    found = judged([two], ["a", "b", "c"])

    assert {one.failure for one in found} == {"two returned 2 rewards for 3 completions"}
    assert {one.value for one in found} == {None}


def test_functions_that_cannot_be_loaded_say_why() -> None:
    class Unloadable:
        def __reduce__(self) -> Any:
            return exec, ("raise RuntimeError('no such library')",)

        def __call__(self, completion: str) -> float:
            return 0.0

    with pytest.raises(LoomError, match=r"the reward functions have no process: RuntimeError: no such library"):
        judged([Unloadable()], ["a"])


def test_processes_end_with_the_pool_and_with_their_parent() -> None:
    pool = RewardPool(reward_functions([exact]), 2, 30.0)
    pool.start()
    processes = [psutil.Process(one._process.pid) for one in pool._workers]
    pool._workers[0].connection.close()  # as the kernel does when the parent is gone
    assert pool._workers[0]._process.wait(30) == -signal.SIGKILL
    pool.close()
    assert not still_there(processes)


def test_many_completions_keep_their_order_in_several_processes() -> None:
    texts = [str(number % 9) for number in range(200)]

    found = judged([exact], texts, processes=2)

    assert [one.value for one in found] == [float(one == "7") for one in texts]


@pytest.mark.parametrize(
    ("rewards", "why"),
    [
        ([], "rewards has no function"),
        (["exact"], "a reward is a function, not 'exact'"),
    ],
)
def test_what_is_no_function_is_refused(rewards: list[Any], why: str) -> None:
    with pytest.raises(WrongArguments, match=why):
        reward_functions(rewards)


def test_functions_of_one_name_are_told_apart() -> None:
    assert [one.name for one in reward_functions([exact, lengths, exact])] == ["exact", "lengths", "exact#2"]


def test_a_parameter_for_which_there_is_no_value_is_named_before_anything_is_judged() -> None:
    def with_parser(completion: str, parser: Any) -> float:
        return 0.0

    (function,) = reward_functions([with_parser])

    with pytest.raises(WrongArguments, match=r"with_parser has the parameter parser, and gets only answer, info"):
        function.check(Prompt("a", {"answer": "7"}))
    for one in reward_functions([exact, near, lengths, picky]):
        one.check(CHAT)


@pytest.fixture(autouse=True)
def _no_orphans() -> Iterator[None]:
    yield
    left = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            left += [one] if "loom.rl.rewards.worker" in one.cmdline() else []
    assert not left
