"""`LocalConnection`: a TCP connection to a port of a rank's host."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from loom_gateway.driver.ranks.conduit import Conduit

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
