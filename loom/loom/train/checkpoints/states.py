"""The state in a checkpoint: named tensors, and bytes for everything else.

The bytes are msgpack, not pickle: keys keep their types (an optimizer's are numbers), tuples stay tuples, and
reading them cannot run code.

`IndexReader`, which reads what ``torch.distributed.checkpoint`` wrote, and takes no code from its index.

The index is a pickle, which torch loads as any other: whoever could write to the folder could run code in the
processes that load from it. Torch itself reads the tensors with ``weights_only``.
"""

from __future__ import annotations

import enum
import pathlib
import pickle
from collections.abc import Mapping
from typing import Any

import msgpack
import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata

from loom.errors import CheckpointBroken, UnstorableState

_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")


class IndexReader(FileSystemReader):  # type: ignore[misc]
    """A reader of a checkpoint's tensors. Raises `CheckpointBroken` if the index has anything but their places."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        with open(pathlib.Path(self.path) / ".metadata", "rb") as file:
            try:
                index = _IndexUnpickler(file).load()
            except OSError:
                raise
            except Exception as error:  # garbage that is unpickled can raise anything
                reason = str(error) or type(error).__name__
                raise CheckpointBroken(f"the checkpoint {self.path} has an index that is none: {reason}") from error
        if not isinstance(index, metadata.Metadata):
            raise CheckpointBroken(f"the checkpoint {self.path} has an index that is a {type(index).__name__}")
        if index.storage_meta is None:
            index.storage_meta = metadata.StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found: Any = None
        if module == metadata.__name__:
            found = getattr(metadata, name, None)
            found = found if getattr(found, "__module__", None) == module else None
        elif (module, name) == (filesystem.__name__, "_StorageInfo"):
            found = filesystem._StorageInfo
        elif (module, name) == ("torch.serialization", "_get_layout"):
            found = torch.serialization._get_layout
        elif (module, name) == ("builtins", "getattr"):
            found = _member
        elif module == "pathlib" and name in _PATHS:
            found = pathlib.PurePosixPath
        elif module == "torch":
            found = getattr(torch, name, None)
            found = found if found is torch.Size or isinstance(found, torch.dtype) else None
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return found


def _member(of: Any, name: Any) -> enum.Enum:
    """Return a member of an enumeration: Python 3.11.0 to 3.11.3, as in Debian 12, pickles it as an attribute."""
    if not (isinstance(of, type) and issubclass(of, enum.Enum) and name in of.__members__):
        raise pickle.UnpicklingError(f"it names {name} of {of}")
    return of.__members__[name]


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
