"""`Forward`: a port of a rank's host on this machine."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable

from loom.errors import LoomError, PortInUse
from loom.process.threads import keep_going
from loom_proxy.remote_exec.rank import AWAY, RankProcess

logger = logging.getLogger(__name__)

_PIECE = 256 << 10  # bytes that are sent at once


class Forward:
    """A port of this machine that leads to a port of a rank's host; see `ProcMeshProxy.forward`.

    A context manager that closes it.
    """

    def __init__(
        self,
        process: RankProcess,
        number: int,
        local_port: int,
        address: str,
        on_refused: Callable[[LoomError], object] | None = None,
    ) -> None:
        self._process = process
        self._on_refused = on_refused or (lambda error: logger.warning("%s", error))
        try:
            self._listener = socket.create_server((address, local_port))
        except OSError as error:
            raise PortInUse(
                f"cannot listen on {address}:{local_port} of this machine: {error.strerror}; local_port=0 takes a "
                f"free port"
            ) from None
        try:
            self._handle = process.ask("forward", number).get()
        except BaseException:
            self._listener.close()
            raise
        self.port: int = self._listener.getsockname()[1]
        """The port of this machine."""
        self._lock = threading.Lock()  # guards `_connections` and `_closed`
        self._connections: dict[socket.socket, str | None] = {}
        """The open connections, with their handles in the driver once they have one."""
        self._closed = False
        self._start(keep_going, f"forward port {number}", self._accept)

    def wait(self) -> None:
        """Wait until the session is over, and raise the error that says why."""
        self._process.calls.ended.wait()
        self._process.calls.check_open()

    def close(self) -> None:
        """Close the port and its connections."""
        with self._lock:
            closed, self._closed = self._closed, True
            connections = dict(self._connections)
        if closed:
            return
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        with contextlib.suppress(LoomError):
            for connection, handle in connections.items():
                _break(connection)
                if handle is not None:
                    self._process.ask("end", handle)
            self._process.ask("end", self._handle)

    def __enter__(self) -> Forward:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Forward of {self._process.name} on port {self.port}>"

    def _start(self, function: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=function, args=arguments, name="loom forward", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                raise  # such as too many open files, which passes
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections[connection] = None
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._connect(connection)
        except LoomError as error:
            self._on_refused(error)
        finally:
            with self._lock:
                self._connections.pop(connection, None)
            _break(connection)
            connection.close()
        if self._process.calls.error is not None:  # the session is over, and nothing can come of other connections
            self.close()

    def _connect(self, connection: socket.socket) -> None:
        """Connect to the rank's host, and pass on what both sides send until one ends."""
        handle = self._process.wait_for("connect", self._handle, AWAY)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._connections[connection] = handle
            closed = self._closed
        if closed:
            self._end(handle)
        else:
            self._start(self._send, connection, handle)
            self._receive(connection, handle)

    def _receive(self, connection: socket.socket, handle: str) -> None:
        """Pass on what the rank's host sends, until one side ends the connection."""
        try:
            end = None
            while end is None:
                pieces, end = self._process.wait_for("hear", handle)
                connection.sendall(b"".join(data for _, data in pieces))
        except (OSError, LoomError) as error:
            logger.debug("a forwarded connection broke: %s", error)
            self._end(handle)

    def _end(self, handle: str) -> None:
        with contextlib.suppress(LoomError):
            self._process.wait_for("end", handle)

    def _send(self, connection: socket.socket, handle: str) -> None:
        """Pass on what the program here sends."""
        with contextlib.suppress(OSError, LoomError):  # the other direction ends the connection
            while data := connection.recv(_PIECE):
                self._process.write(handle, data)
            self._process.write(handle, None)


def _break(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
