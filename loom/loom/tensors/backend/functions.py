"""The backend's own functions, whose names begin with a point: what torch has no one function for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from loom.tensors.backend import watching
from loom.tensors.sending.batches import Failure

RESET = Failure(-1, 0, "RuntimeError", "it was freed by lt.reset(): make it again")
"""What becomes of a tensor after `reset`."""


def own(values: Any, name: str) -> Callable[..., Any]:
    """Return a function by its name. Those that need the worker get it first."""
    if name in _OF_WORKER:
        return lambda *args, **kwargs: _OF_WORKER[name](values, *args, **kwargs)
    return _OWN[name]


def data(values: Any, shape: Sequence[int], kind: torch.dtype) -> torch.Tensor:
    """Make a tensor of the next piece of data of the batch."""
    piece = bytearray(next(values.data))
    if not piece:
        return torch.empty(shape, dtype=kind, device=values.device)
    return torch.frombuffer(piece, dtype=kind).reshape(shape).to(values.device)


def made(values: Any, function: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call a function of torch that makes a tensor, on the worker's device."""
    found: torch.Tensor = getattr(torch, function)(*args, device=values.device, **kwargs)
    return found


def made_spread(
    values: Any, placements: Sequence[int], function: str, size: Sequence[int], *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Call a function of torch that makes a tensor of a size, each process for its part."""
    made: torch.Tensor = values.sharding.made(values.device, placements, function, size, *args, **kwargs)
    return made


def spread(values: Any, tensor: torch.Tensor, placements: Sequence[int]) -> torch.Tensor:
    """Return a tensor of its own that is spread over the processes, or whole in each."""
    if values.sharding is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    found: torch.Tensor = values.sharding.spread(tensor, placements)
    return found


def rows(values: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return a matrix of which each process has some rows; one that is spread already as it is."""
    found: torch.Tensor = values.sharding.rows(tensor)
    return found


def seed(values: Any, number: int) -> None:
    """Seed torch's generators."""
    torch.manual_seed(number)


def getitem(tensor: torch.Tensor, index: Sequence[Any]) -> torch.Tensor:
    """Return a part of a tensor."""
    return tensor[_index(index)]


def setitem(tensor: torch.Tensor, index: Sequence[Any], value: Any) -> None:
    """Give a part of a tensor other values, in place."""
    tensor[_index(index)] = value


def with_item(tensor: torch.Tensor, index: Sequence[Any], value: Any) -> torch.Tensor:
    """Return a copy in which a part has other values."""
    copy = tensor.clone()
    copy[_index(index)] = value
    return copy


def getitem_backward(grad: torch.Tensor, index: Sequence[Any], shape: Sequence[int]) -> torch.Tensor:
    """Return zeros of a shape to which a gradient is added at an index."""
    zeros = grad.new_zeros(shape)
    basic: list[Any] = []
    chosen: list[Any] = []
    for each in _index(index):
        if isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8):
            basic += [slice(None)] * each.dim() or [None]
            # One without dimensions selects all of a new dimension, or nothing of it.
            chosen.append(each if each.dim() else torch.zeros(int(bool(each)), dtype=torch.int64))
            continue
        several = isinstance(each, torch.Tensor) and each.dim() > 0
        basic.append(slice(None) if several else each)
        if not isinstance(each, (int, torch.Tensor)) or several:
            chosen.append(each if several else None)
    part = zeros[tuple(basic)]
    if any(each is not None for each in chosen):
        torch.ops.aten.index_put_(part, chosen, grad, True)
    else:
        part.copy_(grad)
    return zeros


def getitem_summed(tensor: torch.Tensor, index: Sequence[Any], shape: Sequence[int]) -> torch.Tensor:
    """Return a part of a tensor, summed to a shape that can be broadcast to the part's."""
    return tensor[_index(index)].sum_to_size(list(shape))


def places(tensor: torch.Tensor) -> Any:
    """Return the places of elements that are not 0, a tensor for each dimension."""
    found = torch.nonzero(tensor, as_tuple=True)
    return found if len(found) > 1 else found[0]


def _index(index: Sequence[Any]) -> tuple[Any, ...]:
    """Return an index of torch: a slice travels as its start, length and step."""
    return tuple(
        slice(each[0], each[0] + each[1] * each[2], each[2]) if isinstance(each, tuple) else each for each in index
    )


def reshaped(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return the elements in another shape, in which they have to lie in memory otherwise."""
    return tensor.reshape(shape)


def real_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the real parts of complex numbers, in memory of their own."""
    return tensor.real.clone(memory_format=torch.contiguous_format)


def matmul_backward(grad: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the gradients of both factors of a product of matrices."""
    return grad.mm(right.t()), left.t().mm(grad)


def linear_backward(
    grad: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, wanted: Sequence[bool]
) -> list[torch.Tensor]:
    """Return those gradients of input, weight and bias of `torch.nn.functional.linear` that are wanted."""
    found = [grad.matmul(weight)] if wanted[0] else []
    rows = grad.flatten(0, -2)
    if wanted[1]:
        found.append(rows.t().mm(inputs.flatten(0, -2)))
    if wanted[2]:
        found.append(rows.sum(0))
    return found


def keep(values: Any, tensor: torch.Tensor, name: str, needs: bool) -> None:
    """Give a tensor a name, by which another program finds it."""
    values.kept[name] = tensor, needs


def kept(values: Any, name: str) -> torch.Tensor:
    """Return the tensor of a name."""
    found: torch.Tensor = values.kept[name][0]
    return found


def forget(values: Any, name: str) -> None:
    """Take a name back."""
    values.kept.pop(name, None)


def reset(values: Any) -> None:
    """Forget every tensor that has no name."""
    values.tensors.clear()
    values.tensors.gone = RESET


_OF_WORKER: dict[str, Callable[..., Any]] = {
    ".data": data,
    ".forget": forget,
    ".keep": keep,
    ".kept": kept,
    ".made": made,
    ".made_spread": made_spread,
    ".reset": reset,
    ".rows": rows,
    ".seed": seed,
    ".spread": spread,
    ".watch": watching.watch,
    ".watch_clear": watching.clear,
    ".watch_count": watching.count,
}
_OWN: dict[str, Callable[..., Any]] = {
    ".getitem": getitem,
    ".getitem_backward": getitem_backward,
    ".getitem_summed": getitem_summed,
    ".linear_backward": linear_backward,
    ".matmul_backward": matmul_backward,
    ".places": places,
    ".real_part": real_part,
    ".reshaped": reshaped,
    ".setitem": setitem,
    ".with_item": with_item,
}
