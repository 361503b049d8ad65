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

``torch.distributed.checkpoint`` writes the tensors, and its tools can read them. Its index is a pickle, of which
this module takes no code; those tools do.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import warnings
from collections.abc import Mapping
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import load as load_tensors
from torch.distributed.checkpoint import save as save_tensors
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from loom.errors import CheckpointBroken, CheckpointNotWritten, WaitTimeout, WrongArguments
from loom.train.checkpoints.files import (
    Aside,
    CheckpointManifest,
    named,
    numbered,
    remove,
    remove_leftovers,
    whats_wrong,
)
from loom.train.checkpoints.states import IndexReader, join, split

_log = logging.getLogger("loom")

# torch warns with each checkpoint that it writes without a process group, which is intended.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable", category=UserWarning)

_REST = "state.msgpack"
_AT_ONCE = 2  # copies of the state at a time: one that is being written, and one that waits


@dataclass(frozen=True)
class SkippedCheckpoint:
    """A checkpoint that is not whole."""

    path: Path
    step: int
    reason: str
    """What is wrong, such as a missing file or a wrong hash."""


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that was whole when it was found."""

    step: int
    path: Path
    time: float
    """When the checkpoint was written, in seconds since the epoch."""
    skipped: tuple[SkippedCheckpoint, ...] = ()
    """Newer checkpoints that are not whole."""

    def load(self) -> dict[str, Any]:
        """Return the state, with its tensors on the CPU.

        Raises:
            CheckpointBroken: the checkpoint is no longer whole, or was removed after newer ones were written.
        """
        if reason := whats_wrong(self.path):
            raise CheckpointBroken(
                f"the checkpoint {self.path} of step {self.step} is not whole: {reason}; "
                "CheckpointStore.newest finds the newest that is"
            )
        reader = IndexReader(self.path)
        tensors: dict[str, Any] = {
            name: torch.empty(stored.size, dtype=stored.properties.dtype)
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
        """Whether the checkpoint was written, or has failed."""
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
        self.keep = keep
        if self.folder.exists() and not self.folder.is_dir():
            raise WrongArguments(f"checkpoints are kept in a folder, and {self.folder} is none")
        self._writer = futures.ThreadPoolExecutor(1, thread_name_prefix="loom-checkpoint")
        self._copies = threading.BoundedSemaphore(_AT_ONCE)
        for left in remove_leftovers(self.folder):
            _log.info("removed what a process that died was writing: %s", left)

    def save(self, state: Mapping[str, Any], step: int) -> PendingCheckpoint:
        """Copy a state, and write it in the background.

        The call waits while two states wait to be written.

        Args:
            state: dicts, lists and tuples of tensors, numbers, strings, bytes, booleans and None. Gather a sharded
                tensor first.
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
            writing = self._writer.submit(self._write, rest, tensors, step)
        except BaseException:
            self._copies.release()
            raise
        writing.add_done_callback(lambda _: self._copies.release())
        return PendingCheckpoint(step, writing)

    def newest(self) -> FoundCheckpoint | None:
        """Return the newest whole checkpoint, or None if there is none.

        The call reads all files of the checkpoint, to compare the hashes.
        """
        skipped: list[SkippedCheckpoint] = []
        for _, step, path in numbered(self.folder):
            reason = whats_wrong(path)
            if reason is None:
                return FoundCheckpoint(step, path, CheckpointManifest.read(path).time, tuple(skipped))
            _log.warning("passed over the checkpoint %s: %s", path, reason)
            skipped.append(SkippedCheckpoint(path, step, reason))
        return None

    def _write(self, rest: bytes, tensors: dict[str, torch.Tensor], step: int) -> FoundCheckpoint:
        try:
            with Aside(self.folder) as aside:
                (aside.path / _REST).write_bytes(rest)
                writer = FileSystemWriter(aside.path, sync_files=False)  # the manifest syncs them
                save_tensors(dict(tensors), storage_writer=writer, no_dist=True)
                manifest = CheckpointManifest.write(aside.path, step, time.time())
                path = self._place(aside, step)
        except BaseException as error:
            # torch wraps the error in one of its own, which is a BaseException.
            text = f"the checkpoint of step {step} cannot be written to {self.folder}: {_root(error)}"
            _log.error("%s; those before it are as they were", text)
            raise CheckpointNotWritten(text) from error
        try:
            self._prune()
        except OSError as error:
            _log.warning("cannot remove old checkpoints from %s: %s", self.folder, error)
        return FoundCheckpoint(step, path, manifest.time)

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
        for _, _, path in numbered(self.folder):
            if whole == self.keep:
                remove(path)
            elif whats_wrong(path, hashes=False) is None:
                whole += 1


def _root(error: BaseException) -> BaseException:
    """Return the OSError behind the errors that wrap it, if there is one."""
    while not isinstance(error, OSError):
        failures = getattr(error, "failures", None)
        inner = next(iter(failures.values()))[0] if failures else error.__cause__ or error.__context__
        if inner is None:
            break
        error = inner
    return error
