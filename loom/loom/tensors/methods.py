"""The operations put where they are called: on `Tensor` as methods, on `Tensors` as functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from loom.tensors.core import indexing, joining, like, network, pointwise, products, reductions, shapes, spreading
from loom.tensors.layouts import ALL, dtype_named
from loom.tensors.learned import method_named, replacing
from loom.tensors.op import functions, methods, properties
from loom.tensors.tensor import Tensor
from loom.tensors.tensors import Tensors

MODULES = (indexing, joining, like, network, pointwise, products, reductions, shapes, spreading)

NUMBER_FIRST = {
    "add", "bitwise_and", "bitwise_left_shift", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "div", "divide",
    "floor_divide", "mul", "multiply", "pow", "remainder", "sub", "subtract", "true_divide",
}  # fmt: skip
"""The functions that take a number before a tensor, as torch's do."""


OTHERS = ("unfold",)
"""The methods whose names are other functions'."""


def put() -> None:
    """Give both classes their operations."""
    for name, function in methods.items():
        setattr(Tensor, name, function)
    for name, found in properties.items():
        setattr(Tensor, name, found)
    setattr(Tensor, "__getattr__", _learned_method)  # noqa: B010
    for dtype in ALL:  # first: `lt.bool` is a dtype, as in torch, and `x.bool()` a method
        setattr(Tensors, dtype.name, dtype)
    for alias in ("float", "double", "half", "int", "long", "short", "cfloat", "cdouble"):
        setattr(Tensors, alias, dtype_named(alias))
    setattr(Tensors, "Tensor", Tensor)  # noqa: B010
    setattr(Tensors, "is_tensor", staticmethod(lambda value: isinstance(value, Tensor)))  # noqa: B010
    setattr(Tensors, "numel", staticmethod(Tensor.numel))  # noqa: B010
    for name in ("detach", "clone"):
        setattr(Tensors, name, staticmethod(getattr(Tensor, name)))
    for name, function in {**methods, **functions}.items():
        if not name.startswith("__") and not hasattr(Tensors, name) and name not in OTHERS:
            free = name in functions or name in NUMBER_FIRST
            own = replacing(f"nn.functional.{name}", function if free else _of_tensor(name, function))
            setattr(Tensors, name, staticmethod(own))


def _learned_method(self: Tensor, name: str) -> Any:
    """Return a method that the laptop has no rule for."""
    if isinstance(getattr(type(self), name, None), property):
        return object.__getattribute__(
            self, name
        )  # it was asked for in the cluster, and an error came of this class
    if name.startswith("_"):
        raise AttributeError(f"'Tensor' object has no attribute {name!r}")
    setattr(Tensor, name, method_named(name))
    return getattr(self, name)


def _of_tensor(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method as a function, which refuses a number as its tensor."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "input" in kwargs:
            args = (kwargs.pop("input"), *args)
        if args and isinstance(args[0], (int, float, complex)):
            raise TypeError(f"{name}(): argument 'input' (position 1) must be Tensor, not {type(args[0]).__name__}")
        return function(*args, **kwargs)

    return call
