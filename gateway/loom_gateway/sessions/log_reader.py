"""Reader of the sessions' logs, the files that their drivers write (`loom_gateway.driver.output.spool`).

A driver that is killed, or a full disk, leaves a line half written. Such a line is left out, and a line of the
source ``loom`` says so in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import IO, Any

from loom.errors import LimitReached, NoSuchMesh, NoSuchRank, UnknownSession, WrongArguments
from loom.token_file import ADMIN
from loom_gateway.sessions.driver_files import open_regular

KEEP_ENDED = 16  # the number of ended sessions of each user whose logs are kept, the newest
LOOK_EVERY = 0.2  # seconds between two reads of a followed file: no event for files works everywhere
MAX_FOLLOWERS = 64  # programs that follow logs at once; each reads five times a second
SIGN_OF_LIFE = 5.0  # seconds of silence after which a follower gets an empty line


@dataclass(frozen=True)
class LogQuery:
    """A filter of log lines. None matches everything."""

    mesh: str | None = None
    rank: int | None = None
    stream: str | None = None
    tail: int | None = None  # the number of last lines to read

    def check(self) -> None:
        """Raise `WrongArguments` if the filter cannot match in any session."""
        if self.stream not in (None, "stdout", "stderr"):
            raise WrongArguments(f"stream={self.stream!r}: it is stdout or stderr")
        if self.tail is not None and self.tail < 0:
            raise WrongArguments(f"tail={self.tail}: it is a number of lines, not negative")
        if self.rank is not None and self.mesh is None:
            raise WrongArguments(f"rank={self.rank} needs a mesh: ranks are counted in each")

    def matches(self, entry: dict[str, Any]) -> bool:
        if "unreadable" in entry:  # whose line it was is not known
            return True
        return (
            "text" in entry
            and self.mesh in (None, entry["mesh"])
            and self.rank in (None, entry["rank"])
            and self.stream in (None, entry["stream"])
        )


class SessionLogs:
    """The logs of the living sessions and of the last `KEEP_ENDED` ended ones of each user."""

    def __init__(self) -> None:
        self._living: dict[str, str] = {}  # paths by session
        self._ended: dict[str, str] = {}  # the newest last
        self._user_of: dict[str, str] = {}  # of the ended ones
        self._closing = False
        self._followers: Counter[str] = Counter()  # by user

    def add(self, session: str, path: str) -> None:
        self._living[session] = path

    def ended(self, session: str, path: str, user: str = ADMIN) -> None:
        """Note that a session of a user has ended and its log is complete. Remove the user's oldest such log."""
        self._living.pop(session, None)
        self._ended[session] = path
        self._user_of[session] = user
        for name in [one for one in self._ended if self._user_of[one] == user][:-KEEP_ENDED]:
            old = self._ended.pop(name)
            del self._user_of[name]
            for part in (old, old + ".1"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(part)

    def stop_following(self) -> None:
        """End every `follow`."""
        self._closing = True

    def read(self, session: str, query: LogQuery) -> list[bytes]:
        """Return the matching lines, as JSON. Raise an error if the query names nothing, or cannot match."""
        lines, reader = self._open(session, query)
        reader.close()
        return lines

    async def follow(self, session: str, query: LogQuery, user: str = ADMIN) -> AsyncIterator[bytes]:
        """Yield the matching lines, old and new, as JSON, until the session ends. Raise as `read` does, at once.

        Raises:
            LimitReached: too many programs of the user follow logs.
        """
        if self._followers[user] >= MAX_FOLLOWERS:
            raise LimitReached(
                f"{MAX_FOLLOWERS} programs follow logs of this gateway as {user!r} already: close one of them first"
            )
        lines, reader = await asyncio.to_thread(self._open, session, query)
        return self._follow(session, query, lines, reader, user)

    async def _follow(
        self, session: str, query: LogQuery, lines: list[bytes], reader: _LogReader, user: str
    ) -> AsyncIterator[bytes]:
        silence = 0.0
        with contextlib.closing(reader), self._following(user):
            while True:
                if lines:
                    yield b"".join(lines)
                    silence = 0.0
                # Checked before the last read, so that no line is missed.
                living = session in self._living and not self._closing
                entries = await asyncio.to_thread(reader.new_entries)
                lines = [line for line, entry in entries if query.matches(entry)]
                if lines:
                    continue
                if not living:
                    return
                await asyncio.sleep(LOOK_EVERY)
                silence += LOOK_EVERY
                if silence >= SIGN_OF_LIFE:
                    lines = [b"\n"]

    @contextlib.contextmanager
    def _following(self, user: str) -> Iterator[None]:
        self._followers[user] += 1
        try:
            yield
        finally:
            self._followers[user] -= 1
            if not self._followers[user]:
                del self._followers[user]

    def _open(self, session: str, query: LogQuery) -> tuple[list[bytes], _LogReader]:
        query.check()
        logs = self._living | self._ended
        if session not in logs:
            raise UnknownSession(f"no log of a session named {session!r} is kept any more")
        reader = _LogReader(logs[session])
        sizes: dict[str, int] = {}
        tail = None if query.tail is None else min(query.tail, sys.maxsize)  # the longest possible deque
        lines: deque[bytes] = deque(maxlen=tail)
        for line, entry in reader.old_entries():
            if "processes" in entry:
                sizes[entry["mesh"]] = entry["processes"]
            elif "unreadable" not in entry:  # the note of the mesh's size may have been unreadable
                sizes[entry["mesh"]] = max(sizes.get(entry["mesh"], 0), entry["rank"] + 1)
            if query.matches(entry):
                lines.append(line)
        _check_exists(session, query, sizes)
        return list(lines), reader


class _LogReader:
    """Reads a log from its oldest entry, then its new entries."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._rest = b""

    def old_entries(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        self._file = _open_if_there(self._path)
        older = _open_if_there(self._path + ".1")
        if older is not None:
            with older:
                # Both names may lead to one file if the driver renamed it just now.
                if self._file is None or not os.path.sameopenfile(self._file.fileno(), older.fileno()):
                    yield from _entries(older.read())
        yield from self.new_entries()

    def new_entries(self) -> list[tuple[bytes, dict[str, Any]]]:
        found = self._read_on()
        # After a rename, one more read gets everything that was written before it.
        if self._was_set_aside():
            found += self._read_on()
            self.close()
            self._file = _open_if_there(self._path)
            found += self._read_on()
        return found

    def _read_on(self) -> list[tuple[bytes, dict[str, Any]]]:
        if self._file is None:
            return []
        data = self._rest + self._file.read()
        end = data.rfind(b"\n") + 1
        self._rest = data[end:]
        return list(_entries(data[:end]))

    def _was_set_aside(self) -> bool:
        if self._file is None:
            return True
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _open_if_there(path: str) -> IO[bytes] | None:
    try:
        return open_regular(path)
    except OSError:  # also of a driver that makes its log unreadable
        return None


def _entries(data: bytes) -> Iterator[tuple[bytes, dict[str, Any]]]:
    when = 0.0
    for line in data.splitlines(keepends=True):
        entry = _entry(line)
        if entry is None:
            entry = _unreadable(len(line), when)
            line = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
        when = entry.get("time", when)
        yield line, entry


def _entry(line: bytes) -> dict[str, Any] | None:
    """Return the entry in a line; None if the line was not written whole."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict):
        return None
    needed = {"mesh"} if "processes" in entry else {"time", "mesh", "rank", "place", "stream", "text"}
    return entry if entry.keys() >= needed else None


def _unreadable(size: int, when: float) -> dict[str, Any]:
    text = f"… a line of {size} bytes was not written whole, and is left out …"
    where = {"mesh": "loom", "rank": 0, "place": "", "stream": "stderr"}
    return {"time": when, **where, "text": text, "unreadable": size}


def _check_exists(session: str, query: LogQuery, sizes: dict[str, int]) -> None:
    if query.mesh is None:
        return
    if query.mesh not in sizes:
        known = ", ".join(repr(name) for name in sizes) or "none"
        raise NoSuchMesh(f"session {session!r} has no proc mesh named {query.mesh!r}; it has: {known}")
    size = sizes[query.mesh]
    if query.rank is not None and not 0 <= query.rank < size:
        raise NoSuchRank(f"no rank {query.rank} in {query.mesh!r}: it has {size} processes, 0 to {size - 1}")
