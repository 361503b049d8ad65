"""Processes of this machine, by pid: what ``/proc`` says of them, and their faults.

A process is killed, or stopped, or its host is lost: its worker is killed with every process that it runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from loom.chaos.host.network_commands import run_at_end
from loom.chaos.host.records import Stopped, note
from loom.chaos.injected import Evidence, Injected
from loom.errors import FaultRefused

SEEN_WITHIN = 5.0  # seconds that the kernel may take to carry out a signal

WORKER_MODULE = "loom_gateway.workers.host"


class ProcessId(NamedTuple):
    """A process, with its start time to tell it from a later one with the same pid."""

    pid: int
    started: str

    @classmethod
    def find(cls, pid: int) -> ProcessId:
        fields = _fields(pid)
        if fields is None:
            raise FaultRefused(f"there is no process {pid} on this machine")
        return cls(pid, fields[19])

    def alive(self) -> bool:
        """Return whether the process exists and is no zombie."""
        fields = _fields(self.pid)
        return fields is not None and fields[0] not in "ZX" and fields[19] == self.started


class Start(NamedTuple):
    """The start of a process: arguments, working folder and environment."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]


def state_of(pid: int) -> str | None:
    """Return the letter of a process's state, such as ``S``, ``T`` (stopped) or ``Z``; None without a process."""
    fields = _fields(pid)
    return None if fields is None else fields[0]


def ancestors(pid: int) -> Iterator[int]:
    """Yield the parent of a process, then that one's parent, and so on."""
    while (fields := _fields(pid)) is not None and (pid := int(fields[1])) > 0:
        yield pid


def start_of(pid: int) -> Start:
    """Return how a process of this user was started."""
    folder = Path(f"/proc/{pid}")
    try:
        arguments = (folder / "cmdline").read_bytes().split(b"\0")[:-1]
        pairs = (pair.partition(b"=") for pair in (folder / "environ").read_bytes().split(b"\0") if pair)
        environment = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
        return Start([os.fsdecode(one) for one in arguments], os.readlink(folder / "cwd"), environment)
    except OSError as error:
        raise FaultRefused(f"process {pid} cannot be looked at: {error.strerror}") from error


def kill(pid: int) -> Injected:
    """Kill a process with SIGKILL; return when it is gone, or a zombie that its parent has not reaped yet."""
    process = ProcessId.find(pid)
    began = time.monotonic()
    _signal(process, signal.SIGKILL)
    _await_state(process, "ZX")
    return Injected("sigkill", {"pid": pid, "state": "gone", "seconds": time.monotonic() - began})


def stop(pid: int) -> Injected:
    """Stop a process with SIGSTOP, so that it hangs; the removal of the fault continues it."""
    process = ProcessId.find(pid)
    note(Stopped(*process))
    # The stopped process cannot repair what its agent has left.
    go_on = run_at_end(["kill", "-CONT", str(pid)])
    _signal(process, signal.SIGSTOP)
    _await_state(process, "T")

    def undo() -> Evidence:
        with contextlib.suppress(FaultRefused):
            go_on()
        if not process.alive():
            return {"pid": pid, "state": "gone"}
        _signal(process, signal.SIGCONT)
        _await_state(process, "RSDIZX")
        return {"pid": pid, "state": state_of(pid) or "gone"}

    return Injected("sigstop", {"pid": pid, "state": "T"}, undo)


def worker_of(pid: int) -> int:
    """Return the pid of the worker that started a process."""
    for ancestor in ancestors(pid):
        with contextlib.suppress(FaultRefused):  # a process of another user cannot be the worker
            if WORKER_MODULE in start_of(ancestor).arguments:
                return ancestor
    raise FaultRefused(f"process {pid} was started by no worker ({WORKER_MODULE}): there is no host to lose")


def lose_host(pid: int) -> Injected:
    """Kill the worker that started a process; the removal of the fault starts the same command again.

    If the old worker would have ended with the process that started it, so does the new one.
    """
    worker = worker_of(pid)
    start = start_of(worker)
    parent_pipe = _parent_pipe(worker, next(ancestors(worker))) if "--exit-with-parent" in start.arguments else None
    there = _children(worker)
    kill(worker)
    evidence = {"worker": worker, "state": state_of(worker) or "gone", "processes": there}

    def undo() -> Evidence:
        begun = subprocess.Popen(
            start.arguments,
            cwd=start.folder,
            env=start.environment,
            stdin=subprocess.DEVNULL if parent_pipe is None else parent_pipe,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if parent_pipe is not None:
            os.close(parent_pipe)
        assert begun.stdout is not None
        line = begun.stdout.readline().decode(errors="replace").strip()
        begun.stdout.close()
        if not line:
            raise FaultRefused(f"the worker does not come up again: it ended with code {begun.wait()}")
        return {"worker": begun.pid, "says": line}

    return Injected("lost_host", evidence, undo)


def _parent_pipe(worker: int, owner: int) -> int:
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


def _signal(process: ProcessId, number: int) -> None:
    try:
        os.kill(process.pid, number)
    except (ProcessLookupError, PermissionError) as error:
        raise FaultRefused(
            f"process {process.pid} cannot be sent {signal.Signals(number).name}: {error}"
        ) from error


def _await_state(process: ProcessId, wanted: str) -> None:
    """Wait until a process is in one of these states of ``/proc``, or gone."""
    until = time.monotonic() + SEEN_WITHIN
    while (state := state_of(process.pid)) is not None and process.alive() and state not in wanted:
        if time.monotonic() > until:
            raise FaultRefused(
                f"process {process.pid} was signalled, but is in state {state} after {SEEN_WITHIN:g} s"
            )
        time.sleep(0.001)


def _fields(pid: int) -> list[str] | None:
    try:
        # The name stands in brackets and may contain any characters, brackets too: read after the last bracket.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
