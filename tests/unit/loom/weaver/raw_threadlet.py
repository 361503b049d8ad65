"""Both ends that talk to a weaver, on plain sockets: a threadlet, and the gateway; and a weaver's process."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loom.control.address import parse_weaver_address
from loom.control.frame import MAX_FRAME, pack, unpack_all
from loom.control.handshake import PROTOCOL
from loom.token_file import ADMIN
from loom.weaver.keys import Keys, read_secret
from loom.wire.length_prefix import FrameSplitter
from tests.support.processes import read_json, start

BOUND = 30.0
"""Seconds; far over what anything takes, so that only a hang fails."""

GPU = {"uuid": "GPU-0", "kind": "gpu", "server": "node-1", "type": "H200", "memory": 139 << 30}


class Line:
    """Frames on a socket, which is closed when the test lets go of it."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        connected.settimeout(BOUND)
        self._splitter = FrameSplitter(MAX_FRAME)
        self._frames: list[list[Any]] = []

    def send(self, *frame: Any) -> None:
        self.socket.sendall(pack(frame))

    def receive(self) -> list[Any]:
        """The next frame; an empty list where the other side has closed."""
        while not self._frames:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return []
            if not data:
                return []
            self._frames += unpack_all(self._splitter.feed(data))
        return self._frames.pop(0)

    def until(self, wanted: Callable[[list[Any]], bool]) -> list[Any]:
        """The next frame that is as wanted; others are passed over."""
        while frame := self.receive():
            if wanted(frame):
                return frame
        raise AssertionError("the weaver closed the connection before it said so")

    def close(self) -> None:
        self.socket.close()

    __del__ = close


class RawThreadlet(Line):
    """A threadlet that says what it is told to."""

    def __init__(self, address: str, replica: str = "train_0", instance: str | None = None, **hello: Any) -> None:
        self.address = parse_weaver_address(address)
        super().__init__(socket.create_connection((self.address.host, self.address.port), timeout=BOUND))
        self.instance = instance or uuid.uuid4().hex
        self.seq = 0
        self.hello = hello_of(self.address.key, replica, self.instance, **hello)
        self.send("hello", self.hello)

    def welcome(self) -> dict[str, Any]:
        frame = self.receive()
        assert frame[0] == "welcome", frame
        return dict(frame[1])

    def report(self, step: int, at: float | None = None, **metrics: float) -> int:
        """Report a step; return the report's number."""
        self.seq += 1
        at = time.time() if at is None else at
        self.send("status", [[self.seq, at, step, None, None, metrics, None]])
        return self.seq

    def await_stored(self, seq: int) -> None:
        self.until(lambda frame: frame[0] == "stored" and frame[1] >= seq)

    def command(self) -> list[Any]:
        """The next command: id, kind, params."""
        return self.until(lambda frame: frame[0] == "command")[1:]

    def ack(self, id: str, step: int = 1, ok: bool = True, **rest: Any) -> None:
        self.send("ack", id, step, {"ok": ok, "reason": None, "changes": {}, "refused": {}, **rest})


def hello_of(key: str, replica: str, instance: str, **rest: Any) -> dict[str, Any]:
    return {
        "protocol": PROTOCOL,
        "key": key,
        "replica": replica,
        "instance": instance,
        "group": "train",
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "procs": None,
        "rank": None,
        "actors": None,
        "session": None,
        "devices": [GPU],
        "handlers": {"learning_rate": "float"},
        "config": {"learning_rate": 0.001},
        "state": "running",
        "applied": [],
        "step": None,
        **rest,
    }


class RawGateway(Line):
    """Asks a weaver: as the gateway for the admin, or as the holder of a key."""

    def __init__(self, path: str, key: str | None = None) -> None:
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(path)
        super().__init__(connected)
        self.send("hello", Keys(read_secret(Path(path).parent)).gateway() if key is None else key)
        self.user: str | None = ADMIN if key is None else None
        self._number = 0
        self._passed: list[list[Any]] = []

    def ask(self, operation: str, **arguments: Any) -> Any:
        self._number += 1
        self.send("ask", self._number, self.user, operation, arguments)
        while True:
            frame = self.receive()
            assert frame, "the weaver closed the connection"
            if frame[0] == "answer" and frame[1] == self._number:
                return frame[2]
            if frame[0] == "error" and frame[1] == self._number:
                raise Refused(frame[2], frame[3])
            self._passed.append(frame)

    def watch(self) -> dict[str, Any]:
        """Begin to watch; return the snapshot."""
        self.send("watch", 0, self.user)
        return dict(self.until(lambda frame: frame[0] == "snapshot")[2])

    def event(self, kind: str, replica: str | None = None) -> dict[str, Any]:
        """The next event of a kind, while watching; what was passed over is kept for later."""
        while True:
            for place, frame in enumerate(self._passed):
                event = frame[2].get("event") if frame[0] == "event" else None
                if event is not None and event["kind"] == kind and replica in (None, event["replica"]):
                    del self._passed[place]
                    return dict(event)
            frame = self.receive()
            assert frame, "the weaver closed the connection"
            self._passed.append(frame)


class Refused(Exception):
    """The weaver answered with an error."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class WeaverProcess:
    """A weaver of a test's own, which can be killed and started again."""

    def __init__(self, *options: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="loom-weaver-"))
        self.socket = str(self.folder / "weaver.sock")
        self.process: subprocess.Popen[str] | None = None
        self.address = ""
        self.pid = 0
        self._options = options

    def start(self, *options: str) -> WeaverProcess:
        with (self.folder / "output").open("a") as output:
            arguments = ["--local", "--state", str(self.folder), "--exit-with-parent", *self._options, *options]
            self.process = start("-m", "loom.weaver", *arguments, stderr=output)
        ready = read_json(self.process)
        self.address, self.pid = f"{ready['address']}/{self.keys.of(ADMIN)}", ready["pid"]
        return self

    def end(self, number: int = signal.SIGKILL) -> int:
        """End it with a signal and return its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        process, self.process = self.process, None
        with process:  # which closes its pipes
            process.wait(BOUND)
        return process.returncode

    def gateway(self, key: str | None = None) -> RawGateway:
        return RawGateway(self.socket, key)

    @property
    def keys(self) -> Keys:
        return Keys(read_secret(self.folder))

    def address_of(self, user: str, session: str | None = None) -> str:
        return f"{self.address.rpartition('/')[0]}/{self.keys.of(user, session)}"

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def close(self) -> None:
        if self.process is not None:
            self.end(signal.SIGTERM)  # in good form: then it also writes down which branches were taken
        shutil.rmtree(self.folder)


@contextmanager
def running_weaver(*options: str) -> Iterator[WeaverProcess]:
    """A weaver that is ended, and its folder removed."""
    weaver = WeaverProcess(*options)
    try:
        yield weaver.start()
    finally:
        weaver.close()
