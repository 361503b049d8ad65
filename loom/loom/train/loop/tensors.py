"""Parameters and optimizer states as plain tensors, whether FSDP2 has sharded them or not."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor; every process of the group has to call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain(tree: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a state with each tensor converted, by `local` for a peer or by `whole` for a checkpoint."""
    if isinstance(tree, torch.Tensor):
        return convert(tree.detach())
    if isinstance(tree, Mapping):
        return {key: plain(value, convert) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(plain(value, convert) for value in tree)
    return tree


def load_model(model: torch.nn.Module, state: Mapping[str, torch.Tensor], of_whole: bool) -> None:
    """Copy the values of a plain state into a model."""
    own = model.state_dict()
    if own.keys() != state.keys():
        missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        raise KeyError(f"the state is of another model: it lacks {missing}, and has {unknown}")
    with torch.no_grad():
        for name, tensor in own.items():
            local(tensor).copy_(local(_like(tensor, state[name], of_whole)))


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], of_whole: bool) -> None:
    """Load a plain state into an optimizer."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    kept = {
        number: {
            key: _like(parameters[number], value, of_whole) if _is_shaped(value) else value
            for key, value in entry.items()
        }
        for number, entry in state["state"].items()
    }
    optimizer.load_state_dict({"state": kept, "param_groups": state["param_groups"]})


def _is_shaped(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _like(tensor: torch.Tensor, value: torch.Tensor, of_whole: bool) -> torch.Tensor:
    value = value.to(local(tensor).device)
    if not isinstance(tensor, DTensor):
        return value
    if of_whole:
        return distribute_tensor(value, tensor.device_mesh, tensor.placements)
    return DTensor.from_local(
        value, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
    )


def flatten(tensors: Iterable[torch.Tensor], extra: Sequence[float] = ()) -> torch.Tensor:
    """Return tensors, followed by some numbers, as one flat tensor."""
    parts = [local(tensor).detach().reshape(-1) for tensor in tensors]
    return torch.cat([*parts, parts[0].new_tensor(list(extra))])


def unflatten(flat: torch.Tensor, tensors: Iterable[torch.Tensor]) -> list[float]:
    """Copy a flat tensor back into tensors; return the numbers that follow them."""
    offset = 0
    with torch.no_grad():
        for tensor in tensors:
            into = local(tensor)
            into.copy_(flat[offset : offset + into.numel()].view_as(into))
            offset += into.numel()
    rest: list[float] = flat[offset:].tolist()
    return rest


def hash_of(model: torch.nn.Module) -> str:
    """Return the SHA-256 of this process's part of a model's parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(local(tensor).detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
