"""Elements filled by a mask; rows of a table by their numbers, as embeddings; one-hot vectors."""

from __future__ import annotations

from typing import Any

from loom.tensors.commands import T
from loom.tensors.dtypes import bool_, int32, int64
from loom.tensors.metas import Meta, broadcast
from loom.tensors.op import Op, function, method
from loom.tensors.ops.layouts.layout import Metas, positional
from loom.tensors.tensor import Tensor

Number = bool | int | float | complex
Grads = tuple[Tensor | None, ...]


def _masked_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    own, mask, *value = metas
    if value and value[0].shape:
        raise RuntimeError(
            "masked_fill_ only supports a 0-dimensional value tensor, but got tensor with "
            f"{len(value[0].shape)} dimension(s)."
        )
    if mask.dtype is not bool_:
        raise RuntimeError(f"masked_fill_ only supports boolean masks, but got mask with dtype {mask.dtype.name}")
    return Meta(broadcast(own.shape, mask.shape), own.dtype)


def _masked_backward(node: Any, grad: Tensor) -> Grads:
    mask = node[1]
    own = masked_fill(grad, mask, 0) if node.needs(0) else None
    if len(node.edges) == 2:
        return own, None
    return own, None, masked_fill(grad, mask.logical_not(), 0).sum() if node.needs(2) else None


_masked_fill = Op("masked_fill", _masked_rule, _masked_backward, (1,))


@method
def masked_fill(self: Tensor, mask: Tensor, value: Tensor | Number) -> Tensor:
    if isinstance(value, Tensor):
        return _masked_fill((self, mask, value))
    return _masked_fill((self, mask), (value,))


@method
def masked_fill_(self: Tensor, mask: Tensor, value: Tensor | Number) -> Tensor:
    if isinstance(value, Tensor):
        return _masked_fill.in_place((self, mask, value))
    return _masked_fill.in_place((self, mask), (value,))


# Tables


def _embedding_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    weight, index = metas
    if len(weight.shape) != 2:
        raise RuntimeError("'weight' must be 2-D")
    if index.dtype not in (int32, int64):
        raise RuntimeError(
            "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; but "
            f"got torch.{index.dtype.scalar_name}Tensor instead (while checking arguments for embedding)"
        )
    return Meta((*index.shape, weight.shape[1]), weight.dtype)


def _embedding_backward(node: Any, grad: Tensor) -> Grads:
    padding = node.static[0]
    return _table((grad, node[1]), (), (node.metas[0].shape, -1 if padding is None else padding)), None


def _embedding_arguments(tensors: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (T(1), T(0)), {} if static[0] is None else {"padding_idx": static[0]}


_embedding = Op(
    "nn.functional.embedding", _embedding_rule, _embedding_backward, (1,), arguments=_embedding_arguments
)


def _table_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    return Meta(static[0], metas[0].dtype)


def _table_backward(node: Any, grad: Tensor) -> Grads:
    padding, index = node.static[1], node[1]
    rows = _embedding((grad, index), (), (None,))
    if padding >= 0:
        rows = masked_fill(rows, index.eq(padding).unsqueeze(-1), 0)
    return rows, None


_table = Op(
    "ops.aten.embedding_dense_backward",
    _table_rule,
    _table_backward,
    (1,),
    arguments=lambda tensors, numbers, static: ((T(0), T(1), static[0][0], static[1], False), {}),
)


@function
def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Return rows of a table, as `torch.nn.functional.embedding`.

    Args:
        input: the numbers of the rows.
        weight: the table.
        padding_idx: a row that gets no gradient.
    """
    if padding_idx is not None:
        rows = weight.shape[0]
        if not -rows <= padding_idx < rows:
            raise AssertionError("Padding_idx must be within num_embeddings")
        padding_idx %= rows
    return _embedding((weight, input), (), (padding_idx,))


def _one_hot_rule(metas: Metas, numbers: Any, static: Any) -> Meta | None:
    (meta,) = metas
    if meta.dtype is not int64:
        raise RuntimeError("one_hot is only applicable to index tensor of type LongTensor.")
    if static[0] == -1:
        return None
    if static[0] <= 0:
        raise RuntimeError("Class values must be smaller than num_classes.")
    return Meta((*meta.shape, static[0]), int64)


_one_hot = Op("nn.functional.one_hot", _one_hot_rule, arguments=positional)


@function
def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Return ones at the numbers of classes, and zeros elsewhere, in a new last dimension.

    Args:
        tensor: the numbers.
        num_classes: how many classes there are; -1 for as many as the largest number needs.
    """
    return _one_hot((tensor,), (), (int(num_classes),))
