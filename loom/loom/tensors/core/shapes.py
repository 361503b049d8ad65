"""Other shapes, and other orders of dimensions, of the same elements: views if the strides allow it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from operator import index
from typing import Any

from loom.errors import NotSupported
from loom.tensors.layouts import DType, Meta, Shape, pointwise_meta, wrapped
from loom.tensors.op import Op, method, properties
from loom.tensors.sending.encoding import T
from loom.tensors.tensor import Tensor

Metas = Sequence[Meta]


def positional(tensors: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the tensors, then the other arguments, all by position."""
    return (*map(T, range(tensors)), *static), {}


def whole(given: Any) -> Shape:
    """Return sizes, or dimensions, as a tuple of ints: those of ``f(2, 3)``, of ``f((2, 3))`` and of ``f(2)``."""
    if isinstance(given, (tuple, list)):
        if len(given) == 1 and isinstance(given[0], (tuple, list)):
            given = given[0]
        return tuple([each if type(each) is int else int(index(each)) for each in given])
    return (int(index(given)),)


def wrapped_dims(dims: Sequence[int], dimensions: int) -> list[int]:
    """Return dimensions counted from the front.

    Raises:
        IndexError: one is out of range.
        RuntimeError: one is there twice.
    """
    found: list[int] = []
    for each in dims:
        place = wrapped(each, dimensions)
        if place in found:
            raise RuntimeError(f"dim {place} appears multiple times in the list of dims")
        found.append(place)
    return found


# Shapes


def _inferred(size: Shape, numel: int) -> Shape:
    """Return a shape with the size instead of -1.

    Raises:
        RuntimeError: no such shape has as many elements.
    """
    if any(each < -1 for each in size):
        at = next(place for place, each in enumerate(size) if each < -1)
        raise RuntimeError(f"invalid shape dimension {size[at]} at index {at} of shape {list(size)}")
    if size.count(-1) > 1:
        raise RuntimeError("only one dimension can be inferred")
    known = prod(each for each in size if each != -1)
    if -1 not in size:
        if known == numel:
            return size
    elif known and numel % known == 0:
        return tuple(numel // known if each == -1 else each for each in size)
    elif known == numel == 0:
        raise RuntimeError(
            f"cannot reshape tensor of 0 elements into shape {list(size)} because the unspecified dimension size "
            "-1 can be any value and is ambiguous"
        )
    raise RuntimeError(f"shape '{list(size)}' is invalid for input of size {numel}")


def viewed(old: Shape, strides: Shape, new: Shape) -> Shape | None:
    """Return the strides of a view with another shape; None if there is none. As `computeStride` of ATen."""
    if not old:
        return (1,) * len(new)
    if 0 in old:
        if old == new:
            return strides
        found = [1] * len(new)
        for place in range(len(new) - 2, -1, -1):
            found[place] = found[place + 1] * max(new[place + 1], 1)
        return tuple(found)
    found = [0] * len(new)
    at = len(new) - 1
    base, chunk, done = strides[-1], 1, 1
    for place in range(len(old) - 1, -1, -1):
        chunk *= old[place]
        if place and (old[place - 1] == 1 or strides[place - 1] == chunk * base):
            continue
        while at >= 0 and (done < chunk or new[at] == 1):
            found[at] = done * base
            done *= new[at]
            at -= 1
        if done != chunk:
            return None
        if place:
            base, chunk, done = strides[place - 1], 1, 1
    return tuple(found) if at == -1 else None


@lru_cache(maxsize=4096)
def _reshaped(old: Shape, strides: Shape, size: Shape) -> tuple[Shape, Shape | None]:
    shape = _inferred(size, prod(old))
    return shape, viewed(old, strides, shape)


def _view_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    (meta,) = metas
    shape, strides = _reshaped(meta.shape, meta.strides, static[0])
    if strides is None:
        raise RuntimeError(
            "view size is not compatible with input tensor's size and stride (at least one dimension spans across "
            "two contiguous subspaces). Use .reshape(...) instead."
        )
    return Meta(shape, meta.dtype, strides)


def _copy_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    (meta,) = metas
    return Meta(_reshaped(meta.shape, meta.strides, static[0])[0], meta.dtype)


_view = Op("Tensor.view", _view_rule, arguments=positional, view=True)
_reshape = Op("reshape", _view_rule, arguments=positional, view=True)
_reshape_copy = Op(".reshaped", _copy_rule, arguments=positional)


@method
def view(self: Tensor, *shape: Any) -> Tensor:
    """Return a view with another shape.

    Raises:
        RuntimeError: there is none with these strides, or the shape has more or fewer elements.
        NotSupported: a dtype is given.
    """
    if len(shape) == 1 and (isinstance(shape[0], DType) or str(shape[0]).startswith("torch.")):
        raise NotSupported("view(dtype) is not supported on lazy tensors: use to(dtype), which copies")
    return _view((self,), (), (whole(shape),))


@method
def reshape(self: Tensor, *shape: Any) -> Tensor:
    """Return the elements with another shape: a view if the strides allow one, else a copy."""
    size = whole(shape)
    meta = self.meta
    op = _reshape_copy if _reshaped(meta.shape, meta.strides, size)[1] is None else _reshape
    return op((self,), (), (size,))


@method
def view_as(self: Tensor, other: Tensor) -> Tensor:
    return view(self, other.shape)


@method
def reshape_as(self: Tensor, other: Tensor) -> Tensor:
    return reshape(self, other.shape)


@method
def ravel(self: Tensor) -> Tensor:
    """Return the elements in one dimension: a view if they lie in memory in their order, else a copy."""
    whole = (self.numel(),)
    return reshape(self, whole) if self.meta.contiguous else _reshape_copy((self,), (), (whole,))


@method
def flatten(self: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    shape = self.shape
    start, end = wrapped(start_dim, len(shape)), wrapped(end_dim, len(shape))
    if start > end:
        raise RuntimeError("flatten() has invalid args: start_dim cannot come after end_dim")
    if not shape:
        return reshape(self, 1)
    if start == end:
        return self
    return reshape(self, (*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]))


@method
def unflatten(self: Tensor, dim: int, sizes: Any) -> Tensor:
    shape = self.shape
    place, parts = wrapped(dim, len(shape)), whole(sizes)
    if not parts:
        raise RuntimeError("unflatten: sizes must be non-empty")
    if not shape:
        raise RuntimeError(
            "unflatten got an unexpected error:\nDimension specified as 0 but tensor has no dimensions"
        )
    try:
        inferred = _inferred(parts, shape[place])
    except RuntimeError as error:
        if "is invalid" not in str(error):
            raise
        raise RuntimeError(
            f"unflatten: Provided sizes {list(parts)} don't multiply up to the size of dim {place} "
            f"({shape[place]}) in the input tensor"
        ) from None
    return view(self, (*shape[:place], *inferred, *shape[place + 1 :]))


# Sizes of 1


def _expand_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    (meta,) = metas
    (size,) = static
    old = meta.shape
    lead = len(size) - len(old)
    if lead < 0:
        raise RuntimeError(
            f"expand({meta.dtype.scalar_name}Tensor{list(old)}, size={list(size)}): the number of sizes provided "
            f"({len(size)}) must be greater or equal to the number of dimensions in the tensor ({len(old)})"
        )
    shape, strides = list(size), [0] * len(size)
    for place in range(len(size) - 1, -1, -1):
        wanted, there = size[place], place >= lead
        if wanted < (-1 if there else 0):
            raise RuntimeError(
                f"The expanded size of the tensor ({wanted}) isn't allowed in a leading, non-existing dimension "
                f"{place}"
            )
        have = old[place - lead] if there else 1
        if wanted in (-1, have):
            shape[place] = have
            if there:
                strides[place] = meta.strides[place - lead]
            elif old:
                strides[place] = shape[place + 1] * strides[place + 1]
        elif have != 1:
            raise RuntimeError(
                f"The expanded size of the tensor ({wanted}) must match the existing size ({have}) at "
                f"non-singleton dimension {place}.  Target sizes: {list(size)}.  Tensor sizes: {list(old)}"
            )
    return Meta(tuple(shape), meta.dtype, tuple(strides))


_expand = Op("Tensor.expand", _expand_rule, arguments=positional, view=True)


@method
def expand(self: Tensor, *sizes: Any) -> Tensor:
    return _expand((self,), (), (whole(sizes),))


@method
def expand_as(self: Tensor, other: Tensor) -> Tensor:
    return expand(self, other.shape)


@method
def broadcast_to(self: Tensor, size: Any) -> Tensor:
    return expand(self, size)


def _unsqueeze_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    (meta,) = metas
    shape, strides = meta.shape, meta.strides
    place = wrapped(static[0], len(shape) + 1)
    stride = shape[place] * strides[place] if place < len(shape) else 1
    return Meta((*shape[:place], 1, *shape[place:]), meta.dtype, (*strides[:place], stride, *strides[place:]))


_unsqueeze = Op("unsqueeze", _unsqueeze_rule, arguments=positional, view=True)


@method
def unsqueeze(self: Tensor, dim: int) -> Tensor:
    return _unsqueeze((self,), (), (int(index(dim)),))


def _squeeze_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    (meta,) = metas
    dims = wrapped_dims(static[0], len(meta.shape)) if static else range(len(meta.shape))
    kept = [place for place, size in enumerate(meta.shape) if size != 1 or place not in dims]
    return picked(meta, kept)


def picked(meta: Meta, places: Sequence[int]) -> Meta:
    """Return the layout of some dimensions, in their order."""
    shape, strides = meta.shape, meta.strides
    return Meta(tuple([shape[each] for each in places]), meta.dtype, tuple([strides[each] for each in places]))


_squeeze = Op("squeeze", _squeeze_rule, arguments=positional, view=True)


@method
def squeeze(self: Tensor, dim: Any = None) -> Tensor:
    """Return a view without the dimensions of size 1, of all or of some."""
    return _squeeze((self,), (), () if dim is None else (whole(dim),))


# Dimensions in another order


def _permute_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    (meta,) = metas
    (dims,) = static
    if len(dims) != len(meta.shape):
        raise RuntimeError(
            "permute(sparse_coo): number of dimensions in the tensor input does not match the length of the "
            f"desired ordering of dimensions i.e. input.dim() = {len(meta.shape)} is not equal to len(dims) = "
            f"{len(dims)}"
        )
    order = [wrapped(each, len(dims)) for each in dims]
    if len(set(order)) != len(order):
        raise RuntimeError("permute(): duplicate dims are not allowed.")
    return picked(meta, order)


_permute = Op("permute", _permute_rule, arguments=positional, view=True)


@method
def permute(self: Tensor, *dims: Any) -> Tensor:
    return _permute((self,), (), (whole(dims),))


def _transpose_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    (meta,) = metas
    one, other = (wrapped(each, len(meta.shape)) for each in static)
    order = list(range(len(meta.shape)))
    if order:
        order[one], order[other] = other, one
    return picked(meta, order)


_transpose = Op(
    "transpose",
    _transpose_rule,
    arguments=positional,
    view=True,
)


@method
def transpose(self: Tensor, dim0: int, dim1: int) -> Tensor:
    return _transpose((self,), (), (int(index(dim0)), int(index(dim1))))


@method
def swapaxes(self: Tensor, axis0: int, axis1: int) -> Tensor:
    return transpose(self, axis0, axis1)


@method
def swapdims(self: Tensor, dim0: int, dim1: int) -> Tensor:
    return transpose(self, dim0, dim1)


@method
def t(self: Tensor) -> Tensor:
    """Return a matrix transposed, and a tensor of fewer dimensions as it is."""
    many = self.dim()
    if many > 2:
        raise RuntimeError(f"t() expects a tensor with <= 2 dimensions, but self is {many}D")
    return transpose(self, 0, many - 1 if many else 0)


def _reversed(self: Tensor) -> Tensor:
    return permute(self, tuple(range(self.dim()))[::-1])


def _matrices_transposed(self: Tensor) -> Tensor:
    if not self.dim():
        return permute(self, ())
    if self.dim() == 1:
        raise RuntimeError(
            f"tensor.mT is only supported on matrices or batches of matrices. Got {self.dim()}-D tensor."
        )
    return transpose(self, -2, -1)


properties["T"] = property(_reversed)
properties["mT"] = property(_matrices_transposed)


@method
def movedim(self: Tensor, source: Any, destination: Any) -> Tensor:
    froms, tos, many = whole(source), whole(destination), self.dim()
    if len(froms) != len(tos):
        raise RuntimeError(
            f"movedim: Invalid source or destination dims: source ({list(froms)} dims) should contain the same "
            f"number of dims as destination ({list(tos)} dims)"
        )
    froms, tos = (tuple([wrapped(each, many) for each in dims]) for dims in (froms, tos))
    for name, dims in (("source", froms), ("destination", tos)):
        if len(set(dims)) != len(dims):
            raise RuntimeError(f"movedim: repeated dim in `{name}` ({list(dims)})")
    if not many:
        return permute(self, ())
    rest = iter(place for place in range(many) if place not in froms)
    moved = dict(zip(tos, froms, strict=True))
    return permute(self, [moved[place] if place in moved else next(rest) for place in range(many)])


@method
def moveaxis(self: Tensor, source: Any, destination: Any) -> Tensor:
    return movedim(self, source, destination)


# Diagonals and windows


def _diagonal_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    (meta,) = metas
    offset, *dims = static
    one, other = (wrapped(each, len(meta.shape)) for each in dims)
    if one == other:
        raise RuntimeError(f"diagonal dimensions cannot be identical {dims[0]}, {dims[1]}")
    rows, columns = meta.shape[one] + min(offset, 0), meta.shape[other] - max(offset, 0)
    rest = picked(meta, [place for place in range(len(meta.shape)) if place not in (one, other)])
    return Meta(
        (*rest.shape, max(min(rows, columns), 0)),
        meta.dtype,
        (*rest.strides, meta.strides[one] + meta.strides[other]),
    )


_diagonal = Op("diagonal", _diagonal_rule, arguments=positional, view=True)


@method
def diagonal(self: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    return _diagonal((self,), (), (int(offset), int(dim1), int(dim2)))


def _unfold_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    (meta,) = metas
    dim, size, step = static
    place = wrapped(dim, len(meta.shape))
    have, stride = (meta.shape[place], meta.strides[place]) if meta.shape else (1, 1)
    if size < 0:
        raise RuntimeError(f"size is {size} but must be >= 0")
    if size > have:
        raise RuntimeError(f"maximum size for tensor at dimension {place} is {have} but size is {size}")
    if step <= 0:
        raise RuntimeError(f"step is {step} but must be > 0")
    shape, strides = [*meta.shape, size], [*meta.strides, stride]
    if meta.shape:
        shape[place], strides[place] = (have - size) // step + 1, stride * step
    return Meta(tuple(shape), meta.dtype, tuple(strides))


_unfold = Op("Tensor.unfold", _unfold_rule, arguments=positional, view=True)


@method
def unfold(self: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Return a view of windows along a dimension; the last dimension is that of a window."""
    return _unfold((self,), (), (int(dimension), int(size), int(step)))


# Copies


def _repeat_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    (meta,) = metas
    (repeats,) = static
    lead = len(repeats) - len(meta.shape)
    if lead < 0:
        raise RuntimeError(
            "Number of dimensions of repeat dims can not be smaller than number of dimensions of tensor"
        )
    shape = tuple([size * many for size, many in zip((1,) * lead + meta.shape, repeats, strict=True)])
    if any(each < 0 for each in shape):
        least = next(each for each in shape if each < 0)
        raise RuntimeError(f"Trying to create tensor with negative dimension {least}: {list(shape)}")
    return Meta(shape, meta.dtype)


_repeat = Op("Tensor.repeat", _repeat_rule, arguments=positional)


@method
def repeat(self: Tensor, *repeats: Any) -> Tensor:
    return _repeat((self,), (), (whole(repeats),))


@method
def tile(self: Tensor, *dims: Any) -> Tensor:
    times = whole(dims)
    return repeat(self, (1,) * (self.dim() - len(times)) + times)


def _same_order(metas: Metas, numbers: Any, static: Any) -> Meta:
    wrapped_dims(static[0], len(metas[0].shape))
    return pointwise_meta(metas, metas[0].dtype)


_flip = Op("flip", _same_order, arguments=positional)


@method
def flip(self: Tensor, *given: Any, dims: Any = ()) -> Tensor:
    return _flip((self,), (), (whole(given or dims),))


def _triangle(name: str) -> Op:
    def rule(metas: Metas, numbers: Any, static: Any) -> Meta:
        (meta,) = metas
        if len(meta.shape) < 2:
            raise RuntimeError(f"{name}: input tensor must have at least 2 dimensions")
        return Meta(meta.shape, meta.dtype)

    return Op(name, rule, arguments=positional)


_tril, _triu = _triangle("tril"), _triangle("triu")


@method
def tril(self: Tensor, diagonal: int = 0) -> Tensor:
    return _tril((self,), (), (int(diagonal),))


@method
def triu(self: Tensor, diagonal: int = 0) -> Tensor:
    return _triu((self,), (), (int(diagonal),))
