"""Parts of tensors by index, as ``x[1:3, None, ..., rows]``, and their assignment.

An index travels in one command. The beginnings of its ints and slices are the command's numbers, so that the
batches of a loop, ``x[i : i + 32]``, have the same form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from operator import index as to_int
from typing import Any, NamedTuple

from loom.tensors.call import (
    UNKNOWN_CALL,
    Function,
    Known,
    call,
    call_asked,
    changed,
    check_leaf,
    function_at,
    run,
)
from loom.tensors.history import needs_grad
from loom.tensors.layout_rules import method, methods, picked, viewed
from loom.tensors.layouts import (
    PLAIN,
    DtypeKind,
    Meta,
    bool_,
    broadcast,
    fits,
    int32,
    int64,
    pointwise_meta,
    uint8,
    wrapped,
)
from loom.tensors.sending.encoding import Form, S, T
from loom.tensors.tensor import Tensor

# An item of an index is one of these, or the length and the step of a slice, whose start is a number.
WHOLE, NEW, INT, ONE, SEVERAL, MASK = "whole", "new", "int", "one", "several", "mask"
"""A whole dimension; a new one; a number; a tensor without dimensions; one with some; a mask."""
_TENSORS = (ONE, SEVERAL, MASK)

Item = str | tuple[int, int]

_VIEW, _COPY = Function(".getitem"), Function(".getitem")
_VIEW.view = True


class Index(NamedTuple):
    """An index as an operation takes it."""

    items: tuple[Item, ...]
    numbers: tuple[int, ...]
    tensors: tuple[Tensor, ...]


def parsed(tensor: Tensor, index: Any) -> Index:
    """Return an index of Python, or raise one of `UNKNOWN_CALL` if it is none of this tensor."""
    parts = [_part(tensor, each) for each in (index if isinstance(index, tuple) else (index,))]
    shape = tensor.shape
    spare = len(shape) - sum(map(_taken, parts))
    fits(spare >= 0)
    items: list[Item] = []
    numbers: list[int] = []
    tensors: list[Tensor] = []
    place = 0
    for part in parts:
        if part is None:
            items.append(NEW)
        elif part is ...:
            items += [WHOLE] * spare
            place += spare
            spare = 0
        elif isinstance(part, slice):
            items.append(_slice(part, shape[place], numbers))
        elif isinstance(part, list):
            fits(len(part) == shape[place])
            items.append(SEVERAL)
            tensors.append(tensor._home.tensor([at for at, each in enumerate(part) if each], dtype=int64))
        elif isinstance(part, Tensor):
            items.append(MASK if _is_mask(part) else SEVERAL if part.shape else ONE)
            tensors.append(part)
        else:
            items.append(INT)
            numbers.append(range(shape[place])[part])
        place += _taken(part)
    while items and items[-1] == WHOLE:
        items.pop()
    return Index(tuple(items), tuple(numbers), tuple(tensors))


def _is_mask(tensor: Tensor) -> bool:
    return tensor.dtype is bool_ or tensor.dtype is uint8


def _taken(part: Any) -> int:
    """Return how many dimensions a part of an index takes."""
    if part is None or part is ...:
        return 0
    return part.dim() if isinstance(part, Tensor) and _is_mask(part) else 1


def _part(tensor: Tensor, part: Any) -> Any:
    """Return an int, a slice, None, an ellipsis, a tensor of ints, a mask, or a list of bools."""
    if type(part) is int or part is None or part is ... or isinstance(part, slice):
        return part
    if isinstance(part, list) and part and all(isinstance(each, bool) for each in part):
        return part
    if isinstance(part, bool):
        return tensor._home.tensor(part)
    if isinstance(part, (list, range)) or (hasattr(part, "__array__") and part.shape and not _is_lazy(part)):
        part = tensor._home.tensor(part, dtype=None if len(part) else int64)
    if not isinstance(part, Tensor):
        return int(to_int(part))
    ints = (int32, int64) if part.shape else (part.dtype,)
    fits(_is_mask(part) or (part.dtype.kind is DtypeKind.INT and part.dtype in ints))
    return part


def _is_lazy(part: Any) -> bool:
    return isinstance(part, Tensor)


def _slice(part: slice, size: int, numbers: list[int]) -> Item:
    step = 1 if part.step is None else int(to_int(part.step))
    fits(step > 0)
    start, stop, _ = part.indices(size)
    length = max(0, -((start - stop) // step))
    if length == size and step == 1:
        return WHOLE
    numbers.append(start)
    return length, step


def _arguments(items: Sequence[Item]) -> tuple[Any, ...]:
    """Return an index as it travels, its tensors from the second one on."""
    found: list[Any] = []
    numbers, tensors = 0, 1
    for item in items:
        if item == WHOLE:
            found.append(slice(None))
        elif item == NEW:
            found.append(None)
        elif item in _TENSORS:
            found.append(T(tensors))
            tensors += 1
        else:
            found.append(S(numbers) if item == INT else (S(numbers), *item))
            numbers += 1
    return tuple(found)


def _layout(metas: Sequence[Meta], items: Sequence[Item]) -> Meta | None:
    """Return what an index gives of a tensor, with the index's tensors; None if only the workers know."""
    if MASK in items:
        return None
    meta, *others = metas
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
        elif item in (WHOLE, SEVERAL):
            shape.append(meta.shape[place])
            strides.append(meta.strides[place])
        place += 1
    part = Meta((*shape, *meta.shape[place:]), meta.dtype, (*strides, *meta.strides[place:]))
    return _indexed(part, chosen, [each for each in others if each.shape]) if chosen else part


def _indexed(part: Meta, chosen: Sequence[int], indices: Sequence[Meta]) -> Meta:
    """Return what tensors of ints give as indices of some dimensions. As `AdvancedIndex` of ATen."""
    shape = broadcast(*(each.shape for each in indices))
    if chosen[-1] - chosen[0] + 1 != len(chosen):  # they are not side by side: the result begins with them
        part = picked(part, [*chosen, *(place for place in range(len(part.shape)) if place not in chosen)])
        chosen = range(len(chosen))
    before, rest = chosen[0], chosen[-1] + 1
    operands = [
        Meta(
            (*part.shape[:before], *shape, *part.shape[rest:]),
            part.dtype,
            (*part.strides[:before], *(0,) * len(shape), *part.strides[rest:]),
        )
    ]
    whole = (1,) * before + shape + (1,) * (len(part.shape) - rest)
    for each in indices:
        lead = len(shape) - len(each.shape)
        strides = tuple(
            0 if size != wanted else stride
            for size, stride, wanted in zip(each.shape, each.strides, shape[lead:], strict=True)
        )
        strides = (0,) * lead + strides
        operands.append(Meta(whole, each.dtype, viewed(shape, strides, whole) if each.numel else None))
    return pointwise_meta(operands, part.dtype)


def _getitem(self: Tensor, index: Any) -> Any:
    """Return a part: a view, or a copy if a tensor with dimensions or a list is part of the index.

    Raises:
        IndexError: the index is out of range.
    """
    home = self._home
    try:
        items, numbers, others = parsed(self, index)
        tensors = (self, *others)
        function = _VIEW if SEVERAL not in items and MASK not in items else _COPY
        metas = tuple([each.meta for each in tensors])
        key = (function, items, metas)
        known = home._known.get(key)
        if known is None:
            meta = _layout(metas, items)
            args = (T(0), _arguments(items))
            form = Form(".getitem", args, tensors=len(tensors), numbers=len(numbers))
            sizes = () if meta is None or function.view else (meta.nbytes,)
            known = Known(home._form(form, (int,) * len(numbers)), None, (meta,), sizes, (True,))
            home._known[key] = known
    except UNKNOWN_CALL:
        known = None
    if known is None:
        return call_asked(home, ".getitem", (self, _travelling(index)))
    return run(home, function, known, tensors, numbers, key)


def _travelling(index: Any) -> list[Any]:
    """Return an index of which the workers are asked: a tuple would be a slice there."""
    parts = index if isinstance(index, tuple) else (index,)
    return [each.tolist() if hasattr(each, "dtype") and not isinstance(each, Tensor) else each for each in parts]


def _setitem(self: Tensor, index: Any, value: Any) -> None:
    """Change a part in place.

    Raises:
        IndexError: the index is out of range.
        RuntimeError: the value does not fit the part, or this is a leaf whose gradient is wanted.
        TypeError: the value is no tensor, and no number.
    """
    home = self._home
    if type(value) not in PLAIN:
        if not isinstance(value, Tensor) and not hasattr(value, "__array__"):
            raise TypeError(f"can't assign a {type(value).__name__} to a tensor")
        value = value if isinstance(value, Tensor) else home.tensor(value)
        if needs_grad(value) and self.dtype.kind < DtypeKind.FLOAT:
            value = value.detach()
    tensors = []
    try:
        items, numbers, others = parsed(self, index)
        part = _layout([each.meta for each in (self, *others)], items)
        if isinstance(value, Tensor) and part is not None:
            _check_fits(value.shape, part.shape)
        tensors = [self, *others]
    except UNKNOWN_CALL:
        pass
    if not tensors:
        call_asked(home, ".setitem", (self, _travelling(index), value))
        return
    if isinstance(value, Tensor):
        tensors.append(value)
    else:
        numbers = (*numbers, value)
    check_leaf(self, "setitem")
    last = T(len(others) + 1) if isinstance(value, Tensor) else S(len(numbers) - 1)
    args = (T(0), _arguments(items), last)
    form = Form(".setitem", args, tensors=len(tensors), numbers=len(numbers), outs=0)
    home._queue(home._form(form, tuple(map(type, numbers))), tensors, numbers)
    changed(self, "setitem", tensors[1:])


def _check_fits(value: Sequence[int], part: Sequence[int]) -> None:
    """Check that a value can be broadcast to a part; leading dimensions of size 1 do not matter."""
    kept = list(value)
    while len(kept) > len(part) and kept[0] == 1:
        del kept[0]
    fits(broadcast(tuple(kept), tuple(part)) == tuple(part))


def _iterator(self: Tensor) -> Iterator[Tensor]:
    if not self.dim():
        raise TypeError("iteration over a 0-d tensor")
    return iter(self.unbind(0))


methods.update(__getitem__=_getitem, __setitem__=_setitem, __iter__=_iterator)


@method
def select(self: Tensor, dim: int, index: int) -> Tensor:
    with suppress(*UNKNOWN_CALL):
        fits(self.dim())
        place, at = wrapped(dim, self.dim()), int(to_int(index))
        fits(-self.shape[place] <= at < self.shape[place])
        return self[(slice(None),) * place + (at,)]
    return call_asked(self._home, "Tensor.select", (self, dim, index))  # type: ignore[no-any-return]


@method
def narrow(self: Tensor, dim: int, start: int, length: int) -> Tensor:
    with suppress(*UNKNOWN_CALL):
        place = wrapped(dim, self.dim())
        size, begin = self.shape[place], int(to_int(start))
        fits(-size <= begin <= size and length >= 0)
        begin += size if begin < 0 else 0
        fits(begin + length <= size)
        return self[(slice(None),) * place + (slice(begin, begin + length),)]
    return call_asked(self._home, "Tensor.narrow", (self, dim, start, length))  # type: ignore[no-any-return]


@method
def nonzero(self: Tensor, *, as_tuple: bool = False) -> Any:
    """Return the places of elements that are not 0: rows of a matrix, or a tensor for each dimension."""
    if not as_tuple:
        return call(self._home, function_at("nonzero"), (self,))
    many = max(self.dim(), 1)
    found = call(self._home, function_at(".places", str(many)), (self,))
    return found if many > 1 else (found,)
