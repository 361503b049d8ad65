"""The time that an operation takes, and that a caller lets it take."""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

from loom.errors import WrongArguments
from loom.wire.plain import plain, shortened


class Timing(NamedTuple):
    """The time that an operation took, in milliseconds."""

    wall_ms: float
    """Time from the call to the arrival of its answer."""
    queue_ms: float
    """Time on the network and in queues: ``wall_ms - rpc_ms``."""
    rpc_ms: float
    """Time in Monarch and the actors, measured by the driver."""


def check_timeout(timeout: float | None) -> float | None:
    """Return a timeout in its plain form (`loom.wire.plain`), or None.

    Raises:
        ValueError: the number of seconds is negative or not finite; Monarch raises it, too.
        WrongArguments: this is no number.
    """
    if timeout is None:
        return None
    if type(timeout) is not float and type(timeout) is not int:
        timeout = plain(timeout, "timeout")
        if not isinstance(timeout, (int, float)):
            raise WrongArguments(f"timeout: a number of seconds has to be given, not {shortened(timeout)}")
    if not 0 <= timeout < math.inf:
        raise ValueError(f"invalid timeout {timeout}: expected a non-negative, finite number of seconds")
    return min(timeout, threading.TIMEOUT_MAX)
