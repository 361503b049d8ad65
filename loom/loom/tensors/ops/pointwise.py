"""Arithmetic and comparisons of tensors and numbers, element by element, in place too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, log, nan
from typing import Any

from loom.tensors.dtypes import DType, Kind, bool_, of_scalar
from loom.tensors.metas import Meta
from loom.tensors.op import function, method, methods
from loom.tensors.ops.elementwise import (
    NO_BOOL,
    NO_FLOAT,
    NO_INT,
    Call,
    Derivative,
    DTypeRule,
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
    result_dtype,
    same,
)
from loom.tensors.tensor import Tensor

# Rules of dtypes


def _scaled(rule: DTypeRule) -> DTypeRule:
    """Return a rule that checks ``alpha`` too."""

    def checked(metas: Sequence[Meta], numbers: tuple[Any, ...], further: Mapping[str, Any]) -> DType:
        dtype = rule(metas, numbers, further)
        kind = of_scalar(further["alpha"]).kind
        if kind is Kind.BOOL and dtype.kind is not Kind.BOOL:
            raise RuntimeError("Boolean alpha only supported for Boolean results.")
        if kind >= Kind.FLOAT > dtype.kind:
            raise RuntimeError("For integral input tensors, argument alpha must not be a floating point number.")
        return dtype

    return checked


def _subtracted(metas: Sequence[Meta], numbers: tuple[Any, ...], further: Mapping[str, Any]) -> DType:
    found = [*[each.dtype for each in metas], *map(of_scalar, numbers)]
    if found == [bool_, bool_]:
        raise RuntimeError(
            "Subtraction, the `-` operator, with two bool tensors is not supported. "
            "Use the `^` or `logical_xor()` operator instead."
        )
    if bool_ in found:
        raise RuntimeError(
            "Subtraction, the `-` operator, with a bool tensor is not supported. "
            "If you are trying to invert a mask, use the `~` or `logical_not()` operator instead."
        )
    return result_dtype(metas, numbers)


def _powered(metas: Sequence[Meta], numbers: tuple[Any, ...], further: Mapping[str, Any]) -> DType:
    return promoted(metas, numbers, further) if numbers else lacking("pow", NO_BOOL)(metas, numbers, further)


def _interpolated(metas: Sequence[Meta], numbers: tuple[Any, ...], further: Mapping[str, Any]) -> DType:
    own = metas[0].dtype
    for name, meta in zip(("end", "weight"), metas[1:], strict=False):
        if meta.dtype is not own and (name == "end" or meta.shape):
            raise RuntimeError(f"expected dtype {own.name} for `{name}` but got dtype {meta.dtype.name}")
    return lacking("lerp_kernel", NO_INT)(metas, (), further)


def _quotient_added(metas: Sequence[Meta], numbers: tuple[Any, ...], further: Mapping[str, Any]) -> DType:
    if all(each.dtype.kind < Kind.FLOAT for each in metas[1:]):
        raise RuntimeError("Integer division with addcdiv is no longer supported")
    return result_dtype(metas, numbers)


def _bounded(metas: Sequence[Meta], numbers: tuple[Any, ...], further: Mapping[str, Any]) -> DType:
    rule = lacking("clamp_scalar_cpu", NO_BOOL) if numbers else promoted
    return rule(metas, numbers, further)


def _close(metas: Sequence[Meta], numbers: tuple[Any, ...], further: Mapping[str, Any]) -> DType:
    one, other = (each.dtype for each in metas)
    if one is not other:
        raise RuntimeError(f"{one.scalar_name} did not match {other.scalar_name}")
    return bool_


# Derivatives


def _missing(name: str) -> Derivative:
    def derivative(grad: Any) -> Any:
        raise RuntimeError(f"derivative for aten::{name} is not implemented")

    return derivative


def _of_divisor(grad: Any, x: Any, y: Any) -> Any:
    return -grad * ((x / y) / y)


def _of_base(grad: Any, x: Any, y: Any) -> Any:
    if isinstance(y, Number):
        return grad * (y * x ** (y - 1)) if y else flat(grad)
    return chosen(y == 0, 0, grad * (y * x ** (y - 1)))


def _of_exponent(grad: Any, x: Any, y: Any, out: Any) -> Any:
    if not isinstance(x, (int, float)):
        return chosen((x == 0) & (y >= 0), 0, grad * (out * x.log()))
    if x == 0:
        return chosen(y >= 0, 0, grad * (out * -inf))
    return grad * (out * (log(x) if x > 0 else nan))


def _distance(x: Any, y: Any) -> Any:
    """Return the squared distance from the origin; 1 there, where torch's gradients are 0."""
    squared = x * x + y * y
    return squared + (squared == 0)


def _of_extreme(grad: Any, x: Any, y: Any, lost: Any) -> Any:
    """Return the gradient of an operand of which the greater or the smaller is taken; of equal ones, half of it."""
    return chosen(lost, 0, chosen(x == y, grad / 2, grad))


def _within(grad: Any, x: Any, y: Any, z: Any) -> Any:
    return chosen((x >= y) & (x <= z), grad, 0)


def _of_modulus(mode: str) -> Derivative:
    return lambda grad, x, y: -grad * _div_rounded[mode](x, y, static=(("rounding_mode", mode),))


# The functions with further arguments

_add = Elementwise("add", promoted, same, same, scalars="xy")
_add_scaled = Elementwise(
    "add", _scaled(promoted), same, lambda grad, alpha: grad * alpha, scalars="xy", further=("alpha",)
)
_sub = Elementwise("sub", _subtracted, same, lambda grad: -grad, scalars="xy")
_sub_scaled = Elementwise(
    "sub", _scaled(_subtracted), same, lambda grad, alpha: grad * -alpha, scalars="xy", further=("alpha",)
)
_rsub = Elementwise("rsub", _subtracted, lambda grad: -grad, same, scalars="y")
_rsub_scaled = Elementwise(
    "rsub", _scaled(_subtracted), lambda grad, alpha: grad * -alpha, same, scalars="y", further=("alpha",)
)
_div = Elementwise("div", floating, lambda grad, y: grad / y, _of_divisor, scalars="xy")
_div_rounded = {
    mode: Elementwise("div", lacking(f"div_{mode}_cpu", NO_BOOL), flat, flat, scalars="xy")
    for mode in ("floor", "trunc")
}
_pow = Elementwise("pow", _powered, _of_base, _of_exponent, scalars="y")
_pow_of_number = Elementwise("pow", lacking("pow", NO_BOOL), None, _of_exponent, scalars="x", contiguous=True)
_clamp = Elementwise(
    "clamp",
    lacking("clamp_cpu", NO_BOOL),
    _within,
    lambda grad, x, y, z: chosen((x < y) & (y < z), grad, 0),
    lambda grad, x, y, z: chosen((x > z) | (z < y), grad, 0),
    scalars="yz",
)
_clamp_one = {
    name: Elementwise(name, _bounded, of_self, of_bound, scalars="y")
    for name, of_self, of_bound in (
        ("clamp_min", lambda grad, x, y: chosen(x >= y, grad, 0), lambda grad, x, y: chosen(x >= y, 0, grad)),
        ("clamp_max", lambda grad, x, y: chosen(x <= y, grad, 0), lambda grad, x, y: chosen(x <= y, 0, grad)),
    )
}
_addcmul = Elementwise(
    "addcmul",
    lacking("addcmul_cpu_out", NO_BOOL),
    same,
    lambda grad, z, value: grad * (z * value),
    lambda grad, y, value: grad * (y * value),
    further=("value",),
)
_addcdiv = Elementwise(
    "addcdiv",
    _quotient_added,
    same,
    lambda grad, z, value: grad * (value / z),
    lambda grad, y, z, value: -grad * (value * y / (z * z)),
    further=("value",),
)
_lerp = Elementwise(
    "lerp",
    _interpolated,
    lambda grad, z: grad * (1 - z),
    lambda grad, z: grad * z,
    lambda grad, x, y: grad * (y - x),
    scalars="z",
)
_isclose = Elementwise("isclose", _close, further=("rtol", "atol"))


@elementwise
def add(self: Tensor, other: Tensor | Number, *, alpha: Number = 1) -> Call:
    """Return ``self + alpha * other``."""
    if type(alpha) is int and alpha == 1:
        return _add, (self, other), (), ()
    return _add_scaled, (self, other), (alpha,), ()


@elementwise
def sub(self: Tensor, other: Tensor | Number, *, alpha: Number = 1) -> Call:
    """Return ``self - alpha * other``."""
    if type(alpha) is int and alpha == 1:
        return _sub, (self, other), (), ()
    return _sub_scaled, (self, other), (alpha,), ()


@function
def rsub(input: Tensor, other: Tensor | Number, *, alpha: Number = 1) -> Tensor:
    """Return ``other - alpha * input``."""
    if type(alpha) is int and alpha == 1:
        return _rsub(input, other)
    return _rsub_scaled(input, other, further=(alpha,))


@elementwise
def div(self: Tensor, other: Tensor | Number, *, rounding_mode: str | None = None) -> Call:
    """Return the quotient, rounded down for "floor" and towards 0 for "trunc"."""
    if rounding_mode is None:
        return _div, (self, other), (), ()
    if rounding_mode not in _div_rounded:
        raise RuntimeError(
            f"div expected rounding_mode to be one of None, 'trunc', or 'floor' but found '{rounding_mode}'"
        )
    return _div_rounded[rounding_mode], (self, other), (), (("rounding_mode", rounding_mode),)


@elementwise
def pow(self: Tensor | Number, exponent: Tensor | Number) -> Call:
    """Return the power of a tensor or of a number."""
    if isinstance(exponent, int) and exponent < 0 and isinstance(self, Tensor) and self.dtype.kind < Kind.FLOAT:
        raise RuntimeError("Integers to negative integer powers are not allowed.")
    return (_pow if isinstance(self, Tensor) else _pow_of_number, (self, exponent), (), ())


@elementwise
def clamp(self: Tensor, min: Tensor | Number | None = None, max: Tensor | Number | None = None) -> Call:
    """Return the elements, or the bound that they pass."""
    if min is None and max is None:
        raise RuntimeError("torch.clamp: At least one of 'min' or 'max' must not be None")
    if max is None:
        return clamp_min(self, min)
    if min is None:
        return clamp_max(self, max)
    if isinstance(min, Tensor) is not isinstance(max, Tensor):
        raise TypeError("clamp() takes two tensors, or two numbers, as its bounds")
    return _clamp, (self, min, max), (), ()


@elementwise
def clamp_min(self: Tensor, min: Any) -> Call:
    """Return the elements, or the bound if they are below."""
    return _clamp_one["clamp_min"], (self, min), (), ()


@elementwise
def clamp_max(self: Tensor, max: Any) -> Call:
    """Return the elements, or the bound if they are above."""
    return _clamp_one["clamp_max"], (self, max), (), ()


@elementwise
def addcmul(self: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Number = 1) -> Call:
    """Return ``self + value * tensor1 * tensor2``."""
    return _addcmul, (self, tensor1, tensor2), (value,), ()


@elementwise
def addcdiv(self: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Number = 1) -> Call:
    """Return ``self + value * tensor1 / tensor2``."""
    return _addcdiv, (self, tensor1, tensor2), (value,), ()


@elementwise
def lerp(self: Tensor, end: Tensor, weight: Tensor | Number) -> Call:
    """Return ``self + weight * (end - self)``."""
    return _lerp, (self, end, weight), (), ()


@function
def where(condition: Tensor, input: Tensor | Number | None = None, other: Tensor | Number | None = None) -> Any:
    """Return the elements of ``input`` if a condition holds, else those of ``other``.

    With a condition only, return where it holds, as an index of tensors.
    """
    if input is None and other is None:
        return condition.nonzero(as_tuple=True)
    return chosen(condition, input, other)


def _where(self: Tensor, condition: Tensor, other: Tensor | Number) -> Tensor:
    """Return the elements if a condition holds, else those of another tensor."""
    return chosen(condition, self, other)


methods["where"] = _where


@method
def isclose(
    self: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> Tensor:
    """Tell for each element whether the other is nearly the same."""
    return _isclose(self, other, further=(rtol, atol), static=(("equal_nan", equal_nan),))


@method
def allclose(
    self: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    """Wait for whether all elements are nearly the same."""
    return bool(isclose(self, other, rtol, atol, equal_nan).all().item())


@method
def equal(self: Tensor, other: Tensor) -> bool:
    """Wait for whether shapes and elements are the same."""
    return self.shape == other.shape and bool(self.eq(other).all().item())


# The functions of two operands without further arguments

_REMAINDERS = {
    name: Elementwise(name, lacking(f"{name}_cpu", NO_BOOL), same, _of_modulus(mode), scalars=scalars)
    for name, mode, scalars in (("remainder", "floor", "xy"), ("fmod", "trunc", "y"))
}
_BITWISE = {
    name: Elementwise(name, lacking(f"{name}_cpu", kinds), scalars="xy")
    for name, kinds in (
        ("bitwise_and", NO_FLOAT),
        ("bitwise_or", NO_FLOAT),
        ("bitwise_xor", NO_FLOAT),
        ("bitwise_left_shift", NO_BOOL + NO_FLOAT),
        ("bitwise_right_shift", NO_BOOL + NO_FLOAT),
    )
}
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_LOGICAL = {name: Elementwise(name, boolean) for name in ("logical_and", "logical_or", "logical_xor")}

OF_TWO: dict[str, Elementwise] = {
    "mul": Elementwise("mul", promoted, lambda grad, y: grad * y, lambda grad, x: grad * x, scalars="xy"),
    "floor_divide": Elementwise(
        "floor_divide", lacking("div_floor_cpu", NO_BOOL), *[_missing("floor_divide")] * 2, scalars="xy"
    ),
    "atan2": Elementwise(
        "atan2",
        floating,
        lambda grad, x, y: grad * y / _distance(x, y),
        lambda grad, x, y: -grad * x / _distance(x, y),
    ),
    "maximum": Elementwise(
        "maximum",
        promoted,
        lambda grad, x, y: _of_extreme(grad, x, y, x < y),
        lambda grad, x, y: _of_extreme(grad, x, y, y < x),
    ),
    "minimum": Elementwise(
        "minimum",
        promoted,
        lambda grad, x, y: _of_extreme(grad, x, y, x > y),
        lambda grad, x, y: _of_extreme(grad, x, y, y > x),
    ),
    **_REMAINDERS,
    **_BITWISE,
    **{name: Elementwise(name, boolean, flat, flat, scalars="y") for name in COMPARISONS},
    **_LOGICAL,
}
"""The functions of two operands, by name."""

ONLY_NEW = ("maximum", "minimum")
"""Those that torch does not have in place."""


def _plan_of_two(function: Elementwise) -> Callable[..., Call]:
    return lambda self, other: (function, (self, other), (), ())


for _name, _function in OF_TWO.items():
    add_methods(_name, _plan_of_two(_function), in_place=_name not in ONLY_NEW)

ALIASES = {
    "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub", "clip": "clamp",
    "arctan2": "atan2", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne",
}  # fmt: skip
"""Other names of torch for the same functions."""

for _name, _of in ALIASES.items():
    methods[_name], methods[f"{_name}_"] = methods[_of], methods[f"{_of}_"]
