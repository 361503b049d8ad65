"""The check of timeouts that a caller gives."""

from __future__ import annotations

import math


def check_timeout(timeout: float | None) -> None:
    """Raise `ValueError`, as Monarch does, unless this is a finite number of seconds >= 0, or None."""
    if timeout is not None and not 0 <= timeout < math.inf:
        raise ValueError(f"timeout is {timeout}: give a number of seconds that is not negative, or None")
