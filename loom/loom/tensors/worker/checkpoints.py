"""Files of the tensors of a worker, of which another one is made when this one's process has died."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from loom.errors import Invalid
from loom.tensors.sending.encoding import Failure
from loom.tensors.worker import functions
from loom.tensors.worker.values import Held

_LOST = Failure(-1, 0, "RuntimeError", "it was made after the last checkpoint, and its process died: make it again")
"""The fate of a tensor that no checkpoint has."""

_VALUE = Failure(-1, 0, "RuntimeError", "it is no tensor, and in no checkpoint: make it again")

_VIEW = Failure(-1, 0, "RuntimeError", "a view of a tensor that is spread is in no checkpoint: make it again")


def folder_for(program: str, path: str | None) -> Path:
    """Return the folder of a program's checkpoints, which nobody else can read if it is this host's own."""
    if path is not None:
        return Path(path)
    return Path(tempfile.gettempdir()) / f"loom-tensors-{os.getuid()}-{program}"


def save(values: Any, rank: int, program: str, path: str | None, mark: int, last: int) -> int | str:
    """Write the tensors of a worker; return the bytes, or what went wrong: see `_save`."""
    try:
        return _save(values, folder_for(program, path), mark, rank, last)
    except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
        return f"process {rank}: {error}"


def load(
    values: Any, rank: int, program: str, path: str | None, mark: int, first: int, freed: Sequence[int]
) -> str:
    """Give a new worker the tensors of a checkpoint; return what went wrong, or "".

    Args:
        first: the id of the first result of the commands that follow.
        freed: what is not needed any more.
    """
    try:
        _load(values, folder_for(program, path), mark, rank)
    except (OSError, RuntimeError, Invalid) as error:
        return f"process {rank}: {error}"
    for ident in freed:
        values.tensors.pop(ident, None)
    values.begin_at(first)
    return ""


def _save(values: Any, folder: Path, mark: int, rank: int, last: int) -> int:
    """Write the tensors of a worker, and remove older checkpoints; return the bytes.

    Args:
        values: the worker's `loom.tensors.worker.values.Values`.
        folder: where to.
        mark: the checkpoint's number, larger than those of earlier ones.
        rank: of this process in its mesh. Tensors that each process has whole, the first one writes.
        last: the number of the last whole checkpoint, which stays.

    Raises:
        OSError: there is no room, or no right to write there.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    whole: dict[Any, Any] = {}
    parts: dict[Any, Any] = {}
    for ident, value in values.tensors.items():
        if hasattr(value, "loom_view"):
            whole[ident] = tuple(_VIEW)
        elif not isinstance(value, torch.Tensor):
            whole[ident] = tuple(value) if isinstance(value, Failure) else tuple(_VALUE)
        else:
            _put(values, ident, value, whole, parts)
            if (grad := functions.gradient(value)) is not None:
                _put(values, f"grad {ident}", grad, whole, parts)
    kept = {name: (tensor, needs) for name, (tensor, needs) in values.kept.items() if type(tensor) is torch.Tensor}
    state = torch.get_rng_state(), torch.cuda.get_rng_state() if values.device.type == "cuda" else None
    size = 0
    if rank == 0:
        size += _write({"tensors": whole, "kept": kept, "random": state}, _file(folder, mark, "whole"))
    if parts:
        size += _write(parts, _file(folder, mark, f"part-{rank}"))
    for name in ("whole", f"part-{rank}") if rank == 0 else (f"part-{rank}",):
        for file in folder.glob(f"*-{name}.pt"):
            if file not in (_file(folder, mark, name), _file(folder, last, name)):
                file.unlink(missing_ok=True)
    return size


def _put(values: Any, key: Any, value: torch.Tensor, whole: dict[Any, Any], parts: dict[Any, Any]) -> None:
    """Add a tensor, without its graph, to what is saved."""
    kind = "" if not value.requires_grad else "leaf" if value.is_leaf else "lost"
    if values.sharding is not None and (how := values.sharding.placements_of(value)):
        part = values.sharding.part_of(value).detach()
        parts[key] = part, kind, how, tuple(value.shape), tuple(value.stride())
    else:
        whole[key] = [value.detach(), kind]


class _Lost(torch.autograd.Function):  # type: ignore[misc]
    """The stand-in for the graph of a tensor whose process has died."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "the graph of a tensor was lost with its processes, as checkpoints have none: compute the tensor again"
        )


def _restored(values: Any, value: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "leaf":
        functions.requires_grad(values, value, True)
    elif kind == "lost":
        value = _Lost.apply(value, torch.zeros((), device=values.device, requires_grad=True))
    return value


def _load(values: Any, folder: Path, mark: int, rank: int) -> None:
    """Give a new worker the tensors of a checkpoint.

    Raises:
        Invalid: the checkpoint is not there, as where the folder is another host's own.
    """
    file = _file(folder, mark, "whole")
    try:
        found = _read(file, values.device)
    except FileNotFoundError:
        raise Invalid(
            f"its host has no checkpoint {file}: give checkpoint() a path that the hosts of all processes share"
        ) from None
    tensors = Held()
    tensors.gone = _LOST
    made: dict[Any, Any] = {}
    for key, value in found["tensors"].items():
        made[key] = Failure(*value) if type(value) is tuple else _restored(values, *value)
    with contextlib.suppress(FileNotFoundError):
        for key, (part, kind, *how) in _read(_file(folder, mark, f"part-{rank}"), values.device).items():
            made[key] = _restored(values, values.sharding.of_part(part, *how), kind)
    for key, value in made.items():
        if type(key) is int:
            tensors[key] = value
        elif isinstance(leaf := made[int(key.removeprefix("grad "))], torch.Tensor) and leaf.is_leaf:
            leaf.grad = value
    values.tensors = tensors
    values.kept.clear()
    values.kept.update(found["kept"])
    cpu, cuda = found["random"]
    torch.set_rng_state(cpu.cpu())
    if cuda is not None and values.device.type == "cuda":
        torch.cuda.set_rng_state(cuda.cpu())


def _file(folder: Path, mark: int, name: str) -> Path:
    return folder / f"{mark}-{name}.pt"


def _write(values: Any, file: Path) -> int:
    """Write a file, which is there whole or not at all."""
    partial = file.with_suffix(".pt.partial")
    try:
        with partial.open("wb") as stream:
            torch.save(values, stream)
            stream.flush()
            os.fsync(stream.fileno())
            size = stream.tell()
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return size


def _read(file: Path, device: torch.device) -> Any:
    return torch.load(file, map_location=device, weights_only=True)
