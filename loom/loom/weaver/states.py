"""The states of replicas and devices, under the same names in Python, REST, the CLI and the metrics."""

from __future__ import annotations

from enum import Enum


class ReplicaState(str, Enum):
    """What a replica does."""

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
    """What a device may be used for."""

    ACTIVE = "active"
    INACTIVE = "inactive"
    """Somebody has deactivated it."""
    FAILED = "failed"

    def __str__(self) -> str:
        return self.value


LIVING = frozenset(ReplicaState) - {ReplicaState.FAILED, ReplicaState.FINISHED}
"""The states of a replica that can be sent commands, now or when it is connected again."""
