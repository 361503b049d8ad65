"""The size limit for the file with a driver's own output."""

from __future__ import annotations

import asyncio
import os

LIMIT = 1 << 20  # bytes above which the file is cut
KEPT = 64 << 10  # bytes at the end of the file that a cut keeps
LOOK_EVERY = 1.0  # seconds between two checks of the size


def keep_small(loop: asyncio.AbstractEventLoop) -> None:
    """Cut the file that receives standard error whenever it has grown too large, for as long as the loop runs."""
    cut(2)
    loop.call_later(LOOK_EVERY, keep_small, loop)


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
