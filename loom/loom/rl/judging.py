"""`Judge`: makes rollouts of completions, by the reward functions and the advantages of a task."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from loom.rl.generation.completions import Completion
from loom.rl.prompts import Prompt
from loom.rl.rewards.pool import RewardPool
from loom.rl.rollouts import Rollout
from loom.rl.samples import Sample
from loom.rl.settings import RunSpec

Answer = tuple[str, Prompt, list[Sample]]
"""Id, prompt and answers to it."""


@dataclass
class Judged:
    """How some completions were judged."""

    failed: int
    """Completions without a reward."""
    failure: str = ""
    """Why the first of these has none."""
    rewards: list[float] = field(default_factory=list)
    means: dict[str, float] = field(default_factory=dict)
    """Of each reward function, over the completions of which it had an opinion, if any."""
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
            if values:
                judged.means[name] = statistics.fmean(values)
        kept = []
        for (id, _, group), rewards in zip(answers, found, strict=True):
            known = [(at, reward.value) for at, reward in enumerate(rewards) if reward.value is not None]
            if known:
                kept.append(([(f"{id}.{at}", group[at]) for at, _ in known], [value for _, value in known]))
        judged.rewards = [value for _, values in kept for value in values]
        advantages = self._task.advantages([values for _, values in kept])
        judged.flat = sum(not any(one) for one in advantages)
        filters = self._filters and judged.flat < len(kept)
        for (samples, values), own in zip(kept, advantages, strict=True):
            if not filters or any(own):
                for (id, sample), value, advantage in zip(samples, values, own, strict=True):
                    judged.rollouts += rollouts_of(id, sample.turns, value, float(advantage))
        return judged


def rollouts_of(id: str, turns: Sequence[Completion], reward: float, advantage: float) -> list[Rollout]:
    """Return what is trained on of an answer.

    A turn whose prompt begins with all tokens before it goes on in the same rollout, in which the tokens between
    turns are masked. Another turn, as after a chat template that drops something, begins a rollout of its own.
    """
    found: list[Rollout] = []
    for turn in turns:
        prompt, tokens = list(turn.prompt_tokens), list(turn.tokens)
        ones, logprobs = [True] * len(tokens), list(turn.logprobs)
        before = found[-1].prompt_tokens + found[-1].tokens if found else None
        if before is not None and prompt[: len(before)] == before:
            last, between = found.pop(), prompt[len(before) :]
            found.append(
                replace(
                    last,
                    tokens=last.tokens + between + tokens,
                    logprobs=last.logprobs + [0.0] * len(between) + logprobs,
                    mask=last.mask + [False] * len(between) + ones,
                    weights_step=min(last.weights_step, turn.weights_step),
                )
            )
        else:
            name = f"{id}.{len(found)}" if found else id
            found.append(Rollout(name, prompt, tokens, logprobs, reward, advantage, turn.weights_step, ones))
    return found
