"""A client of the gateway without Loom's proxy: for what a well-behaved one never does."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as websocket_connect

import loom
from loom.wire.frames import decode_frame
from loom.wire.handshake import Hello, error_from_refusal
from loom.wire.messages import Kind, Message
from loom.wire.stream import unnumbered_frame

BOUND = 30.0
"""Seconds that anything may take."""


@contextlib.contextmanager
def websocket(url: str, token: str, **headers: str) -> Iterator[ClientConnection]:
    """A WebSocket to a gateway on which nothing has been said."""
    given = {"Authorization": f"Bearer {token}", **headers}
    with websocket_connect(f"{url}/ws/v1", additional_headers=given, open_timeout=BOUND) as connected:
        yield connected


def say_hello(connected: ClientConnection, **hello: Any) -> Message:
    """Say hello and return what is answered."""
    connected.send(b"".join(unnumbered_frame(Hello(**hello).message())))
    return answer(connected)


def answer(connected: ClientConnection) -> Message:
    """The next message, which is the only one of its frame."""
    frame = connected.recv(timeout=BOUND)
    assert isinstance(frame, bytes)
    (message,) = decode_frame(frame).messages
    return message


def refusal(connected: ClientConnection, **hello: Any) -> loom.LoomError:
    """The error that a hello is refused with."""
    message = say_hello(connected, **hello)
    assert message.kind == Kind.REFUSE, message
    return error_from_refusal(message)


def exchange(url: str, request: bytes) -> bytes:
    """Send bytes to a gateway's port and return what comes back until it closes the connection, or upgrades it."""
    parts = urlsplit(url)
    received = b""
    with socket.create_connection((parts.hostname, parts.port), BOUND) as sock:
        sock.sendall(request)
        with contextlib.suppress(ConnectionResetError):
            while (data := sock.recv(65536)) and not data.startswith(b"HTTP/1.1 101"):
                received += data
            received += data
    return received


def status_of(response: bytes) -> int:
    """The status in an HTTP response."""
    return int(response.split(b" ", 2)[1])
