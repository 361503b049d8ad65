"""Parts of tensors by index, as ``x[1:3, None, ..., rows]``, and their assignment.

An index travels in one command. Where its ints and slices begin are the command's numbers, so that the batches of a
loop, ``x[i : i + 32]``, have the same form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from operator import index as to_int
from typing import Any, NamedTuple

from loom.tensors.core.shapes import Metas, picked, viewed
from loom.tensors.history import needs_grad
from loom.tensors.layouts import (
    DtypeKind,
    Meta,
    Shape,
    bool_,
    broadcast,
    int32,
    int64,
    pointwise_meta,
    uint8,
    wrapped,
)
from loom.tensors.learned import call, change
from loom.tensors.op import Op, method, methods
from loom.tensors.sending.encoding import S, T
from loom.tensors.tensor import Tensor

Number = bool | int | float | complex

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
    if dtype.kind is not DtypeKind.INT or (tensor.shape and dtype not in (int32, int64)):
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
def _ops() -> tuple[Op, Op]:
    """Return the view and the copy by an index."""

    def arguments(many: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (T(0), arguments_of(static[0])), {}

    return (
        Op(".getitem", _getitem_rule, arguments, view=True),
        Op(".getitem", _getitem_rule, arguments),
    )


def part_at(tensor: Tensor, index: Index) -> Tensor:
    """Return the part of a tensor at an index."""
    view, copy = _ops()
    op = view if _COPYING.isdisjoint(index.items) else copy
    return op((tensor, *index.tensors), index.numbers, (index.items,))


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


# Assignment


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


def _assigned(metas: Metas, numbers: Any, static: Any) -> Meta:
    """The rule of the assignment of a number, or of the last tensor."""
    items = static[0]
    many = sum(item == ONE or item in _COPYING for item in items) + 1
    part = indexed_meta(metas[:many], items)
    if len(metas) > many:
        _check_fits(metas[many], part, SEVERAL in items)
    return metas[0]


def _assign_arguments(tensors: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    of_index = sum(item == ONE or item in _COPYING for item in static[0]) + 1
    return (T(0), arguments_of(static[0]), T(of_index) if tensors > of_index else S(numbers - 1)), {}


_assign = Op(".setitem", _assigned, _assign_arguments, changes=".setitem")


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
    if isinstance(value, (bool, int, float, complex)):
        _assign.in_place((self, *where.tensors), (*where.numbers, value), (where.items,))
        return
    if not isinstance(value, Tensor):
        if not hasattr(value, "__array__"):
            raise TypeError(f"can't assign a {type(value).__name__} to a tensor")
        value = self._home.tensor(value)
    if needs_grad(value) and self.dtype.kind < DtypeKind.FLOAT:
        value = value.detach()
    part = indexed_meta([each.meta for each in (self, *where.tensors)], where.items)
    kept = _without_lead(value.shape, 0 if part is None else len(part.shape))
    value = value if kept == value.shape else value.reshape(kept)
    _assign.in_place((self, *where.tensors, value), where.numbers, (where.items,))


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


# Elements by an index for each, or along a dimension


def _arguments(tensors: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the first tensor, the dimension, the other tensors and the numbers."""
    return (T(0), *static, *map(T, range(1, tensors)), *map(S, range(numbers))), {}


def _flat(shape: Shape) -> Shape:
    return shape or (1,)


def _check_index(name: str, index: Meta) -> None:
    if index.dtype not in (int32, int64) and index.numel:
        raise RuntimeError(f"{name}(): Expected dtype int32/int64 for index")


def _check_sizes(own: Meta, index: Meta, dim: int, source: Meta | None = None) -> None:
    """Check that an index fits a tensor in all other dimensions, and what is scattered in all."""
    if not index.numel:
        return
    mine, its = _flat(own.shape), _flat(index.shape)
    if len(its) != len(mine):
        raise RuntimeError("Index tensor must have the same number of dimensions as input tensor")
    if source is not None and len(_flat(source.shape)) != len(its):
        raise RuntimeError("Index tensor must have the same number of dimensions as src tensor")
    fits = all(size <= mine[place] for place, size in enumerate(its) if place != dim)
    if source is not None and any(a > b for a, b in zip(its, _flat(source.shape), strict=True)):
        fits = False
    if not fits:
        end = f" and to be no larger size than src {list(source.shape)}" if source is not None else ""
        raise RuntimeError(
            f"Expected index {list(index.shape)} to be no larger than self {list(own.shape)} apart from dimension "
            f"{dim}{end}"
        )


def _gather_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    own, index = metas
    dim = wrapped(static[0], len(own.shape))
    _check_index("gather", index)
    _check_sizes(own, index, dim)
    return Meta(index.shape, own.dtype)


_gather = Op("gather", _gather_rule, _arguments)


@method
def gather(self: Tensor, dim: int, index: Tensor) -> Tensor:
    return _gather((self, index), (), (int(dim),))


def _scatter_rule(name: str) -> Any:
    """Return the rule of what an index scatters along a dimension, which is the first static argument."""

    def rule(metas: Metas, numbers: Any, static: Any) -> Meta:
        own, index, *source = metas
        dim = wrapped(static[0], len(own.shape))
        _check_index(name, index)
        if source and source[0].dtype is not own.dtype:
            raise RuntimeError(f"{name}(): Expected self.dtype to be equal to src.dtype")
        _check_sizes(own, index, dim, *source)
        return Meta(own.shape, own.dtype)

    return rule


_scatter = Op("scatter", _scatter_rule("scatter"), _arguments)
_scatter_add = Op("scatter_add", _scatter_rule("scatter_add"), _arguments)


@method
def scatter(
    self: Tensor, dim: int, index: Tensor, src: Tensor | Number | None = None, *, value: Any = None, **reduce: Any
) -> Tensor:
    src = value if src is None else src
    if reduce:
        return call(self._home, "scatter", (self, dim, index, src), reduce, "1")  # type: ignore[no-any-return]
    if isinstance(src, Tensor):
        return _scatter((self, index, src), (), (int(dim),))
    return _scatter((self, index), (src,), (int(dim),))


@method
def scatter_(
    self: Tensor, dim: int, index: Tensor, src: Tensor | Number | None = None, *, value: Any = None, **reduce: Any
) -> Tensor:
    src = value if src is None else src
    if reduce:
        return change("Tensor.scatter_", self, (dim, index, src), reduce)
    if isinstance(src, Tensor):
        return _scatter.in_place((self, index, src), (), (int(dim),))
    return _scatter.in_place((self, index), (src,), (int(dim),))


@method
def scatter_add(self: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return _scatter_add((self, index, src), (), (int(dim),))


@method
def scatter_add_(self: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    return _scatter_add.in_place((self, index, src), (), (int(dim),))


def _check_vector(name: str, index: Meta, error: type[Exception] = IndexError) -> None:
    if len(index.shape) > 1:
        raise error(f"{name}(): Index is supposed to be a vector, but got dim: {len(index.shape)}")


def _select_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    own, index = metas
    _check_vector("index_select", index)
    if index.dtype not in (int32, int64):
        raise RuntimeError("index_select(): Expected dtype int32 or int64 for index")
    dim = wrapped(static[0], len(own.shape))
    if not own.shape:
        if index.numel != 1:
            raise RuntimeError(f"index_select(): Index to scalar can have only 1 value, got {index.numel} value(s)")
        return own
    return Meta((*own.shape[:dim], index.numel, *own.shape[dim + 1 :]), own.dtype)


_select = Op("index_select", _select_rule, _arguments)


@method
def index_select(self: Tensor, dim: int, index: Tensor) -> Tensor:
    return _select((self, index), (), (int(dim),))


@method
def nonzero(self: Tensor, *, as_tuple: bool = False) -> Any:
    """Return the places of elements that are not 0: rows of a matrix, or a tensor for each dimension."""
    if not as_tuple:
        return call(self._home, "nonzero", (self,), {}, "1")
    many = max(self.dim(), 1)
    found = call(self._home, ".places", (self,), {}, str(many))
    return found if many > 1 else (found,)
