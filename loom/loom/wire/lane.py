"""Lanes: numbered frames that are kept until the other side acknowledges them, and sent again if need be."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from loom.errors import ProtocolMismatch
from loom.wire.frames import encode_frame
from loom.wire.framing import behind_length
from loom.wire.messages import Message

WINDOW = 32 << 20  # bytes of kept frames at which no new frame is sent; the last one may go over it
ACK_FRAMES = 128  # received frames after which an acknowledgement is due, even if it needs a frame of its own

ACK_BYTES = 2 << 20
"""Bytes of received frames after which an acknowledgement is due, even if it needs a frame of its own."""


class OutOfStep(ProtocolMismatch):
    """A connection has lost frames, or its other side names frames that do not exist: connect anew and resume."""


class Lane:
    """One end of a lane (0: small messages, 1: bulk): the numbers of its frames, and the frames that are kept."""

    def __init__(self, number: int = 0) -> None:
        self._number = number
        self.sent = 0
        self.received = 0
        """Number of the last frame that was received."""
        self.acknowledged = 0
        """Number of the last sent frame that the other side has acknowledged."""
        self.kept: deque[bytes] = deque()
        """The frames after `acknowledged`, behind their lengths."""
        # Each is counted by one thread only. Their difference is `kept_bytes`.
        self._bytes_sent = 0
        self._bytes_acknowledged = 0
        self.again: deque[bytes] = deque()
        self._told = 0  # number of the last received frame that this side has acknowledged
        self._untold_bytes = 0  # bytes of received frames that this side has not acknowledged

    @property
    def kept_bytes(self) -> int:
        return self._bytes_sent - self._bytes_acknowledged

    @property
    def ack_due(self) -> bool:
        """Whether `ACK_FRAMES` or `ACK_BYTES` have come without an acknowledgement."""
        return self.received - self._told >= ACK_FRAMES or self._untold_bytes >= ACK_BYTES

    @property
    def untold(self) -> bool:
        """Whether this side has received frames that it has not acknowledged."""
        return self.received > self._told

    def acknowledgement(self) -> bytes:
        """Return a frame that only acknowledges, behind its length."""
        return behind_length(encode_frame(0, self._tell(), [], self._number))

    def resume(self, received: int) -> None:
        """Begin on a new connection, whose other side says that it has received the frames up to a number."""
        if received < self.acknowledged:
            raise ProtocolMismatch(
                f"the other side has received up to frame {received}, though it acknowledged {self.acknowledged}"
            )
        self._check_resumable(received)
        self._acknowledge(received)
        self.again = deque(self.kept)

    def _check_resumable(self, received: int) -> None:
        if received > self.sent:
            raise ProtocolMismatch(
                f"the other side has received up to frame {received}, though {self.sent} have been sent"
            )

    @property
    def on_wire(self) -> int:
        """The number of the last frame that was given out to be sent on this connection."""
        return self.sent - len(self.again)

    def frame(self, messages: Sequence[Message]) -> bytes:
        """Return the next frame with these messages, behind its length; raise what `encode_frame` raises."""
        # It counts as sent once it is encoded: a number that no frame has would end the stream.
        frame = behind_length(encode_frame(self.sent + 1, self._tell(), messages, self._number))
        self.sent += 1
        self._bytes_sent += len(frame)
        self.kept.append(frame)
        return frame

    def _tell(self) -> int:
        # In this order, so that a frame that comes in between counts as unacknowledged.
        self._untold_bytes = 0
        self._told = self.received
        return self._told

    def _acknowledge(self, number: int) -> None:
        if number > self.sent:
            raise OutOfStep(f"frame {number} was acknowledged; {self.sent} have been sent")
        while self.acknowledged < number:  # frames that are sent again carry old numbers
            self._bytes_acknowledged += len(self.kept.popleft())
            self.acknowledged += 1

    def _is_new(self, seq: int) -> bool:
        """Return whether a numbered frame is new, and not one that came before."""
        if seq <= self.received:
            return False
        if seq != self.received + 1:
            raise OutOfStep(f"frame {seq} came where frame {self.received + 1} had to come")
        return True

    def _came(self, seq: int, size: int) -> None:
        """Note that a new frame of so many bytes has come, which may be acknowledged from now on."""
        self.received = seq
        self._untold_bytes += size


class BulkLane(Lane):
    """The lane of the chunks, which may have a connection of its own besides the one that both lanes can share.

    When the lane moves to the other connection, its kept frames are sent again there. So two threads may receive
    its frames at once, perhaps the same ones. Each connection carries frames without a gap, and begins no later
    than the next expected frame; so the frames fit together, whichever thread is first.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self.lock = threading.Lock()
        """Held while a frame is taken in."""
        self.urgent = False
        """Whether a message has come whole, which must be acknowledged at once, since others may wait for it."""
        self.news = False
        """Whether a frame has come since the sending thread last looked."""
        self.probes: deque[Message] = deque()
        """Questions and answers of `loom.wire.watch` that came on the lane's own connection."""

    @property
    def ack_due(self) -> bool:
        return self.urgent or super().ack_due

    @property
    def full(self) -> bool:
        return self.kept_bytes >= WINDOW

    def acknowledgement(self) -> bytes:
        self.urgent = False
        return super().acknowledgement()

    def resume(self, received: int | None = None) -> None:
        """Begin on another connection, whose other side has received at least the frames up to a number."""
        with self.lock:
            if received is not None:
                self._check_resumable(received)
                self._acknowledge(received)
            self.news = True
            self.again = deque(self.kept)

    @property
    def progress(self) -> tuple[int, int, int]:
        """A value that changes whenever a frame is sent or acknowledged."""
        return self.sent, self.acknowledged, len(self.again)

    def take(self, seq: int, ack: int) -> bool:
        """Take the numbers of a frame; return whether it is new, and so needs `took`. With the lock held."""
        self._acknowledge(ack)
        return seq > 0 and self._is_new(seq)

    def took(self, seq: int, size: int, urgent: bool) -> None:
        """Note that `Stream.arrived` can find the messages of a new frame of so many bytes. With the lock held.

        Until then the frame must not be acknowledged: the other side would send messages that must not overtake it.
        """
        self._came(seq, size)
        self.urgent |= urgent
