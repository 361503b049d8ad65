"""Other dtypes, copies, and new contents in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from loom.tensors.dtypes import dtype_named
from loom.tensors.metas import Meta
from loom.tensors.op import Op, method, methods
from loom.tensors.ops.elementwise import Elementwise, Number, flat, kept, promoted, same
from loom.tensors.tensor import Tensor

DEVICES = ("cpu", "cuda", "loom")
"""Names of devices, which code of torch may ask for."""


def _as_contiguous(metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> Meta:
    return Meta(metas[0].shape, metas[0].dtype)


_to = Elementwise("Tensor.to", lambda metas, numbers, further: further["dtype"], same)
_clone = Elementwise("clone", promoted, same)
_contiguous = Op("Tensor.contiguous", _as_contiguous, lambda node, grad: (grad,))
_copy = Elementwise("copy", kept, flat, same)
_fill = Elementwise("fill", kept, flat, same, scalars="y", overlapping=True)
_zero = Elementwise("zero", kept, flat, overlapping=True)


@method
def to(
    self: Tensor,
    *wanted: Any,
    dtype: Any = None,
    device: Any = None,
    copy: bool = False,
    non_blocking: bool = False,
) -> Tensor:
    """Return the tensor with a dtype, or with that of another tensor.

    Args:
        self: the tensor, which is returned itself if it has the dtype.
        wanted: the dtype, or a tensor that has it. A device makes no difference: a tensor stays in its workers.
        dtype: the same by name.
        device: makes no difference.
        copy: whether to return a copy in any case.
        non_blocking: makes no difference: nothing waits.
    """
    for each in wanted:
        of_device = not isinstance(each, Tensor) and str(each).partition(":")[0] in DEVICES
        dtype = dtype if of_device or isinstance(each, bool) else each
    kind = self.dtype if dtype is None else dtype.dtype if isinstance(dtype, Tensor) else dtype_named(dtype)
    if kind is self.dtype:
        return _clone(self) if copy else self
    return _to(self, static=(("dtype", kind),))


@method
def type_as(self: Tensor, other: Tensor) -> Tensor:
    """Return the tensor with the dtype of another."""
    return to(self, other)


@method
def clone(self: Tensor) -> Tensor:
    """Return a copy."""
    return _clone(self)


@method
def contiguous(self: Tensor) -> Tensor:
    """Return the tensor with its elements in row-major order in memory; itself, if they are."""
    return self if self.meta.contiguous else _contiguous((self,))


@method
def copy_(self: Tensor, src: Tensor | Number) -> Tensor:
    """Replace the elements by those of another tensor, or by a number."""
    return _copy.in_place(self, src) if isinstance(src, Tensor) else fill_(self, src)


@method
def fill_(self: Tensor, value: Tensor | Number) -> Tensor:
    """Replace each element by a number.

    Raises:
        RuntimeError: the number is a tensor with dimensions.
    """
    if isinstance(value, Tensor) and value.dim():
        raise RuntimeError(
            f"fill_ only supports 0-dimension value tensor but got tensor with {value.dim()} dimensions."
        )
    return _fill.in_place(self, value)


@method
def zero_(self: Tensor) -> Tensor:
    """Replace each element by 0."""
    return _zero.in_place(self)


CASTS = {
    "float": "float32", "double": "float64", "half": "float16", "bfloat16": "bfloat16", "long": "int64",
    "int": "int32", "short": "int16", "bool": "bool",
}  # fmt: skip
"""Methods named after a dtype, which they give."""


def _cast(name: str, dtype: str) -> Callable[[Tensor], Tensor]:
    kind = dtype_named(dtype)

    def cast(self: Tensor) -> Tensor:
        return to(self, kind)

    cast.__name__ = cast.__qualname__ = name
    cast.__doc__ = f"Return the tensor with dtype {dtype}."
    return cast


for _name, _dtype in CASTS.items():
    methods[_name] = _cast(_name, _dtype)
