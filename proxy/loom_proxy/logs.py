"""Log lines of a session's processes, shown on the laptop."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack

from loom.process.threads import keep_going
from loom.terminal_text import fit_line
from loom.wire.messages import Message

logger = logging.getLogger(__name__)

BACKLOG = 16 << 20  # bytes of lines that may wait for a slow terminal or callback; further lines are left out


@dataclass(frozen=True)
class LogLine:
    """A line that processes of a mesh printed. Its ``str()`` is the line as it is shown."""

    time: float
    """Seconds since the epoch, by the clock of the host that printed the line first."""
    mesh: str
    """Name of the proc mesh."""
    place: str
    """The place in the mesh that printed the line first, such as ``hosts=0,gpus=1``."""
    ranks: tuple[int, ...]
    """All ranks of the mesh that printed the line."""
    stream: str
    """``stdout`` or ``stderr``."""
    text: str
    """The line without its end."""
    count: int = 1
    """The number of times that the line was printed."""

    def __str__(self) -> str:
        where = fit_line(f"[{self.mesh}/{self.place}]" if self.place else f"[{self.mesh}]")
        similar = f"[{self.count} similar log lines] " if self.count > 1 else ""
        return f"{similar}{where} {self.text}"


Callback = Callable[[LogLine], Any]


class LogReceiver:
    """The receiver of log lines, which prints them and calls callbacks on a thread of its own.

    The thread that reads the connection must not wait for a terminal. This one may; it starts with the first line.

    Args:
        others: whether the lines are another user's, so that a terminal must not obey them.
    """

    def __init__(self, others: bool = False) -> None:
        self.printing = True
        self._others = others
        self._callbacks: list[Callback] = []
        self._batches: deque[bytes] = deque()
        self._waiting = 0  # bytes in `_batches`
        self._left_out = 0  # batches left out since the last warning about it
        self._busy = False  # whether a batch is being shown
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add_callback(self, callback: Callback) -> Callable[[], None]:
        """Call a function with each line; return a function that removes the callback."""
        self._callbacks = [*self._callbacks, callback]

        def remove() -> None:
            self._callbacks = [other for other in self._callbacks if other is not callback]

        return remove

    def receive(self, message: Message) -> None:
        """Take in a `LogLines` message. The thread that reads the connection calls this."""
        batch = message.parts[0]
        with self._changed:
            if self._waiting > BACKLOG:
                self._left_out += 1
                return
            self._batches.append(bytes(batch))
            self._waiting += len(batch)
            if self._thread is None:
                showing = "show log lines", self._deliver
                self._thread = threading.Thread(target=keep_going, args=showing, name="loom-logs", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drain(self, timeout: float) -> bool:
        """Wait until every line has been printed; return False if some have not within ``timeout`` seconds."""
        if threading.current_thread() is self._thread:
            return False  # called by a callback, which its own line waits for
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
            text = fit_line(str(line)) if self._others else str(line)
            print_text("stderr" if line.stream == "stderr" else "stdout", f"{text}\n")
        for callback in self._callbacks:
            try:
                callback(line)
            except BaseException:
                logger.exception("a callback for log lines raised; line: %s", line)


def print_text(name: str, text: str) -> None:
    """Print text from the cluster to ``stdout`` or ``stderr`` of this program, as far as that takes it.

    Text that cannot be shown must not take the place of a result. Characters that the stream does not know are
    escaped, and one warning says that a stream takes nothing.
    """
    # Looked up each time, since a notebook or a test may have replaced the stream.
    stream = getattr(sys, name, None)
    if stream is None:
        return
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            known = getattr(stream, "encoding", None) or "ascii"
            stream.write(text.encode(known, "backslashreplace").decode(known))
        stream.flush()
    except Exception as error:  # noqa: BLE001 - closed, without a reader, or any object that a program has put there
        if name not in _silent:
            _silent.add(name)
            with contextlib.suppress(Exception):  # standard error, to which it goes, may be such an object, too
                logger.warning("%s shows nothing of what the cluster prints: %s", name, error)


_silent: set[str] = set()
"""The streams with a logged warning."""
