"""`Task` and `Tokenizer`: what a user brings besides a model, in plain Python."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from loom.errors import WrongArguments
from loom.rl.prompts import Message, Prompt
from loom.rl.rewards.functions import RewardFunction

if TYPE_CHECKING:
    from loom.rl.generation.completions import Completion


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


class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer that also knows how a chat is written."""

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of messages, and of the beginning of the next answer."""


def prompt_tokens(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a prompt.

    Raises:
        WrongArguments: it is a chat, and the tokenizer has no template for one.
    """
    if isinstance(prompt.content, str):
        return list(tokenizer.encode(prompt.content))
    chat = getattr(tokenizer, "chat", None)
    if chat is None:
        raise WrongArguments("the prompts are messages, and the tokenizer has no chat template: give texts")
    return list(chat(prompt.content))


class RolloutPolicy(Protocol):
    """What `Task.rollout` draws the turns of one answer from."""

    async def complete(
        self, given: str | Sequence[Message] | Sequence[int], *, max_tokens: int | None = None
    ) -> Completion:
        """Return what the model writes after a text, the messages of a chat, or tokens.

        Args:
            given: everything before it, with the earlier turns.
            max_tokens: tokens of this turn; None for those of the run.

        Raises:
            WrongArguments: it is a chat, and the tokenizer has no template for one.
        """


class Task:
    """A task with a reward that a program can compute. A subclass overrides at least `prompts` and `reward`."""

    def prompts(self, step: int, n: int) -> Sequence[str | Sequence[Message] | Prompt]:
        """Return the prompts of a step. They depend only on its arguments, so that a step can be made again."""
        raise NotImplementedError(f"{type(self).__name__} has to give prompts(self, step, n)")

    def reward(self, prompt: str, completion: str) -> float:
        """Return how good a completion is; more is better. It is called in a process of its own.

        A completion for which this raises has no reward, and is not trained on.
        """
        raise NotImplementedError(f"{type(self).__name__} has to give reward(self, prompt, completion)")

    async def rollout(self, prompt: Prompt, policy: RolloutPolicy) -> str | Sequence[Message]:
        """Answer a prompt, in one turn or several; return what the reward functions get as the completion.

        A task that overrides this may use tools between turns, and end when it likes. It runs in the orchestrator's
        process, beside all others of a step: it awaits what takes long. The turns are trained on, and not what
        stands between them. An answer for which it raises has no reward.
        """
        return (await policy.complete(prompt.content)).text

    def rewards(self) -> Sequence[RewardFunction]:
        """Return the functions whose numbers are added up: by default `reward` alone."""
        return [RewardFunction("reward", self.reward, plain=True)]

    def weights(self) -> Sequence[float]:
        """Return the first weight of each of these functions, which ``reward_weights`` changes."""
        return [1.0] * len(self.rewards())

    def evaluation(self) -> Sequence[str | Sequence[Message] | Prompt]:
        """Return the prompts of an evaluation, which are not trained on."""
        return ()

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
