"""`Judge`: makes rollouts of completions, by the reward functions and the advantages of a task."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from loom.rl.generation.completions import Completion
from loom.rl.prompts import Prompt
from loom.rl.rewards.pool import RewardPool
from loom.rl.rollouts import Rollout
from loom.rl.settings import RunSpec

Answer = tuple[str, Prompt, list[Completion]]
"""Id, prompt and completions."""


@dataclass
class Judged:
    """How some completions were judged."""

    failed: int
    """Completions without a reward."""
    failure: str = ""
    """Why the first of these has none."""
    rewards: list[float] = field(default_factory=list)
    means: dict[str, float] = field(default_factory=dict)
    """Of each reward function, over the completions of which it had an opinion; NaN for none."""
    flat: int = 0
    """Prompts whose completions are all equally good."""
    rollouts: list[Rollout] = field(default_factory=list)
    """The rewarded completions, without those that are filtered."""


class Judge:
    """Judges the completions of a run, for one thread."""

    def __init__(self, spec: RunSpec) -> None:
        self._task = spec.task
        self._filters = spec.filter_groups
        self._functions = list(spec.task.rewards())
        self._pool = RewardPool(self._functions, spec.reward_processes, spec.reward_timeout)
        self._checked = False
        self.names = [one.name for one in self._functions]

    def start(self) -> None:
        """Start the processes; return at once."""
        self._pool.start()

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    def check(self, prompt: Prompt) -> None:
        """Raise `WrongArguments` if a function wants what the first prompt does not have."""
        if not self._checked:
            for function in self._functions:
                function.check(prompt)
            self._checked = True

    def judge(self, answers: Sequence[Answer], weights: Sequence[float]) -> Judged:
        """Return the rewarded completions, as rollouts; those without a reward are counted."""
        found = self._pool.judge([prompt for _, prompt, _ in answers], [group for _, _, group in answers], weights)
        every = [one for group in found for one in group]
        judged = Judged(
            failed=sum(one.value is None for one in every),
            failure=next((one.failure for one in every if one.failure), ""),
        )
        for name in self.names:
            values = [one.parts[name] for one in every if name in one.parts]
            judged.means[name] = statistics.fmean(values) if values else math.nan
        kept = []
        for (id, _, group), rewards in zip(answers, found, strict=True):
            known = [(at, reward.value) for at, reward in enumerate(rewards) if reward.value is not None]
            if known:
                kept.append(([(f"{id}.{at}", group[at]) for at, _ in known], [value for _, value in known]))
        judged.rewards = [value for _, values in kept for value in values]
        advantages = self._task.advantages([values for _, values in kept])
        judged.flat = sum(not any(one) for one in advantages)
        filters = self._filters and judged.flat < len(kept)
        for (completions, values), own in zip(kept, advantages, strict=True):
            if not filters or any(own):
                judged.rollouts += map(_rollout, completions, values, own)
        return judged


def _rollout(named: tuple[str, Completion], reward: float, advantage: float) -> Rollout:
    id, completion = named
    return Rollout(
        id=id,
        prompt_tokens=list(completion.prompt_tokens),
        tokens=list(completion.tokens),
        logprobs=list(completion.logprobs),
        reward=reward,
        advantage=float(advantage),
        weights_step=completion.weights_step,
    )
