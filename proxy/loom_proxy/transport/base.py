"""The common base of the transports that carry frames to a gateway and back."""

from __future__ import annotations

from typing import ClassVar, Protocol

from loom.wire.sender import Wire
from loom.wire.sockets import let_go
from loom_proxy.transport.liveness import PingedConnection


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
