"""Where the time of an operation went."""

from __future__ import annotations

from typing import NamedTuple


class Timing(NamedTuple):
    """Where the time of an operation went, in milliseconds."""

    wall_ms: float
    """From the call to the arrival of its answer."""
    queue_ms: float
    """On the way and waiting: ``wall_ms - rpc_ms``."""
    rpc_ms: float
    """In Monarch and the actors, as the driver measured it."""
