"""Tensors made like others, and what is known of a tensor under torch's other names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loom.tensors.layouts import broadcast
from loom.tensors.op import function, method, methods, properties
from loom.tensors.tensor import Tensor


def _new(name: str) -> Any:
    def call(self: Tensor, *size: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
        return getattr(self._home, name)(*size, dtype=dtype or self.dtype, **kwargs)  # type: ignore[no-any-return]

    call.__name__ = call.__qualname__ = f"new_{name}"
    call.__doc__ = f"See ``torch.Tensor.new_{name}``."
    return call


def _like(name: str) -> Any:
    def call(
        input: Tensor, *fill_value: Any, dtype: Any = None, memory_format: Any = None, **kwargs: Any
    ) -> Tensor:
        make = getattr(input._home, name)
        return make(input.shape, *fill_value, dtype=dtype or input.dtype, **kwargs)  # type: ignore[no-any-return]

    call.__name__ = call.__qualname__ = f"{name}_like"
    call.__doc__ = f"See ``torch.{name}_like``."
    return call


for _name in ("empty", "full", "ones", "zeros", "tensor"):
    method(_new(_name))
for _name in ("empty", "full", "ones", "rand", "randn", "zeros"):
    function(_like(_name))


@method
def is_floating_point(self: Tensor) -> bool:
    return self.dtype.is_floating_point


@method
def is_complex(self: Tensor) -> bool:
    return self.dtype.is_complex


def _itself(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the tensor itself, which stays in the cluster where it is."""
    return self


for _name in ("cpu", "cuda"):
    methods[_name] = _itself
methods["nelement"] = lambda self: self.numel()
methods["ndimension"] = lambda self: self.dim()
methods["element_size"] = lambda self: self.dtype.itemsize
properties["itemsize"] = property(lambda self: self.dtype.itemsize)
properties["nbytes"] = property(lambda self: self.numel() * self.dtype.itemsize)
properties["mH"] = property(lambda self: self.adjoint())
properties["H"] = property(lambda self: self.t().conj())
properties["real"] = property(lambda self: self._home.real(self) if self.dtype.is_complex else self)
properties["imag"] = property(lambda self: self._home.imag(self))


@function
def broadcast_tensors(*tensors: Any) -> Sequence[Tensor]:
    given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)) else tensors
    shape = broadcast(*(each.shape for each in given))
    return [each.expand(shape) for each in given]
