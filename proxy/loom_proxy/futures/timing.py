"""The time that an operation takes, and that a caller lets it take."""

from __future__ import annotations

import math
from typing import NamedTuple


class Timing(NamedTuple):
    """The time that an operation took, in milliseconds."""

    wall_ms: float
    """Time from the call to the arrival of its answer."""
    queue_ms: float
    """Time on the network and in queues: ``wall_ms - rpc_ms``."""
    rpc_ms: float
    """Time in Monarch and the actors, measured by the driver."""


def check_timeout(timeout: float | None) -> None:
    """Raise `ValueError`, as Monarch does, unless this is a finite number of seconds >= 0, or None."""
    if timeout is not None and not 0 <= timeout < math.inf:
        raise ValueError(f"invalid timeout {timeout}: expected a non-negative, finite number of seconds")
