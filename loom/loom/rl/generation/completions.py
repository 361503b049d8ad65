"""`Completion`: what a model wrote after a prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Completion:
    """A text that a model wrote after a prompt."""

    prompt: str
    text: str
    """What was written, without the token that ended it."""
    tokens: list[int]
    """What was written, with the token that ended it, if one did."""
    prompt_tokens: list[int]
    logprobs: list[float]
    """Of each token, its logarithmic probability in the distribution from which it was drawn.

    At temperature 0 the most probable token is taken, and this is its probability at temperature 1.
    """
    truncated: bool
    """Whether the text was cut at ``max_tokens``, before the model ended it."""
    weights_step: int
    """The step of the weights with which the completion was begun. Later tokens may be of newer weights."""
