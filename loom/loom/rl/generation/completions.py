"""`Completion`: what a model wrote after a prompt; `RequestLimits`: the bounds of a request for completions."""

from __future__ import annotations

from dataclasses import dataclass

from loom.errors import WrongArguments

MAX_TEMPERATURE = 100.0


@dataclass(frozen=True)
class Sampling:
    """The sampling of completions' tokens."""

    max_tokens: int
    temperature: float = 1.0
    """0 takes the most probable token."""
    seed: int | None = None
    """With the index of the completion it decides what is drawn."""


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request, and of an engine at a time."""

    concurrency: int = 64
    """Completions that are generated at the same time."""
    queue: int = 4096
    """Completions that may wait for that."""
    max_prompt: int = 4096
    """Tokens of a prompt."""
    max_tokens: int = 4096
    """Tokens of a completion."""
    max_n: int = 128
    """Completions of one prompt."""
    max_completions: int = 4096
    """Completions of a request: prompts times ``n``."""

    def checked(self, sampling: Sampling) -> Sampling:
        """Return a sampling that is within the limits; raise `WrongArguments` for another one."""
        _check_whole("max_tokens", sampling.max_tokens, self.max_tokens)
        heat = sampling.temperature
        if isinstance(heat, bool) or not isinstance(heat, int | float) or not 0 <= heat <= MAX_TEMPERATURE:
            raise WrongArguments(f"temperature is a number from 0 to {MAX_TEMPERATURE:g}, not {heat!r:.40}")
        if sampling.seed is not None and (isinstance(sampling.seed, bool) or not isinstance(sampling.seed, int)):
            raise WrongArguments(f"seed is a whole number, not {sampling.seed!r:.40}")
        return sampling

    def check_count(self, prompts: int, n: int) -> None:
        """Raise `WrongArguments` if a request asks for no completion, or for too many."""
        _check_whole("n", n, self.max_n)
        if not 1 <= prompts * n <= self.max_completions:
            raise WrongArguments(
                f"a request has from 1 to {self.max_completions} completions, and {prompts} prompts with n={n} "
                f"are {prompts * n}"
            )

    def check_prompt(self, tokens: int) -> None:
        """Raise `WrongArguments` if a prompt is empty or too long."""
        if not 1 <= tokens <= self.max_prompt:
            raise WrongArguments(f"a prompt has from 1 to {self.max_prompt} tokens, and this one {tokens}")


def _check_whole(name: str, value: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise WrongArguments(f"{name} is a whole number from 1 to {most}, not {value!r:.40}")


@dataclass(frozen=True)
class Completion:
    """A text that a model wrote after a prompt."""

    prompt: str
    text: str
    """The tokens, without the one that ended the text."""
    tokens: list[int]
    """The tokens, with the one that ended the text, if one did."""
    prompt_tokens: list[int]
    logprobs: list[float]
    """Of each token, its logarithmic probability in the distribution from which it was drawn.

    At temperature 0 the most probable token is taken, and this is its probability at temperature 1.
    """
    truncated: bool
    """True if the text was cut at ``max_tokens``, before the model ended it."""
    weights_step: int
    """The step of the weights with which the completion was begun. Later tokens may be of newer weights."""
