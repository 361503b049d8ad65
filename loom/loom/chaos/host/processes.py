"""The faults of a process of this machine, by its pid: it is killed, or stopped as if it hung."""

from __future__ import annotations

import os
import signal
import time

from loom.chaos.host.proc import ProcessId, state_of
from loom.chaos.injected import Evidence, Injected
from loom.errors import FaultRefused

SEEN_WITHIN = 5.0
"""Seconds that the kernel may take to carry out a signal."""


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
    _signal(process, signal.SIGSTOP)
    _await_state(process, "T")

    def undo() -> Evidence:
        if not process.alive():
            return {"pid": pid, "state": "gone"}
        _signal(process, signal.SIGCONT)
        _await_state(process, "RSDIZX")
        return {"pid": pid, "state": state_of(pid) or "gone"}

    return Injected("sigstop", {"pid": pid, "state": "T"}, undo)


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
