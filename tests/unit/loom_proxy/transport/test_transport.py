"""A WebSocket whose other side goes away in the middle of anything."""

from __future__ import annotations

import socket

from websockets.client import ClientProtocol
from websockets.frames import Close, CloseCode, Frame, Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from loom_proxy.transport.websocket import WebSocketTransport


def test_what_cannot_be_answered_any_more_is_the_end_and_no_error() -> None:
    near, far = socket.socketpair()
    transport = WebSocketTransport(near, ClientProtocol(parse_uri("ws://127.0.0.1"), state=State.OPEN))
    farewell = Close(CloseCode.NORMAL_CLOSURE, "").serialize()
    far.sendall(Frame(Opcode.PING, b"").serialize(mask=False) + Frame(Opcode.CLOSE, farewell).serialize(mask=False))
    far.close()

    assert transport.receive() == []  # neither the ping nor the farewell can be answered
    assert transport.receive() is None
    near.close()
