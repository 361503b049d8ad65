"""The session's log on disk, for clients that were not connected when it was printed.

The log is a file of JSON lines. A full file becomes ``PATH.1`` and a new one begins, so that the newest lines are
always there and the log never exceeds twice the limit. `loom_gateway.sessions.logs` reads it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any

LIMIT = 8 << 20  # bytes of a file

logger = logging.getLogger(__name__)


class LogSpool:
    """Writes the log of one session, in two files of ``limit`` bytes. Used by one thread."""

    def __init__(self, path: str, limit: int = LIMIT, mode: int = 0o600) -> None:
        self._path = path
        self._mode = mode
        self._limit = limit
        self._size = 0
        self._file: IO[bytes] | None = None
        self._broken = False  # so that a broken disk is logged once
        self._unwritten = b""  # what the last write left over
        self._left_out = 0  # lines that the disk did not take
        self.tell: Callable[[str], object] = lambda note: None
        """Called with a note for the client when the disk takes nothing any more, and when it does again."""
        self._torn = False  # whether the last line in the file has no end, because the disk was full
        self._processes: dict[str, int] = {}  # processes of each mesh, which every file begins with

    def add_processes(self, mesh: str, size: int) -> None:
        """Note the number of processes of a mesh. A new file begins with all such notes."""
        size = max(size, self._processes.get(mesh, 0))
        if self._processes.get(mesh) != size:
            self._processes[mesh] = size
            self.append([_processes_entry(mesh, size)])

    def forget_processes(self, mesh: str) -> None:
        """Leave a mesh out of the notes of later files: no process of that name will print any more."""
        self._processes.pop(mesh, None)

    def append(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Write entries. A full disk costs the history and nothing else; later the log says how much."""
        lines = [json.dumps(entry, ensure_ascii=False).encode() + b"\n" for entry in entries]
        note = ""
        if self._left_out:
            note = f"… {self._left_out} lines are missing here: the disk of the session's log was full …"
            about = {"time": time.time(), "mesh": "loom", "rank": 0, "place": "", "stream": "stderr", "text": note}
            lines.insert(0, json.dumps(about, ensure_ascii=False).encode() + b"\n")
        try:
            self._write(b"".join(lines))
        except OSError as error:
            if not self._broken:
                logger.warning("the session's log cannot be written to %s: %s", self._path, error)
                why = error.strerror or error
                self.tell(f"… the session's log takes no lines now ({why}): `loom logs` will not have them …")
            self._broken = True
            # A reader says of a torn line that it is none.
            self._left_out += self._unwritten.count(b"\n") - self._torn - bool(note)
            return
        self._broken = False
        if note:
            self._left_out = 0
            self.tell(note)

    def _write(self, data: bytes) -> None:
        self._unwritten = data
        if self._size + len(data) > self._limit and self._file is not None:
            self.close()
            os.replace(self._path, self._path + ".1")
        if self._file is None:
            # Unbuffered: a reader finds whole entries as soon as they are written.
            self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115
            os.fchmod(self._file.fileno(), self._mode)
            self._size = 0
            heads = [json.dumps(_processes_entry(*item)).encode() + b"\n" for item in self._processes.items()]
            data = b"".join(heads) + data
        elif self._torn:
            data = b"\n" + data
        while data:
            self._unwritten = data
            written = self._file.write(data)  # a disk that is nearly full takes a part
            self._size += written
            self._torn = not data[:written].endswith(b"\n")
            data = data[written:]

    def close(self) -> None:
        """Close the file. The next entry begins another."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def _processes_entry(mesh: str, size: int) -> dict[str, object]:
    return {"processes": size, "mesh": mesh}
