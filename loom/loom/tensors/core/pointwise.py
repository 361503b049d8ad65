"""Arithmetic, comparisons and functions of each element, in place too; and Python's operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from loom.tensors.core.elementwise import (
    NO_BOOL,
    NO_FLOAT,
    NO_INT,
    OPERAND,
    Call,
    DTypeRule,
    Elementwise,
    Number,
    add_table,
    boolean,
    elementwise,
    floating,
    kept,
    lacking,
    promoted,
    refusing,
    result_dtype,
)
from loom.tensors.layouts import (
    DType,
    DtypeKind,
    Meta,
    bool_,
    broadcast,
    dtype_named,
    int64,
    of_scalar,
    plain,
    real_of,
    uint8,
)
from loom.tensors.op import Op, function, method, methods
from loom.tensors.tensor import Tensor

Metas = Sequence[Meta]
Further = Mapping[str, Any]

# Rules of dtypes


def _scaled(rule: DTypeRule) -> DTypeRule:
    """Return a rule that checks ``alpha`` too."""

    def checked(metas: Metas, numbers: tuple[Any, ...], further: Further) -> DType:
        dtype = rule(metas, numbers, further)
        kind = of_scalar(further["alpha"]).kind
        if kind is DtypeKind.BOOL and dtype.kind is not DtypeKind.BOOL:
            raise RuntimeError("Boolean alpha only supported for Boolean results.")
        if kind >= DtypeKind.FLOAT > dtype.kind:
            raise RuntimeError("For integral input tensors, argument alpha must not be a floating point number.")
        return dtype

    return checked


_INVERTED = "If you are trying to invert a mask, use the `~` or `logical_not()`"


def _subtracted(metas: Metas, numbers: tuple[Any, ...], further: Further) -> DType:
    found = [*[each.dtype for each in metas], *map(of_scalar, numbers)]
    if bool_ in found:
        both = found == [bool_, bool_]
        what = "two bool tensors" if both else "a bool tensor"
        hint = "Use the `^` or `logical_xor()`" if both else _INVERTED
        raise RuntimeError(f"Subtraction, the `-` operator, with {what} is not supported. {hint} operator instead.")
    return result_dtype(metas, numbers)


def _powered(metas: Metas, numbers: tuple[Any, ...], further: Further) -> DType:
    return promoted(metas, numbers, further) if numbers else lacking("pow", NO_BOOL)(metas, numbers, further)


def _interpolated(metas: Metas, numbers: tuple[Any, ...], further: Further) -> DType:
    own = metas[0].dtype
    for name, meta in zip(("end", "weight"), metas[1:], strict=False):
        if meta.dtype is not own and (name == "end" or meta.shape):
            raise RuntimeError(f"expected dtype {own.name} for `{name}` but got dtype {meta.dtype.name}")
    return lacking("lerp_kernel", NO_INT)(metas, (), further)


def _quotient_added(metas: Metas, numbers: tuple[Any, ...], further: Further) -> DType:
    if all(each.dtype.kind < DtypeKind.FLOAT for each in metas[1:]):
        raise RuntimeError("Integer division with addcdiv is no longer supported")
    return result_dtype(metas, numbers)


def _bounded(metas: Metas, numbers: tuple[Any, ...], further: Further) -> DType:
    rule = lacking("clamp_scalar_cpu", NO_BOOL) if numbers else promoted
    return rule(metas, numbers, further)


def _squared(metas: Metas, numbers: tuple[Any, ...], further: Further) -> DType:
    return int64 if metas[0].dtype.kind is DtypeKind.BOOL else metas[0].dtype


def _size(metas: Metas, numbers: tuple[Any, ...], further: Further) -> DType:
    return real_of(metas[0].dtype)


def _where_dtype(metas: Metas, numbers: tuple[Any, ...], further: Further) -> DType:
    if metas[0].dtype not in (bool_, uint8):
        name = metas[0].dtype.scalar_name
        raise RuntimeError(f"where expected condition to be a boolean tensor, but got a tensor with dtype {name}")
    return result_dtype(metas[1:], numbers)


# Functions of one tensor

FLOATING = (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "erfc", "exp", "exp2", "expm1", "log",
    "log10", "log1p", "log2", "reciprocal", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip
"""Functions that give floating point numbers, or complex ones."""

_NEGATION = f"Negation, the `-` operator, on a bool tensor is not supported. {_INVERTED} operator instead."

KEEPING: dict[str, Elementwise] = {
    "neg": Elementwise("neg", refusing(NO_BOOL, _NEGATION)),
    "square": Elementwise("square", _squared),
    "sign": Elementwise("sign", promoted),
    "relu": Elementwise("relu", refusing(NO_BOOL, "Boolean inputs not supported for relu")),
    "abs": Elementwise("abs", lacking("abs_cpu", NO_BOOL, _size)),
    "logical_not": Elementwise("logical_not", boolean),
    "bitwise_not": Elementwise("bitwise_not", lacking("bitwise_not_cpu", NO_FLOAT)),
    **{name: Elementwise(name, lacking(f"{name}_vml_cpu", NO_BOOL)) for name in ("floor", "ceil", "trunc")},
}

add_table({name: Elementwise(name, floating) for name in FLOATING}, 1)
add_table(KEEPING, 1)
add_table({name: Elementwise(name, boolean) for name in ("isnan", "isinf", "isfinite")}, 1, in_place=False)

_gelu = Elementwise("nn.functional.gelu", lacking("GeluKernelImpl", NO_INT))
_silu = Elementwise("nn.functional.silu", lacking("silu_cpu", NO_INT))
_leaky_relu = Elementwise(
    "nn.functional.leaky_relu", lacking("leaky_relu_cpu", NO_INT), further=("negative_slope",)
)


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
def leaky_relu(self: Tensor, negative_slope: float = 0.01) -> Tensor:
    """Return the elements, the negative ones times a slope."""
    return _leaky_relu(self, further=(negative_slope,))


# Functions of two

BOTH = (0, 1)
"""Either operand may be a number."""

OF_TWO: dict[str, Elementwise] = {
    "mul": Elementwise("mul", promoted, BOTH),
    "floor_divide": Elementwise("floor_divide", lacking("div_floor_cpu", NO_BOOL), BOTH),
    "atan2": Elementwise("atan2", floating),
    "remainder": Elementwise("remainder", lacking("remainder_cpu", NO_BOOL), BOTH),
    "fmod": Elementwise("fmod", lacking("fmod_cpu", NO_BOOL), (1,)),
    **{
        name: Elementwise(name, lacking(f"{name}_cpu", kinds), BOTH)
        for name, kinds in (
            ("bitwise_and", NO_FLOAT),
            ("bitwise_or", NO_FLOAT),
            ("bitwise_xor", NO_FLOAT),
            ("bitwise_left_shift", NO_BOOL + NO_FLOAT),
            ("bitwise_right_shift", NO_BOOL + NO_FLOAT),
        )
    },
    **{name: Elementwise(name, boolean, (1,)) for name in ("eq", "ne")},
    **{name: Elementwise(name, boolean, (1,)) for name in ("lt", "le", "gt", "ge")},
    **{name: Elementwise(name, boolean) for name in ("logical_and", "logical_or", "logical_xor")},
}
"""The functions of two operands, by name, that torch has in place, too."""

add_table(OF_TWO, 2)
add_table(
    {name: Elementwise(name, promoted) for name in ("maximum", "minimum")},
    2,
    in_place=False,
)

# Functions with further arguments

_add, _sub = Elementwise("add", promoted, BOTH), Elementwise("sub", _subtracted, BOTH)
_add_scaled = Elementwise("add", _scaled(promoted), BOTH, ("alpha",))
_sub_scaled = Elementwise("sub", _scaled(_subtracted), BOTH, ("alpha",))
_rsub = Elementwise("rsub", _scaled(_subtracted), (1,), ("alpha",))
_div = Elementwise("div", floating, BOTH)
_div_rounded = {mode: Elementwise("div", lacking(f"div_{mode}_cpu", NO_BOOL), BOTH) for mode in ("floor", "trunc")}
_pow = Elementwise("pow", _powered, (1,))
_pow_of_number = Elementwise("pow", lacking("pow", NO_BOOL), (0,), contiguous=True)
_clamp = Elementwise("clamp", lacking("clamp_cpu", NO_BOOL), (1, 2))
_clamp_one = {name: Elementwise(name, _bounded, (1,)) for name in ("clamp_min", "clamp_max")}
_addcmul = Elementwise("addcmul", lacking("addcmul_cpu_out", NO_BOOL), (), ("value",))
_addcdiv = Elementwise("addcdiv", _quotient_added, (), ("value",))
_lerp = Elementwise("lerp", _interpolated, (2,))
_where = Elementwise("where", _where_dtype, (1, 2))
_round = Elementwise("round", lacking("round_vml_cpu", NO_BOOL))
_round_decimals = Elementwise("round", lacking("round_cpu", NO_INT), (), ("decimals",))


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
    return _rsub(input, other, further=(alpha,))


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
    if (
        isinstance(exponent, int)
        and exponent < 0
        and isinstance(self, Tensor)
        and self.dtype.kind < DtypeKind.FLOAT
    ):
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
    if self.dtype.kind is DtypeKind.BOOL:
        raise RuntimeError("The `+` operator, on a bool tensor is not supported.")
    return self


@function
def where(condition: Tensor, input: Tensor | Number | None = None, other: Tensor | Number | None = None) -> Any:
    """Return the elements of ``input`` if a condition holds, else those of ``other``.

    With a condition only, return where it holds, as an index of tensors.
    """
    if input is None and other is None:
        return condition.nonzero(as_tuple=True)
    return _where(condition, input, other)


methods["where"] = lambda self, condition, other: _where(condition, self, other)


def _masked_rule(metas: Metas, numbers: Any, static: Any) -> Meta:
    own, mask, *value = metas
    if value and value[0].shape:
        raise RuntimeError(
            "masked_fill_ only supports a 0-dimensional value tensor, but got tensor with "
            f"{len(value[0].shape)} dimension(s)."
        )
    if mask.dtype is not bool_:
        raise RuntimeError(f"masked_fill_ only supports boolean masks, but got mask with dtype {mask.dtype.name}")
    return Meta(broadcast(own.shape, mask.shape), own.dtype)


_masked_fill = Op("masked_fill", _masked_rule)


@method
def masked_fill(self: Tensor, mask: Tensor, value: Tensor | Number) -> Tensor:
    if isinstance(value, Tensor):
        return _masked_fill((self, mask, value))
    return _masked_fill((self, mask), (value,))


@method
def masked_fill_(self: Tensor, mask: Tensor, value: Tensor | Number) -> Tensor:
    if isinstance(value, Tensor):
        return _masked_fill.in_place((self, mask, value))
    return _masked_fill.in_place((self, mask), (value,))


@method
def allclose(
    self: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    """Wait for whether all elements are nearly the same."""
    return bool(self.isclose(other, rtol, atol, equal_nan).all().item())


@method
def equal(self: Tensor, other: Tensor) -> bool:
    """Wait for whether shapes and elements are the same."""
    return self.shape == other.shape and bool(self.eq(other).all().item())


# Other dtypes, copies, and new contents

DEVICES = ("cpu", "cuda", "loom", "meta")
"""Names of devices, which code of torch may ask for."""

_to = Elementwise("Tensor.to", lambda metas, numbers, further: further["dtype"])
_clone = Elementwise("clone", promoted)
_contiguous = Op("Tensor.contiguous", lambda metas, numbers, static: Meta(metas[0].shape, metas[0].dtype))
_copy = Elementwise("copy", kept)
_fill = Elementwise("fill", kept, (1,), overlapping=True)
_zero = Elementwise("zero", kept, overlapping=True)


@method
def to(
    self: Tensor,
    *wanted: Any,
    dtype: Any = None,
    device: Any = None,
    copy: bool = False,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Tensor:
    """Return the tensor with a dtype, or with that of another tensor.

    Args:
        self: the tensor, which is returned itself if it has the dtype.
        wanted: the dtype, or a tensor that has it. A device makes no difference: a tensor stays in its workers.
        dtype: the same by name.
        device: makes no difference.
        copy: whether to return a copy in any case.
        non_blocking: makes no difference: nothing waits.
        memory_format: the order of the dimensions in memory, as torch has it.
    """
    if memory_format is not None:
        return to(self, *wanted, dtype=dtype, copy=copy).clone(memory_format=memory_format)  # type: ignore[no-any-return]
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
def clone(self: Tensor, *, memory_format: Any = None) -> Tensor:
    """Return a copy."""
    if memory_format is None:
        return _clone(self)
    return self._home.call("clone", self, memory_format=memory_format)  # type: ignore[no-any-return]


@method
def contiguous(self: Tensor, memory_format: Any = None) -> Tensor:
    """Return the tensor with its elements in row-major order in memory; itself, if they are."""
    if memory_format is not None:
        return self._home.call("Tensor.contiguous", self, memory_format=memory_format)  # type: ignore[no-any-return]
    return self if self.meta.contiguous else _contiguous((self,))


@method
def copy_(self: Tensor, src: Tensor | Number, non_blocking: bool = False) -> Tensor:
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
    "int": "int32", "short": "int16", "char": "int8", "byte": "uint8", "bool": "bool", "cfloat": "complex64",
    "cdouble": "complex128",
}  # fmt: skip
"""Methods named after a dtype, which they give."""


def _cast(name: str, dtype: str) -> Callable[..., Tensor]:
    kind = dtype_named(dtype)

    def cast(self: Tensor, memory_format: Any = None) -> Tensor:
        return to(self, kind, memory_format=memory_format)

    cast.__name__ = cast.__qualname__ = name
    cast.__doc__ = f"Return the tensor with dtype {dtype}."
    return cast


for _name, _dtype in CASTS.items():
    methods[_name] = _cast(_name, _dtype)

# Other names, and Python's operators

ALIASES = {
    "absolute": "abs", "arccos": "acos", "arcsin": "asin", "arctan": "atan", "arctan2": "atan2", "clip": "clamp",
    "divide": "div", "fix": "trunc", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le",
    "multiply": "mul", "negative": "neg", "not_equal": "ne", "subtract": "sub", "true_divide": "div",
}  # fmt: skip
"""Other names of torch for the same functions."""

for _name, _of in ALIASES.items():
    methods[_name], methods[f"{_name}_"] = methods[_of], methods[f"{_of}_"]

OPERATORS = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide", "mod": "remainder",
    "pow": "pow", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}  # fmt: skip
"""Python's operators of two operands, by the function that each one calls."""

COMMUTATIVE = ("add", "mul", "and", "or", "xor")


def _operator(name: str, call: Callable[[Any, Any], Any], reflected: bool = False) -> None:
    """Make a function an operator that leaves operands of other types to these, but for an array after a tensor."""

    def operator(self: Tensor, other: Any) -> Any:
        if not isinstance(other, OPERAND):
            other = plain(other)
            if type(other).__module__ == "numpy" and not reflected:
                other = self._home.tensor(other)
        return call(self, other) if isinstance(other, OPERAND) else NotImplemented

    operator.__name__ = operator.__qualname__ = f"__{name}__"
    methods[operator.__name__] = operator


def _reflected(name: str, call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a function of a tensor and of the operand that stands before it."""
    if name in COMMUTATIVE:
        return call
    return rsub if name == "sub" else partial(_turned, call)


def _turned(call: Callable[[Any, Any], Any], self: Tensor, other: Any) -> Any:
    return call(other, self)


for _name, _of in OPERATORS.items():
    _operator(_name, methods[_of])
    _operator(f"i{_name}", methods[f"{_of}_"])
    if not _name.endswith("shift"):
        _operator(f"r{_name}", _reflected(_name, methods[_of]), reflected=True)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _operator(_name, methods[_name])


def _invert(self: Tensor) -> Tensor:
    if self.dtype.kind >= DtypeKind.FLOAT:
        raise TypeError("~ (operator.invert) is only implemented on integer and Boolean-type tensors")
    return methods["bitwise_not"](self)  # type: ignore[no-any-return]


methods["__neg__"], methods["__abs__"], methods["__invert__"], methods["__pos__"] = (
    methods["neg"], methods["abs"], _invert, positive
)  # fmt: skip
