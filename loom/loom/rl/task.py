"""`Task` and `Tokenizer`: what a user brings besides a model, in plain Python."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """A tokenizer. Its ids are smaller than `size`."""

    eos: int
    """The token that ends a completion."""
    pad: int
    """The token that fills shorter texts of a batch up, on the left; no text has it."""
    size: int
    """Number of tokens."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without `eos`."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens, without `eos` and `pad`."""


class Task:
    """A task with a reward that a program can compute. A subclass overrides at least `prompts` and `reward`."""

    def prompts(self, step: int, n: int) -> list[str]:
        """Return the prompts of a step. They depend only on the step, so that a step can be made again."""
        raise NotImplementedError(f"{type(self).__name__} has to give prompts(self, step, n)")

    def reward(self, prompt: str, completion: str) -> float:
        """Return how good a completion is; more is better."""
        raise NotImplementedError(f"{type(self).__name__} has to give reward(self, prompt, completion)")

    def advantages(self, rewards: list[list[float]]) -> list[list[float]]:
        """Return how much better each completion is than the others of its prompt.

        Args:
            rewards: of the completions of each prompt.

        Returns:
            For each reward its distance from the mean of its prompt's, in standard deviations of these, as in GRPO
            (https://arxiv.org/abs/2402.03300); zeros if all completions of a prompt are equally good.
        """
        return [_normalized(group) for group in rewards]


def _normalized(rewards: list[float]) -> list[float]:
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    if deviation < 1e-6:
        return [0.0] * len(rewards)
    return [(reward - mean) / deviation for reward in rewards]
