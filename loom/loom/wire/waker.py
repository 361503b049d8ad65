"""Waking a thread that waits for a socket."""

from __future__ import annotations

import contextlib
import os


class Bell:
    """Something to `select.poll` beside a socket, which another thread makes readable."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        os.set_blocking(self._out, False)
        os.set_blocking(self._in, False)
        self.rung = False
        """Whether it has been rung since it was last silent; a moment later than `fileno` is readable."""

    def fileno(self) -> int:
        """What to poll for reading."""
        return self._out

    def ring(self) -> None:
        """Wake who polls. For one thread at a time."""
        with contextlib.suppress(BlockingIOError):  # it is ringing
            os.write(self._in, b"\0")
        self.rung = True

    def silence(self) -> None:
        """Be silent until it is rung again. For the thread that polls, before it looks at what it was rung for."""
        self.rung = False
        with contextlib.suppress(BlockingIOError):
            os.read(self._out, 4096)

    def __del__(self) -> None:
        os.close(self._out)
        os.close(self._in)
