"""`Making`: the functions that make tensors, with torch's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from loom.tensors.dtypes import DEFAULT, DType, dtype_named, int64, plain
from loom.tensors.elements import pack
from loom.tensors.metas import Meta, Shape
from loom.tensors.placements import WHOLE, largest_part, packed
from loom.tensors.sending.encoding import Form, S
from loom.tensors.tensor import Tensor, Value

Placements = Sequence[Any] | None
"""How a tensor is spread over the processes; each has all of it if None."""


class Making:
    """The functions of `loom.tensors.tensors.Tensors` that make tensors."""

    if TYPE_CHECKING:
        mesh: dict[str, int]
        queue: Any
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
        shape, kind, raw = pack(data, None if dtype is None else dtype_named(dtype))
        made = self._made(Form(".data", (shape, kind)), Meta(shape, kind), False, data=raw)
        made = made if placements is None else made.redistribute(placements)
        return made.requires_grad_() if requires_grad else made

    def from_numpy(self, array: Any) -> Tensor:
        """Make a tensor of a numpy array, of which it is a copy."""
        return self.tensor(array)

    def zeros(
        self,
        *size: Any,
        dtype: Any = None,
        requires_grad: bool = False,
        placements: Placements = None,
        device: Any = None,
    ) -> Tensor:
        return self._filled("zeros", size, dtype, requires_grad, placements)

    def ones(
        self,
        *size: Any,
        dtype: Any = None,
        requires_grad: bool = False,
        placements: Placements = None,
        device: Any = None,
    ) -> Tensor:
        return self._filled("ones", size, dtype, requires_grad, placements)

    def empty(
        self,
        *size: Any,
        dtype: Any = None,
        requires_grad: bool = False,
        placements: Placements = None,
        device: Any = None,
    ) -> Tensor:
        return self._filled("empty", size, dtype, requires_grad, placements)

    def rand(
        self,
        *size: Any,
        dtype: Any = None,
        requires_grad: bool = False,
        placements: Placements = None,
        device: Any = None,
    ) -> Tensor:
        return self._filled("rand", size, dtype, requires_grad, placements)

    def randn(
        self,
        *size: Any,
        dtype: Any = None,
        requires_grad: bool = False,
        placements: Placements = None,
        device: Any = None,
    ) -> Tensor:
        return self._filled("randn", size, dtype, requires_grad, placements)

    def full(
        self,
        size: Sequence[int],
        fill_value: Any,
        dtype: Any = None,
        requires_grad: bool = False,
        placements: Placements = None,
        device: Any = None,
    ) -> Tensor:
        fill_value = plain(fill_value)
        if dtype is None:
            kind = {bool: "bool", int: "int64", complex: "complex64"}.get(type(fill_value), DEFAULT.name)
        else:
            kind = dtype_named(dtype).name
        meta = Meta(_size((size,)), dtype_named(kind))
        form = Form(".made", ("full", meta.shape, S(0)), (("dtype", meta.dtype),), numbers=1)
        return self._made(form, meta, requires_grad, (fill_value,), placements=placements)

    def eye(
        self, n: int, m: int | None = None, dtype: Any = None, requires_grad: bool = False, device: Any = None
    ) -> Tensor:
        meta = Meta(_size((n, n if m is None else m)), _dtype(dtype))
        form = Form(".made", ("eye", *meta.shape), (("dtype", meta.dtype),))
        return self._made(form, meta, requires_grad)

    def arange(
        self,
        start: Any,
        end: Any = None,
        step: Any = 1,
        dtype: Any = None,
        requires_grad: bool = False,
        device: Any = None,
    ) -> Tensor:
        """Make the numbers from ``start``, below ``end``, in steps.

        Raises:
            RuntimeError: the step leads away from the end, or is 0.
        """
        start, end, step = plain(start), plain(end), plain(step)
        if end is None:
            start, end = 0, start
        if step == 0:
            raise RuntimeError("step must be nonzero")
        if (end - start) * step < 0:
            raise RuntimeError("upper bound and lower bound inconsistent with step sign")
        whole = all(isinstance(each, int) for each in (start, end, step))
        kind = (int64 if whole else DEFAULT) if dtype is None else dtype_named(dtype)
        length = max(0, -((start - end) // step))
        form = Form(".made", ("arange", S(0), S(1), S(2)), (("dtype", kind),), numbers=3)
        return self._made(form, Meta((int(length),), kind), requires_grad, (start, end, step))

    def linspace(
        self,
        start: Any,
        end: Any,
        steps: int,
        *,
        dtype: Any = None,
        requires_grad: bool = False,
        device: Any = None,
    ) -> Tensor:
        """Make so many numbers from ``start`` to ``end``, at equal distances."""
        if steps < 0:
            raise RuntimeError("number of steps must be non-negative")
        meta = Meta((int(steps),), _dtype(dtype))
        form = Form(".made", ("linspace", S(0), S(1), int(steps)), (("dtype", meta.dtype),), numbers=2)
        return self._made(form, meta, requires_grad, (plain(start), plain(end)))

    def randint(
        self,
        low: int,
        high: Any = None,
        size: Sequence[int] | None = None,
        *,
        dtype: Any = None,
        device: Any = None,
    ) -> Tensor:
        """Make random ints from ``low``, 0 if it is left out, below ``high``."""
        low, high = plain(low), plain(high)
        if size is None:
            low, high, size = (0, low, high) if not isinstance(high, int) else (low, high, None)
        if size is None or high is None:
            raise TypeError("randint() takes a bound and a size, or two bounds and a size")
        if low >= high:
            raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")
        meta = Meta(_size((size,)), int64 if dtype is None else dtype_named(dtype))
        form = Form(".made", ("randint", S(0), S(1), meta.shape), (("dtype", meta.dtype),), numbers=2)
        return self._made(form, meta, False, (int(low), int(high)))

    def randperm(self, n: int, *, dtype: Any = None, device: Any = None) -> Tensor:
        """Make the ints below ``n`` in a random order."""
        if n < 0:
            raise RuntimeError(f"n must be non-negative, got {n}")
        meta = Meta((int(n),), int64 if dtype is None else dtype_named(dtype))
        return self._made(Form(".made", ("randperm", int(n)), (("dtype", meta.dtype),)), meta, False)

    def as_tensor(self, data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        """Make a tensor of data; a tensor is returned itself if it has the dtype."""
        if isinstance(data, Tensor):
            return data if dtype is None else data.to(dtype)
        return self.tensor(data, dtype)

    asarray = as_tensor

    def seed(self, number: int) -> None:
        """Let every process draw the random numbers of a seed from here on."""
        self._queue(self._form(Form(".seed", (S(0),), numbers=1, outs=0), (int,)), (), (plain(number),))

    manual_seed = seed

    def _filled(
        self, function: str, size: tuple[Any, ...], dtype: Any, requires_grad: bool, placements: Placements
    ) -> Tensor:
        meta = Meta(_size(size), _dtype(dtype))
        form = Form(".made", (function, meta.shape), (("dtype", meta.dtype),))
        return self._made(form, meta, requires_grad, placements=placements)

    def _made(
        self,
        form: Form,
        meta: Meta,
        requires_grad: bool,
        numbers: tuple[Any, ...] = (),
        data: bytes | None = None,
        placements: Placements = None,
    ) -> Tensor:
        size = meta.nbytes
        how = () if placements is None else packed(placements, self.mesh, len(meta.shape))
        if any(each != WHOLE for each in how):
            self._join()
            form = form._replace(function=".made_spread", args=(how, *form.args))
            size = largest_part(meta.shape, how, self.mesh) * meta.dtype.itemsize
        number = self._form(form, tuple(map(type, numbers)))
        tensor = Tensor(self, Value(self.queue, self._queue(number, (), numbers, (size,), data)), meta)
        return tensor.requires_grad_() if requires_grad else tensor


def _size(size: tuple[Any, ...]) -> Shape:
    """Return the shape of ``zeros(2, 3)`` and of ``zeros((2, 3))``."""
    if len(size) == 1 and not isinstance(size[0], int):
        size = (plain(size[0]),) if hasattr(size[0], "item") else tuple(size[0])
    size = plain(size)
    for each in size:
        if each < 0:
            raise RuntimeError(
                f"Trying to create tensor with negative dimension {each}: [{', '.join(map(str, size))}]"
            )
    return tuple(size)


def _dtype(dtype: Any) -> DType:
    return DEFAULT if dtype is None else dtype_named(dtype)
