"""Functions of two tensors, element by element, beside those of `loom.tensors.ops.pointwise`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loom.tensors.dtypes import DType, Kind, float64
from loom.tensors.metas import Meta
from loom.tensors.op import function, method
from loom.tensors.ops.elementwise import (
    NO_INT,
    Call,
    Elementwise,
    Number,
    add_methods,
    chosen,
    flat,
    floating,
    lacking,
    promoted,
    result_dtype,
)
from loom.tensors.ops.mathematics.complexes import check_no_complex
from loom.tensors.tensor import Tensor


def _of_factor(grad: Any, x: Any, y: Any) -> Any:
    """The gradient of ``x`` in ``x * log(y)``, which is 0 if ``x`` is, whatever ``y`` is."""
    logarithm = y.log() if isinstance(y, Tensor) else _log(grad, y)
    return chosen((x == 0) & (y <= 0), 0, grad * logarithm)


def _log(like: Any, number: Number) -> Any:
    return like._home.tensor(number, dtype=like.dtype).log()


def _of_size(grad: Any, x: Any, out: Any) -> Any:
    """The gradient of an element that gets another's sign."""
    return chosen(x == 0, 0, grad * (out / chosen(x == 0, 1, x)))


def _first(x: Any, y: Any, greater: bool) -> Any:
    """Return where the first of two is taken: no number is no extreme."""
    return (x >= y if greater else x <= y) | y.isnan()


def _integral(metas: Sequence[Meta], numbers: tuple[Any, ...], further: Mapping[str, Any]) -> DType:
    dtype = result_dtype(metas, numbers)
    if dtype.kind is not Kind.INT:
        raise NotImplementedError(f"\"gcd_cpu\" not implemented for '{dtype.scalar_name}'")
    return dtype


OF_TWO: dict[str, Elementwise] = {
    "hypot": Elementwise(
        "hypot",
        lacking("hypot_cpu", NO_INT),
        lambda grad, x, out: grad * (x / out),
        lambda grad, y, out: grad * (y / out),
    ),
    "logaddexp": Elementwise(
        "logaddexp",
        lacking("logaddexp_cpu", NO_INT),
        lambda grad, x, y: grad / (1 + (y - x).exp()),
        lambda grad, x, y: grad / (1 + (x - y).exp()),
    ),
    "logaddexp2": Elementwise(
        "logaddexp2",
        lacking("logaddexp2_cpu", NO_INT),
        lambda grad, x, y: grad / (1 + (y - x).exp2()),
        lambda grad, x, y: grad / (1 + (x - y).exp2()),
    ),
    "xlogy": Elementwise("xlogy", floating, _of_factor, lambda grad, x, y: grad * (x / y), scalars="xy"),
    "copysign": Elementwise("copysign", floating, _of_size, flat, scalars="y"),
    "fmax": Elementwise(
        "fmax",
        promoted,
        lambda grad, x, y: chosen(_first(x, y, True), grad, 0),
        lambda grad, x, y: chosen(_first(x, y, True), 0, grad),
    ),
    "fmin": Elementwise(
        "fmin",
        promoted,
        lambda grad, x, y: chosen(_first(x, y, False), grad, 0),
        lambda grad, x, y: chosen(_first(x, y, False), 0, grad),
    ),
    "gcd": Elementwise("gcd", _integral),
    "lcm": Elementwise("lcm", _integral),
}
"""The functions of two operands, by name."""

ONLY_NEW = ("logaddexp", "logaddexp2", "fmax", "fmin")


def _plan(function: Elementwise) -> Callable[..., Call]:
    return lambda self, other: (function, (self, other), (), ())


for _name, _function in OF_TWO.items():
    add_methods(_name, _plan(_function), in_place=_name not in ONLY_NEW)


@function
def xlogy(input: Tensor | Number, other: Tensor | Number) -> Tensor:
    """Return ``input * log(other)``, and 0 if ``input`` is 0."""
    return OF_TWO["xlogy"](input, other)


@function
def float_power(input: Tensor | Number, exponent: Tensor | Number) -> Tensor:
    """Return the power in double precision."""
    check_no_complex("float_power", input, exponent)
    base, power = (each.to(float64) if isinstance(each, Tensor) else each * 1.0 for each in (input, exponent))
    if isinstance(base, Tensor):
        return base.pow(power)  # type: ignore[no-any-return]
    if not isinstance(power, Tensor):
        raise TypeError("float_power() takes at least one tensor")
    return power._home.pow(base, power)  # type: ignore[no-any-return]


@method
def ldexp(self: Tensor, other: Tensor) -> Tensor:
    """Return ``self * 2 ** other``."""
    return self * other._home.pow(2.0, other)  # type: ignore[no-any-return]
