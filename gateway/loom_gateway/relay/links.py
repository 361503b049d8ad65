"""`DriverLink`, the gateway's end of a connection to a driver, and the interface of the client's end.

`RelayTurns` share the event loop's time among users while frames come faster than they can be handled. An event
loop handles everything that a socket has before it looks at the next one, and 256 KiB of the smallest frames take
it a second. So `MESSAGES` messages of one connection are handled at once. The rest waits, and nothing more is read
from that connection. Of the connections of a user that wait, one goes on in each round of the loop: a user who
sends more waits for longer, and others do not.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from loom.errors import ProtocolMismatch
from loom.wire.frames import decode_frame
from loom.wire.length_prefix import LENGTH, MAX_FRAME
from loom.wire.messages import Buffer, Kind
from loom.wire.websocket import joined
from loom_gateway.sessions.driver_process import DriverProcess
from loom_gateway.sessions.session import Traffic

MESSAGES = 128
"""Messages of one connection that are handled at once: one to two milliseconds."""

SLICE = 1 << 10
"""Bytes of one connection that are parsed at once while they may be control frames, which take 6 bytes each."""


class RelayTurns:
    """The connections that wait for their turn, by user."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        """The continuation of each connection that waits, the one that waits longest first."""

    def wait(self, user: str, go_on: Callable[[], None]) -> None:
        """Call ``go_on`` in a later round of the event loop, after what waits of the same user."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._next_round)
        self._waiting.setdefault(user, deque()).append(go_on)

    async def turn(self, user: str) -> None:
        """Wait for a turn of a user."""
        mine = asyncio.get_running_loop().create_future()
        self.wait(user, lambda: None if mine.done() else mine.set_result(None))
        await mine

    def _next_round(self) -> None:
        due = [(user, of_user.popleft()) for user, of_user in self._waiting.items()]
        for user, _ in due:
            if not self._waiting[user]:
                del self._waiting[user]
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next_round)
        for _, go_on in due:
            go_on()


_HIGH_WATER = 512 << 10
"""Bytes that may wait for the other side before reading pauses. A small call waits behind all of them."""

MAX_DRIVER_FRAME = MAX_FRAME + 4096
"""Bytes of a driver's largest frame, as of a client's. The user's code in the driver can write any length."""

_FAREWELL = 4096  # bytes of the largest frame that may be a driver's farewell


class FrameSink(Protocol):
    """The other side of a link, as the link uses it."""

    def send_frame(self, *pieces: Buffer) -> None:
        """Send the other side a frame, given in pieces. Drop it if the connection is closing."""

    def pause_receiving(self) -> None:
        """Stop taking frames from the other side, because this one takes none for now."""

    def resume_receiving(self) -> None:
        """Take frames from the other side again."""


class ClientSocket(FrameSink, Protocol):
    """A client's connection, as its link to the driver uses it."""

    gone: asyncio.Future[None]
    """Done when the connection is over."""

    def relay_to(self, link: DriverLink) -> None:
        """Send the client's frames to a driver from now on, including those that have arrived."""

    def abort(self) -> None:
        """Close the connection at once, and drop what waits to be sent."""


class DriverLink(asyncio.Protocol):
    """The gateway's end of one connection to a driver, whose frames and bytes it adds to ``traffic``."""

    def __init__(self, traffic: Traffic) -> None:
        self._transport: asyncio.Transport
        self.max_frame = MAX_DRIVER_FRAME
        """Bytes of the largest frame that is taken."""
        self._head = b""  # an incomplete length
        self._pieces: list[Buffer] = []  # the parts of the current frame that have arrived
        self._missing = 0  # bytes of the current frame that have not arrived
        self._last: Sequence[Buffer] = ()  # the last frame, if it may be a farewell
        self._held = False  # whether a frame waits for `relay_to`
        self._client_full = False  # whether the client takes no frames for now
        self.error: ProtocolMismatch | None = None
        """Why the gateway has closed the connection, if the driver breaks the protocol."""
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue()  # frames from before `relay_to`
        self._socket: FrameSink | None = None
        self._traffic = traffic
        self.stream = ""  # the name of the client's stream, when it is known
        self.driver: DriverProcess  # set once it is connected
        self.answer: bytes | None = None  # the driver's answer to the hello
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the driver has closed the connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass
        self._transport.set_write_buffer_limits(high=_HIGH_WATER)

    def relay_to(self, socket: FrameSink) -> None:
        """Send every frame to a client from now on, including those that have arrived."""
        self._socket = socket
        while not self._frames.empty():
            frame = self._frames.get_nowait()
            if frame is not None:
                socket.send_frame(frame)
        self._held = False
        self._read_if_taken()

    async def next(self) -> bytes | None:
        """Return the driver's next frame, before `relay_to`; None if the driver has closed the connection."""
        if self._frames.empty():
            self._held = False
            self._read_if_taken()
        return await self._frames.get()

    def data_received(self, data: bytes) -> None:
        self._traffic.bytes_out += len(data)
        if not self._missing and not self._head and len(data) >= 4 and LENGTH.unpack_from(data)[0] == len(data) - 4:
            self._frame([data[4:]])  # small frames usually arrive whole
            return
        if self._head:
            data = self._head + data
            self._head = b""
        view = memoryview(data)
        position = 0
        while position < len(data):
            if not self._missing:
                if len(data) - position < LENGTH.size:
                    self._head = data[position:]
                    return
                (length,) = LENGTH.unpack_from(data, position)
                if length > self.max_frame:
                    self._refuse(length)
                    return
                self._missing = length
                position += LENGTH.size
            piece = view[position : position + self._missing]
            self._pieces.append(piece)
            self._missing -= len(piece)
            position += len(piece)
            if not self._missing:
                pieces, self._pieces = self._pieces, []
                self._frame(pieces)

    def _refuse(self, length: int) -> None:
        """Close the connection before anything of a frame over the limit is kept."""
        self.error = ProtocolMismatch(
            f"the session's driver announces a frame of {length} bytes, over the limit of {self.max_frame}: code "
            f"of the session has written to the driver's socket"
        )
        self._transport.abort()

    def _frame(self, pieces: Sequence[Buffer]) -> None:
        self._last = pieces if sum(map(len, pieces)) <= _FAREWELL else ()
        if self._socket is not None:
            if self._traffic.observer is not None:
                self._traffic.observer(self.stream, False, pieces)
            self._socket.send_frame(*pieces)
        else:
            self._frames.put_nowait(joined(pieces))
            self._held = True
            self._read_if_taken()

    @property
    def last_word(self) -> int | None:
        """The kind of the driver's last message, if it is one that ends a connection."""
        if not self._last:
            return None
        # Only unnumbered frames matter: numbered ones are between the client and the driver.
        decoded = decode_frame(joined(self._last))
        ends = [message.kind for message in decoded.messages if message.kind in (Kind.ENDED, Kind.REFUSE)]
        return ends[0] if decoded.seq == 0 and ends else None

    def write(self, *pieces: Buffer) -> None:
        """Send a frame to the driver. Drop it if the driver is gone: the client is about to learn of that."""
        if self._transport.is_closing():
            return  # uvloop's transport would raise, and the client's connection would end without an explanation
        if self._traffic.observer is not None:
            self._traffic.observer(self.stream, True, pieces)
        size = sum(map(len, pieces))
        self._traffic.frames += 1
        self._traffic.bytes_in += LENGTH.size + size
        self._send(LENGTH.pack(size), *pieces)

    def _send(self, *pieces: Buffer) -> None:
        self._transport.writelines(pieces)

    def pause_writing(self) -> None:
        if self._socket is not None:
            self._socket.pause_receiving()

    def resume_writing(self) -> None:
        if self._socket is not None:
            self._socket.resume_receiving()

    def pause_reading(self) -> None:
        """Stop reading from the driver, because the client takes no frames for now."""
        self._client_full = True
        self._read_if_taken()

    def resume_reading(self) -> None:
        """Read from the driver again."""
        self._client_full = False
        self._read_if_taken()

    def _read_if_taken(self) -> None:
        """Read from the driver only while somebody takes its frames."""
        if self._transport.is_closing():
            return
        if self._held or self._client_full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._frames.put_nowait(None)
        if not self.closed.done():
            self.closed.set_result(None)

    def close(self) -> None:
        self._transport.close()
