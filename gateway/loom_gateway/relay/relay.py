"""The WebSocket endpoint: authenticates, finds or starts the session's driver, and relays frames.

After the first frame nothing that passes is decoded: a WebSocket message is a frame, and a frame on the unix socket
is the same bytes behind their length. The endpoint is an ASGI application of its own, not a FastAPI route, because
it sits on the path of every call.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request
from websockets.protocol import State

from loom.errors import LoomError, ProtocolMismatch, TooLarge
from loom.wire.bodies import OpenSession
from loom.wire.frames import MAX_FRAME, decode_frame
from loom.wire.handshake import Hello, Welcome, check_protocol, refusal
from loom.wire.messages import Buffer, Kind
from loom.wire.sockets import keep_queues_short
from loom.wire.stream import unnumbered_frame
from loom.wire.websocket import WebSocketFrames, joined, message_head
from loom_gateway.access.control import AccessControl, Principal
from loom_gateway.sessions.draining import Draining
from loom_gateway.sessions.manager import SessionManager
from loom_gateway.sessions.session import Session, SessionState

__all__ = ["ClientSocket", "DriverLink", "Relay", "RelaySocket"]

logger = logging.getLogger(__name__)

HELLO_TIMEOUT = 10.0
"""Seconds that a client has to say hello."""

EXIT_TIMEOUT = 5.0
"""Seconds that are waited for a driver's exit code once its socket has closed."""

CUT_TIMEOUT = 5.0
"""Seconds that a client has to take the news that its token is not good any more."""

_HIGH_WATER = 512 << 10
"""Bytes that wait for the other side before no more are read. All of it is ahead of a small call."""

_SMALL = 16 << 10
"""Bytes up to which joining costs less than writing in pieces."""

_FAREWELL = 4096
"""Bytes of the largest frame that may be a driver's last word."""

_LENGTH = struct.Struct(">I")

AsgiScope: TypeAlias = MutableMapping[str, Any]
AsgiReceive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
AsgiSend: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

CLOSE_NORMAL = 1000
CLOSE_REFUSED = 4000
CLOSE_SUPERSEDED = 4001


class ClientSocket(Protocol):
    """A client's connection, as the link to its driver sees it."""

    def relay_to(self, link: DriverLink) -> None:
        """Send what the client sends from now on to a driver, and what has come already."""

    def send_frame(self, *pieces: Buffer) -> None:
        """Send a frame, given in pieces, to the client; dropped where the connection is closing."""

    def pause_receiving(self) -> None:
        """The driver takes no more for now."""

    def resume_receiving(self) -> None:
        """The driver takes more."""

    def abort(self) -> None:
        """Close the connection without a word, and drop what waits to be sent."""


class RelaySocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket (``websockets-sansio``), with a short way for frames.

    An ASGI application takes each message from a queue in a task of its own. Once a client is connected to its
    driver, frames go straight from one socket's callback to the other socket.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._link: DriverLink | None = None
        self._splitter = WebSocketFrames(MAX_FRAME + 4096)

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if hasattr(self, "scope"):
            self.scope["loom.socket"] = self  # type: ignore[typeddict-unknown-key]

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # A header that HTTP allows and `websockets` does not; uvicorn would leave the client without a word.
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.transport.close()

    def refuse(self, status: int, headers: Mapping[str, str], text: str) -> None:
        """Answer the upgrade with an error. Of one that an application refuses, uvicorn complains in the log."""
        response = self.conn.reject(status, text)
        for name, value in headers.items():
            response.headers.pop(name, None)  # which would keep both
            response.headers[name] = value
        self.conn.send_response(response)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.handshake_complete = self.close_sent = True
        self.transport.close()

    def abort(self) -> None:
        """Close the connection without a word, and drop what waits to be sent."""
        self.transport.abort()

    def relay_to(self, link: DriverLink) -> None:
        """Send every binary message from now on to a driver, and what has come already."""
        self._link = link
        keep_queues_short(self.transport.get_extra_info("socket"))
        while not self.queue.empty():
            event = self.queue.get_nowait()
            if event["type"] == "websocket.receive":
                link.write(event.get("bytes") or b"")
            else:
                self.queue.put_nowait(event)
                break

    def data_received(self, data: bytes) -> None:
        link = self._link
        if link is None:
            super().data_received(data)
            return
        try:
            for is_message, pieces in self._splitter.receive(data):
                if is_message:
                    link.write(*pieces)
                else:
                    super().data_received(joined(pieces))
        except TooLarge as error:
            logger.warning("closing a client's connection: %s", error)
            self.conn.fail(1009, "message too large")
            self.handle_parser_exception()

    def handle_bytes(self, event: Frame) -> None:
        if self._link is None or not event.fin:
            super().handle_bytes(event)
        else:
            self._link.write(bytes(event.data))  # bytes already: no copy

    def send_receive_event_to_app(self) -> None:
        if self._link is None or self.curr_msg_data_type == "text":
            super().send_receive_event_to_app()
        else:  # a message in several WebSocket frames
            self._link.write(b"".join(self.frames))
            self.frames = []

    def send_frame(self, *pieces: Buffer) -> None:
        """Send a binary message; dropped where the connection is closing."""
        if not self.close_sent and not self.disconnected and self.conn.state is State.OPEN:
            head = message_head(sum(map(len, pieces)))
            if len(pieces) == 1 and len(pieces[0]) < _SMALL:
                self.transport.write(head + pieces[0])
            else:
                self.transport.writelines((head, *pieces))

    def pause_receiving(self) -> None:
        self.transport.pause_reading()

    def resume_receiving(self) -> None:
        self.transport.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._link is not None:
            self._link.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._link is not None:
            self._link.resume_reading()


class DriverLink(asyncio.Protocol):
    """The gateway's end of one connection to a driver."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._head = b""
        self._pieces: list[Buffer] = []
        self._missing = 0
        self._last: Sequence[Buffer] = ()
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._socket: ClientSocket | None = None
        self.frames = 0
        """Frames that were sent to the driver."""
        self.bytes_in = 0
        """Bytes of them, with their lengths."""
        self.bytes_out = 0
        """Bytes that came from the driver."""
        self.closed: asyncio.Future[None] = self._loop.create_future()
        """Done when the driver has closed the connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._transport.set_write_buffer_limits(high=_HIGH_WATER)

    def relay_to(self, socket: ClientSocket) -> None:
        """Send every frame from now on to a client, and what has come already."""
        self._socket = socket
        while not self._frames.empty():
            frame = self._frames.get_nowait()
            if frame is not None:
                socket.send_frame(frame)

    async def next(self) -> bytes | None:
        """The next frame from the driver, before `relay_to`; None when the driver has closed the connection."""
        return await self._frames.get()

    def data_received(self, data: bytes) -> None:
        self.bytes_out += len(data)
        if (
            not self._missing
            and not self._head
            and len(data) >= 4
            and _LENGTH.unpack_from(data)[0] == len(data) - 4
        ):
            self._frame([data[4:]])  # one frame that came whole, as small ones do
            return
        if self._head:
            data = self._head + data
            self._head = b""
        view = memoryview(data)
        position = 0
        while position < len(data):
            if not self._missing:
                if len(data) - position < _LENGTH.size:
                    self._head = data[position:]
                    return
                (self._missing,) = _LENGTH.unpack_from(data, position)
                position += _LENGTH.size
            piece = view[position : position + self._missing]
            self._pieces.append(piece)
            self._missing -= len(piece)
            position += len(piece)
            if not self._missing:
                pieces, self._pieces = self._pieces, []
                self._frame(pieces)

    def _frame(self, pieces: Sequence[Buffer]) -> None:
        self._last = pieces if sum(map(len, pieces)) <= _FAREWELL else ()
        if self._socket is not None:
            self._socket.send_frame(*pieces)
        else:
            self._frames.put_nowait(joined(pieces))

    @property
    def last_frame(self) -> bytes:
        """The last frame that came from the driver; empty if it was too large for a farewell."""
        return joined(self._last)

    def write(self, *pieces: Buffer) -> None:
        """Send a frame to the driver; dropped where it is gone, of which the client is about to be told."""
        if self._transport.is_closing():
            return  # uvloop's transport would raise, and the client's connection would end without a word
        size = sum(map(len, pieces))
        self.frames += 1
        self.bytes_in += _LENGTH.size + size
        self._transport.writelines((_LENGTH.pack(size), *pieces))

    def pause_writing(self) -> None:
        if self._socket is not None:
            self._socket.pause_receiving()

    def resume_writing(self) -> None:
        if self._socket is not None:
            self._socket.resume_receiving()

    def pause_reading(self) -> None:
        """The client takes no more for now."""
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """The client takes more."""
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._frames.put_nowait(None)
        if not self.closed.done():
            self.closed.set_result(None)

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()


class Relay:
    """ASGI application of the path ``/ws/v1``."""

    def __init__(self, manager: SessionManager, access: AccessControl, draining: Draining) -> None:
        self._manager = manager
        self._access = access
        self._draining = draining

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        await receive()  # websocket.connect
        await send({"type": "websocket.accept"})
        principal: Principal = scope["loom.principal"]
        try:
            opened = await self._open(receive, principal)
        except LoomError as error:
            await _say(send, error)
            return
        if opened is not None:
            session, link, hello = opened
            await self._serve(session, link, hello, scope["loom.socket"], receive, send, principal)

    async def _open(self, receive: AsgiReceive, principal: Principal) -> tuple[Session, DriverLink, Hello] | None:
        """Take the client's hello and pass it to the driver of its session."""
        try:
            event = await asyncio.wait_for(receive(), HELLO_TIMEOUT)
        except asyncio.TimeoutError:
            raise ProtocolMismatch(f"the client did not say hello within {HELLO_TIMEOUT:g} s") from None
        if event["type"] == "websocket.disconnect":
            return None
        frame = event.get("bytes")
        if not frame:
            raise ProtocolMismatch("a client begins with a binary message; this one began with text")
        hello = _read_hello(frame)
        check_protocol(hello.protocol, ours="gateway", theirs="client")
        self._access.check_hello(principal, hello)
        if hello.session is None:
            self._draining.check_open()
            with self._access.opening(principal, self._manager.sessions()):
                session = await self._manager.create(principal.identity.token)
        else:
            session = self._manager.get(hello.session)
        loop = asyncio.get_running_loop()
        try:
            _, link = await loop.create_unix_connection(DriverLink, session.driver.socket_path)
        except OSError:
            await _await_exit(session)
            raise session.ended_error() from None
        for buffer in (unnumbered_frame(OpenSession(session.name).message()), [frame]):
            link.write(b"".join(buffer))
        return session, link, hello

    async def _serve(
        self,
        session: Session,
        link: DriverLink,
        hello: Hello,
        socket: ClientSocket,
        receive: AsgiReceive,
        send: AsgiSend,
        principal: Principal,
    ) -> None:
        first = await link.next()
        answer = None if first is None else decode_frame(first).messages[0]
        welcomed = answer is not None and answer.kind == Kind.WELCOME
        if answer is not None and welcomed and not Welcome.from_body(answer.body).linger:
            self._manager.persist(session)
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
        if not hello.lane:  # another is the second connection of a client that is counted already
            self._manager.connected(session)
            logger.info("session %s: client connected", session.name)
            self._access.entered(principal, session, hello)
        socket.relay_to(link)
        link.relay_to(socket)
        farewell = asyncio.ensure_future(self._farewell(session, link, send))

        async def cut(error: LoomError) -> None:
            farewell.cancel()
            link.close()
            try:
                await asyncio.wait_for(_say(send, error), CUT_TIMEOUT)
            except asyncio.TimeoutError:  # it takes nothing, not even this
                socket.abort()

        try:
            with self._access.connected(principal, cut), session.traffic.on(link), self._told(hello, socket):
                while (await receive())["type"] != "websocket.disconnect":
                    pass  # text, which no client of ours sends
        finally:
            link.close()
            farewell.cancel()
            if not hello.lane:
                self._access.left(principal, session)
                self._manager.disconnected(session)
                logger.info("session %s: client disconnected", session.name)

    def _told(self, hello: Hello, socket: ClientSocket) -> AbstractContextManager[None]:
        """While a client is to be told that the gateway ends: once, on the first of its connections."""
        if hello.lane or "draining" not in hello.capabilities:
            return nullcontext()
        return self._draining.told(socket.send_frame)

    async def _farewell(self, session: Session, link: DriverLink, send: AsgiSend) -> None:
        """Wait until the driver has closed the connection, and tell the client why."""
        await link.closed
        last = _last_word(link.last_frame)
        if last == Kind.ENDED:
            session.begin_to_end()
            await send({"type": "websocket.close", "code": CLOSE_NORMAL})
        elif last == Kind.REFUSE:
            await send({"type": "websocket.close", "code": CLOSE_REFUSED})
        else:
            await self._say_lost(session, send)

    async def _say_lost(self, session: Session, send: AsgiSend) -> None:
        try:
            await asyncio.wait_for(session.driver.exited.wait(), EXIT_TIMEOUT)
        except asyncio.TimeoutError:
            # It lives: it has given up this connection for a later one of the same client.
            await send({"type": "websocket.close", "code": CLOSE_SUPERSEDED})
        else:
            await _say(send, session.ended_error())


async def _await_exit(session: Session) -> None:
    try:
        await asyncio.wait_for(session.driver.exited.wait(), EXIT_TIMEOUT)
    except asyncio.TimeoutError:
        logger.warning("session %s: the driver closed its socket but lives", session.name)


def _read_hello(frame: bytes) -> Hello:
    if len(frame) > MAX_FRAME:
        raise ProtocolMismatch(f"a hello of {len(frame)} bytes is over the limit of {MAX_FRAME}")
    messages = decode_frame(frame).messages
    if len(messages) != 1 or messages[0].kind != Kind.HELLO:
        raise ProtocolMismatch("a client begins with HELLO; this one began with something else")
    return Hello.from_body(messages[0].body)


def _last_word(frame: bytes) -> int | None:
    """The kind of a driver's last message, if that is one that it ends a connection with."""
    # Only unnumbered frames are looked into: a numbered one is the client's and the driver's business.
    if not frame or len(frame) > _FAREWELL:
        return None
    decoded = decode_frame(frame)
    ends = [message.kind for message in decoded.messages if message.kind in (Kind.ENDED, Kind.REFUSE)]
    return ends[0] if decoded.seq == 0 and ends else None


async def _say(send: AsgiSend, error: LoomError) -> None:
    """Tell the client why the connection ends, and end it."""
    await send({"type": "websocket.send", "bytes": b"".join(unnumbered_frame(refusal(error)))})
    await send({"type": "websocket.close", "code": CLOSE_REFUSED, "reason": error.code})
