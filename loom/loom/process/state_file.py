"""Files of a process's state: a reader finds the old content or the new one, whole, also after a power cut."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file that several processes replace. Its folder is made if it is missing.

    A missing folder raises `OSError` if it cannot be made; so does a lock that cannot be opened.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The lock is a separate file: the file is replaced, and a lock on a replaced file excludes no process.
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with open(lock, "wb"):
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_json(path: str | os.PathLike[str], value: object, mode: int = 0o600) -> None:
    """Replace a file by the JSON of a value, which may contain dataclasses."""
    replace_file(path, json.dumps(value, default=asdict), mode)


def replace_file(path: str | os.PathLike[str], text: str, mode: int = 0o600) -> None:
    """Replace a file, or make it. By default only this user can read it."""
    folder, name = os.path.split(os.path.abspath(path))
    descriptor, temporary = tempfile.mkstemp(prefix=f".{name}-", dir=folder)
    try:
        os.fchmod(descriptor, mode)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    sync_folder(folder)


def is_gone(path: str | os.PathLike[str]) -> bool:
    """Return whether there is no such file. One that a disk does not show, as after an I/O error, is not gone."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Sync the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
