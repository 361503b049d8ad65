"""Weights in folders: ``FOLDER/step_N`` with ``model.safetensors`` and ``config.json``, whole or not there.

A folder is written beside the others, synced and renamed. Remains of a process that died while it saved are removed
by the next `save`. Weights are data only: no code is taken from them. `WeightUpdates` gives an engine new ones.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from loom import tracing
from loom.errors import CheckpointBroken, Denied, WrongArguments
from loom.process.state_file import sync_folder
from loom.rl.generation import tensor_files
from loom.train.checkpoints.files import Aside, remove, remove_leftovers

if TYPE_CHECKING:
    from torch import Tensor

    from loom.rl.generation.weight_client import UpdateAnswer


MODEL, CONFIG = "model.safetensors", "config.json"
INDEX = "model.safetensors.index.json"
"""The file that says, in a folder whose tensors lie in several files, which one has which."""

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
    dtype: str | None = None,
    final: tensor_files.Final = tensor_files.unchanged,
) -> Path:
    """Write the weights of a step; return their folder. Weights of the same step are replaced.

    Args:
        state: tensors by name, of any device. While they are sharded, the other members of the group have to call
            `tensor_files.take_part`.
        config: what JSON can hold, to build the model with.
        folder: of all steps.
        step: the step of the training that the weights are after.
        keep: how many of the newest whole weights remain; None for all of them.
        dtype: the type of floating-point numbers in the file, such as ``bfloat16``; None for each tensor's own.
        final: the last change of each whole tensor.

    Raises:
        WrongArguments: ``step`` is no whole number from 0, or ``keep`` is none from 1.
        OSError: the folder cannot be written; what was there is as it was.
    """
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
        checksum = tensor_files.write(model, state, dtype, final)
        own = {"step": step, "bytes": model.stat().st_size, "crc32": checksum}
        (aside.path / CONFIG).write_text(json.dumps({**config, _OWN: own}, indent=1))
        _sync(aside.path / CONFIG)
        sync_folder(aside.path)
        if path.exists():
            remove(path)
        aside.become(path)
    if keep is not None:
        prune(folder, keep)
    return path


def load(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
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
        state = {name: one for file in model_files(path) for name, one in load_file(file).items()}
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
        for file in model_files(path):
            if reason := tensor_files.whats_wrong(file, own.get("bytes")):
                return reason
        if checksum and "crc32" in own and _checksum(path / MODEL) != own["crc32"]:
            return f"{MODEL} is not what was written: its checksum differs"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        return f"it cannot be read: {error}"
    return None


def model_files(folder: Path) -> list[Path]:
    """Return the files with a folder's tensors: one, or those of Hugging Face's index.

    Raises:
        OSError: the index cannot be read.
        ValueError: it is no JSON.
        KeyError: it names no files.
    """
    if not (folder / INDEX).exists():
        return [folder / MODEL]
    names: Mapping[str, str] = json.loads((folder / INDEX).read_bytes())["weight_map"]
    if any(Path(name).name != name for name in names.values()):
        raise ValueError(f"{INDEX} names a file that is not in the folder")
    return [folder / name for name in sorted(set(names.values()))]


def _steps(folder: str | os.PathLike[str]) -> list[int]:
    """Return the steps of a folder, whole or not, the newest first."""
    found = (step_of(path) for path in Path(folder).glob("step_*"))
    steps = {step for step in found if step is not None}
    return sorted((step for step in steps if path_of(folder, step).is_dir()), reverse=True)


def _checksum(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


class Swapping(Protocol):
    """An engine whose weights can be swapped for others."""

    def swap(self, state: Mapping[str, Tensor], step: int) -> None:
        """Replace the weights by those of a step. Blocks until the engine has them."""


class WeightUpdates:
    """The updates of an engine's weights, one after the other.

    Args:
        engine: the engine.
        folder: where weights are, as ``step_N`` or ``weights/step_N``; None if they come by messages only.
    """

    def __init__(self, engine: Swapping, folder: Path | None) -> None:
        self._engine = engine
        self._folder = folder
        self._lock = threading.Lock()

    def update(
        self, step: int, path: str | Path | None = None, state: Mapping[str, Tensor] | None = None
    ) -> UpdateAnswer:
        """Load weights, blocking; return the answer of the seed's servers, with the step.

        Raises:
            CheckpointBroken: the folder is not there, or not whole.
            WrongArguments: the weights are not this model's, or nothing says where they are.
        """
        if type(step) is not int or step < 0:
            raise WrongArguments(f"the step of weights is a whole number from 0, not {step!r:.40}")
        if path is None and state is None:
            path = path_of(self._weights_folder(), step)
        return self._measured("update_weights", step, path, state)

    def reload(self) -> UpdateAnswer:
        """Load the newest whole weights of the folder, blocking.

        Raises:
            CheckpointBroken: there are none.
        """
        folder = self._weights_folder()
        step = latest(folder)
        if step is None:
            raise CheckpointBroken(f"there are no whole weights in {folder}")
        return self._measured("reload_weights", step, path_of(folder, step), None)

    def inside(self, path: str) -> Path:
        """Return the real path of weights that a stranger named; a relative one is in the weights' folder.

        Raises:
            Denied: the path is not inside of the generator's folder, also by links.
        """
        if self._folder is None:
            raise Denied("this generator has no folder, so that it loads no weights by path")
        root = self._folder.resolve()
        try:
            found = (self._weights_folder() / path).resolve()
        except (OSError, ValueError, RuntimeError):
            found = None
        if found is None or not found.is_relative_to(root) or found == root:
            raise Denied(f"{path!r:.200} is not in the folder of this generator")
        return found

    def _weights_folder(self) -> Path:
        if self._folder is None:
            raise WrongArguments("this generator has no folder: say the path of the weights, or send their state")
        inner = self._folder / "weights"
        return inner if inner.is_dir() else self._folder

    def _measured(
        self, op: str, step: int, path: str | Path | None, state: Mapping[str, Tensor] | None
    ) -> UpdateAnswer:
        began = time.monotonic()
        tracing.event("weights.rpc.start", op=op)
        with self._lock:
            if state is None:
                assert path is not None
                state, _ = load(path)
            self._engine.swap(state, step)
        rpc_ms = round((time.monotonic() - began) * 1000, 3)
        tracing.event("weights.rpc.done", op=op, rpc_ms=rpc_ms)
        return {"status": "ok", "rpc_ms": rpc_ms, "step": step}
