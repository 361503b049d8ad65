"""The sessions' logs, the files that their drivers write (`loom_gateway.driver.output.spool`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator

from loom.errors import LimitReached, NoSuchMesh, NoSuchRank, UnknownSession
from loom.token_file import ADMIN
from loom_gateway.sessions.log_cursor import LogCursor
from loom_gateway.sessions.log_feed import LOOK_EVERY, RUNS, LogFeed, LogQuery

KEEP_ENDED = 16  # the number of ended sessions of each user whose logs are kept, the newest
KEEP_IN_ALL = 128  # and of all users; beyond it, the oldest of the user with the most is removed
MAX_FOLLOWERS = 64  # programs of a user that follow logs at once


class SessionLogs:
    """The logs of the living sessions and of the last `KEEP_ENDED` ended ones of each user."""

    def __init__(self) -> None:
        self._living: dict[str, str] = {}  # paths by session
        self._ended: dict[str, str] = {}  # the newest last
        self._user_of: dict[str, str] = {}  # of the ended ones
        self._closing = False
        self._followers: Counter[str] = Counter()  # by user
        self._feeds: dict[str, LogFeed] = {}  # of the logs that are followed, by path

    def add(self, session: str, path: str) -> None:
        self._living[session] = path

    def ended(self, session: str, path: str, user: str = ADMIN) -> None:
        """Note that a session of a user has ended and its log is complete. Remove the log that is one too many."""
        self._living.pop(session, None)
        self._ended[session] = path
        self._user_of[session] = user
        users = Counter(self._user_of.values())
        if users[user] > KEEP_ENDED:
            self._remove_oldest(user)
        elif len(self._ended) > KEEP_IN_ALL:
            self._remove_oldest(users.most_common(1)[0][0])

    def _remove_oldest(self, user: str) -> None:
        name = next(one for one in self._ended if self._user_of[one] == user)
        del self._user_of[name]
        log = self._ended.pop(name)
        for part in (log, log + ".1"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)

    def stop_following(self) -> None:
        """End every `follow`."""
        self._closing = True

    def read(self, session: str, query: LogQuery) -> list[bytes]:
        """Return the matching lines, as JSON. Raise an error if the query names nothing, or cannot match."""
        with contextlib.closing(self._cursor(session, query)) as cursor:
            tail = None if query.tail is None else min(query.tail, sys.maxsize)  # the longest possible deque
            return list(deque(_scan(session, cursor, query), maxlen=tail))

    async def follow(self, session: str, query: LogQuery, user: str = ADMIN) -> AsyncIterator[bytes]:
        """Yield the matching lines, old and new, as JSON, until the session ends. Raise as `read` does, at once.

        Old lines are read as fast as they are taken. Of new ones, a reader that is slow loses some, and is told.

        Raises:
            LimitReached: too many programs of the user follow logs.
        """
        lines = self._follow(session, query, user)
        await anext(lines)
        return lines

    async def _follow(self, session: str, query: LogQuery, user: str) -> AsyncIterator[bytes]:
        with self._following(user), contextlib.closing(self._cursor(session, query)) as cursor:
            skipped = await asyncio.to_thread(_lines_before_tail, session, cursor, query)
            yield b""  # the query is valid
            follower = None
            while follower is None:
                feed = self._feeds.get(cursor.path)
                if feed is not None:
                    entries, follower = await feed.join(cursor, query)
                    if not entries and follower is None:  # the feed is not there yet
                        await asyncio.sleep(LOOK_EVERY)
                else:
                    entries = await asyncio.to_thread(cursor.read)
                    if not entries and cursor.path not in self._feeds:
                        self._start_feed(session, cursor)
                lines = [line for line, entry in entries if query.matches(entry)]
                skipped, lines = max(0, skipped - len(lines)), lines[skipped:]
                if lines:
                    yield b"".join(lines)
            cursor.close()
            assert feed is not None
            try:
                while (new := await follower.lines()) is not None:
                    yield new
            finally:
                feed.leave(follower)

    def _start_feed(self, session: str, cursor: LogCursor) -> None:
        """Begin to read the new lines of a session, from the place of a cursor on."""
        path = cursor.path

        def living() -> bool:
            return self._living.get(session) == path and not self._closing

        self._feeds[path] = LogFeed(cursor.twin(), living, ended=lambda: self._feeds.pop(path))

    @contextlib.contextmanager
    def _following(self, user: str) -> Iterator[None]:
        if self._followers[user] >= MAX_FOLLOWERS:
            raise LimitReached(
                f"{MAX_FOLLOWERS} programs follow logs of this gateway as {user!r} already: close one of them first"
            )
        self._followers[user] += 1
        try:
            yield
        finally:
            self._followers[user] -= 1
            if not self._followers[user]:
                del self._followers[user]

    def _cursor(self, session: str, query: LogQuery) -> LogCursor:
        """Return the beginning of a session's log."""
        query.check()
        logs = self._living | self._ended
        if session not in logs:
            raise UnknownSession(f"no log of a session named {session!r} is kept any more")
        return LogCursor(logs[session])


def _scan(session: str, cursor: LogCursor, query: LogQuery) -> Iterator[bytes]:
    """Yield the lines from a cursor to the end that match. Raise an error if there is no such mesh or rank."""
    sizes: dict[str, int] = {}
    while entries := cursor.read():
        for line, entry in entries:
            if "processes" in entry:
                sizes[entry["mesh"]] = entry["processes"]
            elif "unreadable" not in entry:  # the note of the mesh's size may have been unreadable
                sizes[entry["mesh"]] = max(sizes.get(entry["mesh"], 0), entry["rank"] + 1)
            if query.matches(entry):
                yield line
    _check_exists(session, query, sizes)


def _lines_before_tail(session: str, cursor: LogCursor, query: LogQuery) -> int:
    """Return the number of matching lines before the last ones that are wanted. Raise as `_scan` does."""
    with contextlib.closing(cursor.twin()) as ahead:
        found = sum(1 for _ in _scan(session, ahead, query))
    return 0 if query.tail is None else max(0, found - query.tail)


def _check_exists(session: str, query: LogQuery, sizes: dict[str, int]) -> None:
    if query.mesh is None:
        return
    if query.mesh not in sizes and query.mesh != RUNS:
        known = ", ".join(repr(name) for name in sizes) or "none"
        raise NoSuchMesh(f"session {session!r} has no proc mesh named {query.mesh!r}; it has: {known}")
    size = sizes.get(query.mesh, 1)
    if query.rank is not None and not 0 <= query.rank < size:
        raise NoSuchRank(f"no rank {query.rank} in {query.mesh!r}: it has {size} processes, 0 to {size - 1}")
