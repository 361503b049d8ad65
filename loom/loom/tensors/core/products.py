"""Products of matrices and vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from loom.tensors.core.spreading import shared
from loom.tensors.layouts import DType, Meta, Shape, broadcast
from loom.tensors.op import Op, Rule, function, method
from loom.tensors.tensor import Tensor


def _check_dtypes(one: Meta, other: Meta) -> DType:
    if one.dtype is not other.dtype:
        # The names of torch's errors depend on the shapes; this is the one for matrices.
        raise RuntimeError(
            f"expected m1 and m2 to have the same dtype, but got: {one.dtype.name} != {other.dtype.name}"
        )
    return one.dtype


def _check_inner(one: Shape, other: Shape) -> None:
    if one[-1] != other[0]:
        rows = 1
        for size in one[:-1]:
            rows *= size
        raise RuntimeError(
            f"mat1 and mat2 shapes cannot be multiplied ({rows}x{one[-1]} and {other[0]}x{other[1]})"
        )


def _dot_shape(one: Shape, other: Shape) -> Shape:
    if one != other:
        raise RuntimeError(
            f"inconsistent tensor size, expected tensor {list(one)} and src {list(other)} to have the same number "
            f"of elements, but got {one[0]} and {other[0]} elements respectively"
        )
    return ()


def _mv_shape(one: Shape, other: Shape) -> Shape:
    if one[1] != other[0]:
        raise RuntimeError(f"size mismatch, got input ({one[0]}), mat ({one[0]}x{one[1]}), vec ({other[0]})")
    return one[:1]


def _matmul_shape(one: Shape, other: Shape) -> Shape:
    if not one or not other:
        raise RuntimeError(
            f"both arguments to matmul need to be at least 1D, but they are {len(one)}D and {len(other)}D"
        )
    match len(one), len(other):
        case 1, 1:
            return _dot_shape(one, other)
        case 2, 1:
            return _mv_shape(one, other)
        case 1, 2:
            _check_inner((1, *one), other)
            return other[1:]
        case _, 2:
            _check_inner(one, other)
            return (*one[:-1], other[1])
    left = one if len(one) > 1 else (1, *one)
    right = other if len(other) > 1 else (*other, 1)
    lead = broadcast(left[:-2], right[:-2])
    if left[-1] != right[-2]:
        many = 1
        for size in lead:
            many *= size
        raise RuntimeError(
            f"Expected size for first two dimensions of batch2 tensor to be: [{many}, {left[-1]}] but got: "
            f"[{many}, {right[-2]}]."
        )
    return lead + left[-2:-1] * (len(one) > 1) + right[-1:] * (len(other) > 1)


def _multiplied(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
    one, other = metas
    return Meta(_matmul_shape(one.shape, other.shape), _check_dtypes(one, other))


def _of_dimensions(one_dims: int, other_dims: int, one_error: str, other_error: str) -> Callable[..., Meta]:
    """Return the rule of a product of tensors with so many dimensions."""

    def rule(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
        one, other = (each.shape for each in metas)
        if len(one) != one_dims or len(other) != other_dims:
            raise RuntimeError(
                (one_error if len(one) != one_dims else other_error).format(one=len(one), other=len(other))
            )
        if one_dims == 3 and (one[0] != other[0] or one[2] != other[1]):
            raise RuntimeError(
                f"Expected size for first two dimensions of batch2 tensor to be: [{one[0]}, {one[2]}] but got: "
                f"[{other[0]}, {other[1]}]."
            )
        return _multiplied(metas, numbers, static)

    return rule


_matmul = Op("matmul", _multiplied)
_mm = Op("mm", _of_dimensions(2, 2, "self must be a matrix", "mat2 must be a matrix"))
_bmm = Op(
    "bmm",
    _of_dimensions(3, 3, "batch1 must be a 3D tensor", "batch2 must be a 3D tensor"),
)
_mv_error = "vector + matrix @ vector expected, got 1, {one}, {other}"
_mv = Op("mv", _of_dimensions(2, 1, _mv_error, _mv_error))
_dot_error = "1D tensors expected, but got {one}D and {other}D tensors"
_dot = Op("dot", _of_dimensions(1, 1, _dot_error, _dot_error))


def _product(left: Tensor, right: Tensor) -> Tensor:
    return _matmul((left if left._home.processes == 1 else shared(left, right), right))


@method
def matmul(self: Tensor, other: Tensor) -> Tensor:
    return _product(self, other)


@method
def __matmul__(self: Tensor, other: Tensor) -> Tensor:  # noqa: N807
    return _product(self, other) if isinstance(other, Tensor) else NotImplemented


@method
def __rmatmul__(self: Tensor, other: Tensor) -> Tensor:  # noqa: N807
    return _product(other, self) if isinstance(other, Tensor) else NotImplemented


@method
def mm(self: Tensor, mat2: Tensor) -> Tensor:
    return _mm((shared(self, mat2), mat2))


@method
def bmm(self: Tensor, mat2: Tensor) -> Tensor:
    return _bmm((self, mat2))


@method
def mv(self: Tensor, vec: Tensor) -> Tensor:
    return _mv((self, vec))


@method
def dot(self: Tensor, other: Tensor) -> Tensor:
    return _dot((self, other))


@method
def outer(self: Tensor, vec2: Tensor) -> Tensor:
    for name, each in (("self", self), ("vec2", vec2)):
        if each.dim() != 1:
            raise RuntimeError(f"outer: Expected 1-D argument {name}, but got {each.dim()}-D")
    return self.unsqueeze(-1).mul(vec2)  # type: ignore[no-any-return]


def _expandable(shape: Shape, wanted: Shape) -> None:
    """Raise what torch raises if a tensor cannot be expanded to a shape."""
    lead = len(wanted) - len(shape)
    for place, size in enumerate(shape):
        if lead < 0 or size not in (1, wanted[lead + place]):
            raise RuntimeError(
                f"The expanded size of the tensor ({wanted[lead + place]}) must match the existing size ({size}) "
                f"at non-singleton dimension {lead + place}.  Target sizes: {list(wanted)}.  "
                f"Tensor sizes: {list(shape)}"
            )


def _added(product: Callable[..., Meta]) -> Rule:
    def rule(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
        result = product(metas[1:], numbers, ())
        _check_dtypes(metas[0], result)
        _expandable(metas[0].shape, result.shape)
        return result

    return rule


_addmm = Op(
    "addmm",
    _added(_of_dimensions(2, 2, "mat1 must be a matrix, got {one}-D tensor", "mat2 must be a matrix")),
)
_baddbmm = Op(
    "baddbmm",
    _added(_of_dimensions(3, 3, "batch1 must be a 3D tensor", "batch2 must be a 3D tensor")),
)


@method
def addmm(self: Tensor, mat1: Tensor, mat2: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    return _addmm((self, mat1, mat2), (), (("beta", beta), ("alpha", alpha)))


@method
def baddbmm(self: Tensor, batch1: Tensor, batch2: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    return _baddbmm((self, batch1, batch2), (), (("beta", beta), ("alpha", alpha)))


def _linear_rule(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
    one, weight = metas[0], metas[1]
    if len(weight.shape) != 2:
        raise RuntimeError(f"mat2 must be a matrix, got {len(weight.shape)}-D tensor")
    shape = one.shape if len(one.shape) > 1 else (1, *one.shape)
    _check_inner(shape, weight.shape[::-1])
    result = Meta((*one.shape[:-1], weight.shape[0]), _check_dtypes(one, weight))
    if len(metas) > 2:
        _check_dtypes(metas[2], result)
        _expandable(metas[2].shape, result.shape)
    return result


_linear = Op("nn.functional.linear", _linear_rule)


@function
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``input @ weight.T + bias``."""
    if bias is not None:
        return _linear((input, weight, bias))
    return matmul(input, weight) if weight.dim() == 1 else _linear((input, weight))
