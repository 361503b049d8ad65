"""Doing something in a child process that a test may kill, on a small disk, or with small files only."""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Fork", "mount_small_disk"]

BOUND = 30.0

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000


class Fork:
    """A forked child that runs a function, which may `tell` the test things. A context manager that ends it."""

    def __init__(self, run: Callable[[Callable[[Any], None]], None]) -> None:
        self._read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:

            def tell(what: Any) -> None:
                os.write(write, pickle.dumps(what))

            try:
                run(tell)
            except BaseException:  # noqa: BLE001 - the test is told
                tell(traceback.format_exc())
            os._exit(0)
        os.close(write)

    def told(self) -> Any:
        """The next thing that the child tells."""
        readable, _, _ = select.select([self._read], [], [], BOUND)
        assert readable, "the child told nothing in time"
        return pickle.loads(os.read(self._read, 65536))

    def kill(self) -> None:
        """End it, as the kernel does to one that uses too much memory."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pid = 0

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pid:
            self.kill()
        os.close(self._read)


def mount_small_disk(folder: Path, size: str) -> bool:
    """Have this process, and no other, see a disk of a size in a folder; False where the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) and libc.unshare(_CLONE_NEWNS | _CLONE_NEWUSER):
        return False
    libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    return libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode()) == 0
