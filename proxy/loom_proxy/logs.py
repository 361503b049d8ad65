"""Lines that the processes of a session print, on the laptop."""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack

from loom.wire.messages import Message

logger = logging.getLogger(__name__)

BACKLOG = 16 << 20
"""Bytes of lines that wait for a slow terminal or callback at most; what comes then is left out."""


@dataclass(frozen=True)
class LogLine:
    """A line that processes of a mesh printed. ``str()`` of it is what is shown."""

    time: float
    """Seconds since the epoch, by the clock of the host that printed it first."""
    mesh: str
    """Name of the proc mesh."""
    place: str
    """Where in the mesh it was printed first, such as ``hosts=0,gpus=1``."""
    ranks: tuple[int, ...]
    """All ranks of the mesh that printed it."""
    stream: str
    """``stdout`` or ``stderr``."""
    text: str
    """Without the line end."""
    count: int = 1
    """How often it was printed."""

    def __str__(self) -> str:
        where = f"[{self.mesh}/{self.place}]" if self.place else f"[{self.mesh}]"
        similar = f"[{self.count} similar log lines] " if self.count > 1 else ""
        return f"{similar}{where} {self.text}"


Callback = Callable[[LogLine], Any]


class LogReceiver:
    """Prints lines, and gives them to callbacks, on a thread of its own.

    The thread that reads the connection must not wait for a terminal. This one may; it starts with the first line.
    """

    def __init__(self) -> None:
        self.printing = True
        self._callbacks: list[Callback] = []
        self._batches: deque[bytes] = deque()
        self._waiting = 0
        self._left_out = 0
        self._busy = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add_callback(self, callback: Callback) -> Callable[[], None]:
        """Have a function called with each line; return one that takes this back."""
        self._callbacks = [*self._callbacks, callback]

        def remove() -> None:
            self._callbacks = [other for other in self._callbacks if other is not callback]

        return remove

    def take(self, message: Message) -> None:
        """Take `LogLines`, from the thread that reads the connection."""
        batch = message.parts[0]
        with self._changed:
            if self._waiting > BACKLOG:
                self._left_out += 1
                return
            self._batches.append(bytes(batch))
            self._waiting += len(batch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._deliver, name="loom-logs", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drain(self, timeout: float) -> bool:
        """Wait until every line has been printed; False if they have not within ``timeout`` seconds."""
        if threading.current_thread() is self._thread:
            return False  # a callback
        with self._changed:
            return self._changed.wait_for(lambda: not self._batches and not self._busy, timeout)

    def _deliver(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._batches)
                self._busy = True
                batch = self._batches.popleft()
                self._waiting -= len(batch)
                left_out, self._left_out = self._left_out, 0
            for time, mesh, place, ranks, stream, text, count in msgpack.unpackb(batch):
                self._show(LogLine(time, mesh, place, tuple(ranks), stream, text, count))
            if left_out:
                logger.warning("%d batches of lines were left out: they came faster than they were shown", left_out)

    def _show(self, line: LogLine) -> None:
        if self.printing:
            _print(line)
        for callback in self._callbacks:
            try:
                callback(line)
            except Exception:
                logger.exception("a callback for log lines raised; line: %s", line)


def _print(line: LogLine) -> None:
    # Looked up each time: a notebook and a test put their own there.
    stream = sys.stderr if line.stream == "stderr" else sys.stdout
    try:
        stream.write(f"{line}\n")
        stream.flush()
    except UnicodeEncodeError:
        stream.write(f"{line}\n".encode("ascii", "backslashreplace").decode())
    except (AttributeError, OSError, ValueError):
        return  # there is none, or it was closed
