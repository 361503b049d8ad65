"""The liveness of a transport: a connection that is silent is pinged, and counts as lost if it stays silent.

Apart from the other duties of a transport, since every transport has this one without a line of its own. Frames
that are lost on a connection with signs of life are another matter, of `loom.wire.lost_frames`.
"""

from __future__ import annotations

import time
from typing import Protocol

PING_AFTER, SILENCE = 5.0, 15.0
"""Seconds of silence after which the other side is pinged, and after which the connection counts as lost."""


class PingedConnection(Protocol):
    """A connection whose other side gives signs of life, or is asked for one."""

    heard: float
    """The `time.monotonic` of the last sign of life from the other side."""
    _pinged: bool = False

    def is_alive(self, moved: float = 0.0) -> bool:
        """Return whether to wait on for the other side; ping it after a while of silence.

        ``moved`` is the `time.monotonic` of another sign of life.
        """
        silence = time.monotonic() - max(self.heard, moved)
        if silence <= PING_AFTER:
            self._pinged = False
        elif not self._pinged:
            self._pinged = True
            self.ping()
        return silence < SILENCE

    def ping(self) -> None:
        """Ask the other side for a sign of life."""
