"""The fault of a lost worker host: its worker is killed, with every process that it runs."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from pathlib import Path

from loom.chaos.host.processes import ancestors, kill, start_of, state_of
from loom.chaos.injected import Evidence, Injected
from loom.errors import FaultRefused

WORKER_MODULE = "loom_gateway.workers.host"


def worker_of(pid: int) -> int:
    """Return the pid of the worker that started a process."""
    for ancestor in ancestors(pid):
        with contextlib.suppress(FaultRefused):  # a process of another user cannot be the worker
            if WORKER_MODULE in start_of(ancestor).arguments:
                return ancestor
    raise FaultRefused(f"process {pid} was started by no worker ({WORKER_MODULE}): there is no host to lose")


def lose(pid: int) -> Injected:
    """Kill the worker that started a process; the removal of the fault starts the same command again.

    If the old worker would have ended with the process that started it, so does the new one.
    """
    worker = worker_of(pid)
    start = start_of(worker)
    lifeline = _lifeline(worker, next(ancestors(worker))) if "--exit-with-parent" in start.arguments else None
    there = _children(worker)
    kill(worker)
    evidence = {"worker": worker, "state": state_of(worker) or "gone", "processes": there}

    def undo() -> Evidence:
        begun = subprocess.Popen(
            start.arguments,
            cwd=start.folder,
            env=start.environment,
            stdin=subprocess.DEVNULL if lifeline is None else lifeline,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if lifeline is not None:
            os.close(lifeline)
        assert begun.stdout is not None
        line = begun.stdout.readline().decode(errors="replace").strip()
        begun.stdout.close()
        if not line:
            raise FaultRefused(f"the worker does not come up again: it ended with code {begun.wait()}")
        return {"worker": begun.pid, "says": line}

    return Injected("lost_host", evidence, undo)


def _lifeline(worker: int, owner: int) -> int:
    """Reopen the read end of the pipe by which a worker notices that its owner has ended."""
    theirs = {pipe for _, pipe in _pipes(owner)}
    for descriptor, pipe in _pipes(worker):
        if pipe in theirs and _reads(worker, descriptor):
            return os.open(f"/proc/{worker}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    raise FaultRefused(f"the worker {worker} ends with its parent, but shares no pipe with it ({owner})")


def _pipes(pid: int) -> list[tuple[int, str]]:
    folder, found = f"/proc/{pid}/fd", []
    for name in sorted(os.listdir(folder), key=int):
        with contextlib.suppress(OSError):  # the descriptor was closed meanwhile
            if (target := os.readlink(f"{folder}/{name}")).startswith("pipe:"):
                found.append((int(name), target))
    return found


def _reads(pid: int, descriptor: int) -> bool:
    (flags,) = re.findall(r"^flags:\s*(\d+)", Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text(), re.MULTILINE)
    return int(flags, 8) & os.O_ACCMODE == os.O_RDONLY


def _children(pid: int) -> list[int]:
    running = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return [process for process in running if next(ancestors(process), 0) == pid]
