"""The states of replicas and devices, with the same names in Python, REST, the CLI and the metrics."""

from __future__ import annotations

from enum import Enum


class ReplicaState(str, Enum):
    """The state of a replica."""

    REGISTERING = "registering"
    RUNNING = "running"
    PAUSED = "paused"
    DRAINING = "draining"
    STALLED = "stalled"
    FAILED = "failed"
    RECOVERING = "recovering"
    FINISHED = "finished"

    def __str__(self) -> str:
        return self.value


class DeviceState(str, Enum):
    """The state of a device: what it may be used for."""

    ACTIVE = "active"
    INACTIVE = "inactive"
    """A user deactivated the device."""
    FAILED = "failed"

    def __str__(self) -> str:
        return self.value


LIVING = frozenset(ReplicaState) - {ReplicaState.FAILED, ReplicaState.FINISHED}
"""The states of a replica that can take commands, now or after it has reconnected."""
