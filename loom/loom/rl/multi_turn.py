"""`MultiTurn`: draws the answers to prompts by a task's own coroutine."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from loom.errors import describe_error
from loom.rl.generation.completions import Completion
from loom.rl.generation.generator_pool import GeneratorPool
from loom.rl.generation.interruptible_calls import LOOK_EVERY, ProcessGone, begin, result_of
from loom.rl.prompts import Message, Prompt
from loom.rl.samples import Sample
from loom.rl.task import Task, Tokenizer, prompt_tokens

TURN_SEEDS = 7_919
"""The distance of the seeds of two turns."""
CANCELLED_IN = 5.0
"""Seconds that coroutines have to end when their caller is interrupted."""

_T = TypeVar("_T")


class _Turns:
    """The `RolloutPolicy` of one answer.

    Args:
        source: of all answers.
        seed: of this one.
    """

    def __init__(self, source: MultiTurn, seed: int) -> None:
        self._source = source
        self._seed = seed
        self.turns: list[Completion] = []

    async def complete(
        self, given: str | Sequence[Message] | Sequence[int], *, max_tokens: int | None = None
    ) -> Completion:
        tokens = _tokens(given)
        if tokens is None:
            tokens = prompt_tokens(Prompt.of(given), self._source.tokenizer)  # type: ignore[arg-type]
        found = await self._source.draw(tokens, max_tokens, self._seed + TURN_SEEDS * len(self.turns))
        self.turns.append(found)
        return found


@dataclass
class MultiTurn:
    """Draws answers by the coroutine of a task, in a thread of its own, for which the orchestrator's thread waits.

    A turn that a generator is lost with is drawn again by another one; the turns before it stay.
    """

    task: Task
    pool: GeneratorPool
    tokenizer: Tokenizer
    seconds: float
    """How long one answer may take."""
    max_tokens: int = 0
    _busy: Counter[int] = field(default_factory=Counter)
    _no_generator: Exception | None = None

    def samples(self, prompts: Sequence[Prompt], n: int, max_tokens: int, seed: int) -> list[list[Sample]]:
        """Return ``n`` answers to each prompt.

        Raises:
            LoomError: no generator is left.
        """
        self.max_tokens = max_tokens
        self._busy.clear()
        return _run_apart(self._samples(prompts, n, seed))

    async def _samples(self, prompts: Sequence[Prompt], n: int, seed: int) -> list[list[Sample]]:
        answers = [
            self._sample(prompt, seed + 31 * at) for at, prompt in enumerate(p for p in prompts for _ in range(n))
        ]
        found = await asyncio.gather(*answers)
        if self._no_generator is not None:
            raise self._no_generator
        return [list(found[at : at + n]) for at in range(0, len(found), n)]

    async def _sample(self, prompt: Prompt, seed: int) -> Sample:
        policy = _Turns(self, seed)
        try:
            answer = await asyncio.wait_for(self.task.rollout(prompt, policy), self.seconds)
        except asyncio.TimeoutError:
            return Sample("", policy.turns, f"rollout took longer than {self.seconds:g} s")
        except Exception as error:  # noqa: BLE001 - it is the user's, who reads it
            return Sample("", policy.turns, f"rollout raised {describe_error(error)}")
        if not policy.turns:
            return Sample("", (), "rollout ended without a turn")
        return Sample(answer, policy.turns)

    async def draw(self, tokens: Sequence[int], max_tokens: int | None, seed: int) -> Completion:
        """Return a turn of the generator that is least busy."""
        while True:
            if self._no_generator is not None:
                raise self._no_generator
            try:
                self.pool.admit(block=True)
            except Exception as error:
                self._no_generator = error
                raise
            one = min(self.pool.living, key=lambda each: self._busy[each.number])
            self._busy[one.number] += 1
            try:
                asked: Any = [list(tokens)]
                call = self.pool.begin(one, asked, 1, max_tokens or self.max_tokens, seed)
                waited = asyncio.wrap_future(call)
                while not (waited.done() or one.gone.is_set()):
                    await asyncio.wait([waited], timeout=LOOK_EVERY)
                (found,) = result_of(call, one.gone)
            except ProcessGone as error:
                if one in self.pool.living:
                    self.pool.lose(one, str(error))
            else:
                completion: Completion = found
                return completion
            finally:
                self._busy[one.number] -= 1


def _run_apart(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of a coroutine, from an event loop in another thread: one may run in this thread already.

    An exception that interrupts the wait cancels the coroutine.
    """
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[_T]]] = Future()
    ended = threading.Event()

    async def main() -> _T:
        task = asyncio.ensure_future(coroutine)
        started.set_result((asyncio.get_running_loop(), task))
        try:
            return await task
        finally:
            ended.set()

    def rollouts() -> _T:
        return asyncio.run(main())

    try:
        result = begin(rollouts)
        while not result.done():
            wait([result], LOOK_EVERY)
    except BaseException:
        loop, task = started.result(CANCELLED_IN)
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(task.cancel)
        ended.wait(CANCELLED_IN)
        raise
    found: _T = result.result()
    return found


def _tokens(given: object) -> list[int] | None:
    """Return tokens; None for something else."""
    if (
        isinstance(given, Sequence)
        and not isinstance(given, str)
        and given
        and all(type(one) is int for one in given)
    ):
        return list(given)
    return None
