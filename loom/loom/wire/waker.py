"""A waker of threads that wait for a socket."""

from __future__ import annotations

import contextlib
import os


class Waker:
    """A file descriptor to `select.poll` together with a socket; another thread makes it readable."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        os.set_blocking(self._out, False)
        os.set_blocking(self._in, False)
        self.woken = False
        """Whether `wake` was called since the last `clear`; set a moment after `fileno` is readable."""

    def fileno(self) -> int:
        return self._out

    def wake(self) -> None:
        """Wake the thread that polls. For one thread at a time."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full: the thread is being woken anyway
            os.write(self._in, b"\0")
        self.woken = True

    def clear(self) -> None:
        """Make `fileno` unreadable until the next `wake`. The polling thread calls it before it looks for work."""
        self.woken = False
        with contextlib.suppress(BlockingIOError):
            os.read(self._out, 4096)

    def __del__(self) -> None:
        os.close(self._out)
        os.close(self._in)
