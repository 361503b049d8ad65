"""Runs in which one thing is slow: by waiting, not by work, and with a little chance from a seed."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loom.rl import Arithmetic, Characters, Generators, Orchestrator, SmallTransformer, Trainer, Trainers
from loom.train import LiveConfig

PROMPTS, GROUP = 8, 8
BATCH = PROMPTS * GROUP
ENDS = 3.0
"""What the logit of a completion's end is higher by: most completions have one or two tokens."""
STEPS = 100_000
"""More than any test waits for."""


class Brief(SmallTransformer):
    """The shipped model, which ends most of its completions early before it has learned anything."""

    def __init__(self) -> None:
        super().__init__(Characters.size, Characters.pad, longest=16)

    def forward(self, tokens: Any, cache: Any = None) -> Any:
        logits, after = super().forward(tokens, cache)
        logits[..., Characters.eos] += ENDS
        return logits, after


class Waits(Brief):
    """The shipped model, which waits while it generates or loads, as a slower machine would.

    Args:
        row_s: seconds that a token of each completion takes.
        token_s: seconds that a token takes, however many completions get one.
        load_s: seconds that the loading of weights takes.
    """

    def __init__(self, seed: int, row_s: float = 0.0, token_s: float = 0.0, load_s: float = 0.0) -> None:
        super().__init__()
        self._chance = random.Random(seed)
        self._row_s, self._token_s, self._load_s = row_s, token_s, load_s

    def forward(self, tokens: Any, cache: Any = None) -> Any:
        self._wait(self._row_s * len(tokens) + self._token_s)
        return super().forward(tokens, cache)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._wait(self._load_s)
        return super().state_dict(*args, **kwargs)

    def _wait(self, seconds: float) -> None:
        if seconds:
            time.sleep(seconds * self._chance.uniform(0.8, 1.2))


class WaitingTrainer(Trainer):
    """A trainer that waits for each rollout, more so in one rank, and while it writes.

    Its ``make_model`` has the seconds as attributes, as the orchestrator gives it nothing else.
    """

    def loss_of(self, model: Any, batch: Any) -> Any:
        waits = self._spec.make_model.keywords  # type: ignore[union-attr]
        rollouts = sum(len(part.rollouts) for part in self._parts)
        chance = random.Random(f"{waits['seed']} {batch.step} {batch.shard}")
        each = waits["rollout_s"] + waits["lead_s"] * (batch.shard == waits["slow_rank"])
        time.sleep(each * rollouts * chance.uniform(0.8, 1.2))
        return super().loss_of(model, batch)

    def _write(self, model: Any, weights: Mapping[str, Any], step: int, final: Any) -> None:
        waits = self._spec.make_model.keywords  # type: ignore[union-attr]
        time.sleep(waits["write_s"] * random.Random(f"{waits['seed']} {step}").uniform(0.8, 1.2))
        super()._write(model, weights, step, final)


def plain_model(
    seed: int, rollout_s: float = 0.0, lead_s: float = 0.0, slow_rank: int = -1, write_s: float = 0.0
) -> Brief:
    """Return the trainers' model; the rest is for `WaitingTrainer`."""
    return Brief()


def run_of(
    folder: Path,
    seed: int,
    *,
    generation: dict[str, float] | None = None,
    training: dict[str, float] | None = None,
    groups: int = 1,
    max_tokens: int = 8,
    **settings: Any,
) -> Orchestrator:
    """Return a run of the shipped task."""
    task = Arithmetic(seed=seed)
    waits = {"rollout_s": 0.0, "lead_s": 0.0, "slow_rank": -1, "write_s": 0.0, **(training or {})}
    learner: Callable[[], Any] = functools.partial(plain_model, seed=seed, **waits)
    return Orchestrator(
        task,
        Generators(
            functools.partial(Waits, seed, **(generation or {})),
            Characters(),
            max_tokens=max_tokens,
            concurrency=4 * BATCH,
            seed=seed,
        ),
        Trainers(learner, Characters(), groups=groups, actor=WaitingTrainer, config=LiveConfig(learning_rate=1e-9)),
        folder=folder,
        steps=STEPS,
        batch=BATCH,
        group=GROUP,
        **settings,
    )


BOTTLENECKS: dict[str, dict[str, Any]] = {
    "none": {},
    "checkpoint": {"training": {"write_s": 1.5}, "generation": {"token_s": 0.1}, "async_level": 0},
    "generator": {"generation": {"row_s": 0.008}},
    "truncation": {"max_tokens": 1},
    "trainer": {"training": {"rollout_s": 0.03}},
    "queue": {
        "generation": {"token_s": 0.06},
        "weights_via": "shared",
        "connections": 2,
        "inflight": 4 * BATCH,
        "max_staleness": 8,
    },
    "loading": {"generation": {"load_s": 1.5}},
    "straggler": {"training": {"rollout_s": 0.015, "lead_s": 0.03, "slow_rank": 1}, "groups": 2},
}
"""The settings of each bottleneck, by the rule that has to find it."""
