"""The operations put where they are called: on `Tensor` as methods, on `Tensors` as functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from loom.tensors.dtypes import ALL, dtype_named
from loom.tensors.op import functions, methods, properties
from loom.tensors.ops import (
    activations,
    casts,
    convolution,
    einsum,
    entropy,
    linear,
    losses,
    network,
    operators,
    ordering,
    pointwise,
    pooling,
    reductions,
    sharding,
    softmax,
)
from loom.tensors.ops import functions as of_one
from loom.tensors.ops.images import folding, padding, resizing, transposed, windows
from loom.tensors.ops.layouts import (
    arranging,
    assigning,
    dimensions,
    gathering,
    indexing,
    joining,
    layout,
    like,
    masking,
    scattering,
    selecting,
    sequences,
    stacking,
)
from loom.tensors.ops.mathematics import (
    complexes,
    cumulative,
    distances,
    linalg,
    pairs,
    products,
    quantiles,
    special,
)
from loom.tensors.tensor import Tensor
from loom.tensors.tensors import Tensors

MODULES = (
    activations,
    arranging,
    assigning,
    casts,
    complexes,
    convolution,
    cumulative,
    dimensions,
    distances,
    einsum,
    entropy,
    folding,
    gathering,
    indexing,
    joining,
    layout,
    like,
    linalg,
    linear,
    losses,
    masking,
    network,
    of_one,
    operators,
    ordering,
    padding,
    pairs,
    pointwise,
    pooling,
    products,
    quantiles,
    reductions,
    resizing,
    scattering,
    selecting,
    sequences,
    sharding,
    softmax,
    special,
    stacking,
    transposed,
    windows,
)


NUMBER_FIRST = {
    "add", "bitwise_and", "bitwise_left_shift", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "div", "divide",
    "floor_divide", "mul", "multiply", "pow", "remainder", "sub", "subtract", "true_divide",
}  # fmt: skip
"""The functions that take a number before a tensor, as torch's do."""


def put() -> None:
    """Give both classes their operations."""
    for name, function in methods.items():
        setattr(Tensor, name, function)
    for name, found in properties.items():
        setattr(Tensor, name, found)
    for dtype in ALL:  # first: `lt.bool` is a dtype, as in torch, and `x.bool()` a method
        setattr(Tensors, dtype.name, dtype)
    for alias in ("float", "double", "half", "int", "long", "short"):
        setattr(Tensors, alias, dtype_named(alias))
    for name, function in sequences.MAKERS.items():
        setattr(Tensors, name, function)
    setattr(Tensors, "linalg", linalg.linalg)  # noqa: B010
    setattr(Tensors, "Tensor", Tensor)  # noqa: B010
    setattr(Tensors, "is_tensor", staticmethod(lambda value: isinstance(value, Tensor)))  # noqa: B010
    setattr(Tensors, "numel", staticmethod(Tensor.numel))  # noqa: B010
    for name, function in {**methods, **functions}.items():
        if not name.startswith("__") and not hasattr(Tensors, name):
            free = name in functions or name in NUMBER_FIRST
            setattr(Tensors, name, staticmethod(function if free else _of_tensor(name, function)))


def _of_tensor(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method as a function, which refuses a number as its tensor."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], (int, float, complex)):
            raise TypeError(f"{name}(): argument 'input' (position 1) must be Tensor, not {type(args[0]).__name__}")
        return function(*args, **kwargs)

    return call
