"""Weights in folders: ``FOLDER/step_N`` with ``model.safetensors`` and ``config.json``, whole or not there.

A folder is written beside the others, synced and renamed. What a process that died had begun is removed by the next
`save`. Weights are data only: no code is taken from them.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loom.errors import CheckpointBroken, WrongArguments
from loom.process.state_file import sync_folder
from loom.train.checkpoints.files import Aside, remove, remove_leftovers

if TYPE_CHECKING:
    from torch import Tensor

MODEL, CONFIG = "model.safetensors", "config.json"

_OWN = "_loom"
"""The key of `CONFIG` under which the size and the checksum of `MODEL` are."""
_NAME = re.compile(r"step_(\d+)")
_CHUNK = 1 << 20


def path_of(folder: str | os.PathLike[str], step: int) -> Path:
    """Return where the weights of a step are."""
    return Path(folder) / f"step_{step}"


def step_of(path: str | os.PathLike[str]) -> int | None:
    """Return the step of a folder's name, or None if it has another name."""
    match = _NAME.fullmatch(Path(path).name)
    return int(match[1]) if match else None


def save(
    state: Mapping[str, Tensor],
    config: Mapping[str, Any],
    folder: str | os.PathLike[str],
    step: int,
    *,
    keep: int | None = None,
) -> Path:
    """Write the weights of a step; return their folder. Weights of the same step are replaced.

    Args:
        state: tensors by name, of any device.
        config: what JSON can hold, to build the model with.
        folder: of all steps.
        step: the step of the training that the weights are after.
        keep: how many of the newest whole weights remain; None for all of them.

    Raises:
        WrongArguments: ``step`` is no whole number from 0, or ``keep`` is none from 1.
        OSError: the folder cannot be written; what was there is as it was.
    """
    from safetensors.torch import save_file

    if type(step) is not int or step < 0:
        raise WrongArguments(f"the step of weights is a whole number from 0, not {step!r:.40}")
    if keep is not None and keep < 1:
        raise WrongArguments(f"at least 1 step of weights has to be kept, not {keep}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    path = path_of(folder, step)
    with Aside(folder) as aside:
        model = aside.path / MODEL
        save_file(_apart(state), model)
        own = {"step": step, "bytes": model.stat().st_size, "crc32": _checksum(model)}
        (aside.path / CONFIG).write_text(json.dumps({**config, _OWN: own}, indent=1))
        for written in (model, aside.path / CONFIG):
            _sync(written)
        sync_folder(aside.path)
        if path.exists():
            remove(path)
        aside.become(path)
    if keep is not None:
        prune(folder, keep)
    return path


def load(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a step's folder, on the CPU, and its config.

    Raises:
        CheckpointBroken: the folder is not there, or not whole; the text says what is wrong.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    if reason := whats_wrong(path, checksum=True):
        raise CheckpointBroken(f"the weights {path} are not whole: {reason}")
    try:
        state = load_file(path / MODEL)
        config = json.loads((path / CONFIG).read_bytes())
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointBroken(f"the weights {path} cannot be read: {error}") from error
    config.pop(_OWN, None)
    return state, config


def latest(folder: str | os.PathLike[str]) -> int | None:
    """Return the newest step whose weights are whole, or None if there is none. Others are passed over."""
    return next((step for step in _steps(folder) if whats_wrong(path_of(folder, step)) is None), None)


def prune(folder: str | os.PathLike[str], keep: int) -> list[int]:
    """Remove the weights that are older than the ``keep`` newest whole ones; return their steps."""
    whole, removed = 0, []
    for step in _steps(folder):
        path = path_of(folder, step)
        if whole >= keep:
            remove(path)
            removed.append(step)
        elif whats_wrong(path) is None:
            whole += 1
    return removed


def whats_wrong(path: str | os.PathLike[str], *, checksum: bool = False) -> str | None:
    """Return why a folder has no whole weights; None if it has.

    Args:
        checksum: whether all bytes are read and compared with the checksum, if the folder has one.
    """
    path = Path(path)
    try:
        if not path.is_dir():
            return "there is no such folder"
        config = json.loads((path / CONFIG).read_bytes())
        own = config.get(_OWN, {})
        promised = _promised(path / MODEL)
        size = (path / MODEL).stat().st_size
        if size != promised or size != own.get("bytes", size):
            return f"{MODEL} has {size} bytes instead of {own.get('bytes', promised)}"
        if checksum and "crc32" in own and _checksum(path / MODEL) != own["crc32"]:
            return f"{MODEL} is not what was written: its checksum differs"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        return f"it cannot be read: {error}"
    return None


def _promised(model: Path) -> int:
    """Return how many bytes a file of tensors has by its own header; raise ValueError if that is none."""
    with open(model, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        if len(start) < 8 or (length := struct.unpack("<Q", start)[0]) > size - 8:
            raise ValueError(f"{model.name} has no whole header")
        header = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return int(8 + length + max(ends, default=0))


def _steps(folder: str | os.PathLike[str]) -> list[int]:
    """Return the steps of a folder, whole or not, the newest first."""
    found = (step_of(path) for path in Path(folder).glob("step_*"))
    steps = {step for step in found if step is not None}
    return sorted((step for step in steps if path_of(folder, step).is_dir()), reverse=True)


def _apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU, each with memory of its own, as the format wants it."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in state.items():
        own = tensor.detach().cpu().contiguous()
        place = own.untyped_storage().data_ptr()
        apart[name] = own.clone() if place in seen else own
        seen.add(place)
    return apart


def _checksum(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
