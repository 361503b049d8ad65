"""The common base of the transports that carry frames to a gateway and back, and a transport's liveness.

A connection that is silent is pinged, and counts as lost if it stays silent. Frames that are lost on a connection
with signs of life are another matter, of `loom.wire.lost_frames`.
"""

from __future__ import annotations

import time
from typing import ClassVar, Protocol

from loom.wire.sender import Wire
from loom.wire.sockets import let_go

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


class Transport(Wire, PingedConnection, Protocol):
    """A carrier of frames in both directions. One thread may receive while another sends."""

    kind: ClassVar[str]
    """The transport's name for `loom.connect`."""

    def fileno(self) -> int:
        """Return the descriptor to `select`; -1 if it does not show whether something has come."""

    def receive(self, wait: bool = True) -> list[bytes] | None:
        """Return the frames that have come, perhaps none; None when the connection is over."""

    def send_control(self, data: bytes) -> None:
        """Send protocol bytes from the receiving thread. The owner replaces it, to order it among its senders."""

    def close(self) -> None:
        """End the connection."""

    def let_go(self) -> None:
        """Leave the connection to the parent process, whose forked child this is. Nothing is sent."""
        let_go(self.fileno())
