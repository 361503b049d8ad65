"""Sparse patches: the elements in which tensors differ from those that a server has, bit by bit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loom.rl.generation.tensor_files import bits_of

if TYPE_CHECKING:
    from torch import Tensor

INDEX = 4
"""Bytes of an index."""
LARGEST = 1 << 31
"""Elements of the largest tensor that such indices reach."""


@dataclass(frozen=True)
class Patch:
    """New elements of a tensor."""

    indices: Tensor | None
    """Their places in the flat tensor, as ``int32``; None for all places."""
    values: Tensor

    def parts(self) -> Iterator[Tensor]:
        """Give the indices, and then the values."""
        import torch

        yield torch.arange(len(self.values), dtype=torch.int32) if self.indices is None else self.indices
        yield self.values


Patches = Mapping[str, Patch]
"""The patches of tensors, by their names. Tensors without one are the same."""


def changes_of(old: Mapping[str, Tensor], new: Mapping[str, Tensor], most: float) -> Patches | None:
    """Return the patches that make old tensors the new ones.

    Args:
        old: contiguous tensors in the CPU's memory, as the new ones.
        most: bytes of all patches.

    Returns:
        None if they have more bytes than so, or names, types or shapes differ.
    """
    kinds, others = ({name: (one.dtype, one.shape) for name, one in given.items()} for given in (old, new))
    if kinds != others:
        return None
    found: dict[str, Patch] = {}
    for name, tensor in new.items():
        if tensor is old[name]:
            continue
        changed = bits_of(tensor) != bits_of(old[name])
        count = int(changed.count_nonzero())
        most -= count * (INDEX + tensor.itemsize)
        if most < 0 or (count and tensor.numel() > LARGEST):
            return None
        if count:
            indices = changed.nonzero().reshape(-1)
            found[name] = Patch(indices.int(), tensor.reshape(-1)[indices])
    return found


def all_of(tensors: Mapping[str, Tensor]) -> Patches:
    """Return patches that have every element."""
    return {name: Patch(None, one.reshape(-1)) for name, one in tensors.items() if one.numel()}


class Comparisons:
    """The comparisons of one order: servers that have the same weights share one."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, float], asyncio.Task[Patches | None]] = {}

    async def changes_of(self, old: Mapping[str, Tensor], new: Mapping[str, Tensor], most: float) -> Patches | None:
        """Return what `changes_of` does. The caller keeps ``old`` until the order ends."""
        key = id(old), most
        if key not in self._found:
            self._found[key] = asyncio.ensure_future(asyncio.to_thread(changes_of, old, new, most))
        return await self._found[key]
