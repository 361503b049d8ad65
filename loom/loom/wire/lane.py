"""Numbered frames of one direction and back: sent, kept until they are acknowledged, and sent again."""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Sequence

from loom.errors import ProtocolMismatch
from loom.wire.frames import encode_frame
from loom.wire.messages import Buffer, Message

WINDOW = 32 << 20
"""Bytes of frames that are kept at most; one more frame may go over it."""

ACK_FRAMES = 128
"""Frames after which an acknowledgement is due, though nothing else is to be sent."""

ACK_BYTES = 2 << 20
"""Bytes of frames after which it is."""

LENGTH = struct.Struct(">I")
"""What is written before a frame where the carrier has no messages of its own."""


def behind_length(frame: Sequence[Buffer]) -> bytes:
    """A frame, given as buffers, behind its length."""
    return b"".join([LENGTH.pack(sum(map(len, frame))), *frame])


class Lane:
    """The numbers of one lane, seen from one end.

    Args:
        number: 0 for small messages, 1 for bulk.
    """

    def __init__(self, number: int = 0) -> None:
        self._number = number
        self.sent = 0
        """Number of the last frame that was sent."""
        self.received = 0
        """Number of the last frame that was received."""
        self.acknowledged = 0
        """Number of the last sent frame that the other side has acknowledged."""
        self.kept: deque[bytes] = deque()
        """The frames after `acknowledged`, behind their lengths."""
        # Counted by one thread each: their difference is what is kept.
        self._bytes_sent = 0
        self._bytes_acknowledged = 0
        self.again: deque[bytes] = deque()
        """Frames that are to be sent again."""
        self._told = 0
        """The last frame that was received when the other side was last told."""
        self._untold_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of the frames that are kept."""
        return self._bytes_sent - self._bytes_acknowledged

    @property
    def ack_due(self) -> bool:
        """Whether so much has come since the other side was told that it has to be told now."""
        return self.received - self._told >= ACK_FRAMES or self._untold_bytes >= ACK_BYTES

    @property
    def untold(self) -> bool:
        """Whether anything has come of which the other side has not been told."""
        return self.received > self._told

    def acknowledgement(self) -> bytes:
        """A frame that only acknowledges, behind its length."""
        return behind_length(encode_frame(0, self._tell(), [], self._number))

    def resume(self, received: int) -> None:
        """Begin on a new connection, whose other side has received the frames up to that number.

        Raises:
            ProtocolMismatch: it cannot have: what is lacking is no longer kept, or was never sent.
        """
        self._acknowledge(received)
        if received < self.acknowledged:
            raise ProtocolMismatch(
                f"the other side has received up to frame {received}, though it acknowledged {self.acknowledged}"
            )
        self.again = deque(self.kept)

    def frame(self, messages: Sequence[Message]) -> bytes:
        """The next frame, behind its length."""
        self.sent += 1
        frame = behind_length(encode_frame(self.sent, self._tell(), messages, self._number))
        self._bytes_sent += len(frame)
        self.kept.append(frame)
        return frame

    def _tell(self) -> int:
        # In this order: what comes in between is told of next time.
        self._untold_bytes = 0
        self._told = self.received
        return self._told

    def _acknowledge(self, number: int) -> None:
        if number > self.sent:
            raise ProtocolMismatch(f"frame {number} was acknowledged; {self.sent} have been sent")
        while self.acknowledged < number:  # frames that are sent again carry old numbers
            self._bytes_acknowledged += len(self.kept.popleft())
            self.acknowledged += 1

    def _is_new(self, seq: int) -> bool:
        """Whether a numbered frame that has come had not come already."""
        if seq <= self.received:
            return False
        if seq != self.received + 1:
            raise ProtocolMismatch(f"frame {seq} came where frame {self.received + 1} had to come")
        return True

    def _came(self, seq: int, size: int) -> None:
        """Note that a new frame of so many bytes has come: from now on the other side may be told."""
        self.received = seq
        self._untold_bytes += size


class BulkLane(Lane):
    """The lane of the chunks. It may have a connection of its own beside the one that all can travel on.

    So two threads may receive its frames at once, the same ones perhaps: when it moves from one connection to the
    other, what is kept is sent again there. Each connection carries frames without a gap, from one that is not
    behind the next that is expected; so they fit together in whatever order they come.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self.lock = threading.Lock()
        """Held while a frame is taken in."""
        self.urgent = False
        """Whether a message has come whole of which the other side is to be told at once."""
        self.news = False
        """Whether a frame has come that nobody who sends has looked at."""

    @property
    def ack_due(self) -> bool:
        return self.urgent or super().ack_due

    @property
    def full(self) -> bool:
        """Whether nothing new may be sent for now."""
        return self.kept_bytes >= WINDOW

    def acknowledgement(self) -> bytes:
        self.urgent = False
        return super().acknowledgement()

    def resume(self, received: int | None = None) -> None:
        """Begin on another connection, whose other side has received at least the frames up to that number.

        What was acknowledged later, on the earlier connection, counts as well.
        """
        with self.lock:
            self._acknowledge(self.acknowledged if received is None else received)
            self.news = True
            self.again = deque(self.kept)

    @property
    def progress(self) -> tuple[int, int, int]:
        """Changes whenever a frame is sent or acknowledged."""
        return self.sent, self.acknowledged, len(self.again)

    def take(self, seq: int, ack: int) -> bool:
        """Take the numbers of a frame; whether it is new, and `took` is to follow. With the lock held."""
        self._acknowledge(ack)
        return seq > 0 and self._is_new(seq)

    def took(self, seq: int, size: int, urgent: bool) -> None:
        """Note that what was in a new frame of so many bytes is where `Stream.arrived` finds it.

        Not before: the thread that sends may acknowledge the frame at once, and then comes what must not overtake.
        With the lock held.
        """
        self._came(seq, size)
        self.urgent |= urgent
