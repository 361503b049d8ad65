"""The time accounting of an operation."""

from __future__ import annotations

from typing import NamedTuple


class Timing(NamedTuple):
    """The time that an operation took, in milliseconds."""

    wall_ms: float
    """Time from the call to the arrival of its answer."""
    queue_ms: float
    """Time on the network and in queues: ``wall_ms - rpc_ms``."""
    rpc_ms: float
    """Time in Monarch and the actors, measured by the driver."""
