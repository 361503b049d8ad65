"""Which function carries out which fault of a host."""

from __future__ import annotations

from typing import Any

from loom.chaos.host import disks, network, processes
from loom.chaos.host import lost_host as hosts
from loom.chaos.injected import Evidence, Injected

__all__ = ["carry_out", "prepare"]


def prepare(kind: str, pid: int, params: dict[str, Any]) -> Evidence:
    """See whether this host can have a fault that silences a training process; what it is about to strike.

    Raises:
        FaultRefused: it cannot.
    """
    match kind:
        case "lost_host":
            return {"worker": hosts.worker_of(pid)}
        case "partition":
            return network.try_partition(params["peers"])
        case "link_down":
            return network.try_link_down(params["device"])
    return {"pid": pid}


def carry_out(kind: str, pid: int, params: dict[str, Any], duration: float | None) -> Injected:
    """Inject a fault of `Place.HOST`, from a process on that host.

    Args:
        kind: of `loom.chaos.faults`.
        pid: of the training process that it is about.
        params: all of its parameters.
        duration: seconds after which it is removed.

    Raises:
        FaultRefused: this host cannot have it.
    """
    match kind:
        case "sigkill":
            return processes.kill(pid)
        case "sigstop":
            return processes.stop(pid, duration)
        case "lost_host":
            return hosts.lose(pid, duration)
        case "partition":
            return network.partition(params["peers"], duration)
        case "link_down":
            return network.link_down(params["device"], duration)
        case "loss":
            return network.lose(params["percent"], params["peers"], duration)
        case "delay":
            return network.delay(params["milliseconds"], params["device"], duration)
        case "bandwidth":
            return network.narrow(params["megabits"], params["device"], duration)
        case "full_disk":
            return disks.fill(params["folder"], params["most"], duration)
        case "corrupt_checkpoint":
            return disks.corrupt(params["folder"], params["bytes"], params["seed"], duration)
    raise AssertionError(kind)
