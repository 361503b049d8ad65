"""Keeps the file with a driver's own output small, whoever reads it and for however long it grows."""

from __future__ import annotations

import asyncio
import os

LIMIT = 1 << 20
"""Bytes over which the file is cut."""

KEPT = 64 << 10
"""Bytes that are left of it then: the last ones."""

LOOK_EVERY = 1.0
"""Seconds between two looks at its size."""


class OutputFile:
    """The file that standard error and, from now on, standard output are appended to.

    Args:
        path: of the file.
        descriptor: of the same file, open for appending.
    """

    def __init__(self, path: str, descriptor: int = 2) -> None:
        self._path = path
        self._descriptor = descriptor

    def take_stdout(self) -> None:
        """Have standard output go there, too."""
        os.dup2(self._descriptor, 1)

    def keep_small(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cut the file whenever it has grown too large, for as long as the loop runs."""
        self.cut()
        loop.call_later(LOOK_EVERY, self.keep_small, loop)

    def cut(self) -> None:
        """Leave the end of the file, if it is too large. What is written meanwhile may be lost."""
        size = os.fstat(self._descriptor).st_size
        if size <= LIMIT:
            return
        try:
            with open(self._path, "rb") as file:
                file.seek(size - KEPT)
                kept = file.read(KEPT)
        except OSError:  # somebody has removed it: nobody will read it
            kept = b""
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, kept)
