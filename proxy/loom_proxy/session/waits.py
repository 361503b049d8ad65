"""The side of a connection that a future needs: waiting for an answer."""

from __future__ import annotations

from typing import Protocol

from loom_proxy.mesh.rank_states import MeshStates
from loom_proxy.session.read_loop import ReadLoop


class Waits(Protocol):
    """A connection that brings answers, and that a thread can wait on."""

    progress: bool | None
    """Whether long waits are shown; see `loom_proxy.display.progress.wanted`."""
    states: MeshStates
    """The known states of the meshes' elements."""
    read_loop: ReadLoop
    """The loop in which a thread that waits may read inline."""

    @property
    def away(self) -> bool:
        """Whether the connection is lost and reconnects."""

    def flush(self) -> None:
        """Send the gathered messages, as far as the socket takes them at once."""

    def moving(self) -> tuple[int, int, int]:
        """Return (bytes to send, bytes received of large results, their total size)."""

    def withdraw(self, ident: int) -> bool:
        """Withdraw an operation that has not been started; return whether that was in time."""
