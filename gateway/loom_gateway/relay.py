"""The WebSocket endpoint: authenticates, finds or starts the session's driver, and relays frames.

After the first frame nothing that passes is decoded: a WebSocket message is a frame, and a frame on the unix
socket is the same bytes behind their length. It is an ASGI application of its own, not a FastAPI route, because
it sits on the path of every call.
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias, cast

from loom.errors import AuthenticationError, LoomError, ProtocolMismatch
from loom.wire.frames import MAX_FRAME, decode_frame
from loom.wire.handshake import Hello, check_protocol, refusal
from loom.wire.messages import Kind, Message
from loom.wire.stream import unnumbered_frame
from loom_gateway.auth import TokenAuthority
from loom_gateway.sessions import Session, SessionManager, SessionState

__all__ = ["Relay"]

logger = logging.getLogger(__name__)

HELLO_TIMEOUT = 10.0
"""Seconds that a client has to say hello."""

EXIT_TIMEOUT = 5.0
"""Seconds that are waited for a driver's exit code once its socket has closed."""

_QUEUE_HIGH = 4 << 20
_QUEUE_LOW = 1 << 20
_LENGTH = struct.Struct(">I")

AsgiScope: TypeAlias = MutableMapping[str, Any]
AsgiReceive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
AsgiSend: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

CLOSE_NORMAL = 1000
CLOSE_REFUSED = 4000


class DriverLink(asyncio.Protocol):
    """The gateway's end of one connection to a driver."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._buffer = bytearray()
        self._frames: deque[bytes] = deque()
        self._queued = 0
        self._reading = True
        self._closed = False
        self._frame_waiter: asyncio.Future[None] | None = None
        self._drain_waiter: asyncio.Future[None] | None = None
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._transport.set_write_buffer_limits(high=_QUEUE_HIGH)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        if not buffer and len(data) >= 4 and _LENGTH.unpack_from(data)[0] == len(data) - 4:
            self._put(data[4:])  # one frame that came whole, as small ones do
            return
        buffer += data
        position = 0
        while len(buffer) - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, position)
            end = position + _LENGTH.size + length
            if end > len(buffer):
                break
            self._put(bytes(memoryview(buffer)[position + _LENGTH.size : end]))
            position = end
        if position:
            del buffer[:position]

    def _put(self, frame: bytes) -> None:
        self._frames.append(frame)
        self._queued += len(frame)
        if self._frame_waiter is not None and not self._frame_waiter.done():
            self._frame_waiter.set_result(None)
        if self._reading and self._queued > _QUEUE_HIGH:
            self._reading = False
            self._transport.pause_reading()

    async def next(self) -> bytes | None:
        """The next frame from the driver; None when the driver has closed the connection."""
        while not self._frames:
            if self._closed:
                return None
            self._frame_waiter = self._loop.create_future()
            await self._frame_waiter
        frame = self._frames.popleft()
        self._queued -= len(frame)
        if not self._reading and self._queued < _QUEUE_LOW:
            self._reading = True
            self._transport.resume_reading()
        return frame

    def write(self, frame: bytes) -> None:
        """Send a frame to the driver."""
        self._transport.writelines((_LENGTH.pack(len(frame)), frame))

    async def drain(self) -> None:
        """Wait until the driver has taken most of what was written."""
        if self._paused and not self._closed:
            self._drain_waiter = self._loop.create_future()
            await self._drain_waiter

    @property
    def must_drain(self) -> bool:
        return self._paused

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._wake(self._drain_waiter)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._wake(self._frame_waiter)
        self._wake(self._drain_waiter)

    @staticmethod
    def _wake(waiter: asyncio.Future[None] | None) -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def close(self) -> None:
        self._transport.close()


class Relay:
    """ASGI application of the path ``/ws/v1``."""

    def __init__(self, manager: SessionManager, authority: TokenAuthority) -> None:
        self._manager = manager
        self._authority = authority

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        await receive()  # websocket.connect
        try:
            self._authority.check(scope["headers"])
        except AuthenticationError as error:
            await _refuse_upgrade(send, 401, error)
            return
        await send({"type": "websocket.accept"})
        try:
            session, link = await self._open(receive)
        except LoomError as error:
            await _say(send, error)
            return
        if session is not None and link is not None:
            await self._serve(session, link, receive, send)

    async def _open(self, receive: AsgiReceive) -> tuple[Session | None, DriverLink | None]:
        """Take the client's hello and pass it to the driver of its session."""
        try:
            event = await asyncio.wait_for(receive(), HELLO_TIMEOUT)
        except asyncio.TimeoutError:
            raise ProtocolMismatch(f"the client did not say hello within {HELLO_TIMEOUT:g} s") from None
        if event["type"] == "websocket.disconnect":
            return None, None
        frame = event.get("bytes")
        if not frame:
            raise ProtocolMismatch("a client begins with a binary message; this one began with text")
        hello = _read_hello(frame)
        check_protocol(hello.protocol, ours="gateway", theirs="client")
        if hello.session is None:
            session = await self._manager.create()
        else:
            session = self._manager.get(hello.session)
        loop = asyncio.get_running_loop()
        try:
            _, link = await loop.create_unix_connection(DriverLink, session.driver.socket_path)
        except OSError:
            raise session.ended_error() from None
        for buffer in (unnumbered_frame(Message(Kind.OPEN, 0, [session.name])), [frame]):
            link.write(b"".join(buffer))
        return session, link

    async def _serve(self, session: Session, link: DriverLink, receive: AsgiReceive, send: AsgiSend) -> None:
        first = await link.next()
        welcomed = first is not None and decode_frame(first).messages[0].kind == Kind.WELCOME
        if first is not None:
            await send({"type": "websocket.send", "bytes": first})
        if not welcomed:
            if first is not None:
                await send({"type": "websocket.close", "code": CLOSE_REFUSED})
            else:
                await self._say_lost(session, send)
            link.close()
            if session.state is SessionState.STARTING:
                await self._manager.end(session, "it could not be opened")
            return
        self._manager.connected(session)
        logger.info("session %s: client connected", session.name)
        outward = asyncio.ensure_future(self._outward(session, link, send))
        try:
            await self._inward(session, link, receive)
        finally:
            link.close()
            outward.cancel()
            self._manager.disconnected(session)
            logger.info("session %s: client disconnected", session.name)

    async def _inward(self, session: Session, link: DriverLink, receive: AsgiReceive) -> None:
        """Client to driver, until the client is gone."""
        while True:
            event = await receive()
            if event["type"] == "websocket.disconnect":
                return
            frame = event.get("bytes")
            if frame:
                session.operations += 1
                link.write(frame)
                if link.must_drain:
                    await link.drain()

    async def _outward(self, session: Session, link: DriverLink, send: AsgiSend) -> None:
        """Driver to client, until the driver is gone."""
        last = b""
        while (frame := await link.next()) is not None:
            last = frame
            await send({"type": "websocket.send", "bytes": frame})
        if _is_farewell(last):
            session.end_reason = session.end_reason or "the client closed it"
            session.move_to(SessionState.ENDING)
            await send({"type": "websocket.close", "code": CLOSE_NORMAL})
        else:
            await self._say_lost(session, send)

    async def _say_lost(self, session: Session, send: AsgiSend) -> None:
        try:
            await asyncio.wait_for(session.driver.exited.wait(), EXIT_TIMEOUT)
        except asyncio.TimeoutError:
            logger.warning("session %s: the driver closed its socket but lives", session.name)
        await _say(send, session.ended_error())


def _read_hello(frame: bytes) -> Hello:
    if len(frame) > MAX_FRAME:
        raise ProtocolMismatch(f"a hello of {len(frame)} bytes is over the limit of {MAX_FRAME}")
    messages = decode_frame(frame).messages
    if len(messages) != 1 or messages[0].kind != Kind.HELLO:
        raise ProtocolMismatch("a client begins with HELLO; this one began with something else")
    return Hello.from_body(messages[0].body)


def _is_farewell(frame: bytes) -> bool:
    # Only unnumbered frames are looked into: a numbered one is the client's and the driver's business.
    if not frame or len(frame) > 4096:
        return False
    decoded = decode_frame(frame)
    return decoded.seq == 0 and any(message.kind == Kind.ENDED for message in decoded.messages)


async def _say(send: AsgiSend, error: LoomError) -> None:
    """Tell the client why the connection ends, and end it."""
    await send({"type": "websocket.send", "bytes": b"".join(unnumbered_frame(refusal(error)))})
    await send({"type": "websocket.close", "code": CLOSE_REFUSED, "reason": error.code})


async def _refuse_upgrade(send: AsgiSend, status: int, error: LoomError) -> None:
    body = json.dumps({"error": {"code": error.code, "message": str(error)}}).encode()
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    await send({"type": "websocket.http.response.start", "status": status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})
