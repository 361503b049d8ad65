"""The operations put where they are called: on `Tensor` as methods, on `Tensors` as functions."""

from __future__ import annotations

from loom.tensors.dtypes import ALL, dtype_named
from loom.tensors.op import functions, methods, properties
from loom.tensors.ops import (
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
    softmax,
)
from loom.tensors.ops import functions as of_one
from loom.tensors.ops.layouts import (
    arranging,
    assigning,
    dimensions,
    gathering,
    indexing,
    joining,
    layout,
    masking,
)
from loom.tensors.tensor import Tensor
from loom.tensors.tensors import Tensors

MODULES = (
    arranging,
    assigning,
    casts,
    convolution,
    dimensions,
    einsum,
    entropy,
    gathering,
    indexing,
    joining,
    layout,
    linear,
    losses,
    masking,
    network,
    of_one,
    operators,
    ordering,
    pointwise,
    pooling,
    reductions,
    softmax,
)


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
    for name, function in {**methods, **functions}.items():
        if not name.startswith("__") and not hasattr(Tensors, name):
            setattr(Tensors, name, staticmethod(function))
