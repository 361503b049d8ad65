"""Answers of several turns, by a task's coroutine; the pool of generators is a stand-in."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from loom.errors import LoomError
from loom.rl.arithmetic import Characters
from loom.rl.generation.completions import Completion
from loom.rl.generation.interruptible_calls import ProcessGone
from loom.rl.multi_turn import MultiTurn
from loom.rl.prompts import Prompt
from loom.rl.samples import Sample
from loom.rl.task import RolloutPolicy, Task

CHARACTERS = Characters()
BOUND = 60.0


@dataclass
class OneGenerator:
    """A stand-in for a generator."""

    number: int
    gone: threading.Event = field(default_factory=threading.Event)


class FakePool:
    """A stand-in for `GeneratorPool`, whose generators write the last character again.

    ``loses`` are the numbers of requests with which their generator is lost.
    """

    def __init__(self, generators: int = 2, loses: Sequence[int] = ()) -> None:
        self.living = [OneGenerator(number) for number in range(generators)]
        self.asked: list[str] = []
        self._loses = loses

    def admit(self, block: bool = False) -> None:
        if not self.living:
            raise LoomError("no generator is left")

    def begin(
        self, one: OneGenerator, prompts: Any, n: int, max_tokens: int, seed: int
    ) -> Future[list[Completion]]:
        (tokens,) = prompts
        self.asked.append(f"{one.number}:{CHARACTERS.decode(tokens)}")
        call: Future[list[Completion]] = Future()
        if len(self.asked) in self._loses:
            call.set_exception(ProcessGone("its process is gone"))
        else:
            again = [tokens[-1]] * min(max_tokens, 2)
            text = CHARACTERS.decode(again)
            call.set_result([Completion("", text, again, tokens, [-1.0] * len(again), False, 4)])
        return call

    def lose(self, one: OneGenerator, reason: str) -> None:
        self.living.remove(one)


class Calculator(Task):
    """Asks, gets the next digit from a tool, and asks again."""

    async def rollout(self, prompt: Prompt, policy: RolloutPolicy) -> str:
        first = await policy.complete(prompt.content)
        await asyncio.sleep(0)  # the tool
        second = await policy.complete(f"{prompt.text}{first.text}+7", max_tokens=1)
        return f"{first.text}|{second.text}"


def samples(task: Task, pool: FakePool, *prompts: str, n: int = 1, seconds: float = 60.0) -> list[list[Sample]]:
    made = MultiTurn(task, pool, CHARACTERS, seconds)  # type: ignore[arg-type]
    return made.samples([Prompt(one) for one in prompts], n, 2, 0)


def test_a_coroutine_draws_turns_and_its_answer_is_judged() -> None:
    pool = FakePool()

    ((first, second), _) = samples(Calculator(), pool, "1+2", "5", n=2)

    assert first.answer == second.answer == "22|7"
    assert [CHARACTERS.decode(one.prompt_tokens) for one in first.turns] == ["1+2", "1+222+7"]
    assert CHARACTERS.decode(first.tokens) == "227"
    assert {one[0] for one in pool.asked} == {"0", "1"}
    assert len(pool.asked) == 8


def test_a_turn_that_is_lost_with_its_generator_is_drawn_again_by_another() -> None:
    pool = FakePool(loses=[2])

    ((found,),) = samples(Calculator(), pool, "1+2")

    assert found.answer == "22|7"
    assert [one[2:] for one in pool.asked] == ["1+2", "1+222+7", "1+222+7"]
    assert len(pool.living) == 1


def test_without_a_generator_the_run_ends_and_no_answer_is_blamed() -> None:
    with pytest.raises(LoomError, match="no generator is left"):
        samples(Calculator(), FakePool(generators=1, loses=[1]), "1", "2")


async def test_it_works_where_an_event_loop_runs_already() -> None:
    ((found,),) = samples(Calculator(), FakePool(), "1+2")

    assert found.answer == "22|7"


def test_an_interruption_of_the_orchestrator_cancels_the_coroutines() -> None:
    begun, cancelled, raised = threading.Event(), threading.Event(), []

    class Hanging(Task):
        async def rollout(self, prompt: Prompt, policy: RolloutPolicy) -> str:
            try:
                begun.set()
                await asyncio.sleep(600)
            finally:
                cancelled.set()
            return ""

    def orchestrate() -> None:
        try:
            samples(Hanging(), FakePool(), "1", seconds=600)
        except KeyboardInterrupt as error:
            raised.append(error)

    thread = threading.Thread(target=orchestrate)
    thread.start()
    assert begun.wait(BOUND)
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt))
    thread.join(BOUND)

    assert raised
    assert cancelled.is_set()


def failing(rollout: Callable[[Prompt, RolloutPolicy], Any]) -> Sample:
    class Failing(Task):
        async def rollout(self, prompt: Prompt, policy: RolloutPolicy) -> Any:
            return await rollout(prompt, policy)

    ((found, other),) = [samples(Failing(), FakePool(), "1", n=2, seconds=0.5)][0]
    assert other == found
    return found


def test_an_answer_whose_coroutine_raises_hangs_or_draws_nothing_says_so() -> None:
    async def raises(prompt: Prompt, policy: RolloutPolicy) -> str:
        await policy.complete("1")
        raise KeyError("no tool")

    async def hangs(prompt: Prompt, policy: RolloutPolicy) -> str:
        await asyncio.sleep(600)
        return ""

    async def idles(prompt: Prompt, policy: RolloutPolicy) -> str:
        return "42"

    async def errs(prompt: Prompt, policy: RolloutPolicy) -> str:
        return (await policy.complete([{"role": "user", "content": "1"}])).text

    assert failing(raises).failure == "rollout raised KeyError: 'no tool'"
    assert failing(hangs).failure == "rollout took longer than 0.5 s"
    assert failing(idles).failure == "rollout ended without a turn"
    assert "the tokenizer has no chat template" in failing(errs).failure
