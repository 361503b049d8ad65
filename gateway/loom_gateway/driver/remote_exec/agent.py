"""The actors in the process of a rank that run commands, connect to ports of its host, and read and write files.

They are apart from the handlers because each such process imports them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from loom.actor import Actor, endpoint
from loom.file_access import FileAccess, attempt
from loom_gateway.driver.remote_exec.command import Conduit, RankCommand, Spec


class FileAgent(Actor):
    """An actor apart from `RankAgent`, in a thread of its own, so that a slow disk holds up no terminal."""

    def __init__(self) -> None:
        self._copies: dict[str, FileAccess] = {}

    @endpoint
    def begin(self, handle: str) -> None:
        self._copies[handle] = FileAccess()

    @endpoint
    def do(self, handle: str, method: str, arguments: tuple[Any, ...]) -> Any:
        """Return the result of a method of `FileAccess`, or a `loom.file_access.FileProblem`."""
        return attempt(lambda: getattr(self._copies[handle], method)(*arguments))

    @endpoint
    def end(self, handle: str) -> None:
        """Remove the files of a copy that were begun and not finished."""
        copy = self._copies.pop(handle, None)
        if copy is not None:
            copy.close()


CONNECT_TIMEOUT = 10.0  # seconds to connect to a port of the own host


class LocalConnection:
    """A connection to ``127.0.0.1``, or to ``::1`` if nothing listens there.

    Raises:
        OSError: nothing listens on the port.
    """

    def __init__(self, handle: str, port: Any, number: int, on_end: Callable[[str], object]) -> None:
        self._handle = handle
        self._on_end = on_end
        self._socket = _connect(number)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ends = [os.dup(self._socket.fileno()) for _ in range(2)]
        self.conduit = Conduit(
            handle, port, {"data": ends[0]}, ends[1], lambda: self._socket.shutdown(socket.SHUT_WR)
        )
        threading.Thread(target=self._await_end, name="loom rank", daemon=True).start()

    def resize(self, rows: int, columns: int) -> None:
        pass

    def signal(self, number: int) -> None:
        pass

    def end(self) -> None:
        self.conduit.drop()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _await_end(self) -> None:
        self.conduit.wait_for_output(None)
        self.conduit.over(0)
        self._on_end(self._handle)


def _connect(number: int) -> socket.socket:
    try:
        return socket.create_connection(("127.0.0.1", number), CONNECT_TIMEOUT)
    except ConnectionRefusedError as refused:
        with contextlib.suppress(OSError):
            return socket.create_connection(("::1", number), CONNECT_TIMEOUT)
        raise refused


class RankAgent(Actor):
    """Works beside the process's other actors, in a thread of its own, as its endpoints are plain functions.

    None of them waits for a program or for the network. The driver chooses the handles of what goes on.
    """

    def __init__(self, port: Any) -> None:
        self._port = port
        self._running: dict[str, RankCommand | LocalConnection] = {}
        self._starting = threading.Lock()  # held until what starts is in `_running`: it may end sooner

    @endpoint
    def run(self, handle: str, spec: Spec) -> str:
        """Start a command; return why it cannot be started, or nothing."""
        return self._begin(handle, lambda: RankCommand(handle, self._port, spec, self._ended))

    @endpoint
    def connect(self, handle: str, number: int) -> str:
        """Connect to a port of this host; return why that is impossible, or nothing."""
        return self._begin(handle, lambda: LocalConnection(handle, self._port, number, self._ended))

    @endpoint
    def write(self, handle: str, data: bytes | None) -> None:
        """Write input to a command or connection; None closes the input."""
        if (running := self._running.get(handle)) is not None:
            running.conduit.write(data)

    @endpoint
    def grant(self, handle: str, size: int) -> None:
        """Let so many more bytes of output come."""
        if (running := self._running.get(handle)) is not None:
            running.conduit.grant(size)

    @endpoint
    def signal(self, handle: str, number: int) -> None:
        if (running := self._running.get(handle)) is not None:
            running.signal(number)

    @endpoint
    def resize(self, handle: str, rows: int, columns: int) -> None:
        if (running := self._running.get(handle)) is not None:
            running.resize(rows, columns)

    @endpoint
    def end(self, handle: str) -> None:
        """End a command, with what it has started, or a connection."""
        if (running := self._running.get(handle)) is not None:
            running.end()

    def _begin(self, handle: str, start: Callable[[], RankCommand | LocalConnection]) -> str:
        try:
            with self._starting:
                self._running[handle] = start()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _ended(self, handle: str) -> None:
        with self._starting:
            self._running.pop(handle, None)
