"""A WebSocket to the gateway: whole binary messages in and out of one socket.

The protocol is that of `websockets`, whose core is sans-IO; the socket is ours, because a call is sent by the
thread that makes it: handing it to an event loop's thread would cost more than sending it.
"""

from __future__ import annotations

import json
import secrets
import socket
import ssl
import struct
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from websockets.client import ClientProtocol
from websockets.exceptions import WebSocketException
from websockets.frames import Opcode
from websockets.http11 import Response
from websockets.uri import parse_uri

from loom.errors import (
    AuthenticationError,
    GatewayUnreachable,
    InvalidAddress,
    LoomError,
    NotAGateway,
    error_for_code,
)
from loom.sender import try_send
from loom.wire.frames import MAX_FRAME
from loom.wire.messages import Buffer

try:
    from websockets.speedups import apply_mask
except ImportError:  # websockets without its C extension
    from websockets.utils import apply_mask

__all__ = ["PATH", "WebSocketTransport", "normalise_url"]

PATH = "/ws/v1"
"""Path of the gateway's WebSocket."""

_RECEIVE = 256 << 10
_SCHEMES = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss"}


def normalise_url(url: str) -> str:
    """The WebSocket URL of a gateway, from what a person writes: ``ws://host:8470``, ``https://host/prefix``.

    Raises:
        InvalidAddress: it has no host, or another scheme.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidAddress(f"{url!r} is not a gateway's URL: {error}") from None
    if parts.scheme not in _SCHEMES or not parts.hostname:
        raise InvalidAddress(f"{url!r} is not a gateway's URL: write ws://HOST:PORT or wss://HOST")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path.rstrip("/")
    if not path.endswith(PATH):
        path += PATH
    return f"{_SCHEMES[parts.scheme]}://{host}{'' if port is None else f':{port}'}{path}"


class WebSocketTransport:
    """An open WebSocket. One thread may receive while another sends."""

    def __init__(self, sock: socket.socket, protocol: ClientProtocol) -> None:
        self._socket = sock
        self._protocol = protocol
        self.is_tls = isinstance(sock, ssl.SSLSocket)

    @classmethod
    def open(cls, url: str, token: str | None, timeout: float) -> WebSocketTransport:
        """Connect and upgrade, within ``timeout`` seconds.

        Raises:
            GatewayUnreachable: nobody answers at the URL.
            NotAGateway: somebody answers, but not with a gateway's WebSocket.
            AuthenticationError: the token is missing or wrong.
        """
        sock = _connect(url, timeout)
        try:
            transport = cls._upgrade(sock, url, token)
        except TimeoutError:
            sock.close()
            text = f"{url} accepts connections but did not answer as a gateway within {timeout:g} s"
            raise NotAGateway(text) from None
        except LoomError:
            sock.close()
            raise
        except (OSError, EOFError, WebSocketException, ValueError) as error:
            sock.close()
            raise NotAGateway(f"{url} is not a Loom gateway: {error or type(error).__name__}") from error
        sock.settimeout(None)
        return transport

    @classmethod
    def _upgrade(cls, sock: socket.socket, url: str, token: str | None) -> WebSocketTransport:
        protocol = ClientProtocol(parse_uri(url), max_size=MAX_FRAME + 4096)
        request = protocol.connect()
        if token:
            request.headers["Authorization"] = f"Bearer {token}"
        protocol.send_request(request)
        sock.sendall(b"".join(protocol.data_to_send()))
        response: Response | None = None
        while response is None:
            data = sock.recv(_RECEIVE)
            if data:
                protocol.receive_data(data)
            else:
                protocol.receive_eof()
            for event in protocol.events_received():
                if isinstance(event, Response):
                    response = event
            if response is None and (protocol.handshake_exc is not None or not data):
                cause = protocol.handshake_exc and protocol.handshake_exc.__cause__
                raise NotAGateway(
                    f"{url} is not a Loom gateway: {cause or 'it closed the connection without an answer'}"
                )
        if response.status_code != 101:
            raise _refused(url, response)
        if protocol.handshake_exc is not None:
            raise NotAGateway(f"{url} is not a Loom gateway: {protocol.handshake_exc}")
        return cls(sock, protocol)

    def receive(self) -> Iterator[bytes]:
        """Each binary message as it comes, until the connection ends."""
        protocol, sock = self._protocol, self._socket
        fragments: list[bytes] = []
        while True:
            for event in protocol.events_received():
                opcode = event.opcode  # type: ignore[union-attr]
                if opcode in (Opcode.BINARY, Opcode.CONT):
                    fragments.append(event.data)  # type: ignore[union-attr,arg-type]
                    if event.fin:  # type: ignore[union-attr]
                        yield fragments[0] if len(fragments) == 1 else b"".join(fragments)
                        fragments = []
            pending = protocol.data_to_send()  # pongs, and the answer to a close
            if any(pending):
                self.send_control(b"".join(pending))
            if protocol.close_expected() or protocol.eof_sent:
                return
            try:
                data = sock.recv(_RECEIVE)
            except OSError:
                return
            if not data:
                return
            protocol.receive_data(data)

    def send_control(self, data: bytes) -> None:
        """Send protocol bytes from the receiving thread; replaced by the owner to take its turn among senders."""
        self._socket.sendall(data)

    def try_send(self, data: bytes) -> int:
        """Send without waiting; return how many bytes went out."""
        # A TLS socket cannot be asked to send without waiting: its writer thread does it.
        return 0 if self.is_tls else try_send(self._socket, data)

    def send_all(self, data: bytes | memoryview) -> None:
        """Send, waiting for room. Only for threads that no signal interrupts."""
        self._socket.sendall(data)

    def close(self) -> None:
        """Say goodbye as WebSockets do, and close the socket."""
        try:
            self._socket.send(
                _frame_head(Opcode.CLOSE, 2, mask := secrets.token_bytes(4)) + apply_mask(b"\x03\xe8", mask)
            )
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was faster
        self._socket.close()

    @staticmethod
    def encode(frame: Sequence[Buffer]) -> bytes:
        """A frame as a binary WebSocket message, masked as a client's must be (RFC 6455, 5.3)."""
        data = b"".join(frame)
        mask = secrets.token_bytes(4)
        return _frame_head(Opcode.BINARY, len(data), mask) + apply_mask(data, mask)


def _frame_head(opcode: Opcode, length: int, mask: bytes) -> bytes:
    if length < 126:
        head = struct.pack("!BB", 0x80 | opcode, 0x80 | length)
    elif length < 65536:
        head = struct.pack("!BBH", 0x80 | opcode, 0x80 | 126, length)
    else:
        head = struct.pack("!BBQ", 0x80 | opcode, 0x80 | 127, length)
    return head + mask


def _connect(url: str, timeout: float) -> socket.socket:
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
    if parts.scheme != "wss":
        return sock
    try:
        return ssl.create_default_context().wrap_socket(sock, server_hostname=parts.hostname)
    except (ssl.SSLError, OSError) as error:
        sock.close()
        raise NotAGateway(f"no TLS connection to {url}: {error}") from error


def _refused(url: str, response: Response) -> LoomError:
    """The error for an answer that is not an upgrade; a gateway's own says why in JSON."""
    try:
        error = json.loads(response.body or b"")["error"]
        return error_for_code(error["code"], error["message"])
    except (ValueError, KeyError, TypeError):
        if response.status_code == 401:
            return AuthenticationError(f"{url} wants other credentials (401 {response.reason_phrase})")
        return NotAGateway(
            f"{url} answers, but is not a Loom gateway: HTTP {response.status_code} {response.reason_phrase}. "
            f"Check host, port and path."
        )
