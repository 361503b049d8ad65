"""``python -m loom.chaos.host.agent``: a process on a host that injects one fault there, holds it, and removes it.

The agent outlives the training process that started it, which the fault may have stopped or cut off. It removes
the fault when its time is over, or on SIGTERM, which `remove` sends. It prints a line of JSON with the evidence, or
with the reason why there is no fault, and another line when the fault is gone. If the agent is killed, the training
process that started it, or the next worker or agent on the host, repairs the damage in its record.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loom.chaos.host import disks, network, pod, processes, records
from loom.chaos.host.processes import ProcessId
from loom.chaos.host.records import HostFaultRecord
from loom.chaos.host.sweep import repair, sweep
from loom.chaos.injected import Evidence, Injected
from loom.control.fault_kinds import FAULTS
from loom.errors import FaultRefused, NotFound
from loom.process.child import python

REMOVED_WITHIN = 30.0  # seconds that the removal of a fault may take; restarting a worker takes longest


_OF_PROCESSES: Mapping[str, Callable[[int], Injected]] = {
    "sigkill": processes.kill,
    "sigstop": processes.stop,
    "lost_host": pod.lose_host,
}
"""Functions of the training process's pid."""

_OF_HOSTS: Mapping[str, Callable[..., Injected]] = {
    "partition": network.partition,
    "link_down": network.link_down,
    "loss": network.lose,
    "delay": network.delay,
    "bandwidth": network.narrow,
    "full_disk": disks.fill,
    "corrupt_checkpoint": disks.corrupt,
}
"""Functions of the parameters that `loom.control.fault_kinds` lists."""


def keep(
    injection: str,
    kind: str,
    params: Mapping[str, Any],
    duration: float | None,
    pid: int,
    on_removal: Callable[[Evidence], None],
) -> tuple[Evidence, Callable[[], None] | None]:
    """Start an agent that injects a fault and holds it; return the evidence that the fault is present.

    A fault that silences the training process strikes only when the returned function is called. Its evidence comes
    with that of its removal.

    Args:
        duration: seconds after which the fault is removed; None: when `remove` is called.
        pid: of the training process.
        on_removal: called, on a thread of its own, with the evidence that the fault is gone.

    Raises:
        FaultRefused: the fault is impossible on this host.
    """
    request = json.dumps({"id": injection, "kind": kind, "params": params, "duration": duration, "pid": pid})
    process = subprocess.Popen(
        python("loom.chaos.host.agent", request),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    line = process.stdout.readline()
    reply: Mapping[str, Any] = (
        json.loads(line) if line else {"refused": f"the agent ended with code {process.wait()}"}
    )
    if "refused" in reply:
        process.communicate()
        raise FaultRefused(reply["refused"])

    def follow() -> None:
        last: Mapping[str, Any] | None = None
        with process:  # waits for it, and closes its pipes
            for line in process.stdout or ():
                last = json.loads(line)
                on_removal(last.get("removed", last))
        if last is None:
            on_removal({"agent": f"ended with code {process.returncode}", "repaired": _repair(injection)})

    def strike() -> None:
        assert process.stdin is not None
        process.stdin.write(b"now\n")
        process.stdin.flush()

    threading.Thread(target=follow, name="loom-chaos", daemon=True).start()
    return reply["evidence"], strike if FAULTS[kind].silences else None


def remove(injection: str) -> None:
    """Remove a fault of this host; return when it is gone. If its agent was killed, repair what it has left."""
    path = _record_of(injection)
    try:
        agent = ProcessId(*HostFaultRecord.read(path).agent)
    except (FileNotFoundError, ValueError):
        path.unlink(missing_ok=True)
        text = f"no fault with the id {injection!r:.80} is there on this host"
        raise NotFound(text, code="unknown_injection") from None
    with contextlib.suppress(ProcessLookupError):
        if agent.alive():
            os.kill(agent.pid, signal.SIGTERM)
    until = time.monotonic() + REMOVED_WITHIN
    while path.exists() and agent.alive():
        if time.monotonic() > until:
            raise FaultRefused(f"the fault {injection} was not removed within {REMOVED_WITHIN:g} s")
        time.sleep(0.005)
    _repair(injection)
    if path.exists():
        raise FaultRefused(f"what the fault {injection} has left cannot be repaired: this process's log says why")


def _record_of(injection: str) -> Path:
    return records.folder() / f"{injection}.json"


def _repair(injection: str) -> list[str]:
    """Repair what the fault of an agent that has ended has left."""
    try:
        return repair(HostFaultRecord.read(_record_of(injection)))
    except (FileNotFoundError, ValueError):
        return []


def _prepare(kind: str, pid: int, params: Mapping[str, Any]) -> Evidence:
    """Check that a fault that silences its process is possible here; return evidence of its target."""
    match kind:
        case "lost_host":
            return pod.try_lose_host(pid)
        case "partition":
            return network.try_partition(**params)
        case "link_down":
            return network.try_link_down(**params)
    return {"pid": pid}


def main() -> int:
    """Inject one fault and hold it until its end; return the exit code."""
    request = json.loads(sys.argv[1])  # as `keep` writes it
    kind, pid, params = request["kind"], request["pid"], request["params"]
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: asked.set())
    record = _record_of(request["id"])
    try:
        sweep()
        records.begin(HostFaultRecord(record, ProcessId.find(os.getpid()), []))
        silences = FAULTS[kind].silences
        if silences:
            _print(evidence=_prepare(kind, pid, params))
            sys.stdin.readline()
        injected = _OF_PROCESSES[kind](pid) if kind in _OF_PROCESSES else _OF_HOSTS[kind](**params)
    except FaultRefused as error:
        _repair(request["id"])
        _print(refused=str(error))
        return 1
    if not silences:
        _print(evidence=injected.evidence)
    if injected.removable:
        asked.wait(request["duration"])
    removed = injected.remove()  # the record stays if it fails, and the next sweep repairs the rest
    record.unlink(missing_ok=True)
    _print(removed={"was": injected.evidence, **removed})
    return 0


def _print(**line: Any) -> None:
    with contextlib.suppress(OSError):  # the process that started the agent may be gone
        print(json.dumps(line), flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
