"""Results that wait on the disk because their client does not take them now.

Results pile up while their client is away or slow, and would fill the driver's memory. Beyond a limit they are
written to nameless files in the session's folder, which disappear with the results or with the driver, and read
from there when they are sent. The bytes in these files are limited, too.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from loom.wire.messages import Buffer, Message
from loom.wire.mux import Pieces

logger = logging.getLogger(__name__)

FILE_SIZE = 64 << 20  # bytes of results that share a file; a larger result has one of its own


class StoredResults:
    """The results of one session that are in files. Safe on any thread.

    Args:
        folder: folder of the files.
        limit: bytes of results to keep in files, for all sessions of the user together; 0 is any number.
    """

    def __init__(self, folder: str, limit: int = 0) -> None:
        self._folder = folder
        self.most = limit
        self.kept_elsewhere = 0
        """Bytes that the user's other sessions keep."""
        self.failure = ""  # why the disk has not taken the last result; empty if it has
        self._lock = threading.Lock()  # guards `_file` and `_used`
        self._file: _ResultFile | None = None  # takes the next result
        self._used = 0  # bytes in all files, without those in `_freed`
        self._freed: deque[int] = deque()  # sizes of files that are gone, filled by the garbage collector
        self.free_some: Callable[[], bool] = lambda: False
        """Frees the result that is least needed; returns False if there is none."""

    @property
    def limit(self) -> int:
        """Bytes of results that may be kept here; 0 is any number, and 1, which no result has, none."""
        return max(1, self.most - self.kept_elsewhere) if self.most else 0

    @property
    def why_full(self) -> str:
        """Why `keep` had no room for the last result."""
        if self.failure:
            return f"the disk of the session's driver did not take it ({self.failure})"
        return f"there was no room for it (--keep-results {self.most:,} for all of a user)"

    @property
    def used(self) -> int:
        """The bytes in all files."""
        with self._lock:
            self._count_freed()
            return self._used

    def keep(self, message: Message) -> Message | None:
        """Return the message with its payload in a file; None if there is no room for it."""
        if not message.parts or all(map(is_stored, message.parts)):
            return message
        self.failure = ""
        if not self._make_room(message.size):
            return None
        try:
            with self._lock:
                return message._replace(parts=self._write(message))
        except OSError as error:
            self.failure = error.strerror or str(error)
            logger.warning("a result of %d bytes cannot be kept in %s: %s", message.size, self._folder, error)
            return None

    def begin_anew(self) -> None:
        """Add no more to the present file, so that it goes with the last of its results."""
        with self._lock:
            self._file = None

    def _make_room(self, size: int) -> bool:
        limit = self.limit
        if not limit or self.used + size <= limit:
            return True
        if size > limit:
            return False
        # More than is needed is freed, so that not every further result has to make room.
        enough = limit - max(size, limit // 8)
        while self.used > enough and self.free_some():
            pass
        return self.used + size <= limit

    def _count_freed(self) -> None:
        if self._file is not None and self._file.is_unused():
            self._file = None
        while self._freed:
            self._used -= self._freed.popleft()

    def _write(self, message: Message) -> list[Buffer]:
        file = self._file
        if file is None or not file.takes(message.size):
            file = _ResultFile(self._folder, max(message.size, FILE_SIZE))
            weakref.finalize(file.map, self._note_freed, file.written).atexit = False
            self._file = file
        parts = []
        for part in message.parts:
            parts.append(file.add(part))
            self._used += len(part)
        return parts

    def _note_freed(self, written: list[int]) -> None:
        self._freed.append(written[0])


class _ResultFile:
    """A nameless file, and the map of it that its results are parts of."""

    def __init__(self, folder: str, size: int) -> None:
        with tempfile.TemporaryFile(dir=folder) as file:
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        os.truncate(self._descriptor, size)
        # A writable part stays writable: a copy-on-write map takes its changes, and the file keeps the original.
        self.map = mmap.mmap(self._descriptor, size, access=mmap.ACCESS_COPY)
        self.written = [0]  # bytes; a list, so that they are known when the map is gone
        self._size = size

    def takes(self, size: int) -> bool:
        return self.written[0] + size <= self._size

    def is_unused(self) -> bool:
        """Return whether all results in the file are gone. Then nothing can be added any more."""
        if not self.written[0]:
            return False
        try:
            self.map.close()
        except BufferError:
            return False
        return True

    def add(self, part: Buffer | Pieces) -> Buffer:
        start = position = self.written[0]
        # Written and not assigned to the map, where a full disk would kill the process.
        for piece in part if isinstance(part, Pieces) else (part,):
            rest = memoryview(piece).cast("B")
            while rest:
                written = os.pwrite(self._descriptor, rest, position)
                position += written
                rest = rest[written:]
        self.written[0] = position
        view = memoryview(self.map)[start:position]
        read_only = part.read_only if isinstance(part, Pieces) else memoryview(part).readonly
        return view.toreadonly() if read_only else view


def is_stored(part: Any) -> bool:
    """Return whether a part of a message is in a file of stored results."""
    return isinstance(part, memoryview) and isinstance(part.obj, mmap.mmap)
