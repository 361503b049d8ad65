"""`RelaySocket`, a client's WebSocket that passes frames straight on to a driver."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request
from websockets.protocol import State

from loom.errors import TooLarge
from loom.wire.length_prefix import MAX_FRAME
from loom.wire.messages import Buffer
from loom.wire.sockets import keep_queues_short
from loom.wire.websocket import WebSocketFrames, joined, message_head
from loom_gateway.relay.links import MESSAGES, SLICE, DriverLink, RelayTurns

logger = logging.getLogger(__name__)

_SMALL = 16 << 10  # bytes up to which one joined write is cheaper than a write in pieces
_ONE_TURN = 6 * MESSAGES  # bytes that cannot hold more than a turn's messages, since a client masks them


class RelaySocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket (``websockets-sansio``) with a short path for frames.

    An ASGI application takes each message from a queue, in a separate task. Once a client is connected to its
    driver, this class passes frames from one socket's callback to the other socket instead.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gone = self.loop.create_future()
        self._link: DriverLink | None = None
        self._splitter = WebSocketFrames(MAX_FRAME + 4096)
        self.turns = RelayTurns()
        """The turns of the gateway's connections. A connection of its own has its own."""
        self._unhandled: Iterator[bool] | None = None  # what has been read and waits for its turn
        self._driver_full = False  # whether the driver takes no frames for now
        self._pong = b""  # for a client that takes nothing

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if hasattr(self, "scope"):
            self.scope["loom.socket"] = self  # type: ignore[typeddict-unknown-key]

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # `websockets` refuses some headers that HTTP allows. uvicorn would close the connection without an
            # answer.
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.transport.close()

    def refuse(self, status: int, headers: Mapping[str, str], text: str) -> None:
        """Answer the upgrade with an error. If an application refused it instead, uvicorn would log a complaint."""
        response = self.conn.reject(status, text)
        for name, value in headers.items():
            response.headers.pop(name, None)  # otherwise both values would be sent
            response.headers[name] = value
        self.conn.send_response(response)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.handshake_complete = self.close_sent = True
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.gone.set_result(None)

    def limit_messages(self, most: int) -> None:
        """Close the connection at a message of more bytes, before it is read."""
        for name in ("max_size", "max_message_size"):  # before and since websockets 16
            if hasattr(self.conn, name):
                setattr(self.conn, name, most)

    def abort(self) -> None:
        self.transport.abort()

    async def receive(self) -> Any:
        event = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self._read_if_taken()
        return event

    def relay_to(self, link: DriverLink) -> None:
        self._link = link
        self.limit_messages(MAX_FRAME + 4096)
        if not self.writable.is_set():
            link.pause_reading()
        keep_queues_short(self.transport.get_extra_info("socket"))
        while not self.queue.empty():
            event = self.queue.get_nowait()
            if event["type"] == "websocket.receive":
                link.write(event.get("bytes") or b"")
            else:
                self.queue.put_nowait(event)  # a disconnection, which the relay's task waits for
                break

    def data_received(self, data: bytes) -> None:
        if self._unhandled is not None:  # it was read before reading was paused
            self._unhandled = chain(self._unhandled, self._messages(data))
            self._read_if_taken()
        elif len(data) > _ONE_TURN:
            self._handle_some(self._messages(data))
        else:
            for _ in self._messages(data):
                pass

    def _messages(self, data: bytes) -> Iterator[bool]:
        """Handle what has come, one message, or a few small ones, before each yield."""
        link = self._link
        if link is None:
            for start in range(0, len(data), SLICE):
                super().data_received(data[start : start + SLICE])
                yield True
            return
        try:
            for is_message, pieces in self._splitter.receive(data):
                if is_message:
                    link.write(*pieces)
                else:
                    super().data_received(joined(pieces))
                yield True
        except TooLarge as error:
            logger.warning("closing a client's connection: %s", error)
            self.conn.fail(1009, "message too large")
            self.handle_parser_exception()

    def _handle_some(self, unhandled: Iterator[bool]) -> None:
        """Handle the messages of one turn. The rest waits for the user's next turn, and nothing more is read."""
        most = 1 if self._link is None else MESSAGES
        if sum(islice(unhandled, most)) == most and not self.transport.is_closing():
            self._unhandled = unhandled
            self._read_if_taken()
            self.turns.wait(self._user, self._go_on)

    def _go_on(self) -> None:
        unhandled, self._unhandled = self._unhandled, None
        if unhandled is not None:
            self._handle_some(unhandled)
            self._read_if_taken()

    @property
    def _user(self) -> str:
        principal = getattr(self, "scope", {}).get("loom.principal")
        return "" if principal is None else str(principal.user)

    def _read_if_taken(self) -> None:
        """Read from the client only while what comes is handled, and the driver, or the application, takes it."""
        if self.transport.is_closing():
            return
        if self._unhandled is not None or self._driver_full or self.read_paused:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def handle_ping(self) -> None:
        pong = b"".join(self.conn.data_to_send())
        if self.writable.is_set():
            self.transport.write(pong)
        elif pong:  # the last pong answers all pings before it (RFC 6455, 5.5.3)
            self._pong = pong

    def handle_bytes(self, event: Frame) -> None:
        if self._link is None or not event.fin:
            super().handle_bytes(event)
        else:
            self._link.write(bytes(event.data))  # bytes already, so this makes no copy

    def handle_cont(self, event: Frame) -> None:
        # Joined as they come: a list of tiny or empty fragments would take many times their bytes.
        if len(self.frames) == 1 and isinstance(self.frames[0], bytes):
            self.frames = [bytearray(self.frames[0])]  # type: ignore[list-item]
        self.frames[0] += event.data
        if event.fin:
            self.frames = [bytes(self.frames[0])]
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        if self._link is None or self.curr_msg_data_type == "text":
            super().send_receive_event_to_app()
        else:  # a message in several WebSocket frames
            self._link.write(b"".join(self.frames))
            self.frames = []

    def send_frame(self, *pieces: Buffer) -> None:
        if not self.close_sent and not self.disconnected and self.conn.state is State.OPEN:
            head = message_head(sum(map(len, pieces)))
            if len(pieces) == 1 and len(pieces[0]) < _SMALL:
                self.transport.write(head + pieces[0])
            else:
                self.transport.writelines((head, *pieces))

    def pause_receiving(self) -> None:
        self._driver_full = True
        self._read_if_taken()

    def resume_receiving(self) -> None:
        self._driver_full = False
        self._read_if_taken()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._link is not None:
            self._link.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._pong:
            pong, self._pong = self._pong, b""
            self.transport.write(pong)
        if self._link is not None:
            self._link.resume_reading()
