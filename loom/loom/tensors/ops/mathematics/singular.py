"""Singular values of matrices, their vectors, and the gradients of both."""

from __future__ import annotations

from typing import Any, NamedTuple

from loom.tensors.metas import Meta
from loom.tensors.ops.mathematics.matrices import Metas, by_columns, checked, op_of, transposed
from loom.tensors.tensor import Tensor


class SVD(NamedTuple):
    """Orthonormal columns, singular values in descending order, and orthonormal rows."""

    U: Tensor
    S: Tensor
    Vh: Tensor


def _singular_rule(metas: Metas, static: Any) -> tuple[Meta, Meta, Meta]:
    (meta,) = metas
    checked("svd", meta, square=False)
    *batch, rows, columns = meta.shape
    least = min(rows, columns)
    left, right = (rows, columns) if dict(static)["full_matrices"] else (least, least)
    return (
        by_columns((*batch, rows, left), meta),
        Meta((*batch, least), meta.dtype),
        by_columns((*batch, right, columns), meta),
    )


def _singular_backward(node: Any, grads: Any) -> tuple[Tensor]:
    values = node.result(1)
    rows, columns = node.metas[0].shape[-2:]
    least = min(rows, columns)
    left, right = node.result(0).narrow(-1, 0, least), node.result(2).narrow(-2, 0, least)
    of_left, of_values, of_right = grads.get(0), grads.get(1), grads.get(2)
    inner: Any = 0 if of_values is None else of_values.diag_embed()
    if of_left is not None or of_right is not None:
        of_row, of_column = values.unsqueeze(-1), values.unsqueeze(-2)
        gaps = (of_column - of_row) * (of_column + of_row)
        gaps = gaps + node.home.full(gaps.shape[-1:], 1.0, dtype=values.dtype).diag_embed()
        if of_left is not None:
            of_left = of_left.narrow(-1, 0, least)
            inner = inner + _skew(transposed(left).matmul(of_left)) / gaps * of_column
        if of_right is not None:
            of_right = of_right.narrow(-2, 0, least)
            inner = inner + of_row * (_skew(right.matmul(transposed(of_right))) / gaps)
    if rows > least and of_left is not None:
        beyond = of_left / of_column
        return ((left.matmul(inner) + beyond - left.matmul(transposed(left).matmul(beyond))).matmul(right),)
    if columns > least and of_right is not None:
        beyond = of_right / of_row
        beyond = beyond - beyond.matmul(transposed(right)).matmul(right)
        return (left.matmul(inner.matmul(right) + beyond),)
    return (left.matmul(inner).matmul(right),)


def _skew(matrix: Tensor) -> Tensor:
    return matrix - transposed(matrix)


_svd = op_of("svd", _singular_rule, _singular_backward, (), (0, 1, 2))


def svd(A: Tensor, full_matrices: bool = True) -> SVD:  # noqa: N803
    """Return the singular values of matrices, and the vectors: all of them, or only those that have a value.

    Gradients of vectors are finite only if no two values are equal.
    """
    return SVD(*_svd.several((A,), (), (("full_matrices", full_matrices),)))


def svdvals(A: Tensor) -> Tensor:  # noqa: N803
    """Return the singular values of matrices in descending order."""
    return svd(A, full_matrices=False).S
