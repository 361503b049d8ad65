"""Functions of batches of images, of which each process has some."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from loom.tensors.backend.parts import cut, has_empty_part, own_part, settled
from loom.tensors.metas import contiguous_strides

Call = Callable[[Sequence[Any], Sequence[Any]], Any]

OF_IMAGES = re.compile("conv|pool|upsample|interpolate")
"""Functions of batches of images, by their names. `DTensor` cuts images, not batches (torch 2.13)."""


def by_batch(function: str, call: Call, tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
    """Return what a function of images gives if each process has some of them; None if they are cut otherwise."""
    backward = "convolution_backward" in function
    batches = tensors[:2] if backward else tensors[:1] if "conv" in function else tensors
    others = tensors[len(batches) :]
    like = next((each for each in batches if isinstance(each, DTensor)), None)
    dimensions = others[-1 if backward else 0].dim() if others else 4
    if (
        like is None
        or "nn.grad" in function
        or any(isinstance(each, DTensor) for each in others)
        or any(each.dim() != dimensions for each in batches)
        or any(placement not in (Shard(0), Replicate()) for placement in like.placements)
        or any(isinstance(each, DTensor) and each.placements != like.placements for each in batches)
        or any(map(has_empty_part, batches))
    ):
        return None
    mesh, placements = like.device_mesh, like.placements
    parts = [own_part(each if isinstance(each, DTensor) else cut(each, mesh, placements)) for each in batches]
    sums = [Partial() if isinstance(each, Shard) else each for each in placements]

    def of_all(part: Any, how: Sequence[Placement]) -> Any:
        if part is None:
            return None
        shape = part.shape if how is sums else (like.shape[0], *part.shape[1:])
        strides = contiguous_strides(tuple(shape))
        return DTensor.from_local(
            part.contiguous(), mesh, how, run_check=False, shape=torch.Size(shape), stride=strides
        )

    found = call([*parts, *others], numbers)
    if not isinstance(found, (tuple, list)):
        return of_all(found, placements)
    return settled([of_all(part, sums if backward and k else placements) for k, part in enumerate(found)])
