"""The side of a session's calls that a future needs: waiting for an answer."""

from __future__ import annotations

from collections import deque
from typing import Any

from loom.wire.sender import FrameSender
from loom.wire.stream import Stream
from loom_proxy.mesh.rank_states import MeshStates
from loom_proxy.session.interrupts import Uninterrupted
from loom_proxy.session.read_loop import ReadLoop

READ_TOGETHER = 64
"""Answers that were read of which the driver is told together."""


class Waits:
    """A connection that brings answers, and that a thread can wait on."""

    read_loop: ReadLoop
    """The loop in which a thread that waits may read inline. The connection sets it."""

    def __init__(self, stream: Stream, sender: FrameSender) -> None:
        self.states = MeshStates()
        """The known states of the meshes' elements."""
        self.progress: bool | None = None
        """Whether long waits are shown; see `loom_proxy.display.progress.wanted`."""
        self.away = False
        """Whether the connection is lost and reconnects."""
        self.read: deque[Any] = deque()
        """The answers that the program has read and the driver does not know of; see `ReadAnswers`."""
        self._stream = stream
        self._sender = sender

    def note_read(self, answer: Any, large: bool) -> None:
        """Note that the program has read an answer. The driver is told with others, or in a quiet moment."""
        self.read.append(answer)
        if large or len(self.read) >= READ_TOGETHER:
            self.tell_read(eager=large)

    def tell_read(self, eager: bool = False) -> None:
        """Tell the driver which answers were read: with the next operation, or at once if it is ``eager``."""
        raise NotImplementedError

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
