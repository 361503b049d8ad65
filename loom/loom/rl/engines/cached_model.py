"""`CachedModel`: a causal model of transformers in the form in which Loom's own engine calls models."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from loom.rl.generation.decoding import Cache
from loom.rl.models.causal import weights_of


class CachedModel(nn.Module):  # type: ignore[misc, unused-ignore]
    """A model of transformers with keys and values of its layers, padded on the left.

    Args:
        model: one with attention in each layer.
        pad: the token of padding.
    """

    def __init__(self, model: Any, pad: int) -> None:
        super().__init__()
        self.model = model
        self.longest: int | None = getattr(model.config, "max_position_embeddings", None)
        self._pad = pad
        known = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in known else "past_key_values"  # before transformers 5.24

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the weights under the names that the model's folder has for them."""
        return weights_of(self.model)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """Return logits [rows, positions, size], and the cache of all positions; see `DecodingBatch`."""
        from transformers import DynamicCache

        new = tokens != self._pad
        if cache is None:
            seen, before = new, DynamicCache()
        else:
            seen = torch.cat((cache[0][0].abs().amax(dim=(1, 3)) > 0, new), dim=1)
            before = DynamicCache()
            for layer, (key, value) in enumerate(cache):
                before.update(key, value, layer)
        found = self.model(
            input_ids=tokens,
            attention_mask=seen.long(),
            position_ids=(seen.long().cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :],
            use_cache=True,
            **{self._cache_argument: before},
        )
        mask = seen[:, None, :, None]
        return found.logits, tuple((layer.keys * mask, layer.values) for layer in before.layers)
