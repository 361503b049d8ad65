"""The processes that functions in the driver start, which end with a cancelled run and with the session."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import subprocess
import threading
from collections.abc import Callable, Iterable
from typing import Any

import psutil

logger = logging.getLogger(__name__)

GRACE = 2.0  # seconds that a process has to end after SIGTERM before it is killed
REMEMBERED = 64  # processes of a run above which those that have ended are forgotten


class StartedProcesses:
    """The processes that one run has started. Safe on any thread."""

    def __init__(self) -> None:
        self._processes: list[psutil.Process] = []

    def add(self, pid: int) -> None:
        with contextlib.suppress(psutil.Error):  # it has ended
            self._processes.append(psutil.Process(pid))
        if len(self._processes) > REMEMBERED:
            self._processes = [process for process in self._processes if process.is_running()]

    def end_soon(self) -> None:
        """End the processes and their descendants, on a thread of its own."""
        if self._processes:
            threading.Thread(target=lambda: end(self._with_descendants()), name="end", daemon=True).start()

    def _with_descendants(self) -> list[psutil.Process]:
        found = []
        for process in self._processes.copy():
            with contextlib.suppress(psutil.Error):
                found += [process, *process.children(recursive=True)]
        return found


def started_in_the_driver() -> list[psutil.Process]:
    """Return every process that descends from this one or is in its process group."""
    own = psutil.Process()
    found = {process.pid: process for process in own.children(recursive=True)}
    group = os.getpgid(0)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != own.pid and os.getpgid(process.pid) == group:
                found[process.pid] = process
    return list(found.values())


def end(processes: Iterable[psutil.Process]) -> None:
    """End processes, and kill those that are left after `GRACE` seconds. Waits for that."""
    ending = list(processes)
    for process in ending:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, left = psutil.wait_procs(ending, GRACE)
    for process in left:
        with contextlib.suppress(psutil.Error):
            logger.warning("process %d of a run does not end, and is killed", process.pid)
            process.kill()


def note_processes(current: Callable[[], StartedProcesses | None]) -> None:
    """Note each process that `subprocess` or `os.fork` starts with the run that is ``current`` in its thread."""
    original_init, original_fork = subprocess.Popen.__init__, os.fork

    @functools.wraps(original_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        started = current()
        if started is not None:
            started.add(self.pid)

    @functools.wraps(original_fork)
    def fork() -> int:
        pid = original_fork()
        started = current() if pid else None
        if started is not None:
            started.add(pid)
        return pid

    subprocess.Popen.__init__ = init  # type: ignore[method-assign]
    os.fork = fork
