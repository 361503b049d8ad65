"""A WebSocket to the gateway: whole binary messages in and out of one socket.

`websockets`' sans-IO core speaks the protocol. The socket is Loom's own, because the thread that makes a call also
sends it: handing the call to an event loop's thread would cost more than sending it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import TypeVar, cast
from urllib.parse import urlsplit

from websockets.client import ClientProtocol
from websockets.exceptions import WebSocketException
from websockets.frames import Close, CloseCode, Frame, Opcode
from websockets.http11 import Response
from websockets.uri import parse_uri

from loom.errors import (
    AuthenticationError,
    GatewayUnreachable,
    LoomError,
    NotAGateway,
    NotFound,
    TooLarge,
    error_for_code,
)
from loom.mutual_auth.over_http import check_proof
from loom.tls import client_context, tls_error
from loom.wire.length_prefix import LENGTH, MAX_FRAME
from loom.wire.messages import TURN, Buffer, turns
from loom.wire.sender import try_send
from loom.wire.sockets import Waker, keep_queues_short
from loom.wire.stream import OutOfStep
from loom.wire.websocket import WebSocketFrames, apply_mask, joined, message_head
from loom_proxy.transport.base import Transport
from loom_proxy.transport.tls import TlsSocket

S = TypeVar("S")

_silent = logging.getLogger(f"{__name__}.protocol")
_silent.setLevel(logging.CRITICAL)  # of websockets, which logs the token's header for who debugs

LONGEST_WAIT = 5


class NoUpgrade(NotAGateway):
    """The other side speaks HTTP but gave no working WebSocket: it is no gateway, or a proxy is in the way."""


class UpgradeCut(NoUpgrade):
    """The connection was cut before the WebSocket was open: by the network, or by what breaks WebSockets."""


class WebSocketTransport(Transport):
    """An open WebSocket."""

    kind = "websocket"

    def __init__(self, sock: socket.socket | TlsSocket, protocol: ClientProtocol) -> None:
        self._socket = sock
        self._protocol = protocol
        self._splitter = WebSocketFrames(MAX_FRAME + 4096)
        """Finds binary messages in received bytes, which bypass `websockets`' slower parser."""
        self._pieces: list[bytes] = []  # the fragments so far of a message in several frames
        self.heard = time.monotonic()
        self._waker: Waker | None = None  # ends waits in `receive`; see `listen_for`

    @classmethod
    def open(cls, url: str, token: str | None, timeout: float, ca: str | None = None) -> WebSocketTransport:
        """Connect and upgrade, with the errors of `loom_proxy.session.transport_and_handshake.connect`."""
        context = client_context(ca) if url.startswith("wss:") else None
        host = str(urlsplit(url).hostname)
        sock = connect(url, timeout, lambda sock: sock if context is None else TlsSocket(sock, context, host))
        try:
            with errors_of_opening(url, timeout, cut=UpgradeCut):
                if isinstance(sock, socket.socket):  # the port that kubectl forwards has no TLS
                    check_proof(sock, url, token)
                transport = cls._upgrade(sock, url, token)
        except BaseException:
            sock.close()
            raise
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", LONGEST_WAIT, 0))
        return transport

    @classmethod
    def _upgrade(cls, sock: socket.socket | TlsSocket, url: str, token: str | None) -> WebSocketTransport:
        protocol = ClientProtocol(parse_uri(url), max_size=MAX_FRAME + 4096, logger=_silent)
        request = protocol.connect()
        if token:
            request.headers["Authorization"] = f"Bearer {token}"
        protocol.send_request(request)
        sock.sendall(b"".join(protocol.data_to_send()))
        response: Response | None = None
        while response is None:
            data = sock.recv(TURN)
            if data:
                protocol.receive_data(data)
            else:
                protocol.receive_eof()
            for event in protocol.events_received():
                if isinstance(event, Response):
                    response = event
            if response is None and (protocol.handshake_exc is not None or not data):
                cause = protocol.handshake_exc and protocol.handshake_exc.__cause__
                kind = WebSocketException if data else ConnectionError
                raise kind(cause or "it closed the connection without an answer")
        if response.status_code != 101:
            raise refused(url, response.status_code, response.reason_phrase, response.body or b"")
        if protocol.handshake_exc is not None:
            raise NoUpgrade(f"{url} is not a Loom gateway: {protocol.handshake_exc}")
        return cls(sock, protocol)

    def fileno(self) -> int:
        return self._socket.fileno()

    def listen_for(self, waker: Waker) -> None:
        """End each wait in `receive` when the waker is woken."""
        self._waker = waker
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._poll.register(waker, select.POLLIN)

    def _comes(self, waker: Waker) -> bool:
        """Wait for the socket or the waker; return whether the socket is readable."""
        return any(number != waker.fileno() for number, _ in self._poll.poll(LONGEST_WAIT * 1000))

    def receive(self, wait: bool = True) -> list[bytes] | None:
        # Waits `LONGEST_WAIT` seconds at most, or until `listen_for`'s waker is woken.
        if self._protocol.close_expected():
            return None
        if wait and self._waker is not None and not self._comes(self._waker):
            return []
        try:
            data = self._socket.recv(TURN, 0 if wait else socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        if not data:
            return None
        self.heard = time.monotonic()
        messages: list[bytes] = []
        try:
            for is_message, pieces in self._splitter.receive(data):
                if is_message:
                    messages.append(joined(pieces))
                else:
                    messages += self._other_frame(joined(pieces))
        except TooLarge as error:
            # The gateway sends no such frame, so the bytes are the rest of a frame that the line has damaged.
            raise OutOfStep(str(error)) from error
        return messages

    def _other_frame(self, data: bytes) -> Iterator[bytes]:
        """Let `websockets` handle a control frame or a fragment; yield the message that a fragment completes."""
        protocol = self._protocol
        protocol.receive_data(data)
        for event in protocol.events_received():
            if isinstance(event, Frame) and event.opcode in (Opcode.BINARY, Opcode.CONT):
                self._pieces.append(bytes(event.data))
                if event.fin:
                    yield b"".join(self._pieces)
                    self._pieces.clear()
        if reply := b"".join(protocol.data_to_send()):  # a pong, or the answer to a close
            self.send_control(reply)

    def ping(self) -> None:
        self._protocol.send_ping(b"")
        self.send_control(b"".join(self._protocol.data_to_send()))

    def send_control(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the other side is gone, which `receive` finds next
            self._socket.sendall(data)

    def try_send(self, data: Buffer) -> int:
        sock = self._socket
        return sock.try_send(data) if isinstance(sock, TlsSocket) else try_send(sock, data)

    def send_all(self, data: Buffer) -> None:
        """Send, waiting for room. Only for threads that no signal interrupts."""
        for piece in turns(data):
            self._socket.sendall(piece)

    def close(self) -> None:
        """Send a WebSocket close frame and close the socket."""
        try:
            # Without waiting: the other side of a stalled connection takes nothing.
            self.try_send(Frame(Opcode.CLOSE, Close(CloseCode.NORMAL_CLOSURE, "").serialize()).serialize(mask=True))
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side closed first
        self._socket.close()

    @staticmethod
    def encode(frame: bytes) -> bytes:
        """Return a frame as a binary WebSocket message, masked as a client's must be (RFC 6455, 5.3)."""
        data = memoryview(frame)[LENGTH.size :]  # a WebSocket message has a length of its own
        mask = secrets.token_bytes(4)
        return message_head(len(data), mask) + apply_mask(cast(bytes, data), mask)


@contextlib.contextmanager
def errors_of_opening(url: str, timeout: float, cut: type[NotAGateway] = NotAGateway) -> Iterator[None]:
    """Raise `NotAGateway` for errors of a program that answers at a URL, but not in time or not as a gateway.

    If the connection is cut, the error is ``cut``.
    """
    try:
        yield
    except LoomError:
        raise
    except TimeoutError:
        text = f"{url} accepts connections but did not answer as a gateway within {timeout:g} s"
        raise NotAGateway(text) from None
    except (OSError, EOFError, WebSocketException, http.client.HTTPException, ValueError) as error:
        kind = cut if isinstance(error, ConnectionError) else NotAGateway
        hint = ". If it speaks TLS, write wss:// instead of ws://" if url.startswith("ws:") else ""
        raise kind(f"{url} is not a Loom gateway: {error or type(error).__name__}{hint}") from error


def connect(url: str, timeout: float, secured: Callable[[socket.socket], S]) -> S:
    """Connect to the host of a WebSocket URL; ``secured`` puts TLS on the socket, if the URL asks for it."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "wss" else 80)
    assert parts.hostname is not None
    try:
        sock = socket.create_connection((parts.hostname, port), timeout)
    except OSError as error:
        why = "it did not answer in time" if isinstance(error, socket.timeout) else (error.strerror or str(error))
        raise GatewayUnreachable(
            f"no gateway at {url}: {why}. Check the address, and that `loom serve gateway` or `loom up` runs there."
        ) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_queues_short(sock)
    try:
        return secured(sock)
    except OSError as error:
        sock.close()
        raise tls_error(url, error) from error


def gateway_error(body: Buffer) -> LoomError | None:
    """Return the error that a gateway's JSON answer names; None if the answer is of another program."""
    try:
        error = json.loads(bytes(body))["error"]
        return error_for_code(error["code"], error["message"])
    except (ValueError, KeyError, TypeError):
        return None


def refused(url: str, status: int, reason: str, body: Buffer) -> LoomError:
    """Return the error for an HTTP answer that came in place of a connection."""
    error = gateway_error(body)
    if isinstance(error, NotFound):  # for requests that are no WebSockets a gateway has nothing at this path
        return NoUpgrade(f"the gateway at {url} got no WebSocket: a proxy on the way passes no upgrade on")
    if error is not None:
        return error
    if status == 401:
        return AuthenticationError(f"{url} wants other credentials (401 {reason})")
    return NoUpgrade(
        f"{url} answers, but is not a Loom gateway: HTTP {status} {reason}. Check host, port and path."
    )
