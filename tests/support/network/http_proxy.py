"""An HTTP proxy that does to requests what middleboxes and bad networks do."""

from __future__ import annotations

import contextlib
import enum
import http.client
import random
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

__all__ = ["Fault", "HttpProxy", "Lossy", "without_websockets"]

HELD = 60.0
"""Seconds that the server may take for an answer."""

_OF_ONE_CONNECTION = frozenset({"connection", "keep-alive", "transfer-encoding", "upgrade"})


class Fault(enum.Enum):
    """What may happen to a request."""

    LOSE_REQUEST = "lose request"
    """The server never sees it."""
    LOSE_ANSWER = "lose answer"
    """The server has answered, but the client never sees that."""
    TRUNCATE_ANSWER = "truncate answer"
    """Half of the answer's body comes."""
    REPEAT_REQUEST = "repeat request"
    """The server sees it twice; the client gets the second answer."""
    BAD_GATEWAY = "bad gateway"
    """The client gets the page of a proxy that has found no server."""


Decide = Callable[[str, str], "Fault | int | None"]
"""What to do to a request with a method and a target: a fault, a status to answer with at once, or None."""


def without_websockets(status: int | None) -> Decide:
    """Answer upgrades with a status; None: close the connection."""

    def decide(method: str, target: str) -> Fault | int | None:
        if not target.endswith("/ws/v1"):
            return None
        return Fault.LOSE_REQUEST if status is None else status

    return decide


class Lossy:
    """Faults at random, the same for the same seed and the same requests; a tunnel is opened without one.

    Args:
        share: of the requests that meet a fault.
    """

    def __init__(self, seed: int, share: float) -> None:
        self._random = random.Random(seed)
        self._share = share
        self._lock = threading.Lock()
        self.met: Counter[Fault] = Counter()
        """How often each fault was met."""

    def __call__(self, method: str, target: str) -> Fault | None:
        if target.endswith("/tunnel"):
            return None
        with self._lock:
            if self._random.random() >= self._share:
                return None
            fault = self._random.choice(list(Fault))
            self.met[fault] += 1
            return fault


class HttpProxy:
    """Passes requests on to ``port`` of this machine, as far as ``decide`` lets it. A context manager.

    Args:
        tls: what the proxy speaks TLS with; None for plain HTTP.
        listen: port to listen on; 0 picks a free one.
    """

    def __init__(self, port: int, decide: Decide, tls: ssl.SSLContext | None = None, listen: int = 0) -> None:
        class Handler(_Handler):
            target_port = port
            decide_on = staticmethod(decide)

        self._server = _Server(("127.0.0.1", listen), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self.port: int = self._server.server_port
        """Where it listens, on 127.0.0.1."""

    def __enter__(self) -> HttpProxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that broke is nothing to speak of here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    target_port: int
    decide_on: Decide

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.decide_on(self.command, self.path)
        if isinstance(fault, int):
            self._answer(fault, b"<html>a middlebox</html>", {"Content-Type": "text/html"})
        elif fault is Fault.BAD_GATEWAY:
            self._answer(502, b"<html>no server</html>", {"Content-Type": "text/html"})
        elif fault is Fault.LOSE_REQUEST:
            self._cut()
        else:
            if fault is Fault.REPEAT_REQUEST:
                self._pass_on(body)
            response, answer = self._pass_on(body)
            headers = {name: value for name, value in response.getheaders() if name not in _OF_ONE_CONNECTION}
            if fault is Fault.LOSE_ANSWER:
                self._cut()
            elif fault is Fault.TRUNCATE_ANSWER:
                self._answer(response.status, answer[: len(answer) // 2], headers)
                self._cut()
            else:
                self._answer(response.status, answer, headers)

    do_GET = do_POST = do_DELETE = _handle

    def _pass_on(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.target_port, timeout=HELD)) as server:
            headers = {n: v for n, v in self.headers.items() if n.lower() not in _OF_ONE_CONNECTION}
            server.request(self.command, self.path, body, headers)
            response = server.getresponse()
            return response, response.read()

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        for name, value in ({"content-length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
