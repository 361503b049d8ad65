"""How tensors are spread over the processes of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loom.tensors.layouts import Meta
from loom.tensors.op import Op, method, properties
from loom.tensors.placements import WHOLE, Placement, packed, spread
from loom.tensors.tensor import Tensor

LARGE = 1 << 32
"""Multiplications from which on a product of matrices is computed by all processes, each some rows."""


def _own_memory(metas: Sequence[Meta], numbers: Any, static: Any) -> Meta:
    return Meta(metas[0].shape, metas[0].dtype)


_spread = Op(".spread", _own_memory)
_rows = Op(".rows", _own_memory)


@method
def redistribute(self: Tensor, placements: Sequence[Any]) -> Tensor:
    """Return the same tensor, spread over the processes in another way.

    Args:
        placements: `loom.tensors.Shard` or `loom.tensors.Replicate`, one for each dimension of the mesh.

    Raises:
        ValueError: there are more or fewer placements than the mesh has dimensions.
    """
    how = packed(placements, self._home.mesh, self.dim())
    if any(each != WHOLE for each in how):
        self._home._join()
    return _spread((self,), (), (("placements", how),))


@method
def full_tensor(self: Tensor) -> Tensor:
    """Return the same tensor, all of it in each process."""
    return _spread((self,), (), (("placements", (WHOLE,) * len(spread(self._home.mesh))),))


def _placements(self: Tensor) -> tuple[Placement, ...]:
    """How it is spread over the processes, one for each dimension of the mesh. This asks the cluster."""
    return self._home.placements_of(self)  # type: ignore[no-any-return]


properties["placements"] = property(_placements)


def shared(left: Tensor, right: Tensor) -> Tensor:
    """Return the left factor of a product, its rows spread over the processes if it is large."""
    home = left._home
    if home.processes == 1 or not isinstance(right, Tensor):
        return left
    one, other = left.meta, right.meta
    if len(one.shape) != 2 or len(other.shape) != 2 or one.numel * other.shape[1] < LARGE:
        return left
    home._join()
    return _rows((left,))
