"""Elements that a mask or a condition selects: the shape of the result depends on elements, and is asked for."""

from __future__ import annotations

from typing import Any

from loom.tensors.commands import T
from loom.tensors.dtypes import bool_, int64
from loom.tensors.metas import Meta, broadcast, wrapped
from loom.tensors.op import Op, method
from loom.tensors.ops.layouts.layout import Metas
from loom.tensors.tensor import Tensor

Grads = tuple[Tensor | None, ...]


def _selected(metas: Metas, numbers: Any, static: Any) -> None:
    own, mask = metas
    if mask.dtype is not bool_:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    broadcast(own.shape, mask.shape)


def _selected_backward(node: Any, grad: Tensor) -> Grads:
    shape = broadcast(*(each.shape for each in node.metas))
    return masked_scatter(node.home.zeros(shape, dtype=grad.dtype), node[1], grad), None


def _scattered(metas: Metas, numbers: Any, static: Any) -> Meta:
    own, mask, source = metas
    if own.dtype is not source.dtype:
        raise RuntimeError(
            "masked_scatter_: expected self and source to have same dtypes but got "
            f"{own.dtype.scalar_name} and {source.dtype.scalar_name}"
        )
    if mask.dtype is not bool_:
        name = mask.dtype.name
        raise RuntimeError(f"masked_scatter_ only supports boolean masks, but got mask with dtype {name}")
    return Meta(broadcast(own.shape, mask.shape), own.dtype)


def _scattered_backward(node: Any, grad: Tensor) -> Grads:
    return (
        grad.masked_fill(node[1], 0) if node.needs(0) else None,
        None,
        _of_source((grad, node[1]), (), node.metas[2].shape) if node.needs(2) else None,
    )


def _of_source_backward(node: Any, grad: Tensor) -> Grads:
    zeros = node.home.zeros(node.metas[0].shape, dtype=grad.dtype)
    return masked_scatter(zeros, node[1], grad), None


_masked_select = Op("masked_select", _selected, _selected_backward, (1,))
_masked_scatter = Op("masked_scatter", _scattered, _scattered_backward, (1,))
_of_source = Op(
    "ops.aten.masked_scatter_backward.default",
    lambda metas, numbers, static: Meta(static, metas[0].dtype),
    _of_source_backward,
    (1,),
    arguments=lambda tensors, numbers, static: ((T(0), T(1), static), {}),
)


@method
def masked_select(self: Tensor, mask: Tensor) -> Tensor:
    """Return the elements at which a mask is true, in a row."""
    return _masked_select((self, mask))


@method
def masked_scatter(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Return a copy in which the elements at which a mask is true are those of another tensor, in their order."""
    return _masked_scatter((self, mask, source))


@method
def masked_scatter_(self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    return _masked_scatter.in_place((self, mask, source))


_nonzero = Op("nonzero", lambda metas, numbers, static: None)
_places = Op(".places", lambda metas, numbers, static: (None,) * max(len(metas[0].shape), 1))


@method
def nonzero(self: Tensor, *, as_tuple: bool = False) -> Any:
    """Return where the elements are that are not 0: a row for each, or with ``as_tuple`` an index of tensors."""
    return _places.several((self,)) if as_tuple else _nonzero((self,))


@method
def argwhere(self: Tensor) -> Tensor:
    """Return where the elements are that are not 0, a row for each."""
    return _nonzero((self,))


# Different elements


def _different(name: str) -> Op:
    def backward(node: Any, grads: Any) -> Grads:
        raise NotImplementedError(f"the derivative for '{name}' is not implemented.")

    return Op(name, _different_rule, backward)


def _different_rule(metas: Metas, numbers: Any, static: Any) -> tuple[Meta | None, ...]:
    given = dict(static)
    (meta,) = metas
    shape = meta.shape
    if given["dim"] is not None:
        place = wrapped(given["dim"], len(shape))
        if not shape:
            raise IndexError("Dimension specified as 0 but tensor has no dimensions")
        shape = (shape[place],)
    inverse = (Meta(shape, int64),) if given["return_inverse"] else ()
    return None, *inverse, *(None,) * given["return_counts"]


_unique, _unique_consecutive = _different("unique"), _different("unique_consecutive")


def _found(op: Op, self: Tensor, inverse: bool, counts: bool, dim: int | None, *more: tuple[str, Any]) -> Any:
    static = (*more, ("return_inverse", bool(inverse)), ("return_counts", bool(counts)), ("dim", dim))
    found = op.several((self,), (), static)
    return found if len(found) > 1 else found[0]


@method
def unique(
    self: Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """Return the different elements, or the different parts along a dimension.

    Args:
        self: the tensor.
        sorted: whether they are in order.
        return_inverse: whether to return for each element of the tensor which of them it is, too.
        return_counts: whether to return how often each of them is there, too.
        dim: the dimension; elements if None.
    """
    return _found(_unique, self, return_inverse, return_counts, dim, ("sorted", bool(sorted)))


@method
def unique_consecutive(
    self: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """Return the elements, or the parts along a dimension, without those that are equal to the one before."""
    return _found(_unique_consecutive, self, return_inverse, return_counts, dim)
