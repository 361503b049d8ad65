"""The checkpoints in a folder, of every layout that a branch can begin from, found without importing a library.

Only whole checkpoints count: each layout has a file that is written last.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from loom.errors import NotFound

_TRAINER = re.compile(r"checkpoint-(\d+)")
_STORE = re.compile(r"\d+-step-(\d+)")
_STEP = re.compile(r"step[-_=]?0*(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
_OF_PARTS = re.compile(r"(?i)(step|checkpoint|ckpt|iter)[-_=]?\d+$")
"""The end of the name of a folder with several distributed checkpoints, which belong together."""

MAX_DEPTH = 3
"""Folders below the given one in which checkpoints are looked for, such as Lightning's versions."""

MAX_LISTED = 20
"""Steps that an error lists."""

MAX_PICKLE = 64 << 20
"""Bytes of a checkpoint's description, without its tensors, that are read for its step."""


class CheckpointLayout(Enum):
    """The program that writes a checkpoint, as its files show."""

    TRAINER = "transformers' Trainer"
    LIGHTNING = "Lightning"
    STORE = "loom.train"
    DISTRIBUTED = "torch.distributed.checkpoint"
    """Also torchtitan's."""


class FoundOnDisk(NamedTuple):
    """A whole checkpoint."""

    step: int
    path: str
    layout: CheckpointLayout
    written: float
    """When, in seconds since the epoch."""


def checkpoints_in(folder: str | os.PathLike[str]) -> list[FoundOnDisk]:
    """Return the whole checkpoints in a folder and below it, by step; of the same step the newest comes last."""
    found = [one for path, depth in _walk(Path(folder), 0) if (one := _read(path)) is not None]
    return sorted(found, key=lambda one: (one.step, one.written))


def choose(folders: Sequence[str], step: int | None, run: str) -> tuple[FoundOnDisk, str]:
    """Return the last checkpoint at or before a step, or of all for None, and the folder that it was found in.

    Raises:
        NotFound: there is none.
    """
    found = [(one, folder) for folder in folders for one in checkpoints_in(folder)]
    fitting = [pair for pair in found if step is None or pair[0].step <= step]
    if fitting:
        return max(fitting, key=lambda pair: (pair[0].step, pair[0].written))
    steps = sorted({one.step for one, _ in found})
    listed = ", ".join(f"{one:,}" for one in steps[:MAX_LISTED]) + (", …" if len(steps) > MAX_LISTED else "")
    where = ", ".join(folders) or "no folder: the run has told none, and its command names none"
    wanted = "" if step is None else f" at or before step {step:,}"
    there = f"there are those of steps {listed}" if steps else "there is none"
    raise NotFound(
        f"run {run!r} has no checkpoint{wanted}: {there} in {where}. Name another folder with --checkpoints"
    )


def part_of_checkpoint(path: str) -> str:
    """Return a path below the checkpoint that it is part of, such as ``optimizer``; empty if it is not."""
    for one in (Path(path), *Path(path).parents):
        if _layout(one) is not None:
            return os.path.relpath(path, one) if one != Path(path) else ""
    return ""


def _walk(path: Path, depth: int) -> Iterator[tuple[Path, int]]:
    """Return what may be checkpoints, from a folder down; nothing within one is another one."""
    yield path, depth
    if depth > MAX_DEPTH or (depth and _layout(path) is not None):
        return
    with suppress(OSError):
        for child in sorted(path.iterdir()):
            if child.is_dir() and not child.is_symlink():
                yield from _walk(child, depth + 1)
            elif child.suffix == ".ckpt":
                yield child, depth + 1


def _layout(path: Path) -> CheckpointLayout | None:
    if path.suffix == ".ckpt":
        return CheckpointLayout.LIGHTNING
    if _TRAINER.fullmatch(path.name) and (path / "trainer_state.json").is_file():
        return CheckpointLayout.TRAINER
    if _STORE.fullmatch(path.name) and (path / "manifest.json").is_file():
        return CheckpointLayout.STORE
    if (path / ".metadata").is_file() and _NUMBER.search(path.name):
        return CheckpointLayout.DISTRIBUTED
    if _OF_PARTS.search(path.name):
        parts = [one.parent.name for one in path.glob("*/.metadata")]
        if parts and not any(_OF_PARTS.search(one) or one.isdecimal() for one in parts):
            return CheckpointLayout.DISTRIBUTED
    return None


def _read(path: Path) -> FoundOnDisk | None:
    layout = _layout(path)
    if layout is None:
        return None
    try:
        step = _STEP_OF[layout](path)
        return None if step is None else FoundOnDisk(step, str(path), layout, path.stat().st_mtime)
    except OSError:
        return None


def _step_of_trainer(path: Path) -> int | None:
    with suppress(ValueError, TypeError, KeyError):
        return int(json.loads((path / "trainer_state.json").read_bytes())["global_step"])
    return None


def _step_of_store(path: Path) -> int | None:
    with suppress(ValueError, TypeError, KeyError):
        return int(json.loads((path / "manifest.json").read_bytes())["step"])
    return None


def _step_in_name(path: Path) -> int | None:
    name = path.name.removesuffix(".ckpt")
    if found := _STEP.findall(name):
        return int(found[-1])
    numbers = _NUMBER.findall(name)
    return int(numbers[-1]) if numbers else None


def _step_of_lightning(path: Path) -> int | None:
    """Return the step that a checkpoint names inside; that of its name if it is a folder, or cannot be read."""
    with suppress(Exception):  # whatever a pickle raises that is none
        with zipfile.ZipFile(path) as archive:
            (name,) = (one for one in archive.namelist() if one.endswith("/data.pkl"))
            if archive.getinfo(name).file_size <= MAX_PICKLE:
                with archive.open(name) as file:
                    return int(_WithoutCode(file).load()["global_step"])
    return _step_in_name(path) if _STEP.search(path.name) else None


class _Nothing:
    """Stands for everything in a pickle that is no plain value."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Nothing:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass

    def add(self, value: Any) -> None:
        pass


class _WithoutCode(pickle.Unpickler):
    """Reads a pickle without calling anything that it names."""

    def find_class(self, module: str, name: str) -> Any:
        return OrderedDict if name == "OrderedDict" else _Nothing

    def persistent_load(self, pid: Any) -> Any:
        return _Nothing()


_STEP_OF = {
    CheckpointLayout.TRAINER: _step_of_trainer,
    CheckpointLayout.LIGHTNING: _step_of_lightning,
    CheckpointLayout.STORE: _step_of_store,
    CheckpointLayout.DISTRIBUTED: _step_in_name,
}
