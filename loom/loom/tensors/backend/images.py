"""Functions of batches of images, of which each process has some."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from loom.tensors.backend.parts import everywhere, has_empty_part, own_part, settled
from loom.tensors.metas import contiguous_strides

Call = Callable[[Sequence[Any], Sequence[Any]], Any]

OF_IMAGES = re.compile("conv|pool|upsample|interpolate")
"""Functions of batches of images, by their names. `DTensor` cuts images, not batches (torch 2.13)."""


def by_batch(function: str, call: Call, tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
    """Return what a function of images gives if each process has some of them; None if they are cut otherwise."""
    like, *others = tensors
    if (
        not isinstance(like, DTensor)
        or any(isinstance(each, DTensor) for each in others)
        or (others and "conv" not in function)
        or like.dim() != (others[0].dim() if others else 4)
        or any(placement not in (Shard(0), Replicate()) for placement in like.placements)
        or has_empty_part(like)
    ):
        return None
    mesh, placements = like.device_mesh, like.placements
    sums = [Partial() if isinstance(each, Shard) else each for each in placements]
    # Each process has the gradients of weights by its own images: those are added up.
    weights = [everywhere(each, mesh).to_local(grad_placements=sums) for each in others]

    def of_all(part: Any) -> Any:
        shape = torch.Size((like.shape[0], *part.shape[1:]))
        return DTensor.from_local(
            part.contiguous(),
            mesh,
            placements,
            run_check=False,
            shape=shape,
            stride=contiguous_strides(tuple(shape)),
        )

    found = call([own_part(like), *weights], numbers)
    return settled([of_all(each) for each in found] if isinstance(found, (tuple, list)) else of_all(found))
