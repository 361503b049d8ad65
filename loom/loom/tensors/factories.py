"""`Making`: the functions that make tensors, with torch's names."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

from loom.errors import NotSupported
from loom.tensors.call import call_asked
from loom.tensors.layouts import (
    DEFAULT,
    PLAIN,
    DType,
    DtypeKind,
    Meta,
    Misfit,
    Shape,
    bfloat16,
    bool_,
    complex64,
    dtype_named,
    fits,
    float32,
    float64,
    int64,
    of_scalar,
    plain,
    real_of,
)
from loom.tensors.placements import WHOLE, largest_part, packed
from loom.tensors.sending.encoding import Form, S
from loom.tensors.tensor import Tensor, Value


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
        wanted: the dtype, which numbers have then if they can be packed so; else the workers convert them.

    Raises:
        ValueError: the sequences have different lengths.
        TypeError: an element is no number.
    """
    if hasattr(data, "detach") and hasattr(data, "cpu"):
        data = data.detach().resolve_conj().resolve_neg().cpu()
        data = (data.float() if str(data.dtype) == "torch.bfloat16" else data).numpy()
    if hasattr(data, "__array_interface__") and hasattr(data, "tobytes"):
        native = data.astype(data.dtype.newbyteorder("<"), copy=False)
        return tuple(native.shape), dtype_named(str(native.dtype.name)), native.tobytes()
    if isinstance(data, (array, memoryview)):
        view = memoryview(data)
        kind = next((each for each in _BY_CODE if each.code == view.format), None)
        if kind is None:
            raise TypeError(f"a buffer of {view.format!r} has no dtype here")
        return tuple(view.shape or ()), kind, view.tobytes()
    shape = _shape_of(data)
    flat = list(_flat(data, shape, 0))
    kind = wanted or _kind_of(flat)
    kind = float32 if kind.itemsize == 2 and kind.is_floating_point else kind
    return shape, kind, _bytes_of(flat, kind)


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
    """Return numbers as the elements of a dtype that C has; a float that is too large is infinite, as in torch."""
    if kind is bool_:
        return bytes(map(bool, flat))
    if kind.kind is DtypeKind.COMPLEX:
        return _bytes_of([part for each in map(complex, flat) for part in (each.real, each.imag)], real_of(kind))
    try:
        return array(kind.code, map(int if kind.kind is DtypeKind.INT else float, flat)).tobytes()
    except OverflowError as error:
        raise RuntimeError(f"value cannot be converted to type {kind.name} without overflow") from error


Placements = Sequence[Any] | None
"""A tensor's placements on the processes; each has all of it if None."""


def _filling(name: str) -> Callable[..., Tensor]:
    """Return the function that makes a tensor of a size, of which each element is filled."""

    def made(self: Making, *size: Any, dtype: Any = None, **how: Any) -> Tensor:
        if "size" in how:
            size = (how.pop("size"),)
        with suppress(Misfit):
            meta = Meta(_size(size), _dtype(dtype))
            return self._made(meta, Form(".made", (name, meta.shape), (("dtype", meta.dtype),)), **how)
        return call_asked(self, ".made", (name, *size))  # type: ignore[no-any-return]

    made.__name__ = made.__qualname__ = name
    made.__doc__ = f"Make a tensor of a size: see ``torch.{name}``."
    return made


class Making:
    """The functions of `loom.tensors.tensors.Tensors` that make tensors."""

    if TYPE_CHECKING:
        mesh: dict[str, int]
        _pending: Any
        _form: Callable[..., Any]
        _join: Callable[[], None]
        _queue: Callable[..., int]

    def tensor(
        self,
        data: Any,
        dtype: Any = None,
        requires_grad: bool = False,
        placements: Placements = None,
        device: Any = None,
    ) -> Tensor:
        """Make a tensor of a number, of nested sequences, of a numpy array or of a tensor of torch.

        Args:
            placements: how it is spread over the processes; each has all of it if None.

        Raises:
            ValueError: the sequences have different lengths.
            TypeError: an element is no number.
        """
        wanted = bfloat16 if str(getattr(data, "dtype", "")) == "torch.bfloat16" else None
        wanted = wanted if dtype is None else dtype_named(dtype)
        shape, kind, raw = pack(data, wanted)
        made = self._made(Meta(shape, kind), Form(".data", (shape, kind)), data=raw)
        made = made if wanted is None else made.to(wanted)
        made = made if placements is None else made.redistribute(placements)
        return made.requires_grad_() if requires_grad else made

    def from_numpy(self, array: Any) -> Tensor:
        """Make a tensor of a numpy array, of which it is a copy."""
        return self.tensor(array)

    def as_tensor(self, data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        """Make a tensor of data; a tensor is returned itself if it has the dtype."""
        if isinstance(data, Tensor):
            return data if dtype is None else data.to(dtype)
        return self.tensor(data, dtype)

    asarray = as_tensor

    zeros, ones, empty, rand, randn = map(_filling, ("zeros", "ones", "empty", "rand", "randn"))

    def full(self, size: Sequence[int], fill_value: Any, dtype: Any = None, **how: Any) -> Tensor:
        fill_value = plain(fill_value)
        meta = Meta(_size((size,)), _dtype(dtype or of_scalar(fill_value)))
        form = Form(".made", ("full", meta.shape, S(0)), (("dtype", meta.dtype),), numbers=1)
        return self._made(meta, form, (fill_value,), **how)

    def arange(self, start: Any, end: Any = None, step: Any = 1, dtype: Any = None, **how: Any) -> Tensor:
        """Make the numbers from ``start``, below ``end``, in steps."""
        start, end, step = plain(start), plain(end), plain(step)
        if end is None:
            start, end = 0, start
        whole = all(isinstance(each, int) for each in (start, end, step))
        kind = int64 if whole and dtype is None else _dtype(dtype)
        begin, bound, by = map(int, (start, end, step)) if kind is int64 else (start, end, step)  # as torch does
        if by == 0 or (bound - begin) * by < 0:
            return call_asked(self, ".made", ("arange", start, end, step), {"dtype": kind})  # type: ignore[no-any-return]
        meta = Meta((int(-((begin - bound) // by)),), kind)
        return self._call(meta, "arange", start, end, step, **how)

    def randint(self, low: int, high: Any = None, size: Any = None, *, dtype: Any = None, **how: Any) -> Tensor:
        """Make random ints from ``low``, 0 if it is left out, below ``high``."""
        low, high = plain(low), plain(high)
        if size is None:
            low, high, size = (0, low, high) if not isinstance(high, int) else (low, high, None)
        if size is None or high is None:
            raise TypeError("randint() takes a bound and a size, or two bounds and a size")
        meta = Meta(_size((size,)), _dtype(dtype or int64))
        return self._call(meta, "randint", int(low), int(high), meta.shape, **how)

    def seed(self, number: int) -> None:
        """Let every process draw the random numbers of a seed from here on."""
        self._queue(self._form(Form(".seed", (S(0),), numbers=1, outs=0), (int,)), (), (plain(number),))

    manual_seed = seed

    def _call(
        self,
        meta: Meta,
        function: str,
        *args: Any,
        requires_grad: bool = False,
        placements: Placements = None,
        **how: Any,
    ) -> Tensor:
        """Queue a function of torch that makes a tensor. Numbers among its arguments may be others each time."""
        args, places = plain(args), count()
        holes = [S(next(places)) if type(each) in PLAIN else each for each in args]
        form = Form(".made", (function, *holes), (("dtype", meta.dtype),), numbers=next(places))
        made = self._made(meta, form, tuple([each for each in args if type(each) in PLAIN]), **how)
        made = made if placements is None else made.redistribute(placements)
        return made.requires_grad_() if requires_grad else made

    def _made(
        self,
        meta: Meta,
        form: Form,
        numbers: tuple[Any, ...] = (),
        *,
        data: bytes | None = None,
        requires_grad: bool = False,
        placements: Placements = None,
        device: Any = None,
        out: None = None,
    ) -> Tensor:
        if out is not None:
            raise NotSupported("out= is not supported on lazy tensors: use the result")
        size = meta.nbytes
        how = () if placements is None else packed(placements, self.mesh, len(meta.shape))
        if any(each != WHOLE for each in how):
            self._join()
            form = form._replace(function=".made_spread", args=(how, *form.args))
            size = largest_part(meta.shape, how, self.mesh) * meta.dtype.itemsize
        number = self._form(form, tuple(map(type, numbers)))
        tensor = Tensor(self, Value(self._pending, self._queue(number, (), numbers, (size,), data)), meta)
        return tensor.requires_grad_() if requires_grad else tensor


def _size(size: tuple[Any, ...]) -> Shape:
    """Return the shape of ``zeros(2, 3)`` and of ``zeros((2, 3))``."""
    if len(size) == 1 and not isinstance(size[0], int):
        size = (plain(size[0]),) if hasattr(size[0], "item") else tuple(size[0])
    size = tuple(plain(size))
    fits(min(size, default=0) >= 0)
    return size


def _dtype(dtype: Any) -> DType:
    return DEFAULT if dtype is None else dtype_named(dtype)
