"""`PeerTransport`: the state of a training group, for a joining one, over HTTP with a key.

Both sides prove that they know the job's key, without sending it: the joining process before it gets a byte of the
state, and the other before a byte of its answer is read. torchft's own transport serves everyone on every address,
and unpickles whatever it gets.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.distributed._serialization import _streaming_load, _streaming_save
from torch.utils._pytree import tree_map
from torchft.checkpointing._rwlock import RWLock
from torchft.checkpointing.transport import CheckpointTransport

from loom.errors import AuthenticationError, ConnectionLost, ProtocolMismatch
from loom.mutual_auth import Purpose
from loom.mutual_auth.over_http import CHALLENGE_HEADER, PROOF_HEADER, Challenges, ask, proof_of_answer
from loom.process.listen import Strangers, bracketed

# torch warns that the state of a peer is read-only, but nothing writes to it.
warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)

CONNECTIONS = 256
"""Connections that have not proved to know the key. Beyond them, the oldest is closed."""

MAX_REQUEST = 16 << 10
"""Bytes of a request at most. It has no body."""


class PeerTransport(CheckpointTransport[Mapping[str, Any]]):  # type: ignore[misc]
    """The transport of the state from a training group to a joining one.

    Args:
        own_address: the address to listen on, at which the job's other hosts reach this one.
        key: the job's key, which all its processes know.
        timeout: seconds that one read or write may take.
    """

    def __init__(self, own_address: str, key: str, timeout: float) -> None:
        self._key = key
        self._challenges = Challenges(Purpose.PEER)
        self._step = -1
        self._state: Mapping[str, Any] = {}
        self._lock = RWLock(timeout=timeout)  # held for writing except while the state may be read
        self._lock.w_acquire()
        self._offers = False
        self._server = _Server(own_address, timeout, self._serve)
        self._url = f"http://{bracketed(own_address)}:{self._server.server_port}/checkpoint/"
        threading.Thread(target=self._server.serve_forever, name="loom-peer-state", daemon=True).start()

    def metadata(self) -> str:
        """Return the URL of the state, to which the step is appended."""
        return self._url

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Mapping[str, Any], timeout: timedelta
    ) -> None:
        """Let other processes read a state until `disallow_checkpoint`."""
        self._state = tree_map(_on_cpu, state_dict)
        self._step = step
        if not self._offers:
            self._offers = True
            self._lock.w_release()

    def disallow_checkpoint(self) -> None:
        """Wait until nobody reads the state, and let nobody begin."""
        if self._offers:
            self._offers = False
            self._lock.w_acquire()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Mapping[str, Any]:
        """Return the state of another process, given its URL.

        Raises:
            AuthenticationError: what answers there does not know the job's key.
            ConnectionLost: it refuses.
        """
        url = urlsplit(f"{metadata}{step}")
        connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=timeout.total_seconds())
        stranger = f"what answers at {url.netloc} is no process of this job: it lacks the key"
        try:
            asked = ask(connection, Purpose.PEER, self._key, "GET", url.path)
            if not asked.proves():
                raise AuthenticationError(stranger)
            answer = asked.response
            if answer.status != 200:
                raise ConnectionLost(f"the process at {url.netloc} does not give its state: {answer.reason}")
            state: Any = _streaming_load(answer, weights_only=True)
        except ProtocolMismatch as error:
            raise AuthenticationError(f"{stranger}, and {error}") from error
        finally:
            connection.close()
        return dict(state)

    def shutdown(self, wait: bool = True) -> None:
        """Stop to listen; ``wait`` until it has."""
        ending = threading.Thread(target=self._server.end, daemon=True)
        ending.start()
        if wait:
            ending.join()

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        host, path = request.headers.get("Host", ""), request.path
        headers = {name.lower(): value for name, value in request.headers.items()}
        exchange = self._challenges.check(self._key, headers, "GET", host, path)
        if exchange is None or not self._url.startswith(f"http://{host}/checkpoint/"):
            request.send_response(403, "only for processes of this job")
            request.send_header(CHALLENGE_HEADER, self._challenges.new())
            request.end_headers()
            return
        self._server.believe(request.connection)
        with self._lock.r_lock():
            there = path == f"/checkpoint/{self._step}"
            status = 200 if there else 404
            request.send_response(status, None if there else f"it has the state of step {self._step}")
            request.send_header(PROOF_HEADER, proof_of_answer(exchange, status))
            request.end_headers()
            if there:
                _streaming_save(self._state, request.wfile)


class _Server(ThreadingHTTPServer):
    request_queue_size = 1024
    daemon_threads = True

    def __init__(self, host: str, limit: float, serve: Callable[[BaseHTTPRequestHandler], None]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        class Handler(BaseHTTPRequestHandler):
            timeout = limit  # of the socket

            def setup(self) -> None:
                super().setup()
                self.rfile = _Bounded(self.rfile, MAX_REQUEST)  # type: ignore[assignment]

            def do_GET(self) -> None:
                serve(self)

            def log_message(self, *_: Any) -> None:  # it would write to stderr for each request
                pass

        self._strangers: Strangers[socket.socket] = Strangers(CONNECTIONS, _shut)
        self._lock = threading.Lock()  # guards `_strangers`
        super().__init__((host, 0), Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._lock:
            self._strangers.add(request)
        return True

    def believe(self, connection: socket.socket) -> None:
        """Note that a connection has proved to know the key, or is over."""
        with self._lock:
            self._strangers.discard(connection)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.believe(request)

    def end(self) -> None:
        """Stop to listen."""
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: Any) -> None:
        """Say nothing: who reads the state has gone, and says so itself."""


class _Bounded:
    """The lines of a request, up to a number of bytes."""

    def __init__(self, lines: BufferedIOBase, most: int) -> None:
        self._lines = lines
        self._left = most

    def readline(self, size: int) -> bytes:
        line = self._lines.readline(min(size, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise ConnectionAbortedError(f"a request has more than {MAX_REQUEST} bytes")
        return line

    def close(self) -> None:
        self._lines.close()


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed
        connection.shutdown(socket.SHUT_RDWR)


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value
