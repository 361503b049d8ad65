"""A WebSocket whose other side goes away in the middle of anything."""

from __future__ import annotations

import json
import socket

import pytest
from websockets.client import ClientProtocol
from websockets.frames import Close, CloseCode, Frame, Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from loom.errors import LoomError, NotFound, SessionLost
from loom_proxy.transport.websocket import NoUpgrade, WebSocketTransport, refused


def test_what_cannot_be_answered_any_more_is_the_end_and_no_error() -> None:
    near, far = socket.socketpair()
    transport = WebSocketTransport(near, ClientProtocol(parse_uri("ws://127.0.0.1"), state=State.OPEN))
    farewell = Close(CloseCode.NORMAL_CLOSURE, "").serialize()
    far.sendall(Frame(Opcode.PING, b"").serialize(mask=False) + Frame(Opcode.CLOSE, farewell).serialize(mask=False))
    far.close()

    assert transport.receive() == []  # neither the ping nor the farewell can be answered
    assert transport.receive() is None
    near.close()


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [(404, NotFound("there is nothing at /ws/v1"), NoUpgrade), (410, SessionLost("it has ended"), SessionLost)],
)
def test_an_answer_of_the_gateway_to_a_plain_request_says_that_the_upgrade_is_lost(
    status: int, error: LoomError, kind: type[LoomError]
) -> None:
    body = json.dumps({"error": {"code": error.code, "message": str(error)}}).encode()

    assert type(refused("ws://127.0.0.1/ws/v1", status, "", body)) is kind
