"""What a future needs of the connection that its answer comes over."""

from __future__ import annotations

from typing import Protocol

from loom_proxy.mesh.rank_states import MeshStates
from loom_proxy.session.read_loop import Reading


class Waits(Protocol):
    """Something that answers come over, and that a thread can wait on."""

    progress: bool | None
    """Whether long waits are shown; see `loom_proxy.display.progress.wanted`."""
    states: MeshStates
    """What is known of the meshes' elements."""
    reading: Reading
    """Lets a thread that waits read from the connection itself."""

    @property
    def away(self) -> bool:
        """Whether the connection is lost, and is being made again."""

    def flush(self) -> None:
        """Send what has been gathered, as far as the socket takes it at once."""

    def moving(self) -> tuple[int, int, int]:
        """Return (bytes to send, bytes received of large results, their total size)."""

    def withdraw(self, ident: int) -> bool:
        """Take back an operation that has not been started; return whether that was in time."""
