"""A tunnel to a gateway through networks that break WebSockets: frames go up in POSTs and come down in long polls.

See `loom_gateway.relay.http_tunnel` for the requests. Each carries the number of its batch, so that a request can
be repeated when it or its answer was lost. A lost request costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

from loom.errors import ConnectionLost, LimitReached, LoomError, ProtocolMismatch, RateLimited, TooLarge
from loom.mutual_auth.over_http import check_proof
from loom.process.backoff import Backoff
from loom.rest_client import WEBSOCKET_PATH
from loom.tls import client_context
from loom.wire.length_prefix import CONTENT_TYPE, ENDED_HEADER, MAX_BATCH, SLOWEST_BATCH, TUNNELS, split_batch
from loom.wire.messages import Buffer
from loom.wire.sockets import let_go
from loom_proxy.transport.base import Transport
from loom_proxy.transport.websocket import connect, errors_of_opening, gateway_error, refused

PATIENCE = 10.0  # seconds of failing requests after which the connection is lost
SLACK = 15.0  # seconds that an answer may take on top of those for which the gateway holds it back

CONNECT_TIMEOUT = 10.0

GOODBYE_TIMEOUT = 2.0  # seconds that closing waits for the gateway

BACKOFF = Backoff(0.05, 1.0, jitter=0.5, at_once=True)
"""Seconds before a request is repeated; the first time at once, since many servers close idle connections."""

T = TypeVar("T")


class _KeepAlive:
    """A keep-alive connection for one request after the other."""

    def __init__(self, url: str, token: str | None, tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        self._url = url
        self._token = token
        self._tls = tls
        self._prefix = parts.path.removesuffix(WEBSOCKET_PATH) + TUNNELS
        self._headers = {"User-Agent": "monarch-loom"} | ({"Authorization": f"Bearer {token}"} if token else {})
        usual_port = 443 if parts.scheme == "wss" else 80
        self._http = http.client.HTTPConnection(str(parts.hostname), parts.port or usual_port)
        self._http.default_port = usual_port  # the Host header leaves the default port out
        self._lock = threading.Lock()

    def ask(
        self, method: str, path: str, body: Buffer | None = None, *, timeout: float, connect_timeout: float
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Make one request and read its answer; timeouts are seconds for that and for a new connection."""
        headers = self._headers | ({} if body is None else {"Content-Type": CONTENT_TYPE})
        with self._lock:
            try:
                if self._http.sock is None:
                    self._http.sock = connect(self._url, connect_timeout, self._secured)
                    check_proof(self._http.sock, self._url, self._token)
                self._http.sock.settimeout(timeout)
                self._http.request(method, self._prefix + path, body, headers)
                response = self._http.getresponse()
                return response, _read(response)
            except BaseException:
                self._http.close()
                raise

    def _secured(self, sock: socket.socket) -> socket.socket:
        return sock if self._tls is None else self._tls.wrap_socket(sock, server_hostname=self._http.host)

    def interrupt(self) -> None:
        """Make a request that is under way fail."""
        sock = self._http.sock
        if sock is not None:
            with contextlib.suppress(OSError):  # it is closed already
                # The plain socket's method: a TLS socket's own discards the state that the reading thread uses.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def let_go(self) -> None:
        """Leave the connection to the parent process, whose forked child this is."""
        if self._http.sock is not None:
            let_go(self._http.sock.fileno())

    def finish(self, seconds: float) -> None:
        """Give a request that is under way so many seconds to end; then make it fail."""
        if self._lock.acquire(timeout=seconds):
            self._lock.release()
        else:
            self.interrupt()

    def close(self) -> None:
        """Close the connection, unless a request that does not end holds it."""
        if self._lock.acquire(timeout=GOODBYE_TIMEOUT):
            self._http.close()
            self._lock.release()


class HttpTransport(Transport):
    """A tunnel through HTTP. Requests to a silent gateway fail by themselves, so it needs no pings."""

    kind = "http"

    def __init__(self, url: str, token: str | None, ca: str | None = None) -> None:
        tls = client_context(ca) if url.startswith("wss:") else None
        self._up = _KeepAlive(url, token, tls)
        self._down = _KeepAlive(url, token, tls)
        self._path = ""  # path of the tunnel, below that of all tunnels
        self._answer_timeout = 0.0
        """Seconds to wait for an answer, which the gateway holds back for up to ``poll_seconds``."""
        self._sent = 0  # number of the last batch that the gateway has taken
        self._received = 0  # number of the last batch that came from the gateway
        self._ended = False
        self._gone = False  # whether the gateway's end of the tunnel is closed or lost, so that it needs no DELETE
        self._closing = threading.Event()
        self._error: LoomError | None = None
        """The error with which the gateway, or a proxy before it, refused a request."""

    @classmethod
    def open(cls, url: str, token: str | None, timeout: float, ca: str | None = None) -> HttpTransport:
        """Open a tunnel to a gateway, with the errors of `loom_proxy.session.transport_and_handshake.connect`."""
        transport = cls(url, token, ca)
        with errors_of_opening(url, timeout):
            response, body = transport._up.ask("POST", "", b"", timeout=timeout, connect_timeout=timeout)
        try:
            opened = json.loads(body)
            transport._path = f"/{opened['tunnel']}"
            transport._answer_timeout = float(opened["poll_seconds"]) + SLACK
        except (ValueError, KeyError, TypeError):
            transport._up.close()
            raise refused(url, response.status, response.reason, body) from None
        return transport

    def fileno(self) -> int:
        return -1  # a readable socket does not mean that a frame has come

    def receive(self, wait: bool = True) -> list[bytes] | None:
        """Return the frames of a request's answer, which the gateway holds back for a while until it has some."""
        if self._ended or self._closing.is_set():
            if self._error is not None:
                raise self._error
            return None
        if not wait:
            return []
        try:
            frames, self._ended = self._request(self._down, "GET", f"/down?n={self._received + 1}", None, _batch)
        except LoomError as error:
            self._lose(error)
            return self.receive()
        if frames:
            self._received += 1
        return frames

    @staticmethod
    def encode(frame: bytes) -> bytes:
        return frame  # a batch of one

    def try_send(self, data: Buffer) -> int:
        return 0  # since every request waits

    def send_all(self, data: Buffer) -> None:
        number = self._sent + 1
        try:
            while self._request(self._up, "POST", f"/up?n={number}", data, _taken) < number:
                pass  # the driver has had no room for it yet
        except LoomError as error:
            self._lose(error)
            raise ConnectionLost(str(error)) from error
        self._sent = number

    def is_alive(self, moved: float = 0.0) -> bool:
        return True

    def _request(
        self,
        connection: _KeepAlive,
        method: str,
        path: str,
        body: Buffer | None,
        parse: Callable[[http.client.HTTPResponse, bytes], T],
    ) -> T:
        """Repeat a request until it is answered, refused, or `PATIENCE` seconds have passed without an answer."""
        deadline = None
        timeout = self._answer_timeout + len(body or b"") / SLOWEST_BATCH
        pauses = iter(BACKOFF)
        while not self._closing.is_set():
            try:
                response, answer = connection.ask(
                    method, self._path + path, body, timeout=timeout, connect_timeout=CONNECT_TIMEOUT
                )
            except (OSError, http.client.HTTPException) as error:
                problem = str(error) or type(error).__name__
            else:
                try:
                    _check_not_refused(response, answer, body)
                    return parse(response, answer)
                except (RateLimited, LimitReached, ProtocolMismatch) as error:
                    problem = str(error)  # such as that the line has lost a part of the request, which did not end
                except LoomError:
                    raise
                except (ValueError, KeyError, TypeError):
                    # A proxy before the gateway answers in its place, perhaps only while the gateway restarts.
                    problem = f"HTTP {response.status} {response.reason}"
            deadline = deadline or time.monotonic() + PATIENCE
            if time.monotonic() > deadline:
                raise ConnectionLost(f"no answer over HTTP for {PATIENCE:g} s: {problem}")
            self._closing.wait(next(pauses))
        raise ConnectionLost("the connection was closed")

    def _lose(self, error: LoomError) -> None:
        """Note that the tunnel is lost, and wake the threads that use it."""
        if self._closing.is_set():
            return  # the error comes from closing the tunnel
        if not isinstance(error, ConnectionLost):
            self._error = error
        self._gone = True
        self._closing.set()
        self._down.interrupt()

    def let_go(self) -> None:
        for connection in (self._up, self._down):
            connection.let_go()

    def close(self) -> None:
        """Close the tunnel after the request that is under way."""
        self._closing.set()
        self._down.interrupt()
        if not self._gone:
            self._gone = True
            self._up.finish(GOODBYE_TIMEOUT)
            for _ in range(2):  # the connection may have been closed for idleness
                with contextlib.suppress(OSError, http.client.HTTPException):
                    self._up.ask("DELETE", self._path, timeout=GOODBYE_TIMEOUT, connect_timeout=GOODBYE_TIMEOUT)
                    break
        self._up.close()
        self._down.close()


def _check_not_refused(response: http.client.HTTPResponse, answer: bytes, body: Buffer | None) -> None:
    """Raise the error of an answer that repeating the request cannot change."""
    if response.status != 200 and (error := gateway_error(answer)):
        raise error
    if response.status == 413:
        raise TooLarge(
            f"something before the gateway does not let a request of {len(body or b'')} bytes through; it has to "
            f"take 1 MiB (nginx: client_max_body_size)"
        )


def _taken(response: http.client.HTTPResponse, answer: bytes) -> int:
    """Return the number of the last batch that the gateway has taken."""
    return int(json.loads(answer)["taken"])


def _batch(response: http.client.HTTPResponse, answer: bytes) -> tuple[list[bytes], bool]:
    """Return the frames of a batch, and whether it is the last."""
    if response.status != 200 or response.headers.get_content_type() != CONTENT_TYPE:
        raise ValueError("not a batch")
    # Copied, so that a result made of one frame does not keep the whole batch in memory.
    return [bytes(frame) for frame in split_batch(answer)], ENDED_HEADER in response.headers


def _read(response: http.client.HTTPResponse) -> bytes:
    """Read a body whole. A cut batch must not pass, since its first half may look like a batch."""
    size = response.length
    if size is None and not response.chunked:
        raise http.client.HTTPException("an answer that does not say how long it is")
    body = response.read(MAX_BATCH + 1)
    if len(body) > MAX_BATCH:
        raise http.client.HTTPException(f"an answer of more than {MAX_BATCH} bytes")
    if size is not None and len(body) < size:  # http.client notices it only of chunked bodies
        raise http.client.IncompleteRead(body, size - len(body))
    return body
