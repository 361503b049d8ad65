"""The dispatch of each fault of a host to its function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loom.chaos.host import disks, lost_host, network, processes
from loom.chaos.injected import Evidence, Injected

_OF_PROCESSES: Mapping[str, Callable[[int], Injected]] = {
    "sigkill": processes.kill,
    "sigstop": processes.stop,
    "lost_host": lost_host.lose,
}
"""Functions of the process's pid."""

_OF_HOSTS: Mapping[str, Callable[..., Injected]] = {
    "partition": network.partition,
    "link_down": network.link_down,
    "loss": network.lose,
    "delay": network.delay,
    "bandwidth": network.narrow,
    "full_disk": disks.fill,
    "corrupt_checkpoint": disks.corrupt,
}
"""Functions of the parameters that `loom.chaos.faults` lists."""


def prepare(kind: str, pid: int, params: dict[str, Any]) -> Evidence:
    """Check that a fault that silences its process is possible here; return evidence of its target."""
    match kind:
        case "lost_host":
            return {"worker": lost_host.worker_of(pid)}
        case "partition":
            return network.try_partition(**params)
        case "link_down":
            return network.try_link_down(**params)
    return {"pid": pid}


def carry_out(kind: str, pid: int, params: dict[str, Any]) -> Injected:
    """Inject a fault of `Place.HOST`, from a process on that host.

    Args:
        kind: of `loom.chaos.faults`.
        pid: of the training process that the fault is about.
        params: all of its parameters.
    """
    if kind in _OF_PROCESSES:
        return _OF_PROCESSES[kind](pid)
    return _OF_HOSTS[kind](**params)
