"""One end of a stream: messages in, frames out, and back, across lost connections.

`Stream` numbers the frames that it sends and checks the numbers of those that come. The first frame of each side is
the handshake and has number 0. All later frames are numbered from 1. Frames of the other direction acknowledge
them; if there are none, an empty frame of number 0 does. A frame is kept until it is acknowledged. When a
connection is lost, each side begins the next one with the number of the last frame that it has received, and the
other side sends its later kept frames again. So every message arrives once, in order.

`WINDOW` limits the bytes of kept frames. While it is full, nothing new is sent until some frames are acknowledged.

If both sides know lanes, the chunks of large messages have numbers and a window of their own: the bulk lane. One
connection can carry both lanes, in turns. A second connection may carry the bulk lane, so that a small message does
not wait behind megabytes in the network's queues. While there is no second connection, the first carries both.
Acknowledgements of both lanes go over the first, where they are not behind bulk, and frames may bring them as well.

The order of `loom.wire.mux` holds across lanes. A small message that must not overtake a large one waits in the
outbox until the large one has been acknowledged. A large message that must not overtake small ones names, in its
head, the frame that comes before it, and the receiver holds it until that frame has come. So only one of the two
lanes ever waits for the other.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from loom.errors import ProtocolMismatch, TooLarge
from loom.wire.frames import WireFrame, decode_frame, encode_frame, sealed
from loom.wire.length_prefix import LENGTH, behind_length
from loom.wire.messages import Buffer, Kind, Message
from loom.wire.mux import MAX_MESSAGE, ChunkInbox, ChunkOutbox, OrderKey

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
        """True if `ACK_FRAMES` or `ACK_BYTES` have come without an acknowledgement."""
        return self.received - self._told >= ACK_FRAMES or self._untold_bytes >= ACK_BYTES

    @property
    def untold(self) -> bool:
        """True if this side has received frames that it has not acknowledged."""
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
        """True if a message has come whole, which must be acknowledged at once, since others may wait for it."""
        self.news = False
        """True if a frame has come since the sending thread last looked."""
        self.probes: deque[Message] = deque()
        """Questions and answers of `loom.wire.lost_frames` that came on the lane's own connection."""

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


MOST_DAMAGES = 10
"""Frames in a row that cannot be read until the other side counts as one that does not speak the protocol."""

_CHUNK = int(Kind.CHUNK)
"""A plain int, since every message is compared with it, and a member of an enum takes twice as long to compare."""

_PROBES = frozenset({Kind.PROBE, Kind.PROBED})
_UNNUMBERED = frozenset({Kind.HELLO, Kind.WELCOME, Kind.REFUSE, Kind.OPEN, Kind.ENDED, Kind.EVENT, *_PROBES})
"""Kinds of message outside the numbered stream. An event there is from the gateway itself (``draining``)."""


def unnumbered_frame(message: Message) -> list[Buffer]:
    """Return a frame outside the numbered stream, for the handshake and for the gateway's own messages."""
    return encode_frame(0, 0, [sealed(message)])


class Stream(Lane):
    """One end of the numbered messages of one client, and, as a `Lane`, the lane of its small messages.

    One thread may receive while another sends, and a third receives from the connection of the bulk lane. Without
    ``lanes``, which both sides must know, chunks and small messages share one lane. With ``keeps_whole``, `abandon`
    also returns large messages of which a part has arrived, if there are lanes.
    """

    def __init__(
        self,
        max_message: int = MAX_MESSAGE,
        in_pieces: Collection[int] = (),
        lanes: bool = False,
        keeps_whole: bool = False,
    ) -> None:
        super().__init__()
        self.outbox = ChunkOutbox(lanes, keeps_whole)
        self._inbox = ChunkInbox(max_message, in_pieces)
        self.bulk = BulkLane() if lanes else None
        self.apart = False
        """True if the bulk lane has a connection of its own."""
        self._damages = 0  # frames that could not be read since `_damaged_at`
        self._damaged_at = (0, 0)  # `received_of_both` at the last frame that could not be read
        self._chunk_turn = False  # whether the bulk lane has the next turn on the connection that both lanes share
        self._arrived: deque[tuple[Message, int]] = deque()
        """Large messages that have come whole on the bulk lane, each with the frame that must come before it."""
        self._held: list[tuple[Message, int]] = []  # messages from `_arrived` that wait for an earlier frame

    def incoming(self) -> tuple[int, int]:
        return self._inbox.incoming()

    def put(self, message: Message, key: OrderKey = None) -> None:
        self.outbox.put(message, key)

    @property
    def ready(self) -> bool:
        """True if `next_frame` may return a frame."""
        if self.again or self.due:
            return True
        if self.bulk is None:
            return bool(self.outbox) and self.kept_bytes < WINDOW
        return (self.outbox.has_small and self.kept_bytes < WINDOW) or (not self.apart and self.bulk_ready)

    @property
    def bulk_ready(self) -> bool:
        """True if `next_bulk_frame` returns a frame."""
        bulk = self.bulk
        return bulk is not None and (bool(bulk.again) or (not bulk.full and self.outbox.has_chunks))

    @property
    def due(self) -> bool:
        """True if received frames make an acknowledgement due, or may let waiting messages leave."""
        return self.ack_due or (self.bulk is not None and self.bulk.news)

    @property
    def unsettled(self) -> bool:
        """True if messages wait for the bulk lane, or frames of its own connection are not acknowledged."""
        return self.outbox.waits or (self.bulk is not None and self.apart and self.bulk.kept_bytes > 0)

    def given_out(self, bulk: bool) -> tuple[int, int]:
        """Return the last frames of both lanes given out for a connection: the first, or the ``bulk`` lane's own.

        The number of a lane that the connection does not carry is 0.
        """
        lane = self.bulk
        return 0 if bulk else self.on_wire, 0 if lane is None or bulk != self.apart else lane.on_wire

    @property
    def received_of_both(self) -> tuple[int, int]:
        """The numbers of the last frames of both lanes that have come."""
        return self.received, 0 if self.bulk is None else self.bulk.received

    @property
    def payload_ahead(self) -> int:
        """Bytes of payload that wait to leave on the connection of the small messages."""
        return self.outbox.small_bytes if self.apart else self.outbox.pending_bytes

    def next_frame(self) -> bytes | None:
        """Take the next frame to send, behind its length; None if there is none, or the window is full."""
        if self.again:
            return self.again.popleft()
        outbox, bulk = self.outbox, self.bulk
        if bulk is not None:
            if bulk.news:
                bulk.news = False  # before it is used, so that news that comes meanwhile is not lost
                outbox.settle(bulk.acknowledged)
                if bulk.ack_due:
                    return bulk.acknowledgement()
            if self._chunk_turn:
                self._chunk_turn = False
                # Not if the bulk lane has got its own connection since: its frames must stay in order on that.
                if not self.apart and (frame := self.next_bulk_frame()) is not None:
                    return frame
        if outbox and self._bytes_sent - self._bytes_acknowledged < WINDOW:
            messages = outbox.next_frame() if bulk is None else outbox.next_small()
            if messages:
                self._chunk_turn = not self.apart and self.bulk_ready
                return self._small_frame(messages)
        if self.ack_due:
            return self.acknowledgement()
        return None if self.apart or bulk is None else self.next_bulk_frame()

    def _small_frame(self, messages: list[Message]) -> bytes:
        """Return the next frame with some messages; those whose heads do not fit into its header wait again."""
        while True:
            try:
                return self.frame(messages)
            except TooLarge:
                if len(messages) == 1:
                    raise
            half = len(messages) // 2
            self.outbox.put_back(messages[half:])
            messages = messages[:half]

    def next_bulk_frame(self) -> bytes | None:
        """Take the bulk lane's next frame, behind its length; None if there is none, or its window is full."""
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
        """Return the messages that the other side has not received, as far as they are still whole here.

        Nothing may be sent afterwards.
        """
        outbox = self.outbox
        if self.bulk is not None:
            outbox.settle(self.bulk.acknowledged)
        inbox = ChunkInbox(MAX_MESSAGE)
        left: list[Message] = []

        def collect(messages: Iterable[Message]) -> None:
            for message in messages:
                with contextlib.suppress(ProtocolMismatch):  # a chunk of a message whose first chunks are not kept
                    complete = inbox.receive(message)
                    if complete is not None:
                        left.append(complete)

        chunks = () if self.bulk is None or outbox.abandons_whole else self.bulk.kept
        for frame in (*self.kept, *chunks):
            collect(decode_frame(memoryview(frame)[LENGTH.size :]).messages)
        self.kept.clear()
        if outbox.abandons_whole:
            return left + outbox.abandon()
        while outbox or outbox.waits:
            outbox.settle(outbox.chunks)
            collect(outbox.next_frame())
        return left

    def expects(self, ident: int, first_chunk: int = 0) -> bool:
        """Return whether a large message has not come whole, or is held; ``first_chunk``: see `ChunkOutbox`."""
        bulk = self.bulk
        if bulk is None:
            return self._inbox.expects(ident)
        with bulk.lock:
            here = any(message.id == ident for message, _ in (*self._arrived, *self._held))
            return here or bulk.received < first_chunk or self._inbox.expects(ident)

    def receive(self, data: Buffer) -> Sequence[Message]:
        """Take one frame; return the messages that may be delivered now. A frame that came before is ignored.

        Raises:
            OutOfStep: frames are missing, or the line has damaged this one: connect anew and resume.
            ProtocolMismatch: the other side does not speak the protocol.
        """
        frame = self._decoded(data)
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
        # A large message that was acknowledged before this frame was sent may still wait here, and goes first.
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
            whole += self.arrived()  # large messages that waited for this frame
        return whole

    def receive_bulk(self, data: Buffer) -> bool:
        """Take one frame from the bulk lane's connection; return whether it completes a message for `arrived`.

        Raises as `receive`.
        """
        frame = self._decoded(data)
        if frame.lane:
            return self._receive_chunk(frame, len(data))
        # Other frames of lane 0 are the gateway's own messages, which it also sends on the other connection.
        if self.bulk is not None:
            self.bulk.probes += [message for message in frame.messages if message.kind in _PROBES]
        return False

    def _decoded(self, data: Buffer) -> WireFrame:
        try:
            return decode_frame(data)
        except ProtocolMismatch as error:
            received = self.received_of_both
            self._damages = self._damages + 1 if received == self._damaged_at else 1
            self._damaged_at = received
            if self._damages > MOST_DAMAGES:
                raise
            raise OutOfStep(str(error)) from error

    def _receive_chunk(self, frame: WireFrame, size: int) -> bool:
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
        """True if a large message has come whole and `arrived` has not returned it."""
        return bool(self._arrived or self._held)

    def arrived(self) -> list[Message]:
        """Take the bulk lane's large messages that may be delivered now. For the thread that calls `receive`."""
        while self._arrived:
            self._held.append(self._arrived.popleft())
        ready = [message for message, after in self._held if after <= self.received]
        if ready:
            self._held = [(message, after) for message, after in self._held if after > self.received]
        return ready
