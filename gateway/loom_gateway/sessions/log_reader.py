"""A place in a session's log, from which entries are read piece by piece.

A driver that is killed, or a full disk, leaves a line half written. Such a line is left out, and a line of the
source ``loom`` says so in its place.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator
from typing import IO, TypedDict, cast

from loom_gateway.sessions.state_dir import open_regular


class LogEntry(TypedDict, total=False):
    """A line of a session's log as JSON: a printed line with its origin, or the size of a mesh (``processes``)."""

    mesh: str
    processes: int
    time: float
    rank: int
    place: str
    stream: str
    text: str
    run: int
    """The id of a function that `Job.run` runs."""
    unreadable: int
    """Bytes of a line that was not written whole, in whose place this one is."""


Entry = tuple[bytes, LogEntry]
"""A line of a log, and what it says."""

PIECE = 128 << 10
"""Bytes that are read at once. A longer line counts as one that was not written whole: a driver's have fewer, and
reading one as JSON holds up the event loop that relays, since a thread does not yield the interpreter meanwhile."""

MOST = 16 << 20  # bytes of a file that are read, the last ones; user code may make it longer than a driver does


_KEYS = {"time", "mesh", "rank", "place", "stream", "text"}


class LogCursor:
    """Reads a log from its oldest entry, then its new entries. `loom_gateway.driver.output.spool` writes it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._files: deque[IO[bytes]] = deque()  # the one that is read, and those that come after it
        self._offset = 0  # in the first file; always at the beginning of a line
        self._when = 0.0  # time of the last entry
        self._open()

    def read(self, until: LogCursor | None = None) -> list[Entry]:
        """Return the next entries, a piece at most; none at the end of the log, or at the place of ``until``."""
        while self._files or self._open():
            meeting = until is not None and self._is_in_file_of(until)
            entries = self._read_on(until._offset - self._offset if until is not None and meeting else PIECE)
            if entries or meeting or not self._to_next_file(entries):
                return entries
        return []

    def is_at(self, other: LogCursor) -> bool:
        """Return whether the next entry of another cursor in the same log is this one's too."""
        if not self._files or not other._files:
            return not self._files and not other._files
        return self._is_in_file_of(other) and self._offset == other._offset

    def twin(self) -> LogCursor:
        """Return another cursor at the same place."""
        twin = LogCursor.__new__(LogCursor)
        twin.path, twin._offset, twin._when = self.path, self._offset, self._when
        twin._files = deque(os.fdopen(os.dup(file.fileno()), "rb") for file in self._files)
        return twin

    def end(self) -> LogCursor:
        """Return another cursor, at the end that the log has now."""
        end = self.twin()
        while len(end._files) > 1:
            end._files.popleft().close()
        if end._files:
            end._offset = os.fstat(end._files[0].fileno()).st_size
        return end

    def close(self) -> None:
        while self._files:
            self._files.popleft().close()

    def _open(self) -> bool:
        self._files.extend(_files_of(self.path))
        self._begin()
        return bool(self._files)

    def _begin(self) -> None:
        self._offset = max(0, os.fstat(self._files[0].fileno()).st_size - MOST) if self._files else 0

    def _is_in_file_of(self, other: LogCursor) -> bool:
        return bool(self._files and other._files) and _is_same(self._files[0], other._files[0])

    def _read_on(self, most: int) -> list[Entry]:
        size = max(0, min(most, PIECE))
        data = os.pread(self._files[0].fileno(), size, self._offset)
        end = data.rfind(b"\n") + 1
        if not end and len(data) == PIECE:
            end = PIECE
        self._offset += end
        return list(self._entries(data[:end]))

    def _to_next_file(self, entries: list[Entry]) -> bool:
        """Go on with the next file, if there is one. Add what is to be said of the end of this one."""
        if len(self._files) == 1:
            return self._find_next_files(entries)
        file = self._files.popleft()
        with file:
            rest = os.fstat(file.fileno()).st_size - self._offset
        if rest:
            entries.append(unreadable(rest, self._when))
        self._begin()
        return not entries

    def _find_next_files(self, entries: list[Entry]) -> bool:
        """Open what follows a file that was set aside, which is then read once more: nothing is added to it now."""
        try:
            if os.path.samestat(os.stat(self.path), os.fstat(self._files[0].fileno())):
                return False
        except FileNotFoundError:
            return False
        for file in _files_of(self.path):
            if _is_same(file, self._files[0]):
                file.close()
            else:
                self._files.append(file)
        if len(self._files) > 2:  # it is not the last that was set aside
            entries.append(left_out("lines", self._when))
        return len(self._files) > 1 and not entries

    def _entries(self, data: bytes) -> Iterator[Entry]:
        for line in data.splitlines(keepends=True):
            entry = _entry(line)
            found = unreadable(len(line), self._when) if entry is None else (line, entry)
            self._when = found[1].get("time", self._when)
            yield found


def unreadable(size: int, when: float) -> Entry:
    """Return the entry in place of a line that was not written whole."""
    return _note(f"… a line of {size} bytes was not written whole, and is left out …", when, size)


def left_out(what: str, when: float) -> Entry:
    """Return the entry in place of lines that came faster than they were read."""
    return _note(f"… {what} came faster than they were read, and are left out …", when, 0)


def _note(text: str, when: float, size: int) -> Entry:
    entry: LogEntry = {
        "time": when,
        "mesh": "loom",
        "rank": 0,
        "place": "",
        "stream": "stderr",
        "text": text,
        "unreadable": size,
    }
    return json.dumps(entry, ensure_ascii=False).encode() + b"\n", entry


def _files_of(path: str) -> list[IO[bytes]]:
    """Return the files of a log that there are, the older one first."""
    while True:
        current, older = _open_if_there(path), _open_if_there(path + ".1")
        files = [file for file in (older, current) if file is not None]
        if _is_at(path, current) and (len(files) < 2 or not _is_same(*files)):
            return files
        for file in files:  # the log turned meanwhile, and these may not follow each other
            file.close()


def _is_at(path: str, file: IO[bytes] | None) -> bool:
    """Return whether a path leads to a file, or to none that can be opened."""
    found = _open_if_there(path)
    if found is None:
        return file is None
    with found:
        return file is not None and _is_same(found, file)


def _is_same(one: IO[bytes], other: IO[bytes]) -> bool:
    return os.path.sameopenfile(one.fileno(), other.fileno())


def _open_if_there(path: str) -> IO[bytes] | None:
    try:
        return open_regular(path)
    except OSError:  # also of a driver that makes its log unreadable
        return None


def _entry(line: bytes) -> LogEntry | None:
    """Return the entry in a line; None if the line was not written whole."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("mesh"), str):
        return None
    if "processes" in entry:
        whole = isinstance(entry["processes"], int)
    else:
        whole = entry.keys() >= _KEYS and isinstance(entry["rank"], int)
    return cast(LogEntry, entry) if whole else None
