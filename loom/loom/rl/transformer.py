"""`SmallTransformer`: a decoder-only transformer with a key-value cache, small enough to learn on a CPU.

A module of its own, because it needs torch, and a program that names the task may lack it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

Cache = tuple[tuple[Tensor, Tensor], ...]
"""Keys and values of each layer, each of shape [batch, heads, positions, head size].

The key of a padding position is zero, which no other key is: so a mask needs no tensor of its own.
"""


class SmallTransformer(nn.Module):  # type: ignore[misc]
    """A transformer over characters, with learned positions and padding on the left.

    Args:
        size: number of tokens that it knows.
        pad: the token that it leaves out.
        width: size of the vector of a position; a multiple of ``heads``.
        longest: positions that a text may have at most, without padding.
    """

    def __init__(
        self, size: int, pad: int, *, width: int = 64, heads: int = 4, layers: int = 2, longest: int = 32
    ) -> None:
        super().__init__()
        self.pad = pad
        self.longest = longest
        self.token = nn.Embedding(size, width)
        self.position = nn.Embedding(longest, width)
        self.layers = nn.ModuleList(_Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, size, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)  # the first policy is nearly uniform
        nn.init.normal_(self.token.weight, std=0.5)
        nn.init.normal_(self.position.weight, std=0.5)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """Return logits [batch, new positions, size] and the cache, which has the new positions, too.

        Args:
            tokens: the new positions, [batch, new positions], padded on the left.
            cache: the positions before them; None if there are none.
        """
        new = tokens != self.pad
        seen = new if cache is None else torch.cat((_seen(cache), new), dim=1)
        places = (seen.long().cumsum(1) - 1)[:, -tokens.shape[1] :].clamp(0, self.longest - 1)
        mask = _causal(seen, tokens.shape[1])
        x = self.token(tokens) + self.position(places)
        after = []
        for number, layer in enumerate(self.layers):
            x, kept = layer(x, new, mask, None if cache is None else cache[number])
            after.append(kept)
        return self.head(self.norm(x)), tuple(after)


class _Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList((nn.LayerNorm(width), nn.LayerNorm(width)))
        self.attention = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(
        self, x: Tensor, new: Tensor, mask: Tensor, before: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, positions, width = x.shape
        parts = self.attention(self.norms[0](x)).view(batch, positions, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        key = key * new[:, None, :, None]
        if before is not None:
            key, value = torch.cat((before[0], key), dim=2), torch.cat((before[1], value), dim=2)
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, positions, width))
        return x + self.mlp(self.norms[1](x)), (key, value)


def _seen(cache: Cache) -> Tensor:
    """Return which positions of a cache are no padding, [batch, positions]."""
    return cache[0][0].detach().abs().amax(dim=(1, 3)) > 0


def _causal(seen: Tensor, new: int) -> Tensor:
    """Return which positions each new position sees, [batch, 1, new, all]: earlier ones, and always itself."""
    count = seen.shape[1]
    earlier = torch.ones(count, count, dtype=torch.bool, device=seen.device).tril()[-new:]
    itself = torch.eye(count, dtype=torch.bool, device=seen.device)[-new:]
    return ((earlier & seen[:, None, :]) | itself)[:, None]
