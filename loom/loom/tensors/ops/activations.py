"""Activations of `torch.nn.functional` that are not in `loom.tensors.ops.functions`."""

from __future__ import annotations

from typing import Any

from loom.tensors.dtypes import Kind
from loom.tensors.metas import wrapped
from loom.tensors.op import function, method
from loom.tensors.ops.elementwise import NO_BOOL, NO_INT, Elementwise, Number, chosen, lacking
from loom.tensors.ops.functions import above_threshold
from loom.tensors.tensor import Tensor

SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


def _of_mish(grad: Any, x: Any) -> Any:
    inner = x.softplus().tanh()
    return grad * (inner + x * (1 - inner * inner) * x.sigmoid())


def _below(x: Any) -> Any:
    """Return the elements below 0, and 0 for the others: above 0 an exponential might overflow."""
    return chosen(x < 0, x, 0)


def _shrunk(grad: Any, x: Any, lambd: Any) -> Any:
    return chosen((x >= -lambd) & (x <= lambd), 0, grad)


_mish = Elementwise("nn.functional.mish", lacking("mish_cpu", NO_INT), _of_mish)
_hardswish = Elementwise(
    "nn.functional.hardswish",
    lacking("hardswish_cpu", NO_INT),
    lambda grad, x: chosen(x < -3, 0, chosen(x <= 3, grad * (x / 3 + 0.5), grad)),
)
_hardsigmoid = Elementwise(
    "nn.functional.hardsigmoid",
    lacking("hardsigmoid_cpu", NO_INT),
    lambda grad, x: chosen((x > -3) & (x < 3), grad / 6, 0),
)
_hardshrink = Elementwise(
    "nn.functional.hardshrink", lacking("hardshrink_cpu", NO_INT), _shrunk, further=("lambd",)
)
_softshrink = Elementwise(
    "nn.functional.softshrink", lacking("softshrink_cpu", NO_INT), _shrunk, further=("lambd",)
)
_selu = Elementwise(
    "nn.functional.selu",
    lacking("elu_cpu", NO_INT),
    lambda grad, x: chosen(x > 0, grad * SELU_SCALE, grad * (SELU_SCALE * SELU_ALPHA) * _below(x).exp()),
)
_celu = Elementwise(
    "nn.functional.celu",
    lacking("elu_cpu", NO_INT),
    lambda grad, x, alpha: chosen(x > 0, grad, grad * (_below(x) / alpha).exp()),
    further=("alpha",),
)
_threshold = Elementwise(
    "nn.functional.threshold",
    lacking("threshold_cpu", NO_BOOL),
    lambda grad, x, threshold: above_threshold(grad, x, static=(("threshold", threshold),)),
    further=("threshold", "value"),
)


@function
def mish(input: Tensor) -> Tensor:
    """Return ``x * tanh(softplus(x))``."""
    return _mish(input)


@function
def hardswish(input: Tensor) -> Tensor:
    """Return ``x * relu6(x + 3) / 6``."""
    return _hardswish(input)


@function
def hardsigmoid(input: Tensor) -> Tensor:
    """Return ``relu6(x + 3) / 6``."""
    return _hardsigmoid(input)


@method
def hardshrink(self: Tensor, lambd: float = 0.5) -> Tensor:
    """Return the elements, and 0 for those that are no further than a distance from 0."""
    return _hardshrink(self, further=(lambd,))


@function
def softshrink(input: Tensor, lambd: float = 0.5) -> Tensor:
    """Return the elements, nearer to 0 by a distance; 0 for those that would pass it."""
    if lambd < 0:
        raise RuntimeError(f"lambda must be greater or equal to 0, but found to be {lambd}.")
    return _softshrink(input, further=(lambd,))


@function
def selu(input: Tensor) -> Tensor:
    """Return `elu` in the scale that keeps mean and variance."""
    return _selu(input)


@function
def celu(input: Tensor, alpha: float = 1.0) -> Tensor:
    """Return the elements, of the negative ones ``alpha * (exp(x / alpha) - 1)``."""
    if alpha == 0:
        raise RuntimeError("ZeroDivisionError: alpha cannot be 0 for CELU")
    return _celu(input, further=(alpha,))


@function
def threshold(input: Tensor, threshold: Number, value: Number) -> Tensor:
    """Return the elements above a threshold, and a number for the others."""
    return _threshold(input, further=(threshold, value))


@function
def softsign(input: Tensor) -> Tensor:
    """Return ``x / (1 + |x|)``."""
    return input / (input.abs() + 1)  # type: ignore[no-any-return]


@function
def tanhshrink(input: Tensor) -> Tensor:
    """Return ``x - tanh(x)``."""
    return input - input.tanh()  # type: ignore[no-any-return]


@function
def softmin(input: Tensor, dim: int | None = None, dtype: Any = None) -> Tensor:
    """Return `softmax` of the negative elements."""
    if dim is None:
        dim = 0 if input.dim() in (0, 1, 3) else 1
    return input.neg().softmax(dim, dtype)  # type: ignore[no-any-return]


@function
def glu(input: Tensor, dim: int = -1) -> Tensor:
    """Return the first half along a dimension, times `sigmoid` of the second."""
    if not input.dim():
        raise RuntimeError("glu does not support 0-dimensional tensors")
    place = wrapped(dim, input.dim())
    size = input.shape[place]
    if size % 2:
        raise RuntimeError(f"Halving dimension must be even, but dimension {place} is size {size}")
    if input.dtype.kind is not Kind.FLOAT:
        raise NotImplementedError(f"\"glu_cpu\" not implemented for '{input.dtype.scalar_name}'")
    half = size // 2
    return input.narrow(place, 0, half) * input.narrow(place, half, half).sigmoid()  # type: ignore[no-any-return]


@method
def prelu(self: Tensor, weight: Tensor) -> Tensor:
    """Return the elements, the negative ones times a weight, which is one number or one for each channel."""
    if weight.dim() > 1:
        raise RuntimeError(f"prelu: Expected `weight` to be a scalar or 1D tensor, but got: ndim = {weight.dim()}")
    channels = self.shape[1] if self.dim() > 1 else 1
    if weight.numel() not in (1, channels):
        raise RuntimeError(
            "Mismatch of parameter numbers and input channel size. Found parameter numbers = "
            f"{weight.numel()} and channel size = {channels}."
        )
    if self.dtype is not weight.dtype:
        raise RuntimeError(f"prelu: Type promoting not supported. Got {self.dtype.name} and {weight.dtype.name}")
    if self.dim() > 1:
        weight = weight.reshape((1, -1, *(1,) * (self.dim() - 2)))
    else:
        weight = weight.reshape((1,) * self.dim())
    return chosen(self > 0, self, self * weight)
