"""The file of one process's events: JSON lines, bounded, readable only by its user."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

MAX_BYTES = 64 << 20
"""Bytes of a file; at them it becomes ``HOST-PID.1.jsonl``, and the one before that is deleted."""
RETRY_S = 5.0
"""Seconds until a file that could not be opened is tried again."""

_log = logging.getLogger("loom.timing")
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

    def write(self, record: dict[str, object]) -> None:
        """Append a record as a line."""
        try:
            line = _encode_any(record) + b"\n"
        except (TypeError, ValueError, RecursionError) as error:  # a field that contains itself, or keys of no text
            return self._count(error)
        self.append(line)

    def append(self, line: bytes) -> None:
        """Append a line with its end."""
        with self._lock:
            try:
                if self._descriptor < 0 or self._pid != os.getpid() or self._size + len(line) > self.max_bytes:
                    self._open(len(line))
                if self._torn:
                    line = b"\n" + line
                written = os.write(self._descriptor, line)
                self._size += written
                self._torn = written < len(line)
                if self._torn:
                    raise OSError(28, f"{written} of {len(line)} bytes were written")
            except OSError as error:
                self._count(error)

    def close(self) -> None:
        """Close the file."""
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

    def _count(self, error: Exception) -> None:
        self.lost += 1
        if not self._said:
            self._said = True
            _log.warning("cannot write timing events to %s, and leaves them out: %s", self.folder, error)


def plain(value: object) -> object:
    """Return a value that JSON has: the number of a numpy or torch scalar, or else its text."""
    item = getattr(value, "item", None)
    if callable(item):
        try:
            return item()
        except Exception:  # noqa: BLE001 - any class may have an `item`
            return str(value)
    return str(value)


_quoted = json.encoder.encode_basestring_ascii
_LARGEST = sys.float_info.max


def who(pid: int, role: str | None) -> str:
    """Return the members of a record that are the same in all records of a process, as JSON."""
    return f'"host":{_quoted(HOST)},"pid":{pid},"role":{"null" if role is None else _quoted(role)}'


def encode_flat(
    name: str, t: float, unix: float, who: str, trace: str | None, fields: Mapping[str, object]
) -> bytes | None:
    """Return the line of an event, sooner than any encoder does; None if its fields are not plain values.

    Args:
        name: the name of the event.
        t: seconds of the session's clock.
        unix: seconds since 1970.
        who: what `who` returns.
        trace: the trace id.
        fields: no key of a record is among them.
    """
    try:
        trace = "null" if trace is None else _quoted(trace)
        text = f'{{"name":{_quoted(name)},"t":{t!r},"time":{unix!r},{who},"trace":{trace}'
        for key, value in fields.items():
            kind = value.__class__
            if kind is float:
                if not -_LARGEST <= value <= _LARGEST:  # type: ignore[operator]
                    return None
                text += f",{_quoted(key)}:{value!r}"
            elif kind is str:
                text += f",{_quoted(key)}:{_quoted(value)}"  # type: ignore[arg-type]
            elif kind is int:
                text += f",{_quoted(key)}:{value}"
            elif value is None:
                text += f",{_quoted(key)}:null"
            elif kind is bool:
                text += f",{_quoted(key)}:{'true' if value else 'false'}"
            else:
                return None
        return (text + "}\n").encode()
    except (TypeError, ValueError):  # a name that is no text, or more digits than Python makes of an integer
        return None


def _any_encoder() -> Callable[[dict[str, object]], bytes]:
    """Return what makes JSON of any record. `json.JSONEncoder` makes a C encoder for each, which takes longer."""
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        encode = json.JSONEncoder(default=plain, separators=(",", ":")).encode
        return lambda record: encode(record).encode()
    pieces = make(None, plain, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, True)
    return lambda record: "".join(pieces(record, 0)).encode()


_encode_any = _any_encoder()
