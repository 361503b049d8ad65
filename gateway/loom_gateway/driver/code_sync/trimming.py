"""What is removed from the cache of synced folders when it has grown over its limit."""

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

PARTIAL_AGE = 24 * 3600.0
"""Seconds after which what was left half made, by a process that was killed, is removed."""

ORPHAN_AGE = 3600.0
"""Seconds that a content may wait for a tree to be assembled from it."""


def trim(cache: Path, limit: int) -> None:
    """Remove contents that no tree has, then trees that nobody holds, the oldest first, until the cache fits.

    Args:
        cache: its folder, which no other process trims meanwhile.
        limit: bytes that may stay.
    """
    partial = cache / "partial"
    _remove_left_over(partial)
    blobs = list(_blobs(cache))
    total = sum(blob.stat().st_size for blob in blobs)
    if total <= limit:
        return
    # When a content was made, linked or unlinked is when its inode was changed.
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
    """Remove a tree unless somebody holds it."""
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
    """Remove a tree, if it is there, from its place at once and then from the disk."""
    gone = partial / f"gone-{uuid.uuid4().hex}"
    with contextlib.suppress(FileNotFoundError):
        tree.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _blobs(cache: Path) -> Iterator[os.DirEntry[str]]:
    """Each content, looked at just now."""
    for folder in os.scandir(cache / "blobs"):
        for blob in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):
                blob.stat()  # which the entry keeps
                yield blob


def _remove_unlinked(blobs: Iterable[os.DirEntry[str]]) -> int:
    """Remove the contents that no tree has; return how many bytes they had."""
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
