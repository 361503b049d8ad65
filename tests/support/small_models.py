"""A small attention model and a tokenizer of letters, for tests of generation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Cache = tuple[tuple[Tensor, Tensor], ...]

LETTERS = "abcdefghijklmnop"


class Letters:
    """A tokenizer with a token for each letter."""

    pad, eos = 0, 1
    size = 2 + len(LETTERS)

    def encode(self, text: str) -> list[int]:
        return [2 + LETTERS.index(letter) for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(LETTERS[token - 2] for token in tokens if token > 1)


class SmallModel(nn.Module):
    """Two layers of attention and learned positions; random weights, so that every token depends on all before."""

    longest = 96

    def __init__(self, seed: int = 0, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.heads = heads
        self.token = nn.Embedding(Letters.size, width)
        self.place = nn.Embedding(self.longest, width)
        self.attention = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.head = nn.Linear(width, Letters.size)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        new = tokens != Letters.pad
        before = tokens[:, :0].bool() if cache is None else cache[0][0].abs().amax(dim=(1, 3)) > 0
        seen = torch.cat((before, new), dim=1)
        count, total = tokens.shape[1], seen.shape[1]
        places = (seen.long().cumsum(1) - 1)[:, -count:].clamp(min=0)
        causal = torch.ones(total, total, dtype=torch.bool).tril()[-count:]
        itself = torch.eye(total, dtype=torch.bool)[-count:]
        mask = ((causal & seen[:, None]) | itself)[:, None]
        x = self.token(tokens) + self.place(places)
        after = []
        for number, layer in enumerate(self.attention):
            parts = layer(x).view(*x.shape[:2], 4, self.heads, -1).permute(2, 0, 3, 1, 4)
            query, key, value, gate = parts
            key = key * new[:, None, :, None]
            if cache is not None:
                key, value = torch.cat((cache[number][0], key), 2), torch.cat((cache[number][1], value), 2)
            after.append((key, value))
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask) * gate.tanh()
            x = x + mixed.transpose(1, 2).reshape(x.shape)
        return 3 * self.head(x), tuple(after)
