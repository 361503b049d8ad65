"""A weaver for tests of the threadlet: a socket, the link's frames, and nothing that a test did not ask for."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from loom.control.frame import MAX_FRAME, pack, unpack_all
from loom.control.handshake import PROTOCOL
from loom.errors import ProtocolMismatch
from loom.threadlet import Threadlet
from loom.wire.length_prefix import FrameSplitter

__all__ = ["BOUND", "KEY", "OK", "Connection", "FakeWeaver", "Loop", "Make", "come", "eventually", "told"]

BOUND = 20.0
"""Seconds within which what a test waits for has to happen."""

KEY = "secret-key"


Make = Callable[..., Threadlet]
"""Makes a threadlet for the test's weaver."""

OK = {"ok": True, "reason": None, "changes": {}, "refused": {}}
"""The answer to a command that has applied and changed nothing."""


def eventually(condition: Callable[[], Any], what: str = "it") -> Any:
    """Wait for something that no event tells of."""
    deadline = time.monotonic() + BOUND
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.005)
    return value


class Connection:
    """One connection of a threadlet, seen from the weaver."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._splitter = FrameSplitter(MAX_FRAME)
        self._came: list[list[Any]] = []
        self.skipped: list[list[Any]] = []
        """Frames that were passed over while others were waited for."""

    def send(self, *frame: Any) -> None:
        self.sock.sendall(pack(frame))

    def receive(self) -> list[Any] | None:
        """The next frame; None at the end of the connection."""
        self.sock.settimeout(BOUND)
        while not self._came:
            data = self.sock.recv(1 << 16)
            if not data:
                return None
            self._came += unpack_all(self._splitter.feed(data))
        return self._came.pop(0)

    def expect(self, kind: str) -> list[Any]:
        """The next frame of a kind; those before it are passed over."""
        while (frame := self.receive()) is not None:
            if frame[0] == kind:
                return frame
            self.skipped.append(frame)
        raise AssertionError(f"the connection ended without {kind!r}; there were {[f[0] for f in self.skipped]}")

    def rows(self, count: int) -> list[list[Any]]:
        """So many rows of status reports, from as many frames as they come in."""
        rows: list[list[Any]] = []
        while len(rows) < count:
            rows += self.expect("status")[1]
        return rows

    def ack(self, ident: str) -> list[Any]:
        """The answer to a command: step and outcome."""
        while (frame := self.expect("ack"))[1] != ident:
            pass
        return frame[2:]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


class FakeWeaver:
    """Listens on a port of its own, which it keeps over `stop` and `start`."""

    def __init__(self, beat: float = 0.05) -> None:
        self.beat = beat
        self._ids = itertools.count()
        self._connections: list[Connection] = []
        self._listener: socket.socket | None = None
        self.port = 0
        self.start()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}/{KEY}"

    def start(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=16)
        self._listener.settimeout(BOUND)
        self.port = self._listener.getsockname()[1]

    def stop(self) -> None:
        """As if killed: nobody listens, and every connection is cut."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    def accept(self) -> tuple[Connection, dict[str, Any]]:
        """The next threadlet's connection and its hello, not answered.

        A Monarch client may still look for a process that had this port before: it is hung up on, as by the weaver.
        """
        assert self._listener is not None
        while True:
            sock, _ = self._listener.accept()
            connection = Connection(sock)
            try:
                frame = connection.receive()
            except ProtocolMismatch:
                connection.close()
                continue
            self._connections.append(connection)
            assert frame is not None
            assert frame[0] == "hello"
            return connection, frame[1]

    def welcome(self, seq: int = 0, **takes: bool) -> tuple[Connection, dict[str, Any]]:
        """The next connection and its hello, answered; ``takes`` is what else this weaver takes."""
        connection, hello = self.accept()
        connection.send("welcome", {"protocol": PROTOCOL, "beat": self.beat, "weaver": "w", "seq": seq, **takes})
        return connection, hello

    def welcome_new(self) -> tuple[Connection, dict[str, Any]]:
        """The next connection and its hello, answered as by a weaver that takes changes of devices, and drains."""
        connection, hello = self.accept()
        fields = {"protocol": PROTOCOL, "beat": self.beat, "weaver": "w", "seq": 0, "changes": True}
        connection.send("welcome", fields)
        return connection, hello

    def command(self, connection: Connection, kind: str, /, **params: Any) -> str:
        """Send a command; return its id."""
        ident = f"c{next(self._ids)}"
        connection.send("command", ident, kind, params)
        return ident


class Loop:
    """A training loop in a thread, that makes a step whenever the test says so."""

    def __init__(self, body: Callable[[int], Any]) -> None:
        self._gates: queue.Queue[bool] = queue.Queue()
        self.done: queue.Queue[int] = queue.Queue()
        self.error: BaseException | None = None
        self._body = body
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def go(self) -> None:
        self._gates.put(True)

    def step(self) -> int:
        """Make a step, to its end."""
        self.go()
        return self.done.get(timeout=BOUND)

    def end(self) -> None:
        self._gates.put(False)
        self._thread.join(BOUND)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            for number in itertools.count():
                if not self._gates.get():
                    return
                self._body(number)
                self.done.put(number)
        except BaseException as error:  # noqa: BLE001 - raised in `end`
            self.error = error


@contextlib.contextmanager
def weaver(beat: float = 0.05) -> Iterator[FakeWeaver]:
    running = FakeWeaver(beat)
    try:
        yield running
    finally:
        running.stop()


def come(threadlet: Threadlet, count: int = 1) -> None:
    """Wait until so many commands wait for the next boundary."""
    eventually(lambda: len(threadlet._pending) >= count, f"{count} commands")


def told(kind: str, **params: Any) -> dict[str, Any]:
    """A command as `get_config_update` returns it."""
    return {"command_type": kind, "params": params, "_is_weaver_command": True}
