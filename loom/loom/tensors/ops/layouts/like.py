"""Tensors made like others, and what is known of a tensor under torch's other names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loom.tensors.dtypes import Kind
from loom.tensors.op import function, method, methods, properties
from loom.tensors.ops.elementwise import Elementwise, flat, kept
from loom.tensors.tensor import Tensor


@method
def new_zeros(self: Tensor, *size: Any, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Return zeros of a size, with this tensor's dtype."""
    return self._home.zeros(*size, dtype=dtype or self.dtype, requires_grad=requires_grad)  # type: ignore[no-any-return]


@method
def new_ones(self: Tensor, *size: Any, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Return ones of a size, with this tensor's dtype."""
    return self._home.ones(*size, dtype=dtype or self.dtype, requires_grad=requires_grad)  # type: ignore[no-any-return]


@method
def new_empty(self: Tensor, *size: Any, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Return a tensor of a size whose elements are not set, with this tensor's dtype."""
    return self._home.empty(*size, dtype=dtype or self.dtype, requires_grad=requires_grad)  # type: ignore[no-any-return]


@method
def new_full(
    self: Tensor, size: Sequence[int], fill_value: Any, dtype: Any = None, requires_grad: bool = False
) -> Tensor:
    """Return a tensor of a size that is filled with a number, with this tensor's dtype."""
    return self._home.full(size, fill_value, dtype=dtype or self.dtype, requires_grad=requires_grad)  # type: ignore[no-any-return]


@method
def new_tensor(self: Tensor, data: Any, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Return a tensor of data, with this tensor's dtype."""
    return self._home.tensor(data, dtype=dtype or self.dtype, requires_grad=requires_grad)  # type: ignore[no-any-return]


def _like(name: str) -> Any:
    def call(input: Tensor, *, dtype: Any = None, requires_grad: bool = False) -> Tensor:
        make = getattr(input._home, name)
        made: Tensor = make(input.shape, dtype=dtype or input.dtype, requires_grad=requires_grad)
        return made

    call.__name__ = call.__qualname__ = f"{name}_like"
    call.__doc__ = f"See ``torch.{name}_like``."
    return call


for _name in ("empty", "rand", "randn"):
    function(_like(_name))


@function
def full_like(input: Tensor, fill_value: Any, *, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Return a tensor of the same shape that is filled with a number."""
    return new_full(input, input.shape, fill_value, dtype, requires_grad)


# Random numbers in place

_normal = Elementwise("normal", kept, flat, further=("mean", "std"))
_uniform = Elementwise("uniform", kept, flat, further=("from", "to"))
_exponential = Elementwise("exponential", kept, flat, further=("lambd",))
_bernoulli = Elementwise("bernoulli", kept, flat)


def _check_floating(name: str, tensor: Tensor) -> None:
    if tensor.dtype.kind < Kind.FLOAT:
        raise NotImplementedError(f"\"{name}\" not implemented for '{tensor.dtype.scalar_name}'")


@method
def normal_(self: Tensor, mean: float = 0, std: float = 1) -> Tensor:
    """Replace each element by one of a normal distribution."""
    if std < 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
    _check_floating("normal_kernel_cpu", self)
    return _normal.in_place(self, further=(float(mean), float(std)))


@method
def uniform_(self: Tensor, from_: float = 0, to: float = 1) -> Tensor:
    """Replace each element by one between two numbers."""
    if from_ > to:
        raise RuntimeError(f"uniform_ expects to return a [from, to) range, but found from={from_} > to={to}")
    _check_floating("check_uniform_bounds", self)
    return _uniform.in_place(self, further=(float(from_), float(to)))


@method
def exponential_(self: Tensor, lambd: float = 1) -> Tensor:
    """Replace each element by one of an exponential distribution."""
    if lambd <= 0:
        raise RuntimeError(f"exponential_ expects lambda > 0.0, but found lambda={lambd}")
    _check_floating("exponential", self)
    return _exponential.in_place(self, further=(float(lambd),))


@method
def bernoulli(self: Tensor) -> Tensor:
    """Return for each probability 1 or 0."""
    _check_floating("bernoulli_tensor_cpu_p_", self)
    return _bernoulli(self)


# Known of a tensor


@method
def is_floating_point(self: Tensor) -> bool:
    return self.dtype.is_floating_point


@method
def is_complex(self: Tensor) -> bool:
    return self.dtype.is_complex


def _itself(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the tensor itself, which stays in the cluster where it is."""
    return self


def _adjoint(self: Tensor) -> Tensor:
    return self.t().conj()  # type: ignore[no-any-return]


for _name in ("cpu", "cuda"):
    methods[_name] = _itself
methods["nelement"] = lambda self: self.numel()
methods["ndimension"] = lambda self: self.dim()
methods["element_size"] = lambda self: self.dtype.itemsize
properties["itemsize"] = property(lambda self: self.dtype.itemsize)
properties["nbytes"] = property(lambda self: self.numel() * self.dtype.itemsize)
properties["mH"] = property(lambda self: self.adjoint())
properties["H"] = property(_adjoint)
