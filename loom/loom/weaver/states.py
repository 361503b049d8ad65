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


class ReplicaEnding(str, Enum):
    """The way in which a replica ended."""

    COMPLETED = "completed"
    """Its program ended in order, after its last step if it had named one."""
    ENDED_EARLY = "ended early"
    """Its program ended in order, before its last step or within a step, and nobody is known to have stopped it."""
    UNKNOWN = "unknown"
    """Its program ended without saying how, and had named no last step."""
    STOPPED = "stopped"
    """A user, or a policy, told it to stop or to drain."""
    CANCELLED = "cancelled"
    """Its processes were stopped, or the session that had spawned them ended."""
    EVICTED = "evicted"
    """Its worker, or the scheduler of its machine, told it to leave."""
    CRASHED = "crashed"
    """Its program raised, or its process died."""
    LOST = "lost"
    """Nothing was heard from it, or its host is gone."""

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
