"""Placements of a tensor on the processes of a mesh: `Shard` and `Replicate`, in torch's names, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from loom.tensors.layouts import wrapped

WHOLE = -1
"""On the wire: each process has all of it. Any other number is the dimension that is cut."""


@dataclass(frozen=True)
class Shard:
    """Each process of a dimension of the mesh has a part of the tensor.

    Args:
        dim: the tensor's dimension that is cut, as `torch.chunk` cuts it.
    """

    dim: int

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim})"


@dataclass(frozen=True)
class Replicate:
    """Each process of a dimension of the mesh has all of the tensor."""

    def __repr__(self) -> str:
        return "Replicate()"


Placement = Shard | Replicate


def spread(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the dimensions of a mesh over which tensors can be spread: those of more than one process."""
    return {name: size for name, size in sizes.items() if size > 1}


def packed(placements: Sequence[Any], sizes: Mapping[str, int], dimensions: int) -> tuple[int, ...]:
    """Return placements as they travel, one for each dimension over which tensors can be spread.

    Args:
        placements: of this module, or torch's own; one for each dimension of the mesh, or for each of more than one
            process.
        sizes: the mesh's.
        dimensions: how many the tensor has.

    Raises:
        ValueError: there are more or fewer placements than the mesh has dimensions.
        TypeError: one is no placement, or one of partial sums, which only operations give.
        IndexError: the tensor has no such dimension.
    """
    given = list(placements) if isinstance(placements, Sequence) else [placements]
    wide = spread(sizes)
    if len(given) == len(sizes):
        given = [each for each, size in zip(given, sizes.values(), strict=True) if size > 1]
    elif len(given) != len(wide) and wide:
        raise ValueError(
            f"`placements` must have the same length as `device_mesh.ndim`! Found placements length: {len(given)}, "
            f"and device_mesh.ndim: {len(wide)}. The mesh is {dict(sizes)}"
        )
    found = tuple(_packed(each, dimensions) for each in given)
    return found if wide else ()


def unpacked(placements: Sequence[int]) -> tuple[Placement, ...]:
    """Return placements that have travelled."""
    return tuple(Replicate() if each == WHOLE else Shard(each) for each in placements)


def largest_part(shape: Sequence[int], placements: Sequence[int], sizes: Mapping[str, int]) -> int:
    """Return the most elements that a process has of a tensor."""
    part = list(shape)
    for dimension, processes in zip(placements, spread(sizes).values(), strict=True):
        if dimension != WHOLE:
            part[dimension] = -(-part[dimension] // processes)
    return prod(part)


def _packed(placement: Any, dimensions: int) -> int:
    kind = type(placement).__name__
    if kind == "Replicate":
        return WHOLE
    if kind == "Shard":
        try:
            return wrapped(int(placement.dim), dimensions)
        except IndexError:
            raise IndexError(f"{placement!r} is out of range: the tensor has {dimensions} dimensions") from None
    hint = ": only operations give partial sums" if kind == "Partial" else ""
    raise TypeError(f"a placement is Shard(dim) or Replicate(), not {placement!r}{hint}")
