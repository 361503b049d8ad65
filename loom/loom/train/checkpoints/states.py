"""The state in a checkpoint: named tensors, and bytes for everything else.

The bytes are msgpack, not pickle: keys keep their types (an optimizer's are numbers), tuples stay tuples, and
reading them cannot run code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack
import torch

from loom.errors import UnstorableState

_TENSOR, _TUPLE, _BIG_INT = 1, 2, 3  # codes of the types that msgpack lacks


def split(state: Mapping[str, Any]) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Copy a state into bytes and tensors, for `join`; the tensors are on the CPU, by the path to each."""
    tensors: dict[str, torch.Tensor] = {}
    rest = _packed(_without_tensors(state, ("state",), tensors))
    return rest, tensors


def join(rest: bytes, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the state that `split` took apart."""

    def found(code: int, data: bytes) -> Any:
        if code == _TENSOR:
            return tensors[data.decode()]
        if code == _TUPLE:
            return tuple(unpacked(data))
        return int(data.decode())

    def unpacked(data: bytes) -> Any:
        return msgpack.unpackb(data, ext_hook=found, strict_map_key=False)

    state: dict[str, Any] = unpacked(rest)
    return state


def _packed(value: Any) -> bytes:
    data: bytes = msgpack.packb(value)
    return data


def _without_tensors(value: Any, path: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        name = _free_name(".".join(path[1:]), tensors)
        tensors[name] = _copy(value, path)
        return msgpack.ExtType(_TENSOR, name.encode())
    if value is None or type(value) in (bool, str, bytes):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        number = int(value)
        return number if -(2**63) <= number < 2**64 else msgpack.ExtType(_BIG_INT, str(number).encode())
    if isinstance(value, Mapping):
        return {_key(key, path): _without_tensors(one, (*path, str(key)), tensors) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_without_tensors(one, (*path, str(place)), tensors) for place, one in enumerate(value)]
        return msgpack.ExtType(_TUPLE, _packed(items)) if isinstance(value, tuple) else items
    raise UnstorableState(
        f"{'.'.join(path)} is a {type(value).__qualname__}: a checkpoint holds tensors, numbers, strings, bytes, "
        "booleans, None, and dicts, lists and tuples of these"
    )


def _key(key: Any, path: tuple[str, ...]) -> str | int:
    if isinstance(key, (str, int)):
        return key
    raise UnstorableState(f"{'.'.join(path)} has the key {key!r:.80}: a checkpoint's keys are strings and integers")


def _free_name(wanted: str, taken: Mapping[str, Any]) -> str:
    """Return a name that is not taken: ``{"a.b": x}`` and ``{"a": {"b": x}}`` lead to the same name."""
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}#{number}"
    return name


def _copy(tensor: torch.Tensor, path: tuple[str, ...]) -> torch.Tensor:
    # Parameters and buffers are whole tensors; a DTensor is only a shard of one.
    if (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or tensor.layout is not torch.strided
        or tensor.is_meta
    ):
        raise UnstorableState(
            f"{'.'.join(path)} is a {type(tensor).__qualname__} ({tensor.layout}, {tensor.device}): a checkpoint "
            "holds whole dense tensors; gather a sharded one first (FSDP2: get_model_state_dict with "
            "full_state_dict=True)"
        )
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
