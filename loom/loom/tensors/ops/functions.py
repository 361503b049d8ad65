"""Functions of one tensor, element by element: roots, exponentials, trigonometry, rounding and activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log, pi, sqrt
from typing import Any

from loom.tensors.dtypes import DType, Kind, int64, real_of, uint8
from loom.tensors.metas import Meta
from loom.tensors.op import method, methods
from loom.tensors.ops.elementwise import (
    NO_BOOL,
    NO_FLOAT,
    NO_INT,
    Call,
    Derivative,
    Elementwise,
    Number,
    add_methods,
    boolean,
    chosen,
    elementwise,
    flat,
    floating,
    lacking,
    promoted,
    refusing,
    same,
)
from loom.tensors.tensor import Tensor

LN_2, LN_10 = log(2), log(10)

FLOATING: dict[str, Derivative] = {
    "reciprocal": lambda grad, out: -grad * (out * out),
    "sqrt": lambda grad, out: grad / (out * 2),
    "rsqrt": lambda grad, out: grad * -0.5 * out**3,
    "exp": lambda grad, out: grad * out,
    "exp2": lambda grad, out: grad * out * LN_2,
    "expm1": lambda grad, out: grad * (out + 1),
    "log": lambda grad, x: grad / x,
    "log2": lambda grad, x: grad / (x * LN_2),
    "log10": lambda grad, x: grad / (x * LN_10),
    "log1p": lambda grad, x: grad / (x + 1),
    "sin": lambda grad, x: grad * x.cos(),
    "cos": lambda grad, x: grad * -x.sin(),
    "tan": lambda grad, out: grad * (1 + out * out),
    "asin": lambda grad, x: grad * (1 - x * x).rsqrt(),
    "acos": lambda grad, x: grad * -(1 - x * x).rsqrt(),
    "atan": lambda grad, x: grad / (1 + x * x),
    "sinh": lambda grad, x: grad * x.cosh(),
    "cosh": lambda grad, x: grad * x.sinh(),
    "tanh": lambda grad, out: grad * (1 - out * out),
    "asinh": lambda grad, x: grad * (x * x + 1).rsqrt(),
    "acosh": lambda grad, x: grad * (x * x - 1).rsqrt(),
    "atanh": lambda grad, x: grad / (1 - x * x),
    "sigmoid": lambda grad, out: grad * ((1 - out) * out),
    "erf": lambda grad, x: grad * (2 / sqrt(pi)) * (-x * x).exp(),
    "erfc": lambda grad, x: grad * (-2 / sqrt(pi)) * (-x * x).exp(),
}
"""Functions that give floating point numbers, with their derivatives."""


def _squared(metas: Sequence[Meta], numbers: tuple[Any, ...], further: Mapping[str, Any]) -> DType:
    dtype = metas[0].dtype
    return int64 if dtype.kind is Kind.BOOL else dtype


def _size(metas: Sequence[Meta], numbers: tuple[Any, ...], further: Mapping[str, Any]) -> DType:
    return real_of(metas[0].dtype)


def _direction(x: Any) -> Any:
    if x.dtype.kind is not Kind.COMPLEX:
        return x.sign()
    size = x.abs()
    return x.conj() / chosen(size.eq(0), 1, size)


_NEGATION = (
    "Negation, the `-` operator, on a bool tensor is not supported. "
    "If you are trying to invert a mask, use the `~` or `logical_not()` operator instead."
)

above_threshold: Elementwise = Elementwise(
    "ops.aten.threshold_backward.default",
    promoted,
    lambda grad, y, threshold: above_threshold(grad, y, static=(("threshold", threshold),)),
    flat,
)
"""The first tensor's elements where those of the second are above a threshold or no numbers; else zeros."""

KEEPING: dict[str, Elementwise] = {
    "neg": Elementwise("neg", refusing(NO_BOOL, _NEGATION), lambda grad: -grad),
    "abs": Elementwise("abs", lacking("abs_cpu", NO_BOOL, _size), lambda grad, x: grad * _direction(x)),
    "sign": Elementwise("sign", promoted, flat),
    "square": Elementwise("square", _squared, lambda grad, x: grad * (x * 2)),
    "relu": Elementwise(
        "relu",
        refusing(NO_BOOL, "Boolean inputs not supported for relu"),
        lambda grad, out: above_threshold(grad, out, static=(("threshold", 0),)),
    ),
    "frac": Elementwise("frac", lacking("frac_cpu", NO_INT), same),
    **{name: Elementwise(name, lacking(f"{name}_vml_cpu", NO_BOOL), flat) for name in ("floor", "ceil", "trunc")},
    "logical_not": Elementwise("logical_not", boolean),
    "bitwise_not": Elementwise("bitwise_not", lacking("bitwise_not_cpu", NO_FLOAT)),
}
"""Functions that give the dtype they are given, or a truth value, and exist in place."""

ASKING = ("isnan", "isinf", "isfinite", "signbit")
"""Functions that tell something of each element, and do not exist in place."""


def _plan_of_one(function: Elementwise) -> Callable[..., Call]:
    return lambda self: (function, (self,), (), ())


for _name, _derivative in FLOATING.items():
    add_methods(_name, _plan_of_one(Elementwise(_name, floating, _derivative)))
for _name, _function in KEEPING.items():
    add_methods(_name, _plan_of_one(_function))
for _name in ASKING:
    add_methods(_name, _plan_of_one(Elementwise(_name, boolean)), in_place=False)

ALIASES = {
    "negative": "neg", "absolute": "abs", "arcsin": "asin", "arccos": "acos", "arctan": "atan", "fix": "trunc"
}  # fmt: skip
"""Other names of torch for the same functions."""

for _name, _of in ALIASES.items():
    methods[_name], methods[f"{_name}_"] = methods[_of], methods[f"{_of}_"]

_round = Elementwise("round", lacking("round_vml_cpu", NO_BOOL), flat)
_round_decimals = Elementwise("round", lacking("round_cpu", NO_INT), flat, further=("decimals",))


@elementwise
def round(self: Tensor, *, decimals: int = 0) -> Call:
    """Return the nearest number with some decimals; of two that are as near, the even one."""
    return (_round_decimals, (self,), (decimals,), ()) if decimals else (_round, (self,), (), ())


@method
def positive(self: Tensor) -> Tensor:
    """Return the tensor itself.

    Raises:
        RuntimeError: the elements are truth values.
    """
    if self.dtype.kind is Kind.BOOL:
        raise RuntimeError("The `+` operator, on a bool tensor is not supported.")
    return self


# Activations, which torch has in `torch.nn.functional`


def _of_gelu(grad: Any, x: Any, approximate: str) -> Any:
    if approximate == "none":
        return grad * (0.5 * (1 + (x * sqrt(0.5)).erf()) + x * (x * x * -0.5).exp() * (1 / sqrt(2 * pi)))
    scale, cubic = sqrt(2 / pi), 0.044715
    inner = (scale * (x + cubic * x**3)).tanh()
    return grad * (0.5 * (1 + inner) + 0.5 * x * (1 - inner * inner) * (scale * (1 + 3 * cubic * (x * x))))


def _of_silu(grad: Any, x: Any) -> Any:
    share = x.sigmoid()
    return grad * (share * (1 + x * (1 - share)))


def _of_softplus(grad: Any, x: Any, beta: Any, threshold: Any) -> Any:
    scaled = x * beta
    return chosen(scaled > threshold, grad, grad * scaled.sigmoid())


def _of_elu(grad: Any, x: Any, alpha: Any) -> Any:
    # Above 0 the exponential would overflow, and its gradient would be 0 times infinity.
    return chosen(x > 0, grad, grad * alpha * chosen(x < 0, x, 0).exp())


_NO_HARDTANH = "Bool inputs not supported for hardtanh"
_hardtanh = Elementwise(
    "nn.functional.hardtanh",
    refusing(NO_BOOL, _NO_HARDTANH),
    lambda grad, x, min_val, max_val: chosen((x > min_val) & (x < max_val), grad, 0),
    further=("min_val", "max_val"),
)
_relu6 = Elementwise(
    "nn.functional.relu6",
    refusing(NO_BOOL, _NO_HARDTANH),
    lambda grad, x: chosen((x > 0) & (x < 6), grad, 0),
)
_leaky_relu = Elementwise(
    "nn.functional.leaky_relu",
    lacking("leaky_relu_cpu", NO_INT),
    lambda grad, x, negative_slope: chosen(x > 0, grad, grad * negative_slope),
    further=("negative_slope",),
)
_elu = Elementwise("nn.functional.elu", lacking("elu_cpu", NO_INT), _of_elu, further=("alpha",))
_gelu = Elementwise("nn.functional.gelu", lacking("GeluKernelImpl", NO_INT), _of_gelu)
_silu = Elementwise("nn.functional.silu", lacking("silu_cpu", NO_INT), _of_silu)
_softplus = Elementwise(
    "nn.functional.softplus", lacking("softplus_cpu", NO_INT), _of_softplus, further=("beta", "threshold")
)
_logsigmoid = Elementwise(
    "nn.functional.logsigmoid", lacking("log_sigmoid_cpu", NO_INT), lambda grad, x: grad * (-x).sigmoid()
)


@method
def relu6(self: Tensor) -> Tensor:
    """Return the elements, at least 0 and at most 6."""
    return _relu6(self)


@method
def hardtanh(self: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """Return the elements within two bounds.

    Raises:
        ValueError: the lower bound is above the other.
        RuntimeError: the elements are truth values, or have no sign and a bound has one.
    """
    if min_val > max_val:
        raise ValueError("min_val cannot be greater than max_val")
    if self.dtype is uint8 and (int(min_val) < 0 or int(max_val) < 0):
        raise RuntimeError("cannot do hardtanh on an unsigned type with negative limits")
    return _hardtanh(self, further=(min_val, max_val))


@method
def leaky_relu(self: Tensor, negative_slope: float = 0.01) -> Tensor:
    """Return the elements, the negative ones times a slope."""
    return _leaky_relu(self, further=(negative_slope,))


@method
def elu(self: Tensor, alpha: float = 1.0) -> Tensor:
    """Return the elements, of the negative ones ``alpha * (exp(x) - 1)``."""
    return _elu(self, further=(alpha,))


@method
def gelu(self: Tensor, approximate: str = "none") -> Tensor:
    """Return each element times the normal distribution's share below it; "tanh" approximates that.

    Raises:
        RuntimeError: there is no such approximation.
    """
    if approximate not in ("none", "tanh"):
        raise RuntimeError("approximate argument must be either none or tanh.")
    return _gelu(self, static=(("approximate", approximate),))


@method
def silu(self: Tensor) -> Tensor:
    """Return ``x * sigmoid(x)``."""
    return _silu(self)


@method
def softplus(self: Tensor, beta: Number = 1, threshold: Number = 20) -> Tensor:
    """Return ``log(1 + exp(beta * x)) / beta``, and ``x`` above a threshold."""
    return _softplus(self, further=(beta, threshold))


@method
def logsigmoid(self: Tensor) -> Tensor:
    """Return ``log(sigmoid(x))``."""
    return _logsigmoid(self)
