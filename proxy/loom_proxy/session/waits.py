"""The side of a session's calls that a future needs: waiting for an answer."""

from __future__ import annotations

from loom.wire.sender import FrameSender
from loom.wire.stream import Stream
from loom_proxy.mesh.rank_states import MeshStates
from loom_proxy.session.interrupts import Uninterrupted
from loom_proxy.session.read_loop import ReadLoop
from loom_proxy.session.reads import Reads


class Waits:
    """A connection that brings answers, and that a thread can wait on."""

    read_loop: ReadLoop
    """The loop in which a thread that waits may read inline. The connection sets it."""

    reads: Reads
    """The answers that the program has read."""

    def __init__(self, stream: Stream, sender: FrameSender) -> None:
        self.states = MeshStates()
        """The known states of the meshes' elements."""
        self.progress: bool | None = None
        """Whether long waits are shown; see `loom_proxy.display.progress.wanted`."""
        self.away = False
        """Whether the connection is lost and reconnects."""
        self._stream = stream
        self._sender = sender

    def flush(self) -> None:
        """Send the gathered messages, as far as the socket takes them at once."""
        if self._stream.ready:
            with Uninterrupted():
                self._sender.flush()

    def moving(self) -> tuple[int, int, int]:
        """Return (bytes to send, bytes received of large results, their total size)."""
        return self._stream.outbox.pending_bytes, *self._stream.incoming()

    def withdraw(self, ident: int) -> bool:
        """Withdraw an operation that has not been started; return whether that was in time."""
        raise NotImplementedError
