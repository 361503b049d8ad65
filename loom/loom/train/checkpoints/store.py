"""`CheckpointStore`: checkpoints that are written while the training goes on, each complete or absent.

::

    store = CheckpointStore("/shared/run-7", keep=3)
    if found := store.newest():
        state = found.load()
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(found.step + 1 if found else 0, steps):
        ...
        if step % 100 == 0:
            store.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step)

``torch.distributed.checkpoint`` writes the tensors, and its tools can read them. Everything else in a checkpoint is
msgpack, not pickle: keys keep their types (an optimizer's are numbers), tuples stay tuples, and reading cannot run
code; neither can the tools' index (`IndexReader`). Torch reads the tensors with ``weights_only``.

A state with tensors that several processes share (DTensors, as of FSDP2) is saved by all of them, each its own
parts of these, and `FoundCheckpoint.load` gives each process its parts again, or the whole tensors. Folders that
other programs have written with ``torch.distributed.checkpoint`` are found, too.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack
import torch
from torch import distributed
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import load as load_tensors
from torch.distributed.checkpoint import save as save_tensors
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from loom.branches.branch import BEGINNING, note_loaded, own_branch
from loom.errors import CheckpointBroken, CheckpointNotWritten, UnstorableState, WaitTimeout, WrongArguments
from loom.train.checkpoints import plain_folders
from loom.train.checkpoints.files import (
    Aside,
    CheckpointManifest,
    named,
    numbered,
    remove,
    remove_leftovers,
    whats_wrong,
)
from loom.train.checkpoints.index import IndexReader

_TENSOR, _TUPLE, _BIG_INT = 1, 2, 3  # codes of the types that msgpack lacks


def split(state: Mapping[str, Any]) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Copy a state into bytes and tensors, for `join`; the tensors are on the CPU, by the path to each."""
    tensors: dict[str, torch.Tensor] = {}
    rest = _packed(_without_tensors(state, ("state",), tensors))
    return rest, tensors


def join(rest: bytes, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
    """Return the state that `split` took apart."""

    def found(code: int, data: bytes) -> Any:
        if code == _TENSOR:
            return tensors[data.decode()]
        if code == _TUPLE:
            return tuple(unpacked(data))
        return int(data.decode())

    def unpacked(data: bytes) -> Any:
        return msgpack.unpackb(data, ext_hook=found, strict_map_key=False)

    state: Mapping[str, Any] = unpacked(rest)
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
    if isinstance(tensor, DTensor):  # only this process's part is copied
        return tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()
    if (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        or tensor.layout is not torch.strided
        or tensor.is_meta
    ):
        raise UnstorableState(
            f"{'.'.join(path)} is a {type(tensor).__qualname__} ({tensor.layout}, {tensor.device}): a checkpoint "
            "holds dense tensors and DTensors; gather one that is sharded in another way first"
        )
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


_log = logging.getLogger("loom")

# torch warns with each checkpoint that it writes without a process group, which is intended.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable", category=UserWarning)

Place = Callable[[str, torch.Size, torch.dtype], torch.Tensor]


def on_the_cpu(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty tensor for a whole one of a checkpoint."""
    return torch.empty(shape, dtype=dtype)


_REST = "state.msgpack"
_PATIENCE = timedelta(hours=1)  # in which all processes of a group write their parts of a checkpoint
_AT_ONCE = 2  # copies of the state at a time: one that is being written, and one that waits


@dataclass(frozen=True)
class SkippedCheckpoint:
    """A checkpoint that is not whole."""

    path: Path
    step: int
    reason: str
    """The fault, such as a missing file or a wrong hash."""


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that was whole when it was found."""

    step: int
    path: Path
    time: float
    """The time of writing, in seconds since the epoch."""
    skipped: tuple[SkippedCheckpoint, ...] = ()
    """Newer checkpoints that are not whole."""
    foreign: bool = False
    """True if another program has written it, with ``torch.distributed.checkpoint``."""

    def load(self, place: Place = on_the_cpu) -> Mapping[str, Any]:
        """Return the state.

        Args:
            place: returns the tensor to read into, given the path to it in the state, with dots between, and its
                shape and type. Of a DTensor only this process's part is read. By default each tensor is read as a
                whole, onto the CPU.

        Raises:
            CheckpointBroken: the checkpoint is no longer whole, or was removed after newer ones were written.
        """
        if reason := plain_folders.whats_wrong(self.path) if self.foreign else whats_wrong(self.path):
            raise CheckpointBroken(
                f"the checkpoint {self.path} of step {self.step} is not whole: {reason}; "
                "CheckpointStore.newest finds the newest that is"
            )
        if self.foreign:
            return plain_folders.load(self.path, place)
        reader = IndexReader(self.path)
        tensors: dict[str, torch.Tensor] = {
            name: place(name, stored.size, stored.properties.dtype)
            for name, stored in reader.read_metadata().state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        load_tensors(tensors, storage_reader=reader, no_dist=True)
        return join((self.path / _REST).read_bytes(), tensors)


class PendingCheckpoint:
    """A checkpoint that is being written."""

    def __init__(self, step: int, writing: futures.Future[FoundCheckpoint]) -> None:
        self.step = step
        self._writing = writing

    @property
    def done(self) -> bool:
        """True if the checkpoint was written, or has failed."""
        return self._writing.done()

    @property
    def error(self) -> CheckpointNotWritten | None:
        """Why the checkpoint could not be written; None if it was, or is still being written."""
        error = self._writing.exception() if self._writing.done() else None
        assert error is None or isinstance(error, CheckpointNotWritten)
        return error

    def wait(self, timeout: float | None = None) -> FoundCheckpoint:
        """Wait until the checkpoint is written; return it.

        Args:
            timeout: seconds to wait at most; None for as long as it takes.

        Raises:
            CheckpointNotWritten: the checkpoint could not be written; earlier ones are as they were.
            WaitTimeout: the checkpoint is still being written.
        """
        try:
            return self._writing.result(timeout)
        except futures.TimeoutError:
            raise WaitTimeout(f"the checkpoint of step {self.step} is not written after {timeout:g} s") from None


class CheckpointStore:
    """The checkpoints of one job, in a folder that all processes of the job reach.

    Half-written checkpoints of dead processes are removed. A program that ends waits until its checkpoints are
    written.

    Args:
        folder: of the checkpoints, created with the first one.
        keep: how many of the newest whole checkpoints to keep.

    Raises:
        WrongArguments: ``keep`` is less than 1, or the folder is a file.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise WrongArguments(f"at least 1 checkpoint has to be kept, not {keep}")
        self.folder = Path(folder).absolute()
        if (branch := own_branch()) is not None:
            self.folder = Path(branch.redirected(str(self.folder)))
        self.keep = keep
        if self.folder.exists() and not self.folder.is_dir():
            raise WrongArguments(f"checkpoints are kept in a folder, and {self.folder} is none")
        self._writer = futures.ThreadPoolExecutor(1, thread_name_prefix="loom-checkpoint")
        self._copies = threading.BoundedSemaphore(_AT_ONCE)
        self._group: Any = None
        """The processes that write sharded states together, with a process group for the writer's thread."""
        for left in remove_leftovers(self.folder):
            _log.info("removed what a process that died was writing: %s", left)

    def save(self, state: Mapping[str, Any], step: int) -> PendingCheckpoint:
        """Copy a state, and write it in the background.

        The call waits while two states wait to be written. If a tensor is a DTensor, all processes of the default
        process group have to call this, and each writes its own parts of such tensors.

        Args:
            state: dicts, lists and tuples of tensors, numbers, strings, bytes, booleans and None.
            step: the last step that the state contains.

        Raises:
            UnstorableState: the state contains something else.
            WrongArguments: ``step`` is no whole number from 0.
        """
        if type(step) is not int or step < 0:
            raise WrongArguments(f"a checkpoint's step is a whole number from 0, not {step!r:.40}")
        self._copies.acquire()
        try:
            rest, tensors = split(state)
            write = self._write
            if any(isinstance(one, DTensor) for one in tensors.values()):
                self._group = self._group or distributed.new_group(backend="gloo", timeout=_PATIENCE)
                write = self._write_together
            writing = self._writer.submit(write, rest, tensors, step)
        except BaseException:
            self._copies.release()
            raise
        writing.add_done_callback(lambda _: self._copies.release())
        return PendingCheckpoint(step, writing)

    def newest(self) -> FoundCheckpoint | None:
        """Return the newest whole checkpoint, or None if there is none.

        The call reads all files of the checkpoint, to compare the hashes. In a branch, that from which it began
        comes before the branch's own.
        """
        skipped: list[SkippedCheckpoint] = []
        for _, step, path in [*numbered(self.folder), *numbered(self.folder / BEGINNING)]:
            reason = whats_wrong(path)
            if reason is None:
                note_loaded()
                return FoundCheckpoint(step, path, CheckpointManifest.read(path).time, tuple(skipped))
            _log.warning("passed over the checkpoint %s: %s", path, reason)
            skipped.append(SkippedCheckpoint(path, step, reason))
        for step, path in plain_folders.found(self.folder):
            reason = plain_folders.whats_wrong(path)
            if reason is None:
                return FoundCheckpoint(step, path, path.stat().st_mtime, tuple(skipped), foreign=True)
            _log.warning("passed over the checkpoint %s: %s", path, reason)
            skipped.append(SkippedCheckpoint(path, step, reason))
        return None

    def _write(self, rest: bytes, tensors: dict[str, torch.Tensor], step: int) -> FoundCheckpoint:
        with self._telling(step), Aside(self.folder) as aside:
            (aside.path / _REST).write_bytes(rest)
            writer = FileSystemWriter(aside.path, sync_files=False)  # the manifest syncs them
            save_tensors(dict(tensors), storage_writer=writer, no_dist=True)
            found = self._complete(aside, step)
        self._prune()
        return found

    def _write_together(self, rest: bytes, tensors: dict[str, torch.Tensor], step: int) -> FoundCheckpoint:
        """Write this process's parts while the others of the group write theirs; the first one does the rest."""
        first = distributed.get_rank() == 0
        with self._telling(step), contextlib.ExitStack() as stack:
            aside = None

            def begin() -> str:
                nonlocal aside
                aside = stack.enter_context(Aside(self.folder))
                (aside.path / _REST).write_bytes(rest)
                return str(aside.path)

            def end() -> FoundCheckpoint:
                assert aside is not None
                return self._complete(aside, step)

            folder = self._from_first(begin if first else None)
            writer = FileSystemWriter(folder, sync_files=False)
            save_tensors(dict(tensors), storage_writer=writer, process_group=self._group)
            found: FoundCheckpoint = self._from_first(end if first else None)
        if first:
            self._prune()
        return found

    def _from_first(self, function: Callable[[], Any] | None) -> Any:
        """Return to all processes what the first one's function returns, or raise what that raises."""
        answer: list[Any] = [None]
        if function is not None:
            try:
                answer = [function()]
            except Exception as error:  # noqa: BLE001 - it is raised in all of them
                answer = [error]
        distributed.broadcast_object_list(answer, src=0, group=self._group)
        if isinstance(answer[0], Exception):
            raise answer[0]
        return answer[0]

    def _complete(self, aside: Aside, step: int) -> FoundCheckpoint:
        manifest = CheckpointManifest.write(aside.path, step, time.time())
        return FoundCheckpoint(step, self._place(aside, step), manifest.time)

    @contextlib.contextmanager
    def _telling(self, step: int) -> Iterator[None]:
        """Raise `CheckpointNotWritten` for whatever prevents the writing."""
        try:
            yield
        except BaseException as error:
            # torch wraps the error in one of its own, which is a BaseException.
            text = f"the checkpoint of step {step} cannot be written to {self.folder}: {_root(error)}"
            _log.error("%s; those before it are as they were", text)
            raise CheckpointNotWritten(text) from error

    def _place(self, aside: Aside, step: int) -> Path:
        while True:
            path = named(self.folder, step)
            try:
                aside.become(path)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another process took the number
                    raise
            else:
                return path

    def _prune(self) -> None:
        """Remove the checkpoints older than the ``keep`` newest whole ones."""
        whole = 0
        try:
            for _, _, path in numbered(self.folder):
                if whole == self.keep:
                    remove(path)
                elif whats_wrong(path, hashes=False) is None:
                    whole += 1
        except OSError as error:
            _log.warning("cannot remove old checkpoints from %s: %s", self.folder, error)


def _root(error: BaseException) -> BaseException:
    """Return the OSError behind the errors that wrap it, if there is one."""
    while not isinstance(error, OSError):
        failures = getattr(error, "failures", None)
        inner = next(iter(failures.values()))[0] if failures else error.__cause__ or error.__context__
        if inner is None:
            break
        error = inner
    return error
