"""`Connection`: one connection of a threadlet with the weaver, which carries frames."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
from typing import Any

from loom.control.frame import Frame, Splitter, pack
from loom.control.reports import Row, StatusReports
from loom.errors import LoomError
from loom.threadlet.exit_code import tell_at_exit

_log = logging.getLogger("loom")

SILENCE = 30.0  # seconds after which a peer that acknowledges no bytes counts as lost

_CHUNK = 1 << 16


class ConnectionOver(Exception):
    """The connection is over."""


class Connection:
    """A connection over one socket, for one thread. Only `exchange` waits; a byte from ``wake`` ends the wait."""

    def __init__(self, sock: socket.socket, wake: socket.socket) -> None:
        _set_options(sock)
        sock.setblocking(False)
        self._socket = sock
        self._wake = wake
        self._selector = selectors.DefaultSelector()
        self._selector.register(wake, selectors.EVENT_READ)
        self._selector.register(sock, selectors.EVENT_READ)
        self._splitter = Splitter()
        self._out = bytearray()
        self._watched = selectors.EVENT_READ

    @property
    def waiting(self) -> int:
        """Bytes that the socket has not taken yet."""
        return len(self._out)

    def put(self, frame: Frame) -> None:
        """Queue a frame. Skip and log one that cannot be packed."""
        try:
            self._out += pack(frame.to_body())
        except (LoomError, TypeError, ValueError, OverflowError, RecursionError) as error:
            _log.error("a %r frame for the weaver is left out: %s", frame.KIND, error)

    def put_rows(self, rows: list[Row]) -> None:
        """Queue rows, in as many frames as their size needs.

        A row that cannot be packed would come again on each connection, so it goes without its values.
        """
        try:
            self._out += pack(StatusReports(rows).to_body())
        except Exception as error:  # noqa: BLE001 - also whatever a stranger's value raises
            if len(rows) > 1:
                self.put_rows(rows[: len(rows) // 2])
                self.put_rows(rows[len(rows) // 2 :])
            else:
                seq, moment, *counts = rows[0][:5]
                _log.error("a status report is sent without metrics and configuration: %s", error)
                self._out += pack(StatusReports([[seq, moment, *counts, {}, None]]).to_body())

    def close(self) -> None:
        """Close the socket. In a forked child nothing is sent, because the parent holds the socket too."""
        self._selector.close()
        self._socket.close()

    def end_sending(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def tell_exit_code(self) -> None:
        """Leave it to the end of this process to send its exit code, after `close`."""
        tell_at_exit(self._socket)

    def exchange(self, timeout: float) -> list[list[Any]]:
        """Send as much as the socket takes, then wait for an event; return the frames that came."""
        self._send()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        if wanted != self._watched:
            self._selector.modify(self._socket, wanted)
            self._watched = wanted
        frames: list[list[Any]] = []
        for key, events in self._selector.select(timeout):
            if key.fileobj is self._wake:
                _empty(self._wake)
            elif events & selectors.EVENT_READ:
                frames += self._receive()
        self._send()
        return frames

    def _send(self) -> None:
        while self._out:
            try:
                sent = self._socket.send(self._out[:_CHUNK])
            except (BlockingIOError, InterruptedError):
                return
            del self._out[:sent]

    def _receive(self) -> list[list[Any]]:
        try:
            data = self._socket.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return []
        if not data:
            raise ConnectionOver("it closed the connection")
        return self._splitter.feed(data)


def _empty(wake: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError, InterruptedError):
        while wake.recv(4096):
            pass


def _set_options(sock: socket.socket) -> None:
    """Set the socket's options: send small frames at once, and notice a peer whose host is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_USER_TIMEOUT", int(SILENCE * 1000))):
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
