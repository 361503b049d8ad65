"""Folders that a program has written with ``torch.distributed.checkpoint``, such as torchtitan's ``step-100``.

They have no manifest: one is whole if its index, which torch writes last, can be read, and its files are long
enough.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint import load as load_tensors
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from loom.errors import CheckpointBroken
from loom.train.checkpoints.files import MANIFEST
from loom.train.checkpoints.index import IndexReader

INDEX = ".metadata"
_NUMBER = re.compile(r"(\d+)\D*$")


def found(folder: Path) -> list[tuple[int, Path]]:
    """Return step and path of each such folder, which may be this one or be in it, the highest step first.

    The step is the last number of the name; 0 if it has none.
    """
    candidates = [folder, *folder.glob("[!.]*")] if folder.is_dir() else []
    there = [path for path in candidates if (path / INDEX).is_file() and not (path / MANIFEST).exists()]
    steps = ((_NUMBER.search(path.name), path) for path in there)
    return sorted(((int(match[1]) if match else 0, path) for match, path in steps), reverse=True)


def whats_wrong(folder: Path) -> str | None:
    """Return why a folder is not whole; None if it is."""
    ends: dict[str, int] = {}
    try:
        for place in (IndexReader(folder).read_metadata().storage_data or {}).values():
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        for name, end in ends.items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if (size := (folder / name).stat().st_size) < end:
                return f"{name} has {size} bytes instead of {end}"
    except (OSError, CheckpointBroken, AttributeError, TypeError) as error:
        return f"it cannot be read: {error}"
    return None


class _PlainPlanner(DefaultLoadPlanner):  # type: ignore[misc]
    """A planner that reads no objects but plain ones: others could run code."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, weights_only=True)
        except Exception as error:
            raise CheckpointBroken(f"{name} is an object, not read because it could run code: {error}") from error


def load(folder: Path, place: Callable[[str, torch.Size, torch.dtype], torch.Tensor]) -> Mapping[str, Any]:
    """Return the state of a folder.

    Raises:
        CheckpointBroken: it has objects other than tensors, numbers, texts, and dicts and lists of these.
    """
    reader = IndexReader(folder)
    index = reader.read_metadata()
    state = {
        name: place(name, one.size, one.properties.dtype) if isinstance(one, TensorStorageMetadata) else None
        for name, one in index.state_dict_metadata.items()
    }
    planner = _PlainPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        load_tensors(state, storage_reader=reader, planner=planner, no_dist=True)
    except BaseException as error:  # torch wraps the error in one of its own, which is a BaseException
        failures = getattr(error, "failures", {})
        broken = next((one[0] for one in failures.values() if isinstance(one[0], CheckpointBroken)), None)
        if broken is None:
            raise
        raise CheckpointBroken(f"the checkpoint {folder} cannot be read: {broken}") from error
    paths = index.planner_data or {name: (name,) for name in state}
    whole: Mapping[str, Any] = unflatten_state_dict(state, paths)
    return whole
