"""Files of tensors, in the format of safetensors, which are written tensor by tensor: no whole copy is in memory.

Tensors that the members of a replica group share (FSDP2) are gathered while they are written: one member calls
`write`, and the others `take_part`, with the same names.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""The format's names of torch's types."""

Final = Callable[[str, "Tensor"], "Tensor"]
"""A change of each whole tensor, by its name, before it is written."""


def unchanged(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor."""
    return tensor


def gathered(
    tensors: Mapping[str, Tensor], dtype: str | None = None, final: Final = unchanged
) -> Iterator[tuple[str, Tensor]]:
    """Give name and whole tensor, one after the other; all members of a group do so in the same order."""
    from loom.train.loop.training_state import whole

    for name in _in_order(tensors, dtype):
        yield name, final(name, whole(tensors[name].detach()))


def take_part(tensors: Mapping[str, Tensor], dtype: str | None = None, final: Final = unchanged) -> None:
    """Give this member's parts of the tensors to the one that writes them."""
    for _ in gathered(tensors, dtype, final):
        pass


def copied(
    tensors: Mapping[str, Tensor],
    dtype: str | None = None,
    final: Final = unchanged,
    older: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return copies of whole tensors, in the CPU's memory; see `write`.

    Args:
        older: earlier copies. A tensor that has not changed since is returned itself.
    """
    found: dict[str, Tensor] = {}
    for name, one in gathered(tensors, dtype, final):
        copy = one.to("cpu", _type_of(one, dtype), copy=True).contiguous()
        before = (older or {}).get(name)
        found[name] = copy if before is None or not same_bits(copy, before) else before
    return found


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two contiguous tensors in the CPU's memory have the same type, shape and bits."""
    import torch

    return (one.dtype, one.shape) == (other.dtype, other.shape) and bool(torch.equal(bits_of(one), bits_of(other)))


def bits_of(tensor: Tensor) -> Tensor:
    """Return the elements of a contiguous tensor as integers: numbers do not compare by their bits."""
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.reshape(-1).view(kinds[tensor.itemsize])


def write(path: Path, tensors: Mapping[str, Tensor], dtype: str | None = None, final: Final = unchanged) -> int:
    """Write tensors, and sync the file; return its CRC-32.

    Args:
        path: the file.
        tensors: by name, of any device, sharded or not.
        dtype: the type of floating-point numbers in the file, such as ``bfloat16``; None for each tensor's own.
        final: the last change of each whole tensor. It changes neither shape nor type.

    Raises:
        OSError: the file cannot be written. The other members have not noticed.
    """
    header = _header(tensors, dtype)
    failure: OSError | None = None
    with open(path, "wb") as file:
        checksum = zlib.crc32(header)
        file.write(header)
        for name, tensor in gathered(tensors, dtype, final):
            if failure is None:
                data = _bytes_of(tensor, _type_of(tensors[name], dtype))
                checksum = zlib.crc32(data, checksum)
                try:
                    file.write(data)
                except OSError as error:
                    failure = error  # the other members wait for this one until the last tensor
        if failure is not None:
            raise failure
        file.flush()
        os.fsync(file.fileno())
    return checksum


def whats_wrong(file: Path, size: int | None = None) -> str | None:
    """Return why a file of tensors is not whole, by its own header and, if given, by its size; None if it is."""
    try:
        promised, found = _promised(file), file.stat().st_size
    except FileNotFoundError:
        return f"{file.name} is missing"
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        return f"it cannot be read: {error}"
    if found != promised or found != (size or found):
        return f"{file.name} has {found} bytes instead of {size or promised}"
    return None


def _promised(path: Path) -> int:
    """Return how many bytes a file of tensors has by its own header; raise ValueError if that is none."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        if len(start) < 8 or (length := struct.unpack("<Q", start)[0]) > size - 8:
            raise ValueError(f"{path.name} has no whole header")
        header = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return int(8 + length + max(ends, default=0))


def _in_order(tensors: Mapping[str, Tensor], dtype: str | None) -> list[str]:
    """Return the names in the file's order: larger numbers first, so that each lies at a multiple of its size."""
    return sorted(tensors, key=lambda name: (-_type_of(tensors[name], dtype).itemsize, name))


def _header(tensors: Mapping[str, Tensor], dtype: str | None) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # as transformers wants it
    end = 0
    for name in _in_order(tensors, dtype):
        kind = _type_of(tensors[name], dtype)
        start, end = end, end + tensors[name].numel() * kind.itemsize
        known = str(kind).removeprefix("torch.")
        entries[name] = {"dtype": NAMES[known], "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _type_of(tensor: Tensor, dtype: str | None) -> torch.dtype:
    import torch

    return getattr(torch, dtype) if dtype and tensor.is_floating_point() else tensor.dtype


def _bytes_of(tensor: Tensor, kind: torch.dtype) -> memoryview:
    import torch

    flat = tensor.to("cpu", kind).contiguous().reshape(-1)
    data: memoryview = flat.view(torch.uint8).numpy().data
    return data
