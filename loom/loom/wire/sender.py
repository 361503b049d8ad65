"""Sending the frames of a stream over a socket, from any thread.

The thread that puts a message sends it, as long as the socket takes the bytes at once: handing each message to an
event loop would cost more than sending it. A writer thread sends the bytes that the socket does not take, so that
callers do not wait for the other side. The proxy and the driver both send this way.

If the stream's bulk lane has a connection of its own, that has another writer thread. The thread gives way to small
messages: while some move, it pauses after each frame. Otherwise a gigabyte would keep every processor between the
two ends busy, and a small message would wait for a processor at each step.

The module is long, but the calling threads and both writer threads share one lock and one state of sending, and can
be understood only together.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

from loom.process.threads import keep_going
from loom.wire.messages import Buffer, Message
from loom.wire.mux import OrderKey, Pieces
from loom.wire.stream import Stream

GATHER = 64  # gathered messages at which the calling thread sends them
INLINE = 64 << 10  # bytes of pending payload up to which the calling thread sends by itself

HIGH_WATER = 64 << 20
"""Bytes of pending payload, without the largest message, over which `FrameSender.wait_for_room` waits."""


COPIED = 1 << 20
"""Bytes of arguments up to which they are copied, so that the caller may change them right after the call."""


LATELY = 0.02  # seconds for which bulk gives way to small messages after one has moved

GIVE_WAY = 5.0
"""Length of the pause after a frame of bulk that gives way, as a multiple of the time that the frame took."""

LONGEST_PAUSE = 0.01
"""Seconds of the longest pause after a frame of bulk: on a narrow network bulk waits for the network anyway."""


class Wire(Protocol):
    """A connection that frames are sent over."""

    def encode(self, frame: bytes) -> bytes:
        """Return the bytes that carry a frame, which is given behind its length (`loom.wire.length_prefix`)."""

    def try_send(self, data: Buffer) -> int:
        """Send without waiting; return how many bytes went out. Raises `OSError` when the connection is over."""

    def send_all(self, data: Buffer) -> None:
        """Send, waiting for room. Raises `OSError` when the connection is over."""


def borrowed_bytes(message: Message) -> int:
    """Return how many bytes of a message's payload, without the pickle, their owner may still change."""
    return sum(len(part) for part in message.parts[1:] if _is_borrowed(part))


def _is_borrowed(part: Buffer | Pieces) -> bool:
    return not isinstance(part, Pieces) and not memoryview(part).readonly


def with_copies(message: Message) -> Message:
    """Return the message with copies of the parts that their owner may change."""
    copies = [bytearray(part) if _is_borrowed(part) else part for part in message.parts[1:]]
    return message._replace(parts=[message.parts[0], *copies])


def try_send(sock: socket.socket, data: Buffer) -> int:
    """Send without waiting; return how many bytes went out.

    A KeyboardInterrupt must not lose the count, and with it the place in the stream. So C code puts the count into
    a list, before Python checks for signals.
    """
    sent: list[int] = []
    try:
        sent.extend(map(sock.send, (data,), (socket.MSG_DONTWAIT,)))
    except (BlockingIOError, InterruptedError):
        return 0
    return sent[0]


class _BulkWriter:
    """The thread that sends over a connection of the bulk lane until the connection is over."""

    def __init__(self, sender: FrameSender, wire: Wire, name: str) -> None:
        self._sender = sender
        self.wire = wire
        self.sends = False
        """True if the thread has taken bytes that may not have been sent yet."""
        self.raw = b""
        """Bytes outside the stream to send before the next frame."""
        self._work = threading.Semaphore(0)  # released to wake the thread
        self._woken = False  # whether `_work` was released and the thread has not looked yet
        self._moved = sender.small_frames  # the number of small frames that had moved at the last look
        self._moved_at = -LATELY  # when that number last grew, by `time.monotonic`
        threading.Thread(target=keep_going, args=("send", self._write), name=name, daemon=True).start()

    def wake(self) -> None:
        """Wake the thread to send, or to notice that its connection is over. With the sender's lock held."""
        if not self._woken:
            self._woken = True
            self._work.release()

    def _write(self) -> None:
        while True:
            self._work.acquire()
            self._woken = False
            if not self._sender.writes_bulk(self):
                return
            while (taken := self._sender.take_bulk(self)) is not None:
                raw, frame = taken
                began = time.monotonic()
                try:
                    self.wire.send_all(raw + self.wire.encode(frame) if frame is not None else raw)
                except OSError:
                    self._sender.detach_bulk(self.wire)
                self._give_way(began, time.monotonic())

    def _give_way(self, began: float, ended: float) -> None:
        """Pause if small messages move. ``began`` and ``ended`` are the times of sending the last frame."""
        moved = self._sender.small_frames
        if moved != self._moved:
            self._moved, self._moved_at = moved, ended
        if ended - self._moved_at < LATELY:
            time.sleep(min(GIVE_WAY * (ended - began), LONGEST_PAUSE))


class FrameSender:
    """The sending half of a stream, over one connection after the other. Any thread may call any method.

    The receiving thread notices that a connection is over, so sending does not raise. Later messages wait for the
    next connection, or are dropped if the sender has been closed.
    """

    def __init__(self, stream: Stream, name: str) -> None:
        self._stream = stream
        self._name = name
        self._wire: Wire | None = None
        self._bulk: _BulkWriter | None = None
        """The writer thread of the bulk lane while that has a connection of its own."""
        self._lock = threading.Lock()
        """Held while frames are taken from the stream and sent: they must leave in the order of their numbers."""
        self._rest: Buffer = b""
        """The rest of the last frame, which the socket did not take. It must be sent before anything else."""
        self._writer_sends = False
        """True if the writer thread is sending, without the lock: no other thread may send meanwhile."""
        self._work = threading.Semaphore(0)  # released to wake the writer thread
        self._woken = False
        """True if `_work` was released and the thread has not woken yet. Releasing again costs a system call."""
        self.has_room = True
        """True if `wait_for_room` returns at once."""
        self._idle = threading.Condition(self._lock)
        """Notified when nothing is left to send, when there is room, and, for `_watchers`, after each frame."""
        self._watchers = 0
        """Threads that wait for single frames to leave. Notifying without any would slow every call."""
        self._closed = False
        self._stalled = False  # whether the queued messages wait for acknowledgements
        threading.Thread(target=keep_going, args=("send", self._write), name=name, daemon=True).start()

    def attach(self, wire: Wire, received: int = 0, received_bulk: int = 0) -> None:
        """Send over a new connection, whose other side has received each lane's frames up to a number."""
        with self._lock:
            self._stream.resume(received)
            bulk = self._stream.bulk
            if bulk is not None and not self._stream.apart:
                bulk.resume(received_bulk)
            self._wire = wire
            self._rest = b""
            self._wake_writer()

    def detach(self, wire: Wire | None = None) -> None:
        """Stop sending over a connection, or over any. Do nothing if another has taken its place."""
        with self._idle:
            if wire is None or wire is self._wire:
                self._wire = None
                self._rest = b""
                self._idle.notify_all()

    def attach_bulk(self, wire: Wire, received: int) -> None:
        """Send the bulk lane over its own connection, whose other side has its frames up to a number."""
        with self._lock:
            assert self._stream.bulk is not None
            self._stream.bulk.resume(received)
            if not self._closed:
                self._replace_bulk(_BulkWriter(self, wire, f"{self._name}-bulk"))

    def detach_bulk(self, wire: Wire) -> None:
        """Send the bulk lane over the first connection again. Do nothing if ``wire`` no longer carries the lane."""
        with self._idle:
            if self._bulk is not None and wire is self._bulk.wire:
                assert self._stream.bulk is not None
                self._stream.bulk.resume()
                self._replace_bulk(None)
                self._wake_writer()
                self._idle.notify_all()

    def _replace_bulk(self, writer: _BulkWriter | None) -> None:
        previous, self._bulk = self._bulk, writer
        self._stream.apart = writer is not None
        for each in (previous, writer):
            if each is not None:
                each.wake()

    def writes_bulk(self, writer: _BulkWriter) -> bool:
        """Return whether the connection of a writer still carries the bulk lane."""
        return writer is self._bulk

    def take_bulk(self, writer: _BulkWriter) -> tuple[bytes, bytes | None] | None:
        """Return the bytes outside the stream and the frame that a writer must send next; None without either."""
        with self._idle:
            frame = self._stream.next_bulk_frame() if writer is self._bulk else None
            raw, writer.raw = writer.raw, b""
            writer.sends = frame is not None or bool(raw)
            self._see_room()
            if self._watchers:
                self._idle.notify_all()
            return (raw, frame) if writer.sends else None

    def put_raw_bulk(self, data: bytes) -> None:
        """Send bytes outside the stream over the connection of the bulk lane."""
        with self._lock:
            if self._bulk is not None:
                self._bulk.raw += data
                self._bulk.wake()

    @property
    def small_frames(self) -> int:
        """The number of frames of small messages that have been sent and received."""
        return self._stream.sent + self._stream.received

    @property
    def attached(self) -> bool:
        return self._wire is not None

    def received(self) -> None:
        """Note that a frame has come, and send the messages and acknowledgements that it makes due."""
        stream = self._stream
        if stream.due or (self._stalled and stream.ready):
            self.flush()

    def put(self, message: Message, key: OrderKey = None, eager: bool = True) -> bool:
        """Send a message, later with others if it is not ``eager``; return False if the sender is closed."""
        with self._lock:
            if self._closed:
                return False
            outbox = self._stream.outbox
            outbox.put(message, key)
            pending = outbox.pending_bytes
            if pending > INLINE:
                self._wake_bulk()
                if pending > HIGH_WATER and outbox.backlog > HIGH_WATER:
                    self.has_room = False
            # Nearly always so little is pending that `payload_ahead` need not be computed.
            if (pending <= INLINE or self._stream.payload_ahead <= INLINE) and (eager or len(outbox) >= GATHER):
                self._pump()
            elif not self._woken:
                self._wake_writer()
            return True

    def gather(self, message: Message) -> bool:
        """Queue a message without an order key, to `flush` later; return False if the sender is closed."""
        with self._lock:
            if self._closed:
                return False
            outbox = self._stream.outbox
            outbox.put(message)
            if outbox.pending_bytes > INLINE:
                self._wake_bulk()
                if self._stream.payload_ahead > INLINE:
                    self._wake_writer()
            return True

    def withdraw(self, ident: int) -> bool:
        """Withdraw the message with an id; return False if it has left, or begun to."""
        with self._lock:
            withdrawn = self._stream.outbox.withdraw(ident)
            self._see_room()
            self._wake_bulk()
            return withdrawn

    def first_chunk(self, ident: int) -> int:
        with self._lock:
            return self._stream.outbox.first_chunk(ident)

    def put_raw(self, data: Buffer) -> None:
        """Send bytes outside the stream, such as a frame without a number."""
        with self._lock:
            if self._wire is not None:
                self._rest = bytes(self._rest) + data
                self._wake_writer()

    def put_behind(self, make: Callable[[], bytes], bulk: bool = False) -> None:
        """Send a frame without a number behind all that were taken; ``make`` returns it, behind its length.

        With ``bulk``, send it over the connection of the bulk lane. Do nothing without a connection.
        """
        with self._lock:
            if bulk and self._bulk is not None:
                self._bulk.raw += self._bulk.wire.encode(make())
                self._bulk.wake()
            elif not bulk and self._wire is not None:
                self._rest = bytes(self._rest) + self._wire.encode(make())
                self._wake_writer()

    def flush(self) -> None:
        """Send the gathered messages, as far as the socket takes them at once."""
        if self._stream.ready:
            with self._lock:
                if self._stream.payload_ahead > INLINE:
                    self._wake_writer()
                else:
                    self._pump()

    @property
    def backlog(self) -> int:
        with self._lock:
            return self._stream.outbox.backlog

    def wait_for_room(self, timeout: float | None = None, on: Wire | None = None) -> bool:
        """Wait while more than `HIGH_WATER` bytes are pending; return False after ``timeout`` seconds.

        With ``on``, the wait also ends when that connection is no longer the one to send over.
        """
        if self.has_room:
            return True
        with self._idle:
            return self._idle.wait_for(lambda: self.has_room or (on is not None and on is not self._wire), timeout)

    def wait_until_taken(self, ident: int, timeout: float | None = None) -> bool:
        """Wait until the message with an id has been copied to be sent; return False after ``timeout`` seconds."""
        with self._idle:
            return self._watch(lambda: self._closed or not self._stream.outbox.holds(ident), timeout)

    def _watch(self, done: Callable[[], bool], timeout: float | None) -> bool:
        self._watchers += 1
        try:
            return self._idle.wait_for(done, timeout)
        finally:
            self._watchers -= 1

    def drain(self, timeout: float) -> bool:
        """Wait until everything has been sent; return False if it has not within ``timeout`` seconds.

        Frames of a bulk lane's own connection must also have arrived, since later bytes here could overtake them.
        """
        with self._idle:
            self._pump()
            return self._watch(lambda: self._wire is None or not self._sends, timeout)

    def drain_while_it_moves(self, timeout: float) -> bool:
        """Wait as `drain` does, as long as some of it leaves or arrives every ``timeout`` seconds."""
        before, now = None, self._position
        while before != now and not self.drain(timeout):
            before, now = now, self._position
        return not self.has_rest

    @property
    def has_rest(self) -> bool:
        """True if a message, or a part of one, has not been sent."""
        with self._lock:
            return self._sends

    @property
    def _position(self) -> tuple[int, ...]:
        """Numbers that change when a frame or a part of one leaves or arrives."""
        stream, bulk = self._stream, self._stream.bulk
        lanes = (stream,) if bulk is None else (stream, bulk)
        return len(self._rest), *(number for lane in lanes for number in (lane.sent, lane.acknowledged))

    @property
    def _sends(self) -> bool:
        """True if anything is still pending. With the lock held."""
        stream, bulk = self._stream, self._bulk
        if self._rest or self._writer_sends or stream.ready or stream.unsettled:
            return True
        return bulk is not None and (bulk.sends or stream.bulk_ready)

    def close(self) -> None:
        with self._idle:
            self._closed = True
            self._wire = None
            self._replace_bulk(None)
            self.has_room = True
            self._idle.notify_all()
        self._work.release()

    def _pump(self) -> None:
        """Send frames until there are none or the socket is full. With the lock held."""
        if self._writer_sends or self._rest:
            self._wake_writer()
            return
        while (wire := self._wire) is not None and (frame := self._next()) is not None:
            data = wire.encode(frame)
            try:
                sent = wire.try_send(data)
            except OSError:
                self._wire = None
                return
            if sent < len(data):
                self._rest = memoryview(data)[sent:]
                self._wake_writer()
                return

    def _next(self) -> bytes | None:
        frame = self._stream.next_frame()
        self._stalled = frame is None and bool(self._stream.outbox)
        if frame is None:
            self._wake_bulk()  # messages that left, or were acknowledged, may have released large ones
        if self._watchers:
            self._idle.notify_all()
        return frame

    def _see_room(self) -> None:
        if not self.has_room and self._stream.outbox.backlog < HIGH_WATER // 2:
            self.has_room = True
            self._idle.notify_all()

    def _wake_bulk(self) -> None:
        if self._bulk is not None and self._stream.bulk_ready:
            self._bulk.wake()

    def _wake_writer(self) -> None:
        if not self._woken:
            self._woken = True
            self._work.release()

    def _write(self) -> None:
        while not self._closed:
            self._work.acquire()
            self._woken = False
            while (taken := self._take()) is not None:
                wire, data = taken
                try:
                    wire.send_all(data)  # without the lock, since it may wait long for the other side
                except OSError:
                    self.detach(wire)

    def _take(self) -> tuple[Wire, Buffer] | None:
        """Return the connection and the bytes that the writer thread must send next."""
        with self._idle:
            wire, data = self._wire, self._rest
            self._rest = b""
            if wire is not None and not data and (frame := self._next()) is not None:
                data = wire.encode(frame)
            self._writer_sends = bool(data)
            self._see_room()
            if wire is None or not data:
                self._idle.notify_all()
                return None
            return wire, data
