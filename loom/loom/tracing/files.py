"""The file of one process's events: JSON lines, bounded, readable only by its user.

`Writer` gathers entries, because the code that writes is seldom in the processor's caches when an event comes. To
write one by itself takes a tenth of a millisecond, most of it waiting for memory, and wakes who reads the lines.
One of many takes a fifth of that.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from loom.process.threads import keep_going
from loom.tracing.encoding import quoted

T = TypeVar("T")

EVERY = 1.0
"""Seconds between two writes: the most that a killed process loses."""
MOST = 10_000
"""Entries that wait at most; who brings one more writes them."""


class Writer(Generic[T]):
    """Gives entries to a function: one after a quiet second at once, others in a thread, and at the process's end.

    A process that is killed, or ends by ``os._exit``, loses what waits. `put` may be called from a signal handler
    or a finalizer.

    Args:
        write: gets the entries in order. It must not raise.
    """

    def __init__(self, write: Callable[[list[T]], object]) -> None:
        self._write = write
        self._waiting: list[T] = []
        self.after_fork()

    def after_fork(self) -> None:
        """Forget what waits: it is the parent's, which writes it."""
        self._waiting.clear()
        self._runs = self._ends = False
        # Reentrant: a finalizer may bring an entry while this thread is writing.
        self._lock = threading.RLock()

    def put(self, entry: T) -> None:
        """Have an entry written soon."""
        self._waiting.append(entry)
        if not self._runs:
            self._begin()
        elif len(self._waiting) > MOST:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        with self._lock:
            entries = self._waiting[:]
            del self._waiting[: len(entries)]
            if entries:
                self._write(entries)

    def _begin(self) -> None:
        self._runs = True
        if not self._ends:
            self._ends = True
            atexit.register(self._end)
            # A process of `multiprocessing` ends by `os._exit`, after finalizers of its own.
            if (util := sys.modules.get("multiprocessing.util")) is not None:
                util.Finalize(None, self.flush, exitpriority=0)
        try:
            writing = "write spans", self._run
            threading.Thread(target=keep_going, args=writing, name="loom-timing", daemon=True).start()
        except BaseException as error:
            self._runs = False
            if not isinstance(error, RuntimeError):  # Ctrl-C, or the end of a run
                raise
            # The interpreter is ending, or there may be no more threads: each entry is written at once.
        self.flush()

    def _end(self) -> None:
        """Write what waits, and each further entry at once: of a function that `atexit` calls after this one."""
        self.flush()
        self.put = self._put_at_once  # type: ignore[method-assign]

    def _put_at_once(self, entry: T) -> None:
        self._write([entry])

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            time.sleep(EVERY)
            # A thread for each burst: an idle process stays asleep, and its next entry is written at once.
            goes_on = self._runs = bool(self._waiting)
            self.flush()


MAX_BYTES = 64 << 20
"""Bytes of a file; at them it becomes ``HOST-PID.1.jsonl``, and the one before that is deleted."""
AT_ONCE = 1 << 20
"""Bytes that are written at once, or one line."""
RETRY_S = 5.0
"""Seconds until a file that could not be opened is tried again."""

_log = logging.getLogger("loom.tracing")
HOST = socket.gethostname()


class EventFile:
    """Appends to ``HOST-PID.jsonl`` in a folder. It never raises: what cannot be written is counted, and said once.

    Args:
        folder: made if it does not exist, for this user only.
        max_bytes: the size at which the file is rotated.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> None:
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.lost = 0
        """Events that were not written."""
        # Reentrant: a signal handler or a finalizer may record an event while this thread is writing one.
        self._lock = threading.RLock()
        self._descriptor = -1
        self._pid = 0
        self._size = 0
        self._torn = False
        self._retry_at = 0.0
        self._said = False

    @property
    def path(self) -> Path:
        """The file of this process."""
        return self.folder / f"{HOST}-{os.getpid()}.jsonl"

    def append(self, lines: Sequence[str]) -> None:
        """Append lines of ASCII with their ends."""
        with self._lock:
            most = min(AT_ONCE, self.max_bytes)
            whole = "".join(lines)
            if len(whole) <= most:
                self._append(whole.encode())
                return
            group: list[str] = []
            size = 0
            for line in lines:
                if group and size + len(line) > most:
                    self._append("".join(group).encode())
                    group, size = [], 0
                group.append(line)
                size += len(line)
            self._append("".join(group).encode())

    def leave_out(self, error: Exception, events: int = 1) -> None:
        """Count events that were not written."""
        self.lost += events
        if not self._said:
            self._said = True
            _log.warning("cannot write timing events to %s, and leaves them out: %s", self.folder, error)

    def _append(self, lines: bytes) -> None:
        end = b"\n" if self._torn else b""  # of the line that was cut off
        written = 0
        try:
            if self._descriptor < 0 or self._pid != os.getpid() or self._size + len(lines) > self.max_bytes:
                self._open(len(lines))
            written = os.write(self._descriptor, end + lines)
            self._size += written
            self._torn = self._torn and not written
            if written < len(end) + len(lines):
                raise OSError(28, f"{written} of {len(lines)} bytes were written")
        except OSError as error:
            whole = max(written - len(end), 0)
            self._torn = self._torn or lines[:whole][-1:] not in (b"", b"\n")
            self.leave_out(error, lines.count(b"\n", whole))

    def close(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1

    def _open(self, more: int) -> None:
        """Open the file of this process, which a fork changes, and rotate a full one."""
        if time.monotonic() < self._retry_at:
            raise OSError("the file could not be opened a moment ago")
        self.close()
        path = self.path
        self._retry_at = time.monotonic() + RETRY_S
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        size = os.fstat(descriptor).st_size
        if size and size + more > self.max_bytes:
            os.close(descriptor)
            os.replace(path, path.with_suffix(".1.jsonl"))
            descriptor, size = os.open(path, flags, 0o600), 0
        self._descriptor, self._pid, self._size, self._retry_at = descriptor, os.getpid(), size, 0.0


def plain(value: object) -> object:
    """Return a value that JSON has: the number of a numpy or torch scalar, or else its text."""
    item = getattr(value, "item", None)
    if callable(item):
        try:
            return item()
        except Exception:  # noqa: BLE001 - any class may have an `item`
            return str(value)
    return str(value)


def who(pid: int, role: str | None) -> str:
    """Return the members of a record that are the same in all records of a process, as JSON."""
    return f'"host":{quoted(HOST)},"pid":{pid},"role":{"null" if role is None else quoted(role)}'


def _any_encoder() -> Callable[[dict[str, object]], str]:
    """Return what makes JSON of any record. `json.JSONEncoder` makes a C encoder for each, which takes longer."""
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        encode = json.JSONEncoder(default=plain, separators=(",", ":")).encode
        return encode
    pieces = make(None, plain, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, True)
    return lambda record: "".join(pieces(record, 0))


_encode_any = _any_encoder()


def encode(record: dict[str, object]) -> str:
    """Return the line of a record, in ASCII, with its end.

    Raises:
        TypeError: a key is no text.
        ValueError: a field contains itself.
        RecursionError: fields lie too deep in each other.
    """
    return _encode_any(record) + "\n"
