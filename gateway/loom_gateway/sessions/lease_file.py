"""The file by which the drivers of a session host know until when it has its sessions.

A driver whose functions could go on elsewhere has ended by then, whatever its host does: that one may hang, or be
cut off.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import NoReturn

from loom_gateway.sessions.state_dir import DriverFiles

logger = logging.getLogger(__name__)

LOOK_EVERY = 1.0
"""Seconds between two looks of a driver."""


def now() -> float:
    """Return the seconds of a clock that all processes of this machine share, and that runs while it sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class LeaseFile:
    """The file at a path. Without one, no other host has ever been able to take sessions over."""

    def __init__(self, path: str, mode: int = 0o600) -> None:
        self.path = path
        self._mode = mode
        self._fresh = Path(f"{path}.new")

    def extend(self, until: float) -> None:
        """Have the sessions until a time of `now`. It need not outlive the machine: the clock does not."""
        self._fresh.write_text(f"{until!r}\n")
        self._fresh.chmod(self._mode)
        os.replace(self._fresh, self.path)

    def is_over(self) -> bool:
        """Return whether the lease is over. A file that cannot be read says nothing."""
        try:
            return now() > float(Path(self.path).read_text())
        except (OSError, ValueError):
            return False


def end_with_lease(path: str, files: DriverFiles) -> None:
    """End this process, a driver, when the lease is over while it has functions that go on elsewhere."""
    lease = LeaseFile(path)

    def look() -> NoReturn:
        while not (lease.is_over() and files.leaves_functions()):
            time.sleep(LOOK_EVERY)
        logger.error("the session host has not renewed its lease: the functions may go on on another one")
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # what functions have started here, too
        os._exit(1)

    threading.Thread(target=look, name="lease", daemon=True).start()
