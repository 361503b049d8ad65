"""Trimming of the cache of synchronised folders to its limit."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from loom.manifest import human_size

logger = logging.getLogger(__name__)

PARTIAL_AGE = 24 * 3600.0  # seconds after which the unfinished work of a killed process is removed
ORPHAN_AGE = 3600.0  # seconds that a content may wait for a tree that contains it


def trim(cache: Path, limit: int) -> None:
    """Remove contents without a tree, then unused trees, the oldest first, until the cache fits its limit.

    No other process may trim it at the same time.
    """
    partial = cache / "partial"
    _remove_left_over(partial)
    blobs = list(_blobs(cache))
    total = sum(blob.stat().st_size for blob in blobs)
    if total <= limit:
        return
    # The inode's change time is the time when the content was made, linked or unlinked.
    total -= _remove_unlinked(blob for blob in blobs if blob.stat().st_ctime < time.time() - ORPHAN_AGE)
    for lock in sorted((cache / "trees").glob("*.lock"), key=_modified):
        if total <= limit:
            return
        if _remove_tree(lock, partial):
            total -= _remove_unlinked(_blobs(cache))
    if total > limit:
        size = human_size(total)
        logger.warning("the cache in %s has %s, over its limit; all of it is in use", cache, size)


def _remove_left_over(partial: Path) -> None:
    old = time.time() - PARTIAL_AGE
    for left in partial.iterdir():
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < old:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def _remove_tree(lock: Path, partial: Path) -> bool:
    """Remove a tree unless a process holds it."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        discard(lock.with_suffix(""), partial)
        lock.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)


def discard(tree: Path, partial: Path) -> None:
    """Remove a tree: first atomically from its place, then from the disk. It need not exist."""
    gone = partial / f"gone-{uuid.uuid4().hex}"
    with contextlib.suppress(FileNotFoundError):
        tree.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _blobs(cache: Path) -> Iterator[os.DirEntry[str]]:
    """Yield each content, with fresh stat values."""
    for folder in os.scandir(cache / "blobs"):
        for blob in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):
                blob.stat()  # the entry keeps the result
                yield blob


def _remove_unlinked(blobs: Iterable[os.DirEntry[str]]) -> int:
    """Remove the contents that are in no tree. Return the freed bytes."""
    freed = 0
    for blob in blobs:
        if blob.stat().st_nlink == 1:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(blob.path)
            freed += blob.stat().st_size
    return freed


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
