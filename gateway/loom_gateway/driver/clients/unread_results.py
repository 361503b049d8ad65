"""Unread results: answers of calls that no program has read yet, and results that wait on the disk.

A result that has arrived on the laptop is lost with the laptop's program unless the driver has it still. So the
driver keeps each answer until the client tells that it was read. These answers are bounded, and nothing is said of
those that go: they had been delivered. Of an answer to a client that tells no reads, only the request is kept.

Results pile up while their client is away or slow, and would fill the driver's memory. Beyond a limit they are
written to nameless files in the session's folder, which disappear with the results or with the driver, and read
from there when they are sent. The bytes in these files are limited, too.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from loom.wire.bodies import OperationError, OperationResult
from loom.wire.messages import Buffer, Kind, Message
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


WATCHER_IDS = 1 << 40  # ids of each client; those of the n-th watching client start at n times this number

MOST = 1 << 14  # answers that are kept unread
IN_MEMORY = 64 << 20  # bytes of them in memory, besides the newest; beyond it, large ones go to the disk
STORED_FROM = 256 << 10  # bytes of an answer that is worth the disk
OVERHEAD = 512  # bytes that an answer takes besides its payload

Answer: TypeAlias = "int | tuple[int, int]"  # the operation's id; of several answers, the id and the number
Request: TypeAlias = "tuple[int, Sequence[Any]]"


def answer_of(message: Message) -> Answer:
    """Return which answer a message is."""
    kind: Any = OperationResult if message.kind == Kind.RESULT else OperationError
    index = kind.from_body(message.body).index
    return message.id if index is None else (message.id, index)


def operation_of(answer: Answer) -> int:
    """Return the id of the operation of an answer."""
    return answer if isinstance(answer, int) else answer[0]


_Kept: TypeAlias = "tuple[Message | None, Request, int]"  # an answer, its request, and its bytes


class Taken(NamedTuple):
    """An answer of a client that is gone; without a message if it was not kept, since the client tells no reads."""

    operation: int
    message: Message | None
    request: Request


class UnreadAnswers:
    """The unread answers of one session's clients. Safe on any thread. ``results`` keeps large ones on the disk."""

    def __init__(self, results: StoredResults, loop: asyncio.AbstractEventLoop) -> None:
        self._results = results
        self._loop = loop
        self._driving_from = WATCHER_IDS  # the lowest id of the client that drives, if it tells what was read
        self._watching: set[int] = set()  # the numbers of the watching clients that tell what was read
        self._lock = threading.Lock()  # guards all below
        self._kept: dict[Answer, _Kept] = {}  # the oldest first
        self._bytes = 0  # of all of those
        self._large: dict[Answer, None] = {}  # the large ones of those, the oldest first
        self._moved: dict[Answer, tuple[Message, Request]] = {}  # older ones, which are or will be on the disk

    def of_client(self, first_id: int, tells: bool) -> None:
        """Note whether a client, whose ids begin with a number, tells what was read."""
        if first_id < WATCHER_IDS:
            self._driving_from = first_id if tells else WATCHER_IDS
        elif tells:
            self._watching.add(first_id // WATCHER_IDS)

    def keep(self, message: Message, call: Request) -> None:
        """Keep an answer of a call that is about to be sent; only its request if the client tells no reads."""
        # Written out for the hot path: every answer of a call comes here.
        _, ident, body, parts = message
        answer = ident if len(body) == 1 else answer_of(message)
        if ident < self._driving_from or (ident >= WATCHER_IDS and ident // WATCHER_IDS not in self._watching):
            kept: _Kept = None, call, OVERHEAD
        elif len(parts) == 1 and (size := len(parts[0])) < STORED_FROM:
            kept = message, call, OVERHEAD + size
        else:
            kept = message, call, _bytes(message)
        with self._lock:
            self._kept[answer] = kept
            self._bytes += kept[2]
            if kept[2] >= STORED_FROM:
                self._large[answer] = None
            if self._bytes > IN_MEMORY or len(self._kept) > MOST:
                self._make_room()

    def _make_room(self) -> None:
        """Move the oldest large answers to the disk, and drop the oldest of what is still too much.

        A large answer costs no small one, and the newest answer stays. With the lock held.
        """
        newest = next(reversed(self._kept))
        to_disk: list[Answer] = []
        while self._bytes > IN_MEMORY and (large := next(iter(self._large), newest)) != newest:
            to_disk += self._move_out(large)
        while len(self._kept) > MOST or self._bytes > IN_MEMORY + self._kept[newest][2]:
            to_disk += self._move_out(next(iter(self._kept)))
        if to_disk:  # on another thread, because a small answer may wait for this one
            self._loop.call_soon_threadsafe(self._loop.run_in_executor, None, self._move, to_disk)

    def _move_out(self, answer: Answer) -> list[Answer]:
        """Return an answer for the disk if it is large; else drop it, and return none. With the lock held."""
        message, call, _ = self._pop_kept(answer)
        if message is None or message.size < STORED_FROM:
            return []
        self._moved[answer] = message, call
        return [answer]

    def _move(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            found = self._moved.get(answer)
            if found is None:
                continue  # it was read meanwhile
            stored = self._results.keep(found[0])
            with self._lock:
                if self._moved.pop(answer, None) is not None and stored is not None:
                    self._moved[answer] = stored, found[1]

    def read(self, answers: Iterable[Answer]) -> None:
        """Drop answers that were read."""
        with self._lock:
            for one in answers:
                if one in self._kept:
                    self._pop_kept(one)
                else:
                    self._moved.pop(one, None)

    def replace(self, message: Message) -> None:
        """Keep an answer in another form, such as with its payload on the disk, if it is kept."""
        answer = answer_of(message)
        with self._lock:
            found = self._kept.get(answer)
            if found is not None and found[0] is not None:
                size = _bytes(message)
                self._bytes += size - found[2]
                self._kept[answer] = message, found[1], size
                if size < STORED_FROM:
                    self._large.pop(answer, None)

    def request_of(self, message: Message) -> Request | None:
        """Return the request of a call that was answered with this message; None if it is not known any more."""
        answer = answer_of(message)
        with self._lock:
            found: Any = self._kept.get(answer) or self._moved.get(answer)
        return None if found is None else found[1]

    def pop(self, message: Message) -> Request | None:
        """Drop an answer that was not sent, if the message is one; return its request as `request_of` does."""
        if message.kind not in (Kind.RESULT, Kind.ERROR):
            return None
        with self._lock:
            found = self._pop(answer_of(message))
        return None if found is None else found[1]

    def _pop(self, answer: Any) -> Sequence[Any] | None:
        return self._pop_kept(answer) if answer in self._kept else self._moved.pop(answer, None)

    def _pop_kept(self, answer: Answer) -> _Kept:
        found = self._kept.pop(answer)
        self._bytes -= found[2]
        if found[2] >= STORED_FROM:
            del self._large[answer]
        return found

    def drop_oldest_stored(self) -> bool:
        """Drop the oldest answer on the disk. Return False if there is none."""
        with self._lock:
            kept: list[tuple[Answer, Any]] = [*self._moved.items(), *self._kept.items()]
            oldest = next((one for one, found in kept if _on_disk(found[0])), None)
            self._pop(oldest)
            return oldest is not None

    def take(self, belongs: Callable[[int], bool]) -> list[Taken]:
        """Return and drop the answers to the operations of a client that is gone, the oldest first."""
        taken = []
        with self._lock:
            for one in (*self._moved, *self._kept):
                operation = operation_of(one)
                if belongs(operation) and (found := self._pop(one)) is not None:
                    taken.append(Taken(operation, found[0], found[1]))
        return taken


def _bytes(message: Message) -> int:
    return OVERHEAD + sum(len(part) for part in message.parts if not is_stored(part))


def _on_disk(message: Message | None) -> bool:
    return message is not None and any(map(is_stored, message.parts))
