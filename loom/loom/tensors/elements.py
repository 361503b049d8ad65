"""The elements of tensors on their way: from lists and arrays to bytes, and back. Needs neither numpy nor torch."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from loom.tensors.dtypes import (
    DEFAULT,
    DType,
    DtypeKind,
    bfloat16,
    bool_,
    complex64,
    complex128,
    dtype_named,
    float32,
    float64,
    int64,
)
from loom.tensors.metas import Shape


class Elements:
    """The elements of a tensor, as they came from the cluster."""

    __slots__ = ("dtype", "raw", "shape")

    def __init__(self, dtype: str, shape: Sequence[int], raw: bytes) -> None:
        self.dtype = dtype_named(dtype)
        self.shape = tuple(shape)
        self.raw = raw
        """In row-major order, in the byte order of the cluster, little endian."""

    def tolist(self) -> Any:
        """Return nested lists of numbers; a number if there is no dimension."""
        flat: list[Any] = list(self._numbers())
        if not self.shape:
            return flat[0]
        for size in reversed(self.shape[1:]):
            flat = [flat[at : at + size] for at in range(0, len(flat), size)] if size else []
        if 0 in self.shape:
            return _empty(self.shape)
        return flat

    def numpy(self) -> Any:
        """Return a numpy array.

        Raises:
            TypeError: numpy has no such elements.
        """
        import numpy

        if self.dtype is bfloat16:
            raise TypeError("Got unsupported ScalarType BFloat16: numpy has none, convert with .float() first")
        return numpy.frombuffer(bytearray(self.raw), self.dtype.name).reshape(self.shape)

    def _numbers(self) -> Iterable[Any]:
        kind = self.dtype
        if kind is bfloat16:
            halves = struct.unpack(f"<{len(self.raw) // 2}H", self.raw)
            return struct.unpack(
                f"<{len(halves)}f", struct.pack(f"<{len(halves)}I", *(one << 16 for one in halves))
            )
        if kind.kind is DtypeKind.COMPLEX:
            code = "f" if kind is complex64 else "d"
            parts = struct.unpack(f"<{2 * len(self.raw) // kind.itemsize}{code}", self.raw)
            return map(complex, parts[::2], parts[1::2])
        return struct.unpack(f"<{len(self.raw) // kind.itemsize}{kind.code}", self.raw)


def _empty(shape: Shape) -> Any:
    if shape[0] == 0 or len(shape) == 1:
        return []
    return [_empty(shape[1:]) for _ in range(shape[0])]


def pack(data: Any, wanted: DType | None) -> tuple[Shape, DType, bytes]:
    """Return the shape, the dtype and the elements of what a tensor is made of.

    Args:
        data: a number, nested sequences of numbers, an array of numpy, a tensor of torch on the CPU, or a buffer.
        wanted: the dtype; that of torch for such data, if None.

    Raises:
        ValueError: the sequences have different lengths.
        TypeError: an element is no number.
    """
    if hasattr(data, "detach") and hasattr(data, "cpu"):
        data = data.detach().resolve_conj().resolve_neg().cpu()
        if str(data.dtype) == "torch.bfloat16":
            shape, _, raw = pack(data.float(), None)
            return _cast(shape, float32, raw, wanted or bfloat16)
        data = data.numpy()
    if hasattr(data, "__array_interface__") and hasattr(data, "tobytes"):
        native = data.astype(data.dtype.newbyteorder("<"), copy=False)
        return _cast(tuple(native.shape), dtype_named(str(native.dtype.name)), native.tobytes(), wanted)
    if isinstance(data, (array, memoryview)):
        view = memoryview(data)
        kind = next((each for each in _BY_CODE if each.code == view.format), None)
        if kind is None:
            raise TypeError(f"a buffer of {view.format!r} has no dtype here")
        return _cast(tuple(view.shape or ()), kind, view.tobytes(), wanted)
    shape = _shape_of(data)
    flat = list(_flat(data, shape, 0))
    kind = wanted or _kind_of(flat)
    return shape, kind, _bytes_of(flat, kind)


def _cast(shape: Shape, found: DType, raw: bytes, wanted: DType | None) -> tuple[Shape, DType, bytes]:
    if wanted is None or wanted is found:
        return shape, found, raw
    return shape, wanted, _bytes_of(list(Elements(found.name, shape, raw)._numbers()), wanted)


_BY_CODE = (bool_, float32, float64, int64, *map(dtype_named, ("uint8", "int8", "int16", "int32")))


def _shape_of(data: Any) -> Shape:
    shape = []
    while isinstance(data, (list, tuple, range)):
        shape.append(len(data))
        if not data:
            break
        data = data[0]
    return tuple(shape)


def _flat(data: Any, shape: Shape, depth: int) -> Iterator[Any]:
    if depth == len(shape):
        if isinstance(data, (list, tuple, range)):
            raise ValueError(f"too many dimensions: {str(data)[:80]} at dim {depth}, where a number is expected")
        if not isinstance(data, (bool, int, float, complex)):
            if isinstance(data, str):
                raise ValueError("too many dimensions 'str'")
            if not hasattr(data, "item"):
                raise TypeError(f"a tensor is made of numbers, not {type(data).__name__}")
            data = data.item()
        yield data
        return
    if not isinstance(data, (list, tuple, range)):
        raise TypeError(f"not a sequence: {str(data)[:80]} at dim {depth}")
    if len(data) != shape[depth]:
        raise ValueError(f"expected sequence of length {shape[depth]} at dim {depth} (got {len(data)})")
    for each in data:
        yield from _flat(each, shape, depth + 1)


def _kind_of(flat: Sequence[Any]) -> DType:
    kinds = set(map(type, flat))
    if complex in kinds:
        return complex64
    if float in kinds or not kinds:
        return DEFAULT
    return int64 if int in kinds else bool_


def _bytes_of(flat: Sequence[Any], kind: DType) -> bytes:
    if kind is bfloat16:
        words = struct.unpack(f"<{len(flat)}I", struct.pack(f"<{len(flat)}f", *map(float, flat)))
        return struct.pack(f"<{len(flat)}H", *(_rounded(word) for word in words))
    if kind.kind is DtypeKind.COMPLEX:
        parts = [part for each in map(complex, flat) for part in (each.real, each.imag)]
        return struct.pack(f"<{len(parts)}{'d' if kind is complex128 else 'f'}", *parts)
    convert = {DtypeKind.BOOL: bool, DtypeKind.INT: int, DtypeKind.FLOAT: float}[kind.kind]
    try:
        return struct.pack(f"<{len(flat)}{kind.code}", *map(convert, flat))
    except OverflowError:  # of a float: torch gives infinity
        return struct.pack(f"<{len(flat)}{kind.code}", *(_within(float(each), kind) for each in flat))
    except struct.error as error:
        raise RuntimeError(f"value cannot be converted to type {kind.name} without overflow") from error


def _within(number: float, kind: DType) -> float:
    try:
        struct.pack(f"<{kind.code}", number)
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")
    return number


def _rounded(word: int) -> int:
    """Return the bfloat16 that is nearest to a float32, of two the even one."""
    if word & 0x7FFFFFFF > 0x7F800000:
        return (word >> 16) | 0x40
    return (word + 0x7FFF + ((word >> 16) & 1)) >> 16
