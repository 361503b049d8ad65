"""A driver's own output: its log lines, the size limit of its file, and the text for which the disk has no room.

The process's main module alone uses it, before Monarch is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import io
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

LIMIT = 1 << 20  # bytes above which the file is cut
KEPT = 64 << 10  # bytes at the end of the file that a cut keeps
LOOK_EVERY = 1.0  # seconds between two checks of the size


DISK_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG))
"""Errors of a write for which the disk, and not the writer, is to blame."""


def survive_full_disk() -> None:
    """Make standard output and error raise nothing that a full disk causes: a ``print`` in a run goes on."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        before.flush()
        stream = io.TextIOWrapper(
            io.BufferedWriter(_OwnOutput(descriptor)),
            encoding=before.encoding,
            errors="backslashreplace",  # a copy of what a run prints must not raise, whatever the locale is
            line_buffering=before.line_buffering or before.write_through,  # the latter with PYTHONUNBUFFERED
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


class _OwnOutput(io.FileIO):
    """A descriptor that counts what the disk does not take, and says so when it has room again."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._lost = 0
        self._reason = ""

    def write(self, data: Any) -> int:
        """Write everything, or count what there is no room for. Return the size of all of it."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            if self._lost:
                self._write(f"\n… {self._lost} bytes were left out here: {self._reason} …\n".encode())
                self._lost = 0
            while rest:
                rest = rest[self._write(rest) :]
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            self._lost += len(rest)
            self._reason = error.strerror or str(error)
        return size

    def _write(self, data: Any) -> int:
        return super().write(data)


def log_own_lines() -> None:
    """Log what Loom says of itself to standard error. The root logger is the user's, as in any program."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    for name in ("loom", "loom_gateway"):
        own = logging.getLogger(name)
        own.setLevel(logging.INFO)
        own.addHandler(handler)
        own.propagate = False


def share_root_logger(current: Callable[[], object]) -> None:
    """Let the first ``logging.basicConfig`` of each run take effect, whatever another run has set before.

    ``current`` returns an object of the run that calls it; None outside of runs.
    """
    configure = logging.basicConfig
    configured_by: object = None
    made: list[logging.Handler] = []  # by the last call that took effect

    @functools.wraps(configure)
    def configure_for_run(**options: Any) -> None:
        nonlocal configured_by, made
        run, root = current(), logging.root
        if run is not None and run is not configured_by:
            if any(handler in root.handlers for handler in made):
                root.setLevel(logging.WARNING)
            for handler in made:
                root.removeHandler(handler)
        before = root.handlers[:]
        configure(**options)
        if root.handlers != before:
            configured_by, made = run, [handler for handler in root.handlers if handler not in before]

    logging.basicConfig = configure_for_run


def keep_small(loop: asyncio.AbstractEventLoop) -> None:
    """Cut the file that receives standard error whenever it has grown too large, for as long as the loop runs."""
    loop.call_later(LOOK_EVERY, keep_small, loop)
    with contextlib.suppress(OSError):  # the disk is full
        cut(2)


def cut(descriptor: int) -> None:
    """Cut a file, open for appending and reading, to its end if it is too large.

    Output that is written at the same moment may be lost.
    """
    size = os.fstat(descriptor).st_size
    if size <= LIMIT:
        return
    kept = os.pread(descriptor, KEPT, size - KEPT)
    os.ftruncate(descriptor, 0)
    os.write(descriptor, kept)
