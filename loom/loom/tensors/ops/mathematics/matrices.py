"""What the functions of `torch.linalg` have in common: the layouts that they give, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from loom.tensors.dtypes import Kind
from loom.tensors.metas import Meta, Shape, contiguous_strides
from loom.tensors.op import Op
from loom.tensors.tensor import Tensor

Metas = Sequence[Meta]

_KERNELS = {"eigh": "linalg_eigh_cpu", "solve_triangular": "triangular_solve_cpu"}
"""What lacks numbers of a kind, in torch's words, where torch looks no earlier."""


def by_columns(shape: Shape, like: Meta) -> Meta:
    """Return what torch's routines give: matrices whose columns lie in memory one after the other."""
    if len(shape) < 2:
        return Meta(shape, like.dtype)
    *batch, rows, columns = shape
    strides = contiguous_strides((*batch, columns, rows))
    return Meta(shape, like.dtype, (*strides[:-2], 1, max(rows, 1)))


def checked(name: str, meta: Meta, square: bool = True) -> None:
    shape = meta.shape
    if len(shape) < 2:
        raise RuntimeError(f"linalg.{name}: The input tensor A must have at least 2 dimensions.")
    if square and shape[-1] != shape[-2]:
        raise RuntimeError(
            f"linalg.{name}: A must be batches of square matrices, but they are {shape[-2]} by {shape[-1]} matrices"
        )
    if meta.dtype.kind < Kind.FLOAT:
        kind = meta.dtype.scalar_name
        if name in _KERNELS:
            raise NotImplementedError(f"\"{_KERNELS[name]}\" not implemented for '{kind}'")
        raise RuntimeError(f"linalg.{name}: Expected a floating point or complex tensor as input. Got {kind}")


def op_of(name: str, rule: Callable[[Metas, Any], Any], *args: Any) -> Op:
    return Op(f"linalg.{name}", lambda metas, numbers, static: rule(metas, static), *args)


def transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(-2, -1)  # type: ignore[no-any-return]


def scaled(factor: Tensor, matrix: Tensor) -> Tensor:
    scaled: Tensor = factor.unsqueeze(-1).unsqueeze(-1) * matrix
    return scaled
