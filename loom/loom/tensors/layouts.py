"""The laptop's knowledge of a tensor: shape, strides and dtype; and torch's rules of layout."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cache, reduce
from operator import mul
from typing import Any


class DtypeKind(IntEnum):
    """The kind of a type's elements. A higher kind takes in the lower ones."""

    BOOL = 0
    INT = 1
    FLOAT = 2
    COMPLEX = 3


class DType:
    """An element type, such as ``float32``. There is one object of each."""

    __slots__ = ("code", "itemsize", "kind", "name", "scalar_name")

    def __init__(self, name: str, itemsize: int, kind: DtypeKind, scalar_name: str, code: str) -> None:
        self.name = name
        self.itemsize = itemsize
        """Bytes of an element."""
        self.kind = kind
        self.scalar_name = scalar_name
        """The name in torch's errors."""
        self.code = code
        """The letter of `struct` and `array` for an element; empty if they have none."""

    @property
    def is_floating_point(self) -> bool:
        return self.kind is DtypeKind.FLOAT

    @property
    def is_complex(self) -> bool:
        return self.kind is DtypeKind.COMPLEX

    def __repr__(self) -> str:
        return f"loom.tensors.{self.name}"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return dtype_named, (self.name,)


bool_ = DType("bool", 1, DtypeKind.BOOL, "Bool", "?")
uint8 = DType("uint8", 1, DtypeKind.INT, "Byte", "B")
int8 = DType("int8", 1, DtypeKind.INT, "Char", "b")
int16 = DType("int16", 2, DtypeKind.INT, "Short", "h")
int32 = DType("int32", 4, DtypeKind.INT, "Int", "i")
int64 = DType("int64", 8, DtypeKind.INT, "Long", "q")
float16 = DType("float16", 2, DtypeKind.FLOAT, "Half", "e")
bfloat16 = DType("bfloat16", 2, DtypeKind.FLOAT, "BFloat16", "")
float32 = DType("float32", 4, DtypeKind.FLOAT, "Float", "f")
float64 = DType("float64", 8, DtypeKind.FLOAT, "Double", "d")
complex64 = DType("complex64", 8, DtypeKind.COMPLEX, "ComplexFloat", "")
complex128 = DType("complex128", 16, DtypeKind.COMPLEX, "ComplexDouble", "")

ALL = (bool_, uint8, int8, int16, int32, int64, float16, bfloat16, float32, float64, complex64, complex128)
_NAMED = {each.name: each for each in ALL} | {
    "half": float16, "float": float32, "double": float64, "short": int16, "int": int32, "long": int64,
    "cfloat": complex64, "cdouble": complex128,
}  # fmt: skip

DEFAULT = float32
"""The type of floats of Python, as in torch."""


def real_of(dtype: DType) -> DType:
    """Return the type of the parts of complex numbers; any other type itself."""
    return {complex64: float32, complex128: float64}.get(dtype, dtype)


def dtype_named(name: object) -> DType:
    """Return the type of a name, or of an object of torch or numpy that is called so.

    Raises:
        TypeError: there is no such type.
    """
    if isinstance(name, DType):
        return name
    known = {bool: bool_, int: int64, float: DEFAULT, complex: complex64}.get(name)  # type: ignore[call-overload]
    if known is not None:
        return known  # type: ignore[no-any-return]
    found = _NAMED.get(str(getattr(name, "name", name)).removeprefix("torch."))
    if found is None:
        raise TypeError(f"there is no dtype {str(name)[:80]!r}: it takes one of {', '.join(_NAMED)}")
    return found


def of_scalar(value: object) -> DType:
    """Return the type that a number of Python has beside no tensor."""
    match value:
        case bool():
            return bool_
        case int():
            return int64
        case float():
            return DEFAULT
        case complex():
            return complex64
    raise TypeError(f"a number is needed, not {type(value).__name__}")


PLAIN = frozenset((bool, int, float, complex))
"""Python's types of numbers."""


def plain(value: Any) -> Any:
    """Return a number of numpy as Python's, also within tuples, lists and slices; everything else as it is."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([plain(each) for each in value])
    if kind is slice:
        return slice(plain(value.start), plain(value.stop), plain(value.step))
    if kind.__module__ == "numpy" and hasattr(value, "item") and value.shape == ():
        return value.item()
    return value


@cache
def promote(one: DType, other: DType) -> DType:
    """Return the type that holds both, as `torch.promote_types`."""
    if one is other:
        return one
    if one.kind < other.kind:
        one, other = other, one
    if one.kind is DtypeKind.COMPLEX:
        wide = one is complex128 or other in (complex128, float64)
        return complex128 if wide else complex64
    if one.kind != other.kind:
        return one
    if one.kind is DtypeKind.FLOAT:
        if one.itemsize == other.itemsize:
            return float32  # float16 and bfloat16
        return max(one, other, key=lambda each: each.itemsize)
    if uint8 in (one, other):
        signed = other if one is uint8 else one
        return int16 if signed is int8 else signed
    return max(one, other, key=lambda each: each.itemsize)


def _to_complex(floating: DType) -> DType:
    return complex128 if floating is float64 else complex64


def _combine(higher: DType | None, lower: DType | None) -> DType | None:
    if higher is None or lower is None:
        return higher or lower
    if higher.kind is DtypeKind.FLOAT and lower.kind is DtypeKind.COMPLEX:
        return _to_complex(higher)
    if higher.kind >= DtypeKind.FLOAT:
        return higher
    if higher.kind is DtypeKind.BOOL or lower.kind >= DtypeKind.FLOAT:
        return promote(higher, lower)
    return higher


def result_type(dimensioned: list[DType], zero_dimensional: list[DType], scalars: list[DType]) -> DType:
    """Return the type of an operation's result.

    Args:
        dimensioned: of the tensors with at least one dimension.
        zero_dimensional: of those without any, which count only if their kind is higher.
        scalars: of numbers of Python, which count only if theirs is higher still.
    """
    groups = []
    for group in (dimensioned, zero_dimensional, scalars):
        found: DType | None = None
        for each in group:
            found = each if found is None else promote(found, each)
        groups.append(found)
    result = _combine(groups[0], _combine(groups[1], groups[2]))
    assert result is not None
    return result


Shape = tuple[int, ...]

MOST_KEPT = 65_536
"""Metas that are kept, so that equal ones are the same object."""


class Meta:
    """Shape, strides in elements, and dtype. Equal ones are mostly the same object, and compare as such."""

    __slots__ = ("contiguous", "dtype", "numel", "shape", "strides")

    shape: Shape
    strides: Shape
    dtype: DType
    numel: int
    contiguous: bool

    def __new__(cls, shape: Shape, dtype: DType, strides: Shape | None = None) -> Meta:
        key = (shape, dtype, strides)
        found = _kept.get(key)
        if found is not None:
            return found
        if strides is None:
            meta = super().__new__(cls)
            meta.shape, meta.dtype, meta.strides = shape, dtype, contiguous_strides(shape)
            meta.numel, meta.contiguous = reduce(mul, shape, 1), True
        elif is_contiguous(shape, strides) and strides == contiguous_strides(shape):
            meta = cls(shape, dtype)
        else:
            meta = super().__new__(cls)
            meta.shape, meta.dtype, meta.strides = shape, dtype, strides
            meta.numel, meta.contiguous = reduce(mul, shape, 1), is_contiguous(shape, strides)
        if len(_kept) >= MOST_KEPT:
            _kept.clear()
        _kept[key] = meta
        return meta

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def of(self, dtype: DType) -> Meta:
        """Return the same layout with other elements."""
        return Meta(self.shape, dtype, self.strides)

    def __repr__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"


_kept: dict[tuple[Shape, DType, Shape | None], Meta] = {}


def contiguous_strides(shape: Shape) -> Shape:
    """Return the strides of elements that lie in memory in their order."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_contiguous(shape: Shape, strides: Shape) -> bool:
    """Whether the elements lie in memory in their order; the strides of dimensions of size 1 do not matter."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 0:
            return True
        if size != 1:
            if stride != step:
                return 0 in shape
            step *= size
    return True


def is_dense(shape: Shape, strides: Shape) -> bool:
    """Whether the elements lie side by side in memory, in any order of the dimensions."""
    if is_contiguous(shape, strides):
        return True
    step = 1
    for size, stride in sorted(
        ((size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1),
        key=lambda each: each[::-1],
    ):
        if stride != step:
            return False
        step *= size
    return True


class Misfit(Exception):
    """A call of which a rule of layouts knows nothing: the workers are asked."""


def fits(condition: object) -> None:
    """Check what a rule of layouts needs.

    Raises:
        Misfit: it is not so.
    """
    if not condition:
        raise Misfit


def broadcast(*shapes: Shape) -> Shape:
    """Return the shape to which shapes are broadcast.

    Raises:
        Misfit: they do not fit.
    """
    first, *others = shapes
    for other in others:
        if other != first:
            first = _broadcast(first, other)
    return first


def _broadcast(one: Shape, other: Shape) -> Shape:
    longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
    lead = len(longer) - len(shorter)
    result = list(longer)
    for place in range(len(longer) - 1, lead - 1, -1):
        size, its = longer[place], shorter[place - lead]
        if size == 1:
            result[place] = its
        else:
            fits(its in (1, size))
    return tuple(result)


def expanded_strides(meta: Meta, shape: Shape) -> Shape:
    """Return the strides with which a tensor is read as if it had a broadcast shape."""
    lead = len(shape) - len(meta.shape)
    steps = [
        0 if size == 1 and wanted != 1 else stride
        for size, stride, wanted in zip(meta.shape, meta.strides, shape[lead:], strict=True)
    ]
    return (0,) * lead + tuple(steps)


def pointwise_meta(metas: Sequence[Meta], dtype: DType) -> Meta:
    """Return what an elementwise operation gives: torch keeps the order of the operands' dimensions in memory."""
    first = metas[0]
    if (len(metas) == 1 and first.contiguous) or all(
        each.shape == first.shape and each.contiguous for each in metas
    ):
        return Meta(first.shape, dtype)
    shape = broadcast(*(each.shape for each in metas))
    if all(each.shape == shape and each.strides == first.strides for each in metas) and is_dense(
        shape, first.strides
    ):
        return Meta(shape, dtype, first.strides)
    return Meta(shape, dtype, _ordered_strides(shape, [expanded_strides(each, shape) for each in metas]))


def _ordered_strides(shape: Shape, operands: Sequence[Shape]) -> Shape:
    """Return dense strides in the operands' order: the first that tells two dimensions apart decides."""
    order = list(reversed(range(len(shape))))  # the innermost first
    for place in range(1, len(order)):
        at = place
        for below in range(place - 1, -1, -1):
            decision = _compare(shape, operands, order[below], order[at])
            if decision > 0:
                order[below], order[at] = order[at], order[below]
                at = below
            elif decision < 0:
                break
    strides = [0] * len(shape)
    step = 1
    for dimension in order:
        strides[dimension] = step
        step *= shape[dimension]
    return contiguous_strides(shape) if 0 in shape else tuple(strides)


def _compare(shape: Shape, operands: Sequence[Shape], inner: int, outer: int) -> int:
    """Return 1 if two dimensions are to change places, -1 if they are in order, 0 if nothing tells."""
    for strides in operands:
        one, other = strides[inner], strides[outer]
        if one == 0 or other == 0:
            continue
        if one < other:
            return -1
        if one > other or shape[inner] > shape[outer]:
            return 1
    return 0


def wrapped(dimension: int, dimensions: int) -> int:
    """Return a dimension counted from the front.

    Raises:
        IndexError: there is none.
    """
    return range(max(dimensions, 1))[dimension]
