"""One end of a stream: messages in, frames out, and back, whatever becomes of the connections that carry them.

`Stream` numbers the frames that it sends and checks the numbers of those that come. The first frame of each side
is the handshake and carries number 0; everything after it is numbered from 1, and acknowledged with the frames
that go the other way, or by an empty frame of number 0 when there are none. A frame is kept until it is
acknowledged: when a connection is lost, the next one begins with each side saying which frame it has received
last, and what the other kept after that is sent again. So every message arrives once, in order.

What is kept is bounded by `WINDOW`: when that is full nothing new is sent until some of it is acknowledged.

Where both sides know lanes, the chunks of large messages have numbers and a window of their own: the bulk lane. One
connection can carry both lanes, in turns. A second connection may carry the bulk lane, so that megabytes in the
network's queues are not ahead of a small message. It comes and goes without harm: meanwhile, the first carries all.
Acknowledgements of both lanes go over the first, where they are not behind bulk, and frames may bring them as well.

The order of `loom.wire.mux` holds across lanes. A small message that may not overtake a large one waits here until
that has been acknowledged. A large one that may not overtake small ones says in its head after which frame it
comes, and the receiver holds it until then. So of two lanes only one ever waits for the other.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from loom.errors import ProtocolMismatch
from loom.wire.frames import Frame, decode_frame, encode_frame
from loom.wire.lane import LENGTH, WINDOW, BulkLane, Lane
from loom.wire.messages import Buffer, Kind, Message
from loom.wire.mux import MAX_MESSAGE, ChunkInbox, ChunkOutbox, OrderKey

_CHUNK = int(Kind.CHUNK)
"""To compare with a member of an enum takes twice as long, and every message is."""

_UNNUMBERED = frozenset({Kind.HELLO, Kind.WELCOME, Kind.REFUSE, Kind.OPEN, Kind.ENDED, Kind.EVENT})
"""An event among them is the gateway's own, for clients with the capability ``draining``."""


def unnumbered_frame(message: Message) -> list[Buffer]:
    """A frame outside the numbered stream, for the handshake and for what the gateway says itself."""
    return encode_frame(0, 0, [message])


class Stream(Lane):
    """The numbered messages of one client, seen from one end; by itself it is the lane of the small ones.

    One thread may receive while another sends, and a third from the connection of the bulk lane.

    Args:
        max_message: as of `loom.wire.mux.ChunkInbox`.
        in_pieces: as of `loom.wire.mux.ChunkInbox`.
        lanes: whether both sides know lanes; otherwise chunks and small messages share one.
    """

    def __init__(
        self, max_message: int = MAX_MESSAGE, in_pieces: Collection[int] = (), lanes: bool = False
    ) -> None:
        super().__init__()
        self.outbox = ChunkOutbox(apart=lanes)
        self._inbox = ChunkInbox(max_message, in_pieces)
        self.bulk = BulkLane() if lanes else None
        self.apart = False
        """Whether the bulk lane has a connection of its own."""
        self._chunk_turn = False
        self._arrived: deque[tuple[Message, int]] = deque()
        """Large messages that have come whole on the bulk lane, each with the frame after which it comes."""
        self._held: list[tuple[Message, int]] = []
        """Those that have been looked at, and come after a frame that has not been received."""

    def incoming(self) -> tuple[int, int]:
        """As `loom.wire.mux.ChunkInbox.incoming`."""
        return self._inbox.incoming()

    def put(self, message: Message, key: OrderKey = None) -> None:
        """Queue a message to be sent; see `loom.wire.mux` for ``key``."""
        self.outbox.put(message, key)

    @property
    def ready(self) -> bool:
        """Whether there is a `next_frame`, or may be."""
        if self.again or self.due:
            return True
        if self.bulk is None:
            return bool(self.outbox) and self.kept_bytes < WINDOW
        return (self.outbox.has_small and self.kept_bytes < WINDOW) or (not self.apart and self.bulk_ready)

    @property
    def bulk_ready(self) -> bool:
        """Whether there is a `next_bulk_frame`."""
        bulk = self.bulk
        return bulk is not None and (bool(bulk.again) or (not bulk.full and self.outbox.has_chunks))

    @property
    def due(self) -> bool:
        """Whether something has to be sent, or may be now, because of what has come."""
        return self.ack_due or (self.bulk is not None and self.bulk.news)

    @property
    def unsettled(self) -> bool:
        """Whether something waits for acknowledgements of the bulk lane, or for the rest of it to arrive."""
        return self.outbox.waits or (self.bulk is not None and self.apart and self.bulk.kept_bytes > 0)

    @property
    def payload_ahead(self) -> int:
        """Bytes of payload that are to leave on the connection of the small messages."""
        return self.outbox.small_bytes if self.apart else self.outbox.pending_bytes

    def next_frame(self) -> bytes | None:
        """The next frame to send, behind its length; None if there is none, or the window is full."""
        if self.again:
            return self.again.popleft()
        outbox, bulk = self.outbox, self.bulk
        if bulk is not None:
            if bulk.news:
                bulk.news = False  # before looking at it
                outbox.settle(bulk.acknowledged)
                if bulk.ack_due:
                    return bulk.acknowledgement()
            if self._chunk_turn:
                self._chunk_turn = False
                # Not where it has a connection of its own since: its frames go over one of them, in order.
                if not self.apart and (frame := self.next_bulk_frame()) is not None:
                    return frame
        if outbox and self._bytes_sent - self._bytes_acknowledged < WINDOW:
            messages = outbox.next_frame() if bulk is None else outbox.next_small()
            if messages:
                self._chunk_turn = not self.apart and self.bulk_ready
                return self.frame(messages)
        if self.ack_due:
            return self.acknowledgement()
        return None if self.apart or bulk is None else self.next_bulk_frame()

    def next_bulk_frame(self) -> bytes | None:
        """The next frame of the bulk lane, as `next_frame`, for the connection of its own."""
        bulk = self.bulk
        if bulk is None:
            return None
        if bulk.again:
            return bulk.again.popleft()
        if bulk.full:
            return None
        chunk = self.outbox.next_chunk(after=self.sent)
        return bulk.frame(chunk) if chunk else None

    def abandon(self) -> list[Message]:
        """What the other side has not received, as far as it is still here whole; nothing more may be sent."""
        inbox = ChunkInbox(MAX_MESSAGE)
        left: list[Message] = []

        def collect(messages: Iterable[Message]) -> None:
            for message in messages:
                with contextlib.suppress(ProtocolMismatch):  # a chunk whose first ones were received
                    complete = inbox.receive(message)
                    if complete is not None:
                        left.append(complete)

        for frame in (*self.kept, *(self.bulk.kept if self.bulk is not None else ())):
            collect(decode_frame(memoryview(frame)[LENGTH.size :]).messages)
        self.kept.clear()
        outbox = self.outbox
        while outbox or outbox.waits:
            outbox.settle(outbox.chunks)
            collect(outbox.next_frame())
        return left

    def expects(self, ident: int, first_chunk: int = 0) -> bool:
        """Whether a large message with that id has not come whole, or is held.

        Args:
            first_chunk: number of the message's first chunk if that may not have come; see `ChunkOutbox`.
        """
        bulk = self.bulk
        if bulk is None:
            return self._inbox.expects(ident)
        with bulk.lock:
            here = any(message.id == ident for message, _ in (*self._arrived, *self._held))
            return here or bulk.received < first_chunk or self._inbox.expects(ident)

    def receive(self, data: Buffer) -> Sequence[Message]:
        """Take one frame; return the messages that may be delivered now. One that had come already is passed over.

        Raises:
            ProtocolMismatch: the bytes are not a frame that could come next.
            TooLarge: a message is over the limit.
        """
        frame = decode_frame(data)
        if frame.lane:
            self._receive_chunk(frame, len(data))
            return self.arrived()
        if frame.seq == 0:
            strange = [message.kind for message in frame.messages if message.kind not in _UNNUMBERED]
            if strange:
                raise ProtocolMismatch(f"messages of kinds {strange} came outside the numbered stream")
            self._acknowledge(frame.ack)
            return frame.messages
        self._acknowledge(frame.ack)
        # A large message that was acknowledged before the frame was sent may still wait here: it comes first.
        whole = self.arrived() if self._held or self._arrived else []
        if not self._is_new(frame.seq):
            return whole
        self._came(frame.seq, len(data))
        for message in frame.messages:
            if message.kind != _CHUNK:
                whole.append(message)
            elif (complete := self._inbox.receive(message)) is not None:
                whole.append(complete)
        if self._held or self._arrived:
            whole += self.arrived()  # what came behind the frame
        return whole

    def receive_bulk(self, data: Buffer) -> bool:
        """Take one frame from the connection of the bulk lane; whether it completes a message, see `arrived`.

        Raises:
            ProtocolMismatch, TooLarge: as `receive`.
        """
        frame = decode_frame(data)
        # What the gateway says by itself it says on the other connection, too.
        return bool(frame.lane) and self._receive_chunk(frame, len(data))

    def _receive_chunk(self, frame: Frame, size: int) -> bool:
        bulk = self.bulk
        if bulk is None or any(message.kind != Kind.CHUNK for message in frame.messages):
            raise ProtocolMismatch("what came on the bulk lane does not belong there")
        whole = False
        with bulk.lock:
            if bulk.take(frame.seq, frame.ack):
                for message in frame.messages:
                    complete = self._inbox.receive_chunk(message)
                    if complete is not None:
                        self._arrived.append(complete)
                        whole = True
                bulk.took(frame.seq, size, whole)
            bulk.news = True
        return whole

    @property
    def holds(self) -> bool:
        """Whether a large message has come whole that nobody has taken from `arrived`."""
        return bool(self._arrived or self._held)

    def arrived(self) -> list[Message]:
        """The large messages of the bulk lane that may be delivered now. For the thread of `receive`."""
        while self._arrived:
            self._held.append(self._arrived.popleft())
        ready = [message for message, after in self._held if after <= self.received]
        if ready:
            self._held = [(message, after) for message, after in self._held if after > self.received]
        return ready
