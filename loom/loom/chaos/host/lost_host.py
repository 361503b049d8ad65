"""The fault of a worker host that is lost: its worker is killed, and with it all that runs there."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from pathlib import Path

from loom.chaos.host.proc import ancestors, start_of, state_of
from loom.chaos.host.processes import kill
from loom.chaos.injected import Evidence, Injected
from loom.errors import FaultRefused

WORKER_MODULE = "loom_gateway.workers.host"


def worker_of(pid: int) -> int:
    """The worker that has started a process."""
    for ancestor in ancestors(pid):
        with contextlib.suppress(FaultRefused):  # of another user, whose worker it cannot be
            if WORKER_MODULE in start_of(ancestor).arguments:
                return ancestor
    raise FaultRefused(f"process {pid} was started by no worker ({WORKER_MODULE}): there is no host to lose")


def lose(pid: int) -> Injected:
    """Kill the worker that has started a process; removed, a worker like it is started on the same address.

    The new one ends with whoever started the old one, if the old one would have.
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
    """The end of the pipe by which a worker knows that its owner is there, opened once more."""
    theirs = {pipe for _, pipe in _pipes(owner)}
    for descriptor, pipe in _pipes(worker):
        if pipe in theirs and _reads(worker, descriptor):
            return os.open(f"/proc/{worker}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    raise FaultRefused(f"the worker {worker} ends with its parent, but shares no pipe with it ({owner})")


def _pipes(pid: int) -> list[tuple[int, str]]:
    folder, found = f"/proc/{pid}/fd", []
    for name in sorted(os.listdir(folder), key=int):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            if (target := os.readlink(f"{folder}/{name}")).startswith("pipe:"):
                found.append((int(name), target))
    return found


def _reads(pid: int, descriptor: int) -> bool:
    (flags,) = re.findall(r"^flags:\s*(\d+)", Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text(), re.MULTILINE)
    return int(flags, 8) & os.O_ACCMODE == os.O_RDONLY


def _children(pid: int) -> list[int]:
    running = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return [process for process in running if next(ancestors(process), 0) == pid]
