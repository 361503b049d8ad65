"""`Arithmetic`: digits to reverse and to add, a task that a small transformer learns by reward alone."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loom.rl.engines.engine import EngineKind
from loom.rl.settings import Generators, Trainers
from loom.rl.task import Task
from loom.train.settings import LiveConfig

if TYPE_CHECKING:
    from loom.rl.orchestrator import Orchestrator

STEPS, QWEN_STEPS = 150, 250
"""Steps that it takes to learn the task, with the small transformer and with a Qwen2."""

SMALL_SERVER: Mapping[str, Any] = {
    "dtype": "float32",
    "max_length": 64,
    "arguments": ("--enforce-eager",),
    "environment": {"VLLM_CPU_KVCACHE_SPACE": "1"},
}
"""Options of a vLLM server for the task's small model: no graphs, and 1 GiB for keys and values."""

CHARACTERS = "0123456789+=r"


class Characters:
    """A tokenizer with a token for each character of the task."""

    eos = len(CHARACTERS)
    pad = eos + 1
    size = pad + 1

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text.

        Raises:
            ValueError: the text has another character.
        """
        return [CHARACTERS.index(character) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens, without `eos` and `pad`."""
        return "".join(CHARACTERS[token] for token in tokens if token < self.eos)


class Arithmetic(Task):
    """Digits to reverse (``r38=`` becomes ``83``) and to add (``3+4=`` becomes ``7``).

    The reward is the share of the characters that are right: 1 for the answer.

    Args:
        digits: number of digits to reverse.
        largest: the largest number to add.
        seed: of the prompts.
    """

    threshold = 0.9
    """The mean reward from which on the task counts as learned."""

    def __init__(self, digits: int = 2, largest: int = 4, seed: int = 0) -> None:
        self.digits = digits
        self.largest = largest
        self.seed = seed

    @property
    def max_tokens(self) -> int:
        """Tokens that the longest answer and its end need."""
        return max(self.digits, len(str(2 * self.largest))) + 1

    def prompts(self, step: int, n: int) -> list[str]:
        """Return prompts of a step, of both kinds alike."""
        chance = random.Random(1_000_003 * self.seed + step)
        return [self._reversal(chance) if chance.random() < 0.5 else self._sum(chance) for _ in range(n)]

    def reward(self, prompt: str, completion: str) -> float:
        """Return the share of the characters that are right, between 0 and 1."""
        right = self.answer(prompt)
        hits = sum(one == other for one, other in zip(right, completion, strict=False))
        return hits / max(len(right), len(completion))

    def answer(self, prompt: str) -> str:
        """Return the right completion of a prompt."""
        question = prompt.rstrip("=")
        if question.startswith("r"):
            return question[:0:-1]
        return str(sum(int(number) for number in question.split("+")))

    def _reversal(self, chance: random.Random) -> str:
        return f"r{chance.randrange(10**self.digits):0{self.digits}}="

    def _sum(self, chance: random.Random) -> str:
        return f"{chance.randint(0, self.largest)}+{chance.randint(0, self.largest)}="


def arithmetic_model() -> Any:
    """Return a transformer of 100,000 parameters, which knows nothing."""
    from loom.rl.transformer import SmallTransformer

    return SmallTransformer(Characters.size, Characters.pad, longest=16)


def arithmetic_run(
    folder: str | os.PathLike[str],
    *,
    steps: int | None = None,
    batch: int = 512,
    group: int = 16,
    generators: int = 1,
    groups: int = 1,
    engine: str | EngineKind = EngineKind.LOOM,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Orchestrator:
    """Return a run that learns the task in about a minute on two cores.

    Args:
        folder: of the run.
        steps: optimizer steps; as many as it takes to learn the task if not given.
        generators: number of generators.
        groups: number of trainer groups.
        engine: of the generators. All but Loom's own get a small Qwen2, which is written into the folder.
        options: further ones of the engine.
        settings: other arguments of `loom.rl.Orchestrator`.
    """
    from loom.rl.orchestrator import Orchestrator

    task, kind = Arithmetic(), EngineKind(engine)
    steps = steps or (STEPS if kind is EngineKind.LOOM else QWEN_STEPS)
    shape: dict[str, Any] = {
        "count": generators,
        "max_tokens": task.max_tokens,
        "concurrency": batch,
        "options": {**(SMALL_SERVER if kind is EngineKind.VLLM else {}), **(options or {})},
    }
    if kind is EngineKind.LOOM:
        sampling = Generators(arithmetic_model, Characters(), **shape)
        learning = Trainers(arithmetic_model, Characters(), groups=groups)
    else:
        from loom.rl.arithmetic_model import write_arithmetic_model

        model = write_arithmetic_model(Path(folder) / "model", letters=CHARACTERS)
        sampling = Generators(engine=kind, model=model, **shape)
        # The rate of the smaller model, and one that stays, make this one forget what it has learned.
        config = LiveConfig(learning_rate=7e-4, optimizer="adam", gradient_clipping=1.0, schedule="linear")
        learning = Trainers(model=model, groups=groups, config=config)
    return Orchestrator(task, sampling, learning, folder=folder, steps=steps, batch=batch, group=group, **settings)
