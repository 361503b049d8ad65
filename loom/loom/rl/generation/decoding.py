"""`DecodingBatch`: rows that a model completes together, with their cache. Rows join and leave between steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_tensor

from loom.rl.generation.completions import Sampling

Cache = tuple[tuple[Tensor, Tensor], ...]
"""Keys and values of each layer, [rows, heads, positions, head size]. The key of a padding position is zero."""


class TextTokenizer(Protocol):
    """A tokenizer: text into tokens and back."""

    eos: int
    pad: int
    size: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


@dataclass(eq=False)
class Row:
    """A completion that is being generated."""

    prompt_tokens: list[int]
    sampling: Sampling
    random: random.Random
    stops: Callable[[Sequence[int]], bool] | None = None
    """Whether the text of some tokens has a text that ends it."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weights_step: int = -1
    """The step of the weights with which the row joined; -1 before."""
    ended: bool = False
    """True if the model ended the text, by its last token."""
    stopped: bool = False
    """True if the text has a text that ends it."""
    error: str = ""
    cancelled: bool = False

    @property
    def done(self) -> bool:
        over = self.ended or self.stopped or self.cancelled or bool(self.error)
        return over or len(self.tokens) >= self.sampling.max_tokens

    @property
    def cached(self) -> int:
        """The number of this row's positions in the cache, without padding: all but the last token."""
        return len(self.prompt_tokens) + len(self.tokens) - 1


class DecodingBatch:
    """Rows that are completed together.

    Args:
        model: called as ``model(tokens, cache)``; it returns logits [rows, positions, size] and the longer cache.
            Tokens are padded on the left. A padding position has zero keys, by which the model knows it later.
        eos: the token with which a text ends.
        pad: the token of padding. A row that draws it ends as well.
    """

    def __init__(self, model: torch.nn.Module, eos: int, pad: int) -> None:
        self.rows: list[Row] = []
        self._model = model
        self._eos, self._pad = eos, pad
        self._cache: Cache = ()

    def step(self, joining: Sequence[Row] = ()) -> list[Row]:
        """Draw one token for every row, those that join included; return the rows that drew, in their order.

        Rows that are done are not in the batch any more afterwards.
        """
        with torch.inference_mode():
            return self._step(joining)

    def _step(self, joining: Sequence[Row]) -> list[Row]:
        self._keep([not row.done for row in self.rows])
        logits: list[Tensor] = []
        if self.rows:
            last = self._tensor([[row.tokens[-1]] for row in self.rows])
            found, self._cache = self._model(last, self._cache)
            logits.append(found[:, -1])
        if joining:
            found, cache = self._model(self._padded([row.prompt_tokens for row in joining]), None)
            logits.append(found[:, -1])
            self._cache = _joined(self._cache, cache) if self.rows else cache
            self.rows.extend(joining)
        if not self.rows:
            return []
        self._draw(torch.cat(logits))
        drew = self.rows[:]
        self._keep([not row.done for row in drew])
        return drew

    def clear(self) -> None:
        """Drop all rows."""
        self.rows, self._cache = [], ()

    def _draw(self, logits: Tensor) -> None:
        samplings = [row.sampling for row in self.rows]
        drawn = [row.random.random() for row in self.rows]
        for row, token, logprob in zip(self.rows, *sample(logits, samplings, drawn), strict=True):
            if logprob != logprob or logprob == float("-inf"):
                row.error = "the model's logits are not finite"
                continue
            row.logprobs.append(logprob)  # first: readers go by the number of tokens
            row.tokens.append(token)
            row.ended = token in (self._eos, self._pad)
            row.stopped = not row.ended and row.stops is not None and row.stops(row.tokens)

    def _keep(self, chosen: list[bool]) -> None:
        """Take the other rows out, and padding that all rows have in common."""
        if not all(chosen):
            kept = [number for number, keep in enumerate(chosen) if keep]
            self.rows = [self.rows[number] for number in kept]
            index = self._tensor(kept)
            self._cache = tuple((key[index], value[index]) for key, value in self._cache) if kept else ()
        if self.rows:
            longest = max(row.cached for row in self.rows)
            if self._cache and self._cache[0][0].shape[2] > longest:
                self._cache = tuple((key[:, :, -longest:], value[:, :, -longest:]) for key, value in self._cache)

    def _padded(self, prompts: list[list[int]]) -> Tensor:
        longest = max(map(len, prompts))
        return self._tensor([[self._pad] * (longest - len(prompt)) + prompt for prompt in prompts])

    def _tensor(self, values: Any) -> Tensor:
        device = next((tensor.device for tensor in self._model.parameters()), torch.device("cpu"))
        return torch.tensor(values, dtype=torch.long, device=device)


def sample(logits: Tensor, samplings: Sequence[Sampling], drawn: list[float]) -> tuple[list[int], list[float]]:
    """Return the token of each row and its logarithmic probability.

    Args:
        logits: [rows, size].
        samplings: of each row. The temperature comes first, then ``top_k``, ``top_p`` and ``min_p``, as elsewhere;
            the probabilities of the tokens that these leave have the sum 1.
        drawn: a number from 0 to 1 for each row, which decides its token.
    """
    heat = _column([one.temperature for one in samplings], logits)
    logprobs = (logits.double() / torch.where(heat == 0, 1.0, heat)).log_softmax(-1)
    if any(one.top_k > 0 or one.top_p < 1 or one.min_p > 0 for one in samplings):
        logprobs = torch.where(heat == 0, logprobs, _narrowed(logprobs, samplings))
    reached = logprobs.exp().cumsum(-1)
    aim = _column(drawn, logits) * reached[:, -1:]
    warm = torch.searchsorted(reached, aim, right=True).clamp(max=logits.shape[-1] - 1)
    tokens = torch.where(heat == 0, logprobs.argmax(-1, keepdim=True), warm)
    return tokens[:, 0].tolist(), logprobs.gather(-1, tokens)[:, 0].tolist()


def _narrowed(logprobs: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return the logarithmic probabilities among the tokens that each row's sampling leaves."""
    size = logprobs.shape[-1]
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    most = torch.tensor([one.top_k if one.top_k > 0 else size for one in samplings], device=logprobs.device)[
        :, None
    ]
    left = torch.arange(size, device=logprobs.device)[None] < most
    share = ordered.masked_fill(~left, -torch.inf).log_softmax(-1).exp()
    left &= share.cumsum(-1) - share < _column([one.top_p for one in samplings], logprobs)
    left &= share >= share[:, :1] * _column([one.min_p for one in samplings], logprobs)
    left[:, 0] = True
    kept = torch.zeros_like(left).scatter(-1, order, left)
    return logprobs.masked_fill(~kept, -torch.inf).log_softmax(-1)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _joined(one: Cache, other: Cache) -> Cache:
    """Return the caches of two groups of rows as one, the shorter one padded on the left."""
    longest = max(cache[0][0].shape[2] for cache in (one, other))

    def both(first: Tensor, second: Tensor) -> Tensor:
        return torch.cat([pad_tensor(part, (0, 0, longest - part.shape[2], 0)) for part in (first, second)])

    layers = zip(one, other, strict=True)
    return tuple((both(key, new_key), both(value, new_value)) for (key, value), (new_key, new_value) in layers)
