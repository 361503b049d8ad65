"""`Completion`: what a model wrote after a prompt; `RequestLimits`: the bounds of a request for completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from loom.errors import WrongArguments

MAX_TEMPERATURE = 100.0
MAX_STOPS = 16
"""Texts that may end a completion."""

TextOrTokens = str | Sequence[int]
"""A text, or its tokens."""


@dataclass(frozen=True)
class Sampling:
    """The sampling of completions' tokens."""

    max_tokens: int
    temperature: float = 1.0
    """0 takes the most probable token."""
    seed: int | None = None
    """With the index of the completion it decides what is drawn."""
    top_p: float = 1.0
    """The most probable tokens that together are as probable as this are drawn from."""
    top_k: int = 0
    """So many of the most probable tokens are drawn from; 0 or -1 for all."""
    min_p: float = 0.0
    """Tokens are drawn from that are at least as probable as this share of the most probable one."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, which has none of them."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """Fields that only some engines know, by their names there."""

    def with_fields(self, values: Mapping[str, Any]) -> Sampling:
        """Return a sampling with some fields changed. Fields without a name of their own here go into `others`."""
        own = {one.name for one in fields(self)} - {"others"}
        known = {name: value for name, value in values.items() if name in own}
        if "stop" in known:
            stop = known["stop"] or ()
            known["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        others = {name: value for name, value in values.items() if name not in own}
        return replace(self, **known, others={**self.others, **others})


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
        _check_share("top_p", sampling.top_p, above=0.0)
        _check_share("min_p", sampling.min_p)
        if isinstance(sampling.top_k, bool) or not isinstance(sampling.top_k, int) or sampling.top_k < -1:
            raise WrongArguments(f"top_k is a whole number from 1, or 0 or -1 for all, not {sampling.top_k!r:.40}")
        if len(sampling.stop) > MAX_STOPS or not all(isinstance(one, str) and one for one in sampling.stop):
            raise WrongArguments(f"stop is a text, or up to {MAX_STOPS} of them, none empty")
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


def _check_share(name: str, value: float, above: float = -1.0) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1 or value <= above:
        raise WrongArguments(f"{name} is a number {'above' if above == 0 else 'from'} 0 to 1, not {value!r:.40}")


@dataclass(frozen=True)
class WeightsSpan:
    """The tokens of a completion that weights of one step drew."""

    step: int
    start: int
    end: int
    """The first token after them."""


@dataclass(frozen=True)
class Completion:
    """A text that a model wrote after a prompt."""

    prompt: TextOrTokens
    """The prompt as it was requested."""
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
    spans: tuple[WeightsSpan, ...] = ()
    """The steps of the weights of all tokens, if the engine says so."""
