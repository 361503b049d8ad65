"""The files of a checkpoint: they are written aside, listed in a manifest with hashes, and then renamed.

A folder of checkpoints holds ``NUMBER-step-STEP`` for each complete checkpoint, and ``.aside-…`` for each that is
being written or removed. The numbers give the order in which checkpoints were written, because a step may be
written again and clocks jump.

A process that works on an ``.aside-…`` folder holds a lock in it, which the kernel releases if the process dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from loom.process.state_file import sync_folder

MANIFEST = "manifest.json"
FORMAT = 1

_LOCK = "lock"
_ASIDE = ".aside-"
_NAME = re.compile(r"(\d+)-step-(\d+)")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class CheckpointManifest:
    """The list of a checkpoint's files."""

    step: int
    time: float  # when the checkpoint was written, in seconds since the epoch
    files: dict[str, tuple[int, str]]  # the size in bytes and the SHA-256 of each file

    @classmethod
    def write(cls, folder: Path, step: int, time: float) -> CheckpointManifest:
        """Sync a folder's files to the disk, write their manifest into it, and return that."""
        files = {}
        for path in sorted(folder.iterdir()):
            if path.name == _LOCK:
                continue
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            files[path.name] = path.stat().st_size, _hash(path)
        with open(folder / MANIFEST, "w") as manifest:
            json.dump({"format": FORMAT, "step": step, "time": time, "files": files}, manifest, indent=1)
            manifest.flush()
            os.fsync(manifest.fileno())
        sync_folder(folder)
        return cls(step, time, files)

    @classmethod
    def read(cls, folder: Path) -> CheckpointManifest:
        """Return the manifest of a folder; raise FileNotFoundError or ValueError if it has no valid one."""
        found = json.loads((folder / MANIFEST).read_bytes())
        try:
            if found["format"] != FORMAT:
                raise ValueError(f"its format is {found['format']!r:.40}, not {FORMAT}")
            files = {str(name): (int(size), str(hash)) for name, (size, hash) in found["files"].items()}
            return cls(int(found["step"]), float(found["time"]), files)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"it is incomplete: {error!r}") from None


def whats_wrong(folder: Path, hashes: bool = True) -> str | None:
    """Return why a checkpoint is not whole, by its sizes and, if ``hashes``, by its hashes; None if it is whole."""
    try:
        manifest = CheckpointManifest.read(folder)
        for name, (size, hash) in manifest.files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if (found := path.stat().st_size) != size:
                return f"{name} has {found} bytes instead of {size}"
            if hashes and (read := _hash(path)) != hash:
                return f"{name} has the SHA-256 {read[:12]}… instead of {hash[:12]}…"
    except FileNotFoundError:
        return "it has no manifest"
    except (ValueError, OSError) as error:
        return f"it cannot be read: {error}"
    return None


def numbered(folder: Path) -> list[tuple[int, int, Path]]:
    """Return number, step and path of each checkpoint, whole or not, the newest first."""
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.glob("*-step-*"))
    return sorted(((int(match[1]), int(match[2]), path) for match, path in matches if match), reverse=True)


def named(folder: Path, step: int) -> Path:
    """Return the path for the next checkpoint."""
    last = max((number for number, _, _ in numbered(folder)), default=0)
    return folder / f"{last + 1:06}-step-{step}"


class Aside:
    """A locked folder next to the checkpoints, in which this process works. The context manager removes it."""

    def __init__(self, folder: Path) -> None:
        while True:
            self.path = folder / f"{_ASIDE}{uuid.uuid4().hex}"
            self.path.mkdir(parents=True)
            try:
                lock = _hold(self.path, wait=True)
            except OSError:
                self.path.rmdir()
                raise
            if lock is not None:
                self._lock = lock
                return

    def become(self, checkpoint: Path) -> None:
        """Rename the folder, which is complete, to a checkpoint; raise OSError if that name is taken."""
        self.path.rename(checkpoint)
        (checkpoint / _LOCK).unlink(missing_ok=True)
        sync_folder(checkpoint.parent)

    def __enter__(self) -> Aside:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint, so that it is never there in part."""
    with Aside(checkpoint.parent) as aside, contextlib.suppress(FileNotFoundError):
        checkpoint.rename(aside.path / checkpoint.name)


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove the folders that dead processes were writing or removing; return their paths."""
    removed = []
    for path in folder.glob(f"{_ASIDE}*"):
        lock = _hold(path, wait=False)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
            removed.append(path)
    return removed


def _hold(folder: Path, wait: bool) -> int | None:
    """Lock a folder; return None if another process holds the lock, or has removed the folder meanwhile."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        # The holder before may have removed the folder with its lock file, whose lock then means nothing.
        if os.path.samestat(os.fstat(lock), os.stat(folder / _LOCK)):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
