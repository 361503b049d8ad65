"""The size limit for the file with a driver's own output."""

from __future__ import annotations

import asyncio
import os

LIMIT = 1 << 20  # bytes above which the file is cut
KEPT = 64 << 10  # bytes at the end of the file that a cut keeps
LOOK_EVERY = 1.0  # seconds between two checks of the size


class OutputFile:
    """The file at ``path`` that receives standard error and, after `take_stdout`, standard output."""

    def __init__(self, path: str, descriptor: int = 2) -> None:
        self._path = path
        self._descriptor = descriptor

    def take_stdout(self) -> None:
        os.dup2(self._descriptor, 1)

    def keep_small(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cut the file whenever it has grown too large, for as long as the loop runs."""
        self.cut()
        loop.call_later(LOOK_EVERY, self.keep_small, loop)

    def cut(self) -> None:
        """Cut the file to its end if it is too large. Output that is written at the same moment may be lost."""
        size = os.fstat(self._descriptor).st_size
        if size <= LIMIT:
            return
        try:
            with open(self._path, "rb") as file:
                file.seek(size - KEPT)
                kept = file.read(KEPT)
        except OSError:  # the file was removed, so nothing will read it
            kept = b""
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, kept)
