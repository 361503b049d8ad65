"""Special functions of one tensor, element by element."""

from __future__ import annotations

from math import nan, pi, sqrt
from typing import Any

from loom.tensors.op import method, methods
from loom.tensors.ops.elementwise import (
    Call,
    Derivative,
    Elementwise,
    add_methods,
    boolean,
    chosen,
    elementwise,
    flat,
    floating,
    promoted,
)
from loom.tensors.tensor import Tensor


def _of_sinc(grad: Any, x: Any) -> Any:
    turned = x * pi
    squared = turned * turned / pi
    slope = (turned * turned.cos() - turned.sin()) / (squared + (squared == 0))
    return chosen(squared == 0, 0, grad * slope)


def _of_logit(grad: Any, x: Any, eps: Any) -> Any:
    low, high, outside = (0.0, 1.0, nan) if eps is None else (eps, 1 - eps, 0)
    return chosen((x < low) | (x > high), outside, grad / (x * (1 - x)))


_polygamma = Elementwise("Tensor.polygamma", floating, lambda grad, x, n: grad * x.polygamma(n + 1))
_logit = Elementwise("logit", floating, _of_logit)
_nan_to_num = Elementwise("nan_to_num", promoted, lambda grad, x: chosen(x.isfinite(), grad, 0))

FUNCTIONS: dict[str, Derivative] = {
    "lgamma": lambda grad, x: grad * x.digamma(),
    "digamma": lambda grad, x: grad * x.polygamma(1),
    "erfinv": lambda grad, out: grad * (sqrt(pi) / 2) * (out * out).exp(),
    "sinc": _of_sinc,
    "deg2rad": lambda grad: grad * (pi / 180),
    "rad2deg": lambda grad: grad * (180 / pi),
}
"""Functions that give floating point numbers, with their derivatives."""


def _plan(function: Elementwise) -> Any:
    return lambda self: (function, (self,), (), ())


for _name, _derivative in FUNCTIONS.items():
    add_methods(_name, _plan(Elementwise(_name, floating, _derivative)))
add_methods("sgn", _plan(Elementwise("sgn", promoted, flat)))
for _name in ("isneginf", "isposinf"):
    add_methods(_name, _plan(Elementwise(_name, boolean)), in_place=False)
for _name, _of in {"arccosh": "acosh", "arcsinh": "asinh", "arctanh": "atanh"}.items():
    methods[_name], methods[f"{_name}_"] = methods[_of], methods[f"{_of}_"]


@elementwise
def logit(self: Tensor, eps: float | None = None) -> Call:
    """Return ``log(x / (1 - x))``, of elements that are first kept ``eps`` away from 0 and 1."""
    return _logit, (self,), (), (("eps", eps),)


@elementwise
def nan_to_num(
    self: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Call:
    """Return the elements, and numbers for those that are none, or infinite."""
    return _nan_to_num, (self,), (), (("nan", nan), ("posinf", posinf), ("neginf", neginf))


@method
def polygamma(self: Tensor, n: int) -> Tensor:
    """Return a derivative of `digamma`."""
    if n < 0:
        raise RuntimeError("polygamma(n, x) does not support negative n.")
    return _polygamma(self, static=(("n", int(n)),))
