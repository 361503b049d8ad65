"""One end of a stream: messages in, frames out, and back, whatever becomes of the connections that carry them.

`Stream` numbers the frames that it sends and checks the numbers of those that come. The first frame of each side
is the handshake and carries number 0; everything after it is numbered from 1, and acknowledged with the frames
that go the other way, or by an empty frame of number 0 when there are none. A frame is kept until it is
acknowledged: when a connection is lost, the next one begins with each side saying which frame it has received
last, and what the other kept after that is sent again. So every message arrives once, in order.

What is kept is bounded by `WINDOW`: when that is full nothing new is sent until some of it is acknowledged.
"""

from __future__ import annotations

import contextlib
import struct
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from loom.errors import ProtocolMismatch
from loom.wire.frames import decode_frame, encode_frame
from loom.wire.messages import Buffer, Kind, Message
from loom.wire.mux import MAX_MESSAGE, Inbox, OrderKey, Outbox

__all__ = ["LENGTH", "WINDOW", "Stream", "behind_length", "unnumbered_frame"]

WINDOW = 32 << 20
"""Bytes of frames that are kept at most; one more frame may go over it."""

ACK_FRAMES = 128
"""Frames after which an acknowledgement is due, though nothing else is to be sent."""

ACK_BYTES = 2 << 20
"""Bytes of frames after which it is."""

LENGTH = struct.Struct(">I")
"""What is written before a frame where the carrier has no messages of its own."""

_UNNUMBERED = frozenset({Kind.HELLO, Kind.WELCOME, Kind.REFUSE, Kind.OPEN, Kind.ENDED})


def behind_length(frame: Sequence[Buffer]) -> bytes:
    """A frame, given as buffers, behind its length."""
    return b"".join([LENGTH.pack(sum(map(len, frame))), *frame])


def unnumbered_frame(message: Message) -> list[Buffer]:
    """A frame outside the numbered stream, for the handshake and for what the gateway says itself."""
    return encode_frame(0, 0, [message])


class Stream:
    """The numbered messages of one connection, seen from one end. Arguments: as `loom.wire.mux.Inbox`.

    One thread may receive while another sends.
    """

    def __init__(self, max_message: int = MAX_MESSAGE, in_pieces: Collection[int] = ()) -> None:
        self.outbox = Outbox()
        self._inbox = Inbox(max_message, in_pieces)
        self.sent = 0
        """Number of the last frame that was sent."""
        self.received = 0
        """Number of the last frame that was received."""
        self.acknowledged = 0
        """Number of the last sent frame that the other side has acknowledged."""
        self._kept: deque[bytes] = deque()
        """The frames after `acknowledged`, behind their lengths."""
        # Counted by one thread each: their difference is what is kept.
        self._bytes_sent = 0
        self._bytes_acknowledged = 0
        self._again: deque[bytes] = deque()
        """Frames that are to be sent again."""
        self._told = 0
        """The last frame that was received when the other side was last told."""
        self._untold_bytes = 0

    def incoming(self) -> tuple[int, int]:
        """As `loom.wire.mux.Inbox.incoming`."""
        return self._inbox.incoming()

    def put(self, message: Message, key: OrderKey = None) -> None:
        """Queue a message to be sent; see `loom.wire.mux` for ``key``."""
        self.outbox.put(message, key)

    # -- sending --------------------------------------------------------------------------------------------

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

    @property
    def ready(self) -> bool:
        """Whether there is a `next_frame`."""
        return bool(self._again) or self.ack_due or (bool(self.outbox) and self.kept_bytes < WINDOW)

    def next_frame(self) -> bytes | None:
        """The next frame to send, behind its length; None if there is none, or the window is full."""
        if self._again:
            return self._again.popleft()
        if self.kept_bytes < WINDOW:
            messages = self.outbox.next_frame()
            if messages:
                self.sent += 1
                frame = behind_length(encode_frame(self.sent, self._tell(), messages))
                self._bytes_sent += len(frame)
                self._kept.append(frame)
                return frame
        return self.acknowledgement() if self.ack_due else None

    def acknowledgement(self) -> bytes:
        """A frame that only acknowledges, behind its length."""
        return behind_length(encode_frame(0, self._tell(), []))

    def _tell(self) -> int:
        # In this order: what comes in between is told of next time.
        self._untold_bytes = 0
        self._told = self.received
        return self._told

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
        self._again = deque(self._kept)

    def _acknowledge(self, number: int) -> None:
        if number > self.sent:
            raise ProtocolMismatch(f"frame {number} was acknowledged; {self.sent} have been sent")
        while self.acknowledged < number:  # frames that are sent again carry old numbers
            self._bytes_acknowledged += len(self._kept.popleft())
            self.acknowledged += 1

    def abandon(self) -> list[Message]:
        """What the other side has not received, as far as it is still here whole; nothing more may be sent."""
        inbox = Inbox(MAX_MESSAGE)
        left: list[Message] = []

        def collect(messages: Iterable[Message]) -> None:
            for message in messages:
                with contextlib.suppress(ProtocolMismatch):  # a chunk whose first ones were received
                    complete = inbox.receive(message)
                    if complete is not None:
                        left.append(complete)

        for frame in self._kept:
            collect(decode_frame(memoryview(frame)[LENGTH.size :]).messages)
        self._kept.clear()
        while messages := self.outbox.next_frame():
            collect(messages)
        return left

    # -- receiving ------------------------------------------------------------------------------------------

    def expects(self, ident: int) -> bool:
        """Whether a large message with that id has come in part."""
        return self._inbox.expects(ident)

    def receive(self, data: Buffer) -> Sequence[Message]:
        """Take one frame; return the messages that are whole now. A frame that had come already is passed over.

        Raises:
            ProtocolMismatch: the bytes are not a frame that could come next.
            TooLarge: a message is over the limit.
        """
        frame = decode_frame(data)
        if frame.seq == 0:
            strange = [message.kind for message in frame.messages if message.kind not in _UNNUMBERED]
            if strange:
                raise ProtocolMismatch(f"messages of kinds {strange} came outside the numbered stream")
            self._acknowledge(frame.ack)
            return frame.messages
        self._acknowledge(frame.ack)
        if frame.seq <= self.received:
            return ()
        if frame.seq != self.received + 1:
            raise ProtocolMismatch(f"frame {frame.seq} came where frame {self.received + 1} had to come")
        self.received = frame.seq
        self._untold_bytes += len(data)
        whole = []
        for message in frame.messages:
            complete = self._inbox.receive(message)
            if complete is not None:
                whole.append(complete)
        return whole
