"""`Inflight`: completions that are generated across steps, so that no generator waits for the next one."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from loom.rl.generators.calls import LOOK_EVERY, ProcessGone, result_of
from loom.rl.generators.pool import GeneratorPool, PooledGenerator


@dataclass
class PromptRequest:
    """A prompt whose completions are generated."""

    id: str
    """``STEP.PROMPT`` of the step that asked for it."""
    prompt: str
    n: int
    max_tokens: int
    seed: int
    generator: PooledGenerator | None = None
    answer: Future[list[Any]] | None = None


class Inflight:
    """Requests that go on from step to step, for one thread."""

    def __init__(self, pool: GeneratorPool) -> None:
        self._pool = pool
        self._open: list[PromptRequest] = []

    @property
    def count(self) -> int:
        """Prompts whose completions are generated now."""
        return len(self._open)

    def take(self, wanted: int, new: list[PromptRequest]) -> list[tuple[PromptRequest, list[Any]]]:
        """Add requests; return the first ones that are done, in the order in which they were asked for."""
        self._open += new
        found: dict[str, list[Any]] = {}
        while len(found) < wanted:
            self._pool.admit(block=True)
            self._send()
            waiting = [one.answer for one in self._open if one.answer is not None and one.id not in found]
            wait(waiting, LOOK_EVERY, FIRST_COMPLETED)
            for one in self._open:
                if one.id not in found and len(found) < wanted and (answer := self._outcome(one)) is not None:
                    found[one.id] = answer
        taken = [one for one in self._open if one.id in found]
        self._open = [one for one in self._open if one.id not in found]
        return [(one, found[one.id]) for one in taken]

    def _send(self) -> None:
        for one in self._open:
            if one.answer is None:
                busy = {each.number: 0 for each in self._pool.living}
                for other in self._open:
                    if other.answer is not None and other.generator is not None and other.generator.number in busy:
                        busy[other.generator.number] += 1
                one.generator = min(self._pool.living, key=lambda each: busy[each.number])
                one.answer = self._pool.begin(one.generator, [one.prompt], one.n, one.max_tokens, one.seed)

    def _outcome(self, one: PromptRequest) -> list[Any] | None:
        """Return the completions of a request; None if there are none. With its generator lost, it begins again."""
        generator, answer = one.generator, one.answer
        if generator is None or answer is None or not (answer.done() or generator.gone.is_set()):
            return None
        try:
            completions: list[Any] = result_of(answer, generator.gone)
        except ProcessGone as error:
            if generator in self._pool.living:
                self._pool.lose(generator, str(error))
            one.generator = one.answer = None
            return None
        return completions
