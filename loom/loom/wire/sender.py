"""Sending the frames of a stream over a socket, from whichever thread has something to say.

The thread that puts a message sends it, as long as the socket takes the bytes at once: to hand each over to an
event loop would cost more than to send it. What the socket does not take is left to a writer thread, so that nobody
waits for the other side. The proxy and the driver both send this way.

Where the stream's bulk lane has a connection of its own, that has a writer thread of its own. It gives way to small
messages: while some move it pauses after each frame, since a gigabyte would keep every processor between the two
ends busy, and a small message wait for one at each step.

One module, though a long one: the calling threads and both writer threads share one lock and one notion of what is
still to be sent, and are understood together only.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Protocol

from loom.wire.messages import Buffer, Message
from loom.wire.mux import OrderKey, Pieces
from loom.wire.stream import Stream

GATHER = 64
"""Messages that are gathered at most before they are sent."""

INLINE = 64 << 10
"""Bytes of payload up to which the calling thread sends by itself."""

HIGH_WATER = 64 << 20
"""Bytes of payload waiting to be sent, besides those of one message, over which `wait_for_room` waits."""


COPIED = 1 << 20
"""Bytes of arguments up to which they are copied, so that the caller may change its own right after the call."""


LATELY = 0.02
"""Seconds after a small message has moved during which bulk gives way to the next one."""

GIVE_WAY = 5.0
"""How long bulk pauses then after a frame, in proportion to the time that the frame took."""

LONGEST_PAUSE = 0.01
"""Seconds that bulk pauses at most after a frame: on a narrow line it waits for the line anyway."""


class Wire(Protocol):
    """What frames are sent over."""

    def encode(self, frame: bytes) -> bytes:
        """The bytes that carry a frame, which is given behind its length (`loom.wire.stream.LENGTH`)."""

    def try_send(self, data: Buffer) -> int:
        """Send without waiting; return how many bytes went out. Raises `OSError` when the connection is over."""

    def send_all(self, data: Buffer) -> None:
        """Send, waiting for room. Raises `OSError` when the connection is over."""


def borrowed_bytes(message: Message) -> int:
    """Bytes of a message's payload, but for its pickle, that their owner may change before they are sent."""
    return sum(len(part) for part in message.parts[1:] if _is_borrowed(part))


def _is_borrowed(part: Buffer | Pieces) -> bool:
    return not isinstance(part, Pieces) and not memoryview(part).readonly


def with_copies(message: Message) -> Message:
    """A message that keeps what it has now, whatever its owner does."""
    copies = [bytearray(part) if _is_borrowed(part) else part for part in message.parts[1:]]
    return message._replace(parts=[message.parts[0], *copies])


def try_send(sock: socket.socket, data: Buffer) -> int:
    """Send without waiting; return how many bytes went out.

    The count survives a KeyboardInterrupt in between, which would otherwise lose it and with it the place in the
    stream: the list is filled by C code, before Python looks for signals.
    """
    sent: list[int] = []
    try:
        sent.extend(map(sock.send, (data,), (socket.MSG_DONTWAIT,)))
    except (BlockingIOError, InterruptedError):
        return 0
    return sent[0]


class _BulkWriter:
    """The thread that sends over a connection of the bulk lane, until that is over."""

    def __init__(self, sender: FrameSender, wire: Wire, name: str) -> None:
        self._sender = sender
        self.wire = wire
        self.sends = False
        """Whether it has taken something that may not have been sent yet."""
        self.raw = b""
        """What is to be sent before the next frame and is no part of the stream."""
        self._work = threading.Semaphore(0)
        self._woken = False
        self._moved = sender.small_frames
        """How many small frames had moved when it looked last."""
        self._moved_at = -LATELY
        """When it last found more of them than before."""
        threading.Thread(target=self._write, name=name, daemon=True).start()

    def wake(self) -> None:
        """Have it look for what there is to send, or notice that it is over. With the sender's lock held."""
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
        """Pause if small messages move, after a frame that was sent between two times."""
        moved = self._sender.small_frames
        if moved != self._moved:
            self._moved, self._moved_at = moved, ended
        if ended - self._moved_at < LATELY:
            time.sleep(min(GIVE_WAY * (ended - began), LONGEST_PAUSE))


class FrameSender:
    """The sending half of a stream, over one connection after the other. Any thread may call any method.

    A connection that is over is noticed by whoever receives from it, so sending does not raise: what is put in
    afterwards waits for the next connection, or goes nowhere if the sender has been closed.
    """

    def __init__(self, stream: Stream, name: str) -> None:
        self._stream = stream
        self._name = name
        """Of its threads."""
        self._wire: Wire | None = None
        """The connection to send over; None while there is none."""
        self._bulk: _BulkWriter | None = None
        """Sends the bulk lane while that has a connection of its own."""
        self._lock = threading.Lock()
        """Held while frames are taken from the stream and sent: they must leave in the order of their numbers."""
        self._rest: Buffer = b""
        """What the socket did not take of the last frame. Nothing else may be sent before it."""
        self._writer_sends = False
        """Whether the writer thread is sending, without the lock: no other thread may send meanwhile."""
        self._work = threading.Semaphore(0)
        """Released to wake the writer thread."""
        self._woken = False
        """Whether that has been done and the thread has not looked yet: to wake it again would be a system call."""
        self.has_room = True
        """Whether `wait_for_room` returns at once."""
        self._idle = threading.Condition(self._lock)
        """Notified when there is nothing left to send, when there is room, and of each frame for `_watchers`."""
        self._watchers = 0
        """Threads that wait for single frames to leave. To notify while there are none would slow every call."""
        self._closed = False
        self._stalled = False
        """Whether what there is to send waits for acknowledgements."""
        threading.Thread(target=self._write, name=name, daemon=True).start()

    def attach(self, wire: Wire, received: int = 0, received_bulk: int = 0) -> None:
        """Send over a new connection, whose other side has received the frames up to a number, and those of bulk.

        Raises:
            ProtocolMismatch: as `Stream.resume`.
        """
        with self._lock:
            self._stream.resume(received)
            bulk = self._stream.bulk
            if bulk is not None and not self._stream.apart:
                bulk.resume(received_bulk)
            self._wire = wire
            self._rest = b""
            self._wake_writer()

    def detach(self, wire: Wire | None = None) -> None:
        """Send no more over a connection, or over any; nothing happens if another has taken its place."""
        with self._idle:
            if wire is None or wire is self._wire:
                self._wire = None
                self._rest = b""
                self._idle.notify_all()

    def attach_bulk(self, wire: Wire, received: int) -> None:
        """Send the bulk lane over a connection of its own, whose other side has received its frames up to a number.

        Raises:
            ProtocolMismatch: as `Stream.resume`.
        """
        with self._lock:
            assert self._stream.bulk is not None
            self._stream.bulk.resume(received)
            if not self._closed:
                self._replace_bulk(_BulkWriter(self, wire, f"{self._name}-bulk"))

    def detach_bulk(self, wire: Wire) -> None:
        """Send the bulk lane over the first connection again; nothing happens if another has taken its place."""
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
        """Whether the connection of that writer carries the bulk lane."""
        return writer is self._bulk

    def take_bulk(self, writer: _BulkWriter) -> tuple[bytes, bytes | None] | None:
        """What that writer is to send next, if anything: bytes as they are, and a frame."""
        with self._idle:
            frame = self._stream.next_bulk_frame() if writer is self._bulk else None
            raw, writer.raw = writer.raw, b""
            writer.sends = frame is not None or bool(raw)
            self._see_room()
            if self._watchers:
                self._idle.notify_all()
            return (raw, frame) if writer.sends else None

    def put_raw_bulk(self, data: bytes) -> None:
        """As `put_raw`, over the connection of the bulk lane."""
        with self._lock:
            if self._bulk is not None:
                self._bulk.raw += data
                self._bulk.wake()

    @property
    def small_frames(self) -> int:
        """How many frames of small messages have been sent and received."""
        return self._stream.sent + self._stream.received

    @property
    def attached(self) -> bool:
        """Whether there is a connection to send over."""
        return self._wire is not None

    def received(self) -> None:
        """Note that a frame has come; send what is due because of it."""
        stream = self._stream
        if stream.due or (self._stalled and stream.ready):
            self.flush()

    def put(self, message: Message, key: OrderKey = None, eager: bool = True) -> bool:
        """Send a message; one that is not ``eager`` may be gathered with those that follow it.

        False once the sender is closed.
        """
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
            # So little is pending nearly always that what is ahead need not be looked at.
            if (pending <= INLINE or self._stream.payload_ahead <= INLINE) and (eager or len(outbox) >= GATHER):
                self._pump()
            elif not self._woken:
                self._wake_writer()
            return True

    def gather(self, message: Message) -> bool:
        """Queue a message that has no order key, to be sent by the `flush` that the caller promises to make.

        False once the sender is closed.
        """
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
        """Take back the message with an id; False if it has left, or begun to."""
        with self._lock:
            withdrawn = self._stream.outbox.withdraw(ident)
            self._see_room()
            self._wake_bulk()
            return withdrawn

    def first_chunk(self, ident: int) -> int:
        """As `loom.wire.mux.ChunkOutbox.first_chunk`."""
        with self._lock:
            return self._stream.outbox.first_chunk(ident)

    def put_raw(self, data: Buffer) -> None:
        """Send bytes that are no part of the stream, such as a frame outside the numbering."""
        with self._lock:
            if self._wire is not None:
                self._rest = bytes(self._rest) + data
                self._wake_writer()

    def flush(self) -> None:
        """Send what has been gathered, as far as the socket takes it at once."""
        if self._stream.ready:
            with self._lock:
                if self._stream.payload_ahead > INLINE:
                    self._wake_writer()
                else:
                    self._pump()

    @property
    def backlog(self) -> int:
        """As `loom.wire.mux.ChunkOutbox.backlog`, which only one thread at a time may look at."""
        with self._lock:
            return self._stream.outbox.backlog

    def wait_for_room(self, timeout: float | None = None, on: Wire | None = None) -> bool:
        """Wait while more than `HIGH_WATER` bytes are waiting to be sent; False after ``timeout`` seconds of it.

        With ``on``, also until that connection is no longer the one to send over.
        """
        if self.has_room:
            return True
        with self._idle:
            return self._idle.wait_for(lambda: self.has_room or (on is not None and on is not self._wire), timeout)

    def wait_until_taken(self, ident: int, timeout: float | None = None) -> bool:
        """Wait until the message with an id has been copied to be sent; False after ``timeout`` seconds of it."""
        with self._idle:
            self._watchers += 1
            try:
                return self._idle.wait_for(lambda: self._closed or not self._stream.outbox.holds(ident), timeout)
            finally:
                self._watchers -= 1

    def drain(self, timeout: float) -> bool:
        """Wait until everything has been sent; False if it has not within ``timeout`` seconds.

        What goes over the connection of the bulk lane has to have arrived: it may be behind what follows here.
        """
        with self._idle:
            self._pump()
            self._watchers += 1
            try:
                return self._idle.wait_for(lambda: self._wire is None or not self._sends, timeout)
            finally:
                self._watchers -= 1

    @property
    def _sends(self) -> bool:
        """Whether anything is still to be sent. With the lock held."""
        stream, bulk = self._stream, self._bulk
        if self._rest or self._writer_sends or stream.ready or stream.unsettled:
            return True
        return bulk is not None and (bulk.sends or stream.bulk_ready)

    def close(self) -> None:
        """Let go of the writer thread and of whoever waits."""
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
            self._wake_bulk()  # what has left or was acknowledged may have let large ones go
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
                    wire.send_all(data)  # without the lock: it may take as long as the other side likes
                except OSError:
                    self.detach(wire)

    def _take(self) -> tuple[Wire, Buffer] | None:
        """What the writer thread is to send next, and over what."""
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
