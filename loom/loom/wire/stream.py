"""One end of a connection: messages in, frames out, and back.

`Stream` numbers the frames that it sends and checks the numbers of those that come. The first frame of each
side is the handshake and carries number 0; everything after it is numbered from 1, and acknowledged with the
frames that go the other way. Resending what was lost with a broken connection builds on these numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from loom.errors import ProtocolMismatch
from loom.wire.frames import decode_frame, encode_frame
from loom.wire.messages import Buffer, Kind, Message
from loom.wire.mux import MAX_MESSAGE, Inbox, OrderKey, Outbox

__all__ = ["Stream", "unnumbered_frame"]

_UNNUMBERED = frozenset({Kind.HELLO, Kind.WELCOME, Kind.REFUSE, Kind.OPEN, Kind.ENDED})


def unnumbered_frame(message: Message) -> list[Buffer]:
    """A frame outside the numbered stream, for the handshake and for what the gateway says itself."""
    return encode_frame(0, 0, [message])


class Stream:
    """The numbered messages of one connection, seen from one end. Arguments: as `loom.wire.mux.Inbox`."""

    def __init__(self, max_message: int = MAX_MESSAGE, in_pieces: Collection[int] = ()) -> None:
        self.outbox = Outbox()
        self._inbox = Inbox(max_message, in_pieces)
        self.sent = 0
        """Number of the last frame that was sent."""
        self.received = 0
        """Number of the last frame that was received."""
        self.acknowledged = 0
        """Number of the last sent frame that the other side has acknowledged."""

    def incoming(self) -> tuple[int, int]:
        """As `loom.wire.mux.Inbox.incoming`."""
        return self._inbox.incoming()

    def put(self, message: Message, key: OrderKey = None) -> None:
        """Queue a message to be sent; see `loom.wire.mux` for ``key``."""
        self.outbox.put(message, key)

    def next_frame(self) -> list[Buffer] | None:
        """The next frame to send, as buffers to write one after the other, or None."""
        messages = self.outbox.next_frame()
        if not messages:
            return None
        self.sent += 1
        return encode_frame(self.sent, self.received, messages)

    def expects(self, ident: int) -> bool:
        """Whether a large message with that id has come in part."""
        return self._inbox.expects(ident)

    def receive(self, data: Buffer) -> Sequence[Message]:
        """Take one frame; return the messages that are whole now.

        Raises:
            ProtocolMismatch: the bytes are not the frame that had to come next.
            TooLarge: a message is over the limit.
        """
        frame = decode_frame(data)
        if frame.seq == 0:
            strange = [message.kind for message in frame.messages if message.kind not in _UNNUMBERED]
            if strange:
                raise ProtocolMismatch(f"messages of kinds {strange} came outside the numbered stream")
            return frame.messages
        if frame.seq != self.received + 1:
            raise ProtocolMismatch(f"frame {frame.seq} came where frame {self.received + 1} had to come")
        if not self.acknowledged <= frame.ack <= self.sent:
            raise ProtocolMismatch(f"frame {frame.ack} was acknowledged; {self.sent} have been sent")
        self.received = frame.seq
        self.acknowledged = frame.ack
        whole = []
        for message in frame.messages:
            complete = self._inbox.receive(message)
            if complete is not None:
                whole.append(complete)
        return whole
