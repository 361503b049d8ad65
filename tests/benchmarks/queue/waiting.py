"""A model and a tokenizer that wait, and hardly use the processor."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

SIZE = 8


class WaitingTokenizer:
    """A tokenizer whose decoding waits, as a slow one would compute."""

    pad, eos, size = 0, 1, SIZE

    def __init__(self, decode_s: float) -> None:
        self._decode_s = decode_s

    def encode(self, text: str) -> list[int]:
        return [2 + ord(letter) % (SIZE - 2) for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        time.sleep(self._decode_s)
        return "x" * len(tokens)


class WaitingModel(nn.Module):
    """A model that never ends a text, and waits in each step."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))
        self._step_s = step_s

    def forward(self, tokens: torch.Tensor, cache: Any = None) -> Any:
        time.sleep(self._step_s)
        keys = (tokens != 0).float()[:, None, :, None]
        if cache is not None:
            keys = torch.cat((cache[0][0], keys), dim=2)
        logits = self.weight.expand(*tokens.shape, SIZE).clone()
        logits[..., :2] = float("-inf")
        return logits, ((keys, keys),)
