"""Tensors as they travel to the laptop: elements, or layouts."""

from __future__ import annotations

from typing import Any

import torch

from loom.tensors.sending.batches import Failure

Elements = tuple[str, tuple[int, ...], bytes]
Layout = tuple[str, tuple[int, ...], tuple[int, ...], bool]


def elements(value: Any) -> Elements | Failure:
    """Return a tensor's dtype, shape and bytes in row-major order; a failure as it is."""
    if isinstance(value, Failure):
        return value
    plain = value.detach().resolve_conj().resolve_neg().cpu()
    kind = _name(plain)
    if plain.dtype is torch.bfloat16:
        plain = plain.view(torch.int16)  # numpy has no bfloat16
    return kind, tuple(plain.shape), plain.numpy(force=True).tobytes()


def layout(value: Any) -> Layout | Failure:
    """Return a tensor's dtype, shape, strides and whether its gradient is wanted; a failure as it is."""
    if isinstance(value, Failure):
        return value
    return _name(value), tuple(value.shape), tuple(value.stride()), value.requires_grad


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
