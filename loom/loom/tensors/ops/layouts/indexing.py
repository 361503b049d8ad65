"""Parts of tensors by index, as ``x[1:3, None, ..., rows]``, and their assignment.

An index travels in one command. Where its ints and slices begin are the command's numbers, so that the batches of a
loop, ``x[i : i + 32]``, have the same form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from operator import index as to_int
from typing import Any, NamedTuple

from loom.tensors.commands import S, T
from loom.tensors.dtypes import Kind, bool_, int32, int64, uint8
from loom.tensors.metas import Meta, Shape, broadcast, pointwise_meta, wrapped
from loom.tensors.op import Op, method, methods
from loom.tensors.ops.layouts.layout import Metas, picked, viewed
from loom.tensors.tensor import Tensor

# An item of an index is one of these, or the length and the step of a slice, whose start is a number.
ALL, NEW, INT, ONE, SEVERAL = "all", "new", "int", "one", "several"
"""A whole dimension; a new one; a number; a tensor without dimensions; a tensor with some."""
MASKS = tuple(f"mask{dimensions}" for dimensions in range(65))
"""A mask with so many dimensions."""
_COPYING = frozenset((SEVERAL, *MASKS))

Item = str | tuple[int, int]


class Index(NamedTuple):
    """An index as an operation takes it."""

    items: tuple[Item, ...]
    numbers: tuple[int, ...]
    tensors: tuple[Tensor, ...]


def parsed(tensor: Tensor, index: Any) -> Index:
    """Return an index of Python.

    Raises:
        IndexError: it is out of range, has too many parts, or one that is no index.
    """
    parts = _parts(tensor, index)
    shape = tensor.shape
    spare = len(shape) - sum(map(_taken, parts))
    if spare < 0:
        if not shape and isinstance(parts[0], int):
            raise IndexError(
                "invalid index of a 0-dim tensor. Use `tensor.item()` in Python or `tensor.item<T>()` in C++ to "
                "convert a 0-dim tensor to a number"
            )
        raise IndexError(f"too many indices for tensor of dimension {len(shape)}")
    items: list[Item] = []
    numbers: list[int] = []
    tensors: list[Tensor] = []
    place = 0
    for part in parts:
        if part is None:
            items.append(NEW)
        elif part is ...:
            items += [ALL] * spare
            place += spare
            spare = 0
        elif isinstance(part, slice):
            items.append(_slice(part, shape[place], numbers))
            place += 1
        elif isinstance(part, Tensor) and is_mask(part):
            check_mask(part.shape, shape, place)
            items.append(MASKS[part.dim()])
            tensors.append(part)
            place += part.dim()
        elif isinstance(part, Tensor):
            items.append(SEVERAL if part.shape else ONE)
            tensors.append(part)
            place += 1
        else:
            size = shape[place]
            if not -size <= part < size:
                raise IndexError(f"index {part} is out of bounds for dimension {place} with size {size}")
            items.append(INT)
            numbers.append(part % size)
            place += 1
    while items and items[-1] == ALL:
        items.pop()
    return Index(tuple(items), tuple(numbers), tuple(tensors))


def is_mask(tensor: Tensor) -> bool:
    """Return whether a tensor, as an index, is a mask."""
    return tensor.dtype is bool_ or tensor.dtype is uint8


def is_masked(items: Sequence[Item]) -> bool:
    """Return whether an index has a mask, so that the shape of what it gives depends on elements."""
    return any(isinstance(each, str) and each.startswith("mask") for each in items)


def check_mask(mask: Shape, shape: Shape, place: int) -> None:
    """Check that a mask fits the dimensions of a tensor from a place on.

    Raises:
        IndexError: it does not, in torch's words.
    """
    for at, size in enumerate(mask, place):
        if shape[at] != size:
            raise IndexError(
                f"The shape of the mask {list(mask)} at index {at - place} does not match the shape of the indexed "
                f"tensor {list(shape)} at index {at}"
            )


def _taken(part: Any) -> int:
    """Return how many dimensions a part of an index takes."""
    if part is None or part is ...:
        return 0
    return part.dim() if isinstance(part, Tensor) and is_mask(part) else 1


def _parts(tensor: Tensor, index: Any) -> list[Any]:
    """Return ints, slices, None, an ellipsis, and tensors of ints and masks."""
    if isinstance(index, list) and any(each is None or isinstance(each, (slice, Tensor, list)) for each in index):
        raise IndexError("an index of several parts has to be a tuple, not a list")
    parts = list(index) if isinstance(index, tuple) else [index]
    for at, part in enumerate(parts):
        if type(part) is int or part is None or part is ... or isinstance(part, slice):
            continue
        if isinstance(part, Tensor):
            parts[at] = tensor_index(part)
        elif isinstance(part, bool):
            parts[at] = tensor._home.tensor(part)
        elif isinstance(part, (list, range)) or (hasattr(part, "__array__") and part.shape):
            parts[at] = _of_sequence(tensor, part, _dimension(tensor, parts, at))
        else:
            try:
                parts[at] = int(to_int(part))
            except TypeError:
                raise IndexError(
                    "only integers, slices (`:`), ellipsis (`...`), None and long or byte Variables are valid "
                    f"indices (got {type(part).__name__})"
                ) from None
    return parts


def _dimension(tensor: Tensor, parts: Sequence[Any], at: int) -> int:
    """Return the dimension that a part of an index is of."""
    if any(each is ... for each in parts[:at]):
        return tensor.dim() - sum(map(_taken, parts[at:]))
    return sum(map(_taken, parts[:at]))


def tensor_index(tensor: Tensor) -> Tensor:
    """Return a tensor that may be an index.

    Raises:
        IndexError: its elements are neither ints nor truth values.
    """
    dtype = tensor.dtype
    if is_mask(tensor):
        return tensor
    if dtype.kind is not Kind.INT or (tensor.shape and dtype not in (int32, int64)):
        raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
    return tensor


def _of_sequence(tensor: Tensor, part: Any, dimension: int) -> Tensor:
    """Make a tensor of a list, a range or an array; of a list of bools, of the places of those that are true."""
    elements = part.tolist() if hasattr(part, "tolist") else list(part)
    if elements and all(isinstance(each, bool) for each in elements):
        shape = tensor.shape
        if dimension < len(shape) and len(elements) != shape[dimension]:
            raise IndexError(
                f"The shape of the mask [{len(elements)}] at index 0 does not match the shape of the indexed "
                f"tensor {list(shape)} at index {dimension}"
            )
        elements = [at for at, each in enumerate(elements) if each]
    made: Tensor = tensor._home.tensor(elements, dtype=None if elements else int64)
    return tensor_index(made)


def _slice(part: slice, size: int, numbers: list[int]) -> Item:
    step = 1 if part.step is None else int(to_int(part.step))
    if step == 0:
        raise ValueError("slice step cannot be zero")
    if step < 0:
        raise ValueError("step must be greater than zero")
    start, stop, _ = part.indices(size)
    length = max(0, -((start - stop) // step))
    if length == size and step == 1:
        return ALL
    numbers.append(start)
    return length, step


def arguments_of(items: Sequence[Item], first: int = 1) -> tuple[Any, ...]:
    """Return an index as it travels."""
    found: list[Any] = []
    numbers, tensors = 0, first
    for item in items:
        if item == ALL:
            found.append(slice(None))
        elif item == NEW:
            found.append(None)
        elif item == ONE or item in _COPYING:
            found.append(T(tensors))
            tensors += 1
        else:
            found.append(S(numbers) if item == INT else (S(numbers), *item))
            numbers += 1
    return tuple(found)


# What an index gives


def _part(meta: Meta, items: Sequence[Item]) -> tuple[Meta, list[int]]:
    """Return the layout of a part, and its dimensions that tensors of several elements index."""
    shape: list[int] = []
    strides: list[int] = []
    chosen: list[int] = []
    place = 0
    for item in items:
        if item == NEW:
            there = place < len(meta.shape)
            shape.append(1)
            strides.append(meta.shape[place] * meta.strides[place] if there else 1)
            continue
        if item == SEVERAL:
            chosen.append(len(shape))
        if isinstance(item, tuple):
            shape.append(item[0])
            strides.append(meta.strides[place] * item[1])
        elif item in (ALL, SEVERAL):
            shape.append(meta.shape[place])
            strides.append(meta.strides[place])
        place += 1
    return Meta((*shape, *meta.shape[place:]), meta.dtype, (*strides, *meta.strides[place:])), chosen


def _indexed(part: Meta, chosen: Sequence[int], indices: Sequence[Meta]) -> Meta:
    """Return what tensors of ints give as indices of some dimensions. As `AdvancedIndex` of ATen."""
    try:
        shape = broadcast(*(each.shape for each in indices))
    except RuntimeError:
        shapes = ", ".join(str(list(each.shape)) for each in indices)
        raise IndexError(
            f"shape mismatch: indexing tensors could not be broadcast together with shapes {shapes}"
        ) from None
    if 0 not in shape and any(part.shape[place] == 0 for place in chosen):
        raise IndexError("index is out of bounds for dimension with size 0")
    if chosen[-1] - chosen[0] + 1 != len(chosen):  # they are not side by side: the result begins with them
        part = picked(part, [*chosen, *(place for place in range(len(part.shape)) if place not in chosen)])
        chosen = range(len(chosen))
    before, after = chosen[0], len(part.shape) - chosen[-1] - 1
    rest = chosen[-1] + 1
    source = Meta(
        (*part.shape[:before], *shape, *part.shape[rest:]),
        part.dtype,
        (*part.strides[:before], *(0,) * len(shape), *part.strides[rest:]),
    )
    operands = [source]
    for each in indices:
        lead = len(shape) - len(each.shape)
        strides = tuple(
            0 if size != wanted else stride
            for size, stride, wanted in zip(each.shape, each.strides, shape[lead:], strict=True)
        )
        strides = (0,) * lead + strides
        whole = (1,) * before + shape + (1,) * after
        operands.append(Meta(whole, each.dtype, viewed(shape, strides, whole) if each.numel else None))
    return pointwise_meta(operands, part.dtype)


def indexed_meta(metas: Metas, items: Sequence[Item]) -> Meta | None:
    """Return what an index gives of a tensor, with the index's tensors; None if it has a mask."""
    if is_masked(items):
        return None
    part, chosen = _part(metas[0], items)
    if not chosen:
        return part
    of_tensors = [each for each in items if each in (ONE, SEVERAL)]
    several = [meta for item, meta in zip(of_tensors, metas[1:], strict=True) if item == SEVERAL]
    return _indexed(part, chosen, several)


def _getitem_rule(metas: Metas, numbers: Any, static: Any) -> Meta | None:
    return indexed_meta(metas, static[0])


@cache
def _ops(tensors: int) -> tuple[Op, Op, Op, Op]:
    """Return the view, the copy, their gradient, and the copy's sum, by an index with so many tensors."""
    saves = range(1, tensors + 1)

    def arguments(many: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (T(0), arguments_of(static[0]), *static[1:]), {}

    def backward(node: Any, grad: Tensor) -> list[Tensor | None]:
        given = tuple(node[place] for place in saves)
        whole = back((grad, *given), node.numbers, (*node.static, node.metas[0].shape))
        return [whole, *[None] * tensors]

    def again(node: Any, grad: Tensor) -> list[Tensor | None]:
        given = tuple(node[place] for place in saves)
        op = view if _COPYING.isdisjoint(node.static[0]) else copy
        return [op((grad, *given), node.numbers, node.static[:1]), *[None] * tensors]

    def back_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
        return Meta(static[1], metas[0].dtype)

    def of_sum(node: Any, grad: Tensor) -> list[Tensor | None]:
        given = tuple(node[place] for place in saves)
        whole = back((grad, *given), node.numbers, (node.static[0], node.metas[0].shape))
        return [whole, *[None] * tensors]

    view = Op(".getitem", _getitem_rule, backward, saves, arguments=arguments, view=True)
    copy = Op(".getitem", _getitem_rule, backward, saves, arguments=arguments)
    back = Op(".getitem_backward", back_rule, again, saves, arguments=arguments)
    summed = Op(".getitem_summed", back_rule, of_sum, saves, arguments=arguments)
    return view, copy, back, summed


def part_at(tensor: Tensor, index: Index) -> Tensor:
    """Return the part of a tensor at an index."""
    view, copy, *_ = _ops(len(index.tensors))
    op = view if _COPYING.isdisjoint(index.items) else copy
    return op((tensor, *index.tensors), index.numbers, (index.items,))


def part_summed(tensor: Tensor, index: Index, shape: Shape) -> Tensor:
    """Return the part of a tensor at an index, summed to a shape that was broadcast to it."""
    return _ops(len(index.tensors))[3]((tensor, *index.tensors), index.numbers, (index.items, shape))


def getitem(self: Tensor, index: Any) -> Tensor:
    """Return a part: a view, or a copy if a tensor with dimensions or a list is part of the index.

    Raises:
        IndexError: the index is out of range.
    """
    return part_at(self, parsed(self, index))


methods["__getitem__"] = getitem


def _iterator(self: Tensor) -> Iterator[Tensor]:
    if not self.dim():
        raise TypeError("iteration over a 0-d tensor")
    return iter(self.unbind(0))


methods["__iter__"] = _iterator


@method
def select(self: Tensor, dim: int, index: int) -> Tensor:
    shape = self.shape
    if not shape:
        raise IndexError("select() cannot be applied to a 0-dim tensor.")
    place, at = wrapped(dim, len(shape)), int(to_int(index))
    if not -shape[place] <= at < shape[place]:
        raise IndexError(f"select(): index {at} out of range for tensor of size {list(shape)} at dimension {place}")
    return part_at(self, Index((*[ALL] * place, INT), (at % shape[place],), ()))


@method
def narrow(self: Tensor, dim: int, start: int, length: int) -> Tensor:
    shape = self.shape
    if not shape:
        raise RuntimeError("narrow() cannot be applied to a 0-dim tensor.")
    if length < 0:
        raise RuntimeError("narrow(): length must be non-negative.")
    place, at, many = wrapped(dim, len(shape)), int(to_int(start)), int(to_int(length))
    size = shape[place]
    if not -size <= at <= size:
        raise IndexError(f"start out of range (expected to be in range of [{-size}, {size}], but got {at})")
    at += size if at < 0 else 0
    if at + many > size:
        raise RuntimeError(f"start ({at}) + length ({many}) exceeds dimension size ({size}).")
    return part_at(self, Index((*[ALL] * place, (many, 1)), (at,), ()))
