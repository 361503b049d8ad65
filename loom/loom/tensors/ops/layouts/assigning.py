"""Assignment to parts of tensors by index, and its form that changes nothing, `index_put`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from loom.tensors.commands import S, T
from loom.tensors.dtypes import Kind, bool_
from loom.tensors.metas import Meta, Shape, broadcast, pointwise_meta
from loom.tensors.op import Op, method, methods
from loom.tensors.ops.layouts.indexing import (
    MASKS,
    SEVERAL,
    Index,
    arguments_of,
    check_mask,
    indexed_meta,
    is_mask,
    is_masked,
    parsed,
    part_at,
    part_summed,
    tensor_index,
)
from loom.tensors.ops.layouts.layout import Metas
from loom.tensors.tensor import Tensor

Number = (bool, int, float, complex)


def _check_fits(value: Meta, part: Meta | None, advanced: bool) -> None:
    """Check that a value can be broadcast to a part, if the part's shape is known.

    Raises:
        RuntimeError: it cannot, in torch's words.
    """
    if part is None:
        return
    try:
        if broadcast(value.shape, part.shape) == part.shape:
            return
    except RuntimeError:
        pass
    if advanced:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(value.shape)} cannot be broadcast to indexing result of "
            f"shape {list(part.shape)}"
        )
    raise RuntimeError(
        f"The expanded size of the tensor ({list(part.shape)}) must match the existing size ({list(value.shape)})"
    )


def _copied(metas: Metas, numbers: Any, static: Any) -> Meta:
    return pointwise_meta(metas[:1], metas[0].dtype)


@cache
def _ops(tensors: int) -> tuple[Op, Op, Op]:
    """Return the assignment of a tensor, of a number, and of 0 to a copy, by an index with so many tensors."""
    saves = range(1, tensors + 1)
    last = tensors + 1

    def arguments(many: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        value = T(last) if many > last else S(numbers - 1)
        return (T(0), arguments_of(static[0]), value), {}

    def zeroed(node: Any, grad: Tensor, numbers: tuple[int, ...]) -> Tensor:
        return zero((grad, *map(node.__getitem__, saves)), (*numbers, 0), node.static)

    def rule(metas: Metas, numbers: Any, static: Any) -> Meta:
        _check_fits(metas[last], indexed_meta(metas[:last], static[0]), SEVERAL in static[0])
        return metas[0]

    def backward(node: Any, grad: Tensor) -> list[Tensor | None]:
        index = Index(node.static[0], node.numbers, tuple(map(node.__getitem__, saves)))
        before = zeroed(node, grad, node.numbers) if node.needs(0) else None
        # Cast before it is summed to the value's shape, as torch does: a sum of float16 is less exact.
        part = _of_value(grad, index, node.metas[last]) if node.needs(last) else None
        return [before, *[None] * tensors, part]

    def number_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
        indexed_meta(metas, static[0])
        return metas[0]

    def number_backward(node: Any, grad: Tensor) -> list[Tensor | None]:
        return [zeroed(node, grad, node.numbers[:-1]), *[None] * tensors]

    tensor = Op(".with_item", rule, backward, saves, arguments=arguments, changes=".setitem")
    number = Op(".with_item", number_rule, number_backward, saves, arguments=arguments, changes=".setitem")
    zero = Op(".with_item", _copied, number_backward, saves, arguments=arguments)
    return tensor, number, zero


def _of_value(grad: Tensor, index: Index, value: Meta) -> Tensor:
    """Return the gradient of a value that was assigned at an index."""
    if is_masked(index.items):
        return part_summed(grad.to(value.dtype), index, value.shape)
    return part_at(grad, index).to(value.dtype)  # type: ignore[no-any-return]


def setitem(self: Tensor, index: Any, value: Any) -> None:
    """Change a part in place.

    Raises:
        IndexError: the index is out of range.
        RuntimeError: the value does not fit the part.
    """
    if isinstance(index, Tensor) and index.dtype is bool_ and not getattr(value, "shape", ()):
        _fill_mask(self, index, value)
        return
    where = parsed(self, index)
    tensor, number, _ = _ops(len(where.tensors))
    if isinstance(value, Number):
        number.in_place((self, *where.tensors), (*where.numbers, value), (where.items,))
        return
    if not isinstance(value, Tensor):
        if not hasattr(value, "__array__"):
            raise TypeError(f"can't assign a {type(value).__name__} to a tensor")
        value = self._home.tensor(value)
    if value._needs and self.dtype.kind < Kind.FLOAT:
        value = value.detach()
    part = indexed_meta([each.meta for each in (self, *where.tensors)], where.items)
    kept = _without_lead(value.shape, 0 if part is None else len(part.shape))
    value = value if kept == value.shape else value.reshape(kept)
    tensor.in_place((self, *where.tensors, value), where.numbers, (where.items,))


methods["__setitem__"] = setitem


def _without_lead(shape: Shape, dimensions: int) -> Shape:
    """Return a shape with so many dimensions, without ones of size 1 at its begin."""
    while len(shape) > dimensions and shape[0] == 1:
        shape = shape[1:]
    return shape


def _fill_mask(self: Tensor, mask: Tensor, value: Any) -> None:
    own, shape = self.shape, mask.shape
    if len(shape) > len(own):
        raise IndexError(f"too many indices for tensor of dimension {len(own)}")
    check_mask(shape, own, 0)
    self.masked_fill_(mask.reshape((*shape, *[1] * (len(own) - len(shape)))), value)


def _put_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    own, *indices, values = metas
    place = 0
    for item, each in zip(static[1], indices, strict=True):
        many = 1 if item == SEVERAL else len(each.shape)
        if place + many > len(own.shape):
            raise IndexError(f"too many indices for tensor of dimension {len(own.shape)} (got {len(indices)})")
        if item != SEVERAL:
            check_mask(each.shape, own.shape, place)
        place += many
    if own.dtype is not values.dtype:
        raise RuntimeError(
            "Index put requires the source and destination dtypes match, got "
            f"{own.dtype.scalar_name} for the destination and {values.dtype.scalar_name} for the source."
        )
    _check_fits(values, indexed_meta((own, *indices), static[1]), True)
    return pointwise_meta([own], own.dtype)


@cache
def _put(tensors: int) -> Op:
    saves = range(1, tensors + 1)

    def arguments(many: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (T(0), tuple(map(T, saves)), T(tensors + 1), static[0]), {}

    def backward(node: Any, grad: Tensor) -> list[Tensor | None]:
        given = tuple(map(node.__getitem__, saves))
        items = node.static[1]
        before = grad
        if node.needs(0) and not node.static[0]:
            before = _ops(tensors)[2]((grad, *given), (0,), (items,))
        value = _of_value(grad, Index(items, (), given), node.metas[-1]) if node.needs(tensors + 1) else None
        return [before, *[None] * tensors, value]

    return Op("index_put", _put_rule, backward, saves, arguments=arguments)


def _put_inputs(self: Tensor, indices: Sequence[Tensor], values: Tensor) -> tuple[Tensor, ...]:
    for each in indices:
        if not isinstance(each, Tensor):
            raise TypeError(f"expected Tensor as element 0 in argument 0, but got {type(each).__name__}")
    return self, *map(tensor_index, indices), values


@method
def index_put(self: Tensor, indices: Sequence[Tensor], values: Tensor, accumulate: bool = False) -> Tensor:
    """Return a copy in which the elements at tensors of ints, or at masks, are others, or have these added."""
    return _put(len(indices))(_put_inputs(self, indices, values), (), (bool(accumulate), _items(indices)))


@method
def index_put_(self: Tensor, indices: Sequence[Tensor], values: Tensor, accumulate: bool = False) -> Tensor:
    inputs = _put_inputs(self, indices, values)
    return _put(len(indices)).in_place(inputs, (), (bool(accumulate), _items(indices)))


def _items(indices: Sequence[Tensor]) -> tuple[str, ...]:
    return tuple([MASKS[each.dim()] if is_mask(each) else SEVERAL for each in indices])
