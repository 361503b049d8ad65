"""The way to a gateway through networks that break WebSockets: frames go up in POSTs and come down in long polls.

See `loom_gateway.relay.http_tunnel` for the requests. Each carries the number of its batch, so that it can be made
again when it or its answer was lost: what the network does to single requests costs time and nothing else.
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

from loom.errors import ConnectionLost, LoomError, ProtocolMismatch, TooLarge
from loom.process.backoff import Backoff
from loom.tls import client_context
from loom.wire.batches import CONTENT_TYPE, ENDED_HEADER, MAX_BATCH, TUNNELS, split_batch
from loom.wire.messages import Buffer
from loom_proxy.transport.websocket import PATH, connect, errors_of_opening, gateway_error, refused

PATIENCE = 10.0
"""Seconds of failing requests after which the connection is lost."""

SLACK = 15.0
"""Seconds that an answer may take on top of those for which the gateway holds it back."""

CONNECT_TIMEOUT = 10.0
"""Seconds that a new connection may take."""

GOODBYE_TIMEOUT = 2.0
"""Seconds that closing waits for the gateway."""

BACKOFF = Backoff(0.05, 1.0, jitter=0.5, at_once=True)
"""Seconds before it is tried again; the first time at once, as idle connections are closed by many."""

T = TypeVar("T")


class _KeptConnection:
    """A connection that is kept alive, for one request after the other."""

    def __init__(self, url: str, token: str | None, tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        self._url = url
        self._tls = tls
        self._prefix = parts.path.removesuffix(PATH) + TUNNELS
        self._headers = {"User-Agent": "monarch-loom"} | ({"Authorization": f"Bearer {token}"} if token else {})
        usual_port = 443 if parts.scheme == "wss" else 80
        self._http = http.client.HTTPConnection(str(parts.hostname), parts.port or usual_port)
        self._http.default_port = usual_port  # which the Host header leaves out
        self._lock = threading.Lock()

    def ask(
        self, method: str, path: str, body: Buffer | None = None, *, timeout: float, connect_timeout: float
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Make one request, and read its answer; the timeouts are seconds for the answer and for a new connection.

        Raises:
            OSError, http.client.HTTPException: there was no answer.
        """
        headers = self._headers | ({} if body is None else {"Content-Type": CONTENT_TYPE})
        with self._lock:
            try:
                if self._http.sock is None:
                    self._http.sock = connect(self._url, connect_timeout, self._secured)
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
        """Have a request that is under way fail."""
        sock = self._http.sock
        if sock is not None:
            with contextlib.suppress(OSError):  # it is closed already
                # Not a TLS socket's own method, which pulls the state from under the thread that reads.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def finish(self, seconds: float) -> None:
        """Let a request that is under way come to its end, for so many seconds; then have it fail."""
        if self._lock.acquire(timeout=seconds):
            self._lock.release()
        else:
            self.interrupt()

    def close(self) -> None:
        """Close the connection, unless a request that does not end holds it."""
        if self._lock.acquire(timeout=GOODBYE_TIMEOUT):
            self._http.close()
            self._lock.release()


class HttpTransport:
    """A tunnel through HTTP. One thread may receive while another sends."""

    kind = "http"

    def __init__(self, url: str, token: str | None, ca: str | None = None) -> None:
        tls = client_context(ca) if url.startswith("wss:") else None
        self._up = _KeptConnection(url, token, tls)
        self._down = _KeptConnection(url, token, tls)
        self._path = ""
        """Path of the tunnel, below that of all tunnels."""
        self._answer_timeout = 0.0
        self._sent = 0
        """Number of the last batch that the gateway has taken."""
        self._received = 0
        """Number of the last batch that came from it."""
        self._ended = False
        """Whether the gateway has no more to say."""
        self._gone = False
        """Whether the gateway has no tunnel to close any more."""
        self._closing = threading.Event()
        self._error: LoomError | None = None
        """Why the gateway or something before it takes no more, if it said so."""

    @classmethod
    def open(cls, url: str, token: str | None, timeout: float, ca: str | None = None) -> HttpTransport:
        """Open a tunnel to the gateway that has a WebSocket URL. Arguments and errors are `open_transport`'s."""
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
        """-1: that a socket has something to read tells nothing about frames."""
        return -1

    def receive(self, wait: bool = True) -> list[bytes] | None:
        """The frames that have come, perhaps none; None when the connection is over.

        Args:
            wait: ask the gateway, which holds its answer back until there is something, for a while.

        Raises:
            LoomError: the gateway does not let this client go on.
        """
        if self._ended or self._closing.is_set():
            if self._error is not None:
                raise self._error
            return None
        if not wait:
            return []
        try:
            frames, self._ended = self._insist(self._down, "GET", f"/down?n={self._received + 1}", None, _batch)
        except LoomError as error:
            self._lose(error)
            return self.receive()
        if frames:
            self._received += 1
        return frames

    @staticmethod
    def encode(frame: bytes) -> bytes:
        """A frame, given behind its length, as a batch of one."""
        return frame

    def try_send(self, data: Buffer) -> int:
        """Sends nothing, since a request cannot be made without waiting."""
        return 0

    def send_all(self, data: Buffer) -> None:
        """Send a batch, waiting for room. Only for threads that no signal interrupts.

        Raises:
            OSError: the connection is over.
        """
        number = self._sent + 1
        try:
            while self._insist(self._up, "POST", f"/up?n={number}", data, _taken) < number:
                pass  # the driver has had no room for it yet
        except LoomError as error:
            self._lose(error)
            raise ConnectionLost(str(error)) from error
        self._sent = number

    @property
    def heard(self) -> float:
        """Now: that the other side is silent is noticed by the requests, which fail."""
        return time.monotonic()

    def ping(self) -> None:
        """Does nothing: see `heard`."""

    def send_control(self, data: bytes) -> None:
        """HTTP has nothing to send from the receiving thread."""

    def _insist(
        self,
        line: _KeptConnection,
        method: str,
        path: str,
        body: Buffer | None,
        understand: Callable[[http.client.HTTPResponse, bytes], T],
    ) -> T:
        """Make a request, again and again until it is answered.

        Raises:
            ConnectionLost: it was not for `PATIENCE` seconds, or the gateway does not know the tunnel any more.
            LoomError: the gateway refuses it.
        """
        deadline = None
        pauses = iter(BACKOFF)
        while not self._closing.is_set():
            try:
                response, answer = line.ask(
                    method, self._path + path, body, timeout=self._answer_timeout, connect_timeout=CONNECT_TIMEOUT
                )
            except (OSError, http.client.HTTPException) as error:
                problem = str(error) or type(error).__name__
            else:
                _check_not_refused(response, answer, body)
                try:
                    return understand(response, answer)
                except (ValueError, KeyError, TypeError, ProtocolMismatch):
                    # Something before the gateway answers in its place: for now, or so one hopes.
                    problem = f"HTTP {response.status} {response.reason}"
            deadline = deadline or time.monotonic() + PATIENCE
            if time.monotonic() > deadline:
                raise ConnectionLost(f"no answer over HTTP for {PATIENCE:g} s: {problem}")
            self._closing.wait(next(pauses))
        raise ConnectionLost("the connection was closed")

    def _lose(self, error: LoomError) -> None:
        """Let the threads that use the tunnel notice that it is gone."""
        if self._closing.is_set():
            return  # that is why
        if not isinstance(error, ConnectionLost):
            self._error = error
        self._gone = True
        self._closing.set()
        self._down.interrupt()

    def close(self) -> None:
        """Close the tunnel, after what is on its way."""
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
    """Raise the error of an answer that will be the same however often one asks."""
    if response.status != 200 and (error := gateway_error(answer)):
        raise error
    if response.status == 413:
        raise TooLarge(
            f"something before the gateway does not let a request of {len(body or b'')} bytes through; it has to "
            f"take 1 MiB (nginx: client_max_body_size)"
        )


def _taken(response: http.client.HTTPResponse, answer: bytes) -> int:
    """Number of the last batch that the gateway has taken."""
    return int(json.loads(answer)["taken"])


def _batch(response: http.client.HTTPResponse, answer: bytes) -> tuple[list[bytes], bool]:
    """The frames of a batch, and whether it is the last."""
    if response.status != 200 or response.headers.get_content_type() != CONTENT_TYPE:
        raise ValueError("not a batch")
    # Copied: what one frame brought is not to keep those beside it in memory.
    return [bytes(frame) for frame in split_batch(answer)], ENDED_HEADER in response.headers


def _read(response: http.client.HTTPResponse) -> bytes:
    """The whole body: half a batch may look like one."""
    size = response.length
    if size is None and not response.chunked:
        raise http.client.HTTPException("an answer that does not say how long it is")
    body = response.read(MAX_BATCH + 1)
    if len(body) > MAX_BATCH:
        raise http.client.HTTPException(f"an answer of more than {MAX_BATCH} bytes")
    if size is not None and len(body) < size:  # which http.client notices of chunks only
        raise http.client.IncompleteRead(body, size - len(body))
    return body
