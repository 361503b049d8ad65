"""The notice that a worker is about to end, by which training processes stop in time to save their state.

The worker has a connected pair of sockets. Its processes inherit one end, and each that heeds the notice says so
with its pid. The worker gives the notice by shutting down its own end. A process that then trains (it has an open
`loom.Threadlet`) goes on until the worker's grace is over, and its loop sees ``should_stop``. Others end at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING

from loom.process.threads import keep_going

if TYPE_CHECKING:
    import psutil

VARIABLE = "LOOM_END_NOTICE"
"""The environment variable with the number of the inherited descriptor."""


class EndNotice:
    """The worker's side. Every process that is started later inherits the other one."""

    def __init__(self) -> None:
        # Imported here, because every process of a session imports this module.
        from loom.threadlet.evictions import SIGNALLED_VARIABLE

        self._ours, self._inherited = socket.socketpair()
        self._inherited.set_inheritable(True)
        os.environ[VARIABLE] = str(self._inherited.fileno())
        os.environ[SIGNALLED_VARIABLE] = "1"
        self._heeding: set[psutil.Process] = set()
        listening = "listen for trainings", self._listen
        threading.Thread(target=keep_going, args=listening, name="end-notice", daemon=True).start()

    def heeded_by(self, process: psutil.Process) -> bool:
        """Return whether a process stops by itself once the notice is given."""
        return process in self._heeding

    def give(self) -> None:
        """Tell the processes that the worker is about to end. A second call does nothing."""
        # Only one direction: by the other one a process sees that the worker still lives.
        self._ours.shutdown(socket.SHUT_WR)

    def _listen(self) -> None:
        import psutil

        with self._ours.makefile("rb") as lines:
            while line := lines.readline(64):  # a process that writes more has no number to say
                known = {process for process in self._heeding if process.is_running()}
                if line.strip().isdigit():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        known.add(psutil.Process(int(line)))
                self._heeding = known


def heed_end_notice() -> None:
    """Stop this process's training when its worker is about to end. Without a worker that tells so, do nothing."""
    # Processes that this one starts do not get the descriptor.
    descriptor = os.environ.pop(VARIABLE, "")
    if not descriptor:
        return
    notice = socket.socket(fileno=int(descriptor))
    notice.set_inheritable(False)
    notice.sendall(f"{os.getpid()}\n".encode())
    threading.Thread(target=_heed, args=(notice,), name="loom-end-notice", daemon=True).start()


def _heed(notice: socket.socket) -> None:
    try:
        while notice.recv(1):
            pass
        notice.sendall(b"\n")
    except OSError:
        return  # the worker was killed, and the kernel kills this process
    evictions = sys.modules.get("loom.threadlet.evictions")
    if evictions is None or not evictions.evict_all():
        os.kill(os.getpid(), signal.SIGTERM)
