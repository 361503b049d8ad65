"""`RelaySocket`, a client's WebSocket that passes frames straight on to a driver."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request
from websockets.protocol import State

from loom.errors import TooLarge
from loom.wire.frames import MAX_FRAME
from loom.wire.messages import Buffer
from loom.wire.sockets import keep_queues_short
from loom.wire.websocket import WebSocketFrames, joined, message_head
from loom_gateway.relay.links import DriverLink

logger = logging.getLogger(__name__)

_SMALL = 16 << 10  # bytes up to which one joined write is cheaper than a write in pieces


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

    def relay_to(self, link: DriverLink) -> None:
        self._link = link
        keep_queues_short(self.transport.get_extra_info("socket"))
        while not self.queue.empty():
            event = self.queue.get_nowait()
            if event["type"] == "websocket.receive":
                link.write(event.get("bytes") or b"")
            else:
                self.queue.put_nowait(event)  # a disconnection, which the relay's task waits for
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
            self._link.write(bytes(event.data))  # bytes already, so this makes no copy

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
