"""Python's operators of tensors, which leave what is neither a tensor nor a number to the other operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loom.tensors.dtypes import Kind, plain
from loom.tensors.op import methods
from loom.tensors.ops.elementwise import OPERAND
from loom.tensors.ops.functions import positive
from loom.tensors.ops.pointwise import COMPARISONS, rsub
from loom.tensors.tensor import Tensor

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
    if name == "sub":
        return rsub
    return lambda self, other: call(other, self)


for _name, _of in OPERATORS.items():
    _operator(_name, methods[_of])
    _operator(f"i{_name}", methods[f"{_of}_"])
    if not _name.endswith("shift"):
        _operator(f"r{_name}", _reflected(_name, methods[_of]), reflected=True)
for _name in COMPARISONS:
    _operator(_name, methods[_name])


def _invert(self: Tensor) -> Tensor:
    if self.dtype.kind >= Kind.FLOAT:
        raise TypeError("~ (operator.invert) is only implemented on integer and Boolean-type tensors")
    return methods["bitwise_not"](self)  # type: ignore[no-any-return]


methods["__neg__"], methods["__abs__"], methods["__invert__"], methods["__pos__"] = (
    methods["neg"], methods["abs"], _invert, positive
)  # fmt: skip
