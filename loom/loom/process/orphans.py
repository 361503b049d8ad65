"""Adoption: a process becomes the parent of its descendants' orphans, so that they end with it, and reaps them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from typing import NamedTuple

from loom.process.threads import keep_going

__all__ = ["Patience", "adopt_orphans"]

LOOK_EVERY = 0.5
"""Seconds between two searches for ended orphans while there is one."""

_PR_SET_CHILD_SUBREAPER = 36


class Patience(NamedTuple):
    """Seconds that this process's own code has to wait for a child that has ended: then it is nobody's."""

    of_session: float = 60.0
    """For one of this process's session, such as Monarch's."""
    of_others: float = 2.0
    """For one of another session: it was once a descendant's, or somebody waits for it who started it so."""


def adopt_orphans(patience: Patience | None = None) -> None:
    """Become the parent of orphans, which the kernel would give to init, and reap those that end. Only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        reaping = "reap orphans", lambda: _reap(patience or Patience())
        threading.Thread(target=keep_going, args=reaping, name="reap-orphans", daemon=True).start()


def _reap(patience: Patience) -> None:
    session = os.getsid(0)
    since: dict[int, float] = {}
    """When each ended child was seen first."""
    while True:
        try:
            # returns as soon as there is a zombie, without reaping it
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            time.sleep(LOOK_EVERY)  # there are no children to wait for
            continue
        now = time.monotonic()
        since = {pid: since.get(pid, now) for pid in _ended_children()}
        for pid, first in since.items():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                own = os.getsid(pid) == session
                if now - first >= (patience.of_session if own else patience.of_others):
                    os.waitpid(pid, os.WNOHANG)
        time.sleep(LOOK_EVERY)


def _ended_children() -> list[int]:
    import psutil

    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE:
                found.append(child.pid)
    return found
