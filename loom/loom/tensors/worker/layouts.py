"""The layouts of tensors, and the shapes of what functions of torch return: tensors within tuples, and values."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from loom.tensors.sending.encoding import Failure, T

logging.getLogger("torch._subclasses.fake_tensor").disabled = True  # of errors that the program is told
Layout = tuple[str, tuple[int, ...], tuple[int, ...], bool]


def layout(value: Any) -> Layout | Failure:
    """Return a tensor's dtype, shape, strides and whether its gradient is wanted; a failure as it is."""
    if isinstance(value, Failure):
        return value
    return dtype_name(value), tuple(value.shape), tuple(value.stride()), value.requires_grad


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def flat(call: Callable[..., Any], only_shape: bool) -> Callable[..., Any]:
    """Return a call that gives the tensors of what another one returns; or only their shape in it, uncomputed."""

    def tensors_of(tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
        found: list[Any] = []
        shape_of(call(tensors, numbers), found)
        return found[0] if len(found) == 1 else found

    def shape(tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
        found: list[Any] = []
        if all(type(each) is torch.Tensor for each in tensors):
            plain = [each.detach() for each in tensors]
            try:
                fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
                with warnings.catch_warnings(), fake as mode:
                    warnings.simplefilter("ignore")  # it asks for gradients of tensors that are no leaves
                    given = [mode.from_tensor(each, static_shapes=True) for each in plain]
                    packed = shape_of(call(given, numbers), found)
            except Exception:  # noqa: BLE001 - it reads elements, or it fails: then with torch's own words
                found.clear()
                packed = shape_of(call([each.clone() for each in plain], numbers), found)
        else:  # some are spread over processes: of these only the layout of the whole
            try:
                packed = shape_of(call([_layout_of(each, "meta") for each in tensors], numbers), found)
            except NotImplementedError:  # of what depends on elements
                packed = shape_of(call([_layout_of(each, "cpu").zero_() for each in tensors], numbers), found)
        return packed, len(found)

    return shape if only_shape else tensors_of


def _layout_of(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Return a tensor of the same layout."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def shape_of(value: Any, found: list[Any]) -> Any:
    """Return the shape of a value, and add its tensors to those that were found."""
    if isinstance(value, torch.Tensor):
        found.append(value)
        return T(len(found) - 1)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "named", type(value).__name__, list(value._fields), [shape_of(each, found) for each in value]
    fields = getattr(type(value), "__match_args__", ()) if isinstance(value, tuple) else ()
    if fields:  # of torch.return_types
        name = type(value).__name__.rpartition(".")[2]
        return "named", name, list(fields), [shape_of(each, found) for each in value]
    if type(value) is torch.Size:
        return "value", tuple(value)
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return kind, [shape_of(each, found) for each in value]
    return "value", value
