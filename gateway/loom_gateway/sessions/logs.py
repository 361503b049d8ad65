"""The sessions' logs, the files that their drivers write (`loom_gateway.driver.output.spool`).

They are apart from the manager of sessions, because logs outlive their sessions. The new lines of a log
are read once for all who follow it (`LogFeed`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

from loom.errors import LimitReached, NoSuchMesh, NoSuchRank, UnknownSession, WrongArguments
from loom.process import tasks
from loom.token_file import ADMIN
from loom_gateway.sessions.log_reader import Entry, LogCursor, LogEntry, left_out

RUNS = "driver"  # the name in place of a mesh's for what functions of `Job.run` print

LOOK_EVERY = 0.2  # seconds between two reads of a followed file: no event for files works everywhere
SIGN_OF_LIFE = 5.0  # seconds of silence after which a follower gets an empty line
BUFFER = 4 << 20  # bytes that wait for a follower; of more, it loses the oldest


@dataclass(frozen=True)
class LogQuery:
    """A filter of log lines. None matches everything."""

    mesh: str | None = None
    rank: int | None = None
    stream: str | None = None
    tail: int | None = None  # the number of last lines to read
    run: int | None = None  # the id of a function that `Job.run` runs

    def check(self) -> None:
        """Raise `WrongArguments` if the filter cannot match in any session."""
        if self.stream not in (None, "stdout", "stderr"):
            raise WrongArguments(f"stream={self.stream!r}: it is stdout or stderr")
        if self.tail is not None and self.tail < 0:
            raise WrongArguments(f"tail={self.tail}: it is a number of lines, not negative")
        if self.rank is not None and self.mesh is None:
            raise WrongArguments(f"rank={self.rank} needs a mesh: ranks are counted in each")
        if self.run is not None and self.mesh not in (None, RUNS):
            raise WrongArguments(f"run={self.run} is about the mesh {RUNS!r}, and not about {self.mesh!r}")

    def matches(self, entry: LogEntry) -> bool:
        if "unreadable" in entry:  # whose line it was is not known
            return True
        return (
            "text" in entry
            and self.mesh in (None, entry["mesh"])
            and self.rank in (None, entry["rank"])
            and self.stream in (None, entry["stream"])
            and self.run in (None, entry.get("run"))
        )


class Follower:
    """The new lines for one reader of a feed, which wait for it in a bounded buffer."""

    def __init__(self, query: LogQuery) -> None:
        self._query = query
        self._lines: deque[bytes] = deque()
        self._size = 0  # bytes of those lines
        self._lost = 0  # lines for which there was no room
        self._when = 0.0  # time of the last line
        self._ended = False
        self._news = asyncio.Event()

    def take(self, entries: Sequence[Entry]) -> None:
        """Add the entries that the reader asked for."""
        for line, entry in entries:
            if self._query.matches(entry):
                self._lines.append(line)
                self._size += len(line)
                self._when = entry["time"]
                self._news.set()
        while self._size > BUFFER:
            self._size -= len(self._lines.popleft())
            self._lost += 1

    def end(self) -> None:
        """Note that no further lines come."""
        self._ended = True
        self._news.set()

    async def lines(self) -> bytes | None:
        """Wait for new lines; None: there are no more. After `SIGN_OF_LIFE` seconds, return an empty line."""
        try:
            await asyncio.wait_for(self._news.wait(), SIGN_OF_LIFE)
        except asyncio.TimeoutError:
            return b"\n"
        if self._lost:
            note, _ = left_out(f"{self._lost} lines", self._when)
            self._lines.appendleft(note)
        data = b"".join(self._lines)
        self._lines.clear()
        self._size = self._lost = 0
        if not self._ended:
            self._news.clear()
        return data or None


Read: TypeAlias = Callable[[LogCursor, LogCursor | None], Awaitable[list[Entry]]]


class LogFeed:
    """Reads the new lines of one log while it has followers, until the session ends.

    ``read`` reads a cursor on, perhaps up to another one, beside the event loop. ``living`` says whether more lines
    may come, and ``ended`` is called once after the last one.
    """

    def __init__(
        self, cursor: LogCursor, read: Read, living: Callable[[], bool], ended: Callable[[], object]
    ) -> None:
        self._cursor = cursor
        self._read = read
        self._living = living
        self._on_end = ended
        self._followers: set[Follower] = set()
        self._ended = False
        self._reading = asyncio.Lock()  # held while the cursor moves, so that a follower can join at its place
        tasks.run_to_end("follow a session's log", self._run)

    async def join(self, cursor: LogCursor, query: LogQuery) -> tuple[list[Entry], Follower | None]:
        """Read towards the feed's place; return the entries on the way, and the follower once it is there."""
        async with self._reading:
            entries = await self._read(cursor, self._cursor)
            if self._ended or not cursor.is_at(self._cursor):
                return entries, None
            follower = Follower(query)
            self._followers.add(follower)
            return entries, follower

    def leave(self, follower: Follower) -> None:
        """Take a follower away. The feed ends with the last one."""
        self._followers.discard(follower)
        if not self._followers:
            self._end()

    async def _run(self) -> None:
        fails = False
        try:
            while not self._ended:
                living = self._living()  # checked before the last read, so that no line is missed
                async with self._reading:
                    entries = await self._read(self._cursor, None)
                    for follower in self._followers:
                        follower.take(entries)
                if not entries:
                    if not living:
                        return
                    await asyncio.sleep(LOOK_EVERY)
        except Exception:
            fails = True  # and is started again, at the same place
            raise
        finally:
            if not fails:
                self._end()
                self._cursor.close()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._on_end()
            for follower in self._followers:
                follower.end()


KEEP_ENDED = 16  # the number of ended sessions of each user whose logs are kept, the newest
KEEP_IN_ALL = 128  # and of all users; beyond it, the oldest of the user with the most is removed
MAX_FOLLOWERS = 64  # programs of a user that read or follow logs at once


class SessionLogs:
    """The logs of the living sessions and of the last `KEEP_ENDED` ended ones of each user."""

    def __init__(self) -> None:
        self._living: dict[str, str] = {}  # paths by session
        self._ended: dict[str, str] = {}  # the newest last
        self._user_of: dict[str, str] = {}  # of the ended ones
        self._closing = False
        self._readers: Counter[str] = Counter()  # programs by user
        self._thread = ThreadPoolExecutor(1, "logs")
        """Reads for all, a piece after the other: threads that compute hold up the event loop together."""
        self._feeds: dict[str, LogFeed] = {}  # of the logs that are followed, by path

    def add(self, session: str, path: str) -> None:
        self._living[session] = path

    def forget(self, session: str) -> None:
        """Note that a session goes on elsewhere, and its log with it."""
        self._living.pop(session, None)

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

    async def read(self, session: str, query: LogQuery, user: str = ADMIN) -> AsyncIterator[bytes]:
        """Yield the matching lines that the log has now, as JSON, as fast as they are taken. Raise as `follow`."""
        return await _begun(self._read(session, query, user))

    async def follow(self, session: str, query: LogQuery, user: str = ADMIN) -> AsyncIterator[bytes]:
        """Yield the matching lines, old and new, as JSON, until the session ends.

        Old lines are read as fast as they are taken. Of new ones, a reader that is slow loses some, and is told.

        Raises:
            LimitReached: too many programs of the user read logs.
            Other errors, at once: the query names nothing, or cannot match.
        """
        return await _begun(self._follow(session, query, user))

    async def _read(self, session: str, query: LogQuery, user: str) -> AsyncIterator[bytes]:
        with self._reader_of(user):
            cursor = await self._cursor(session, query)
            with contextlib.closing(cursor), contextlib.closing(cursor.end()) as end:
                skipped = await self._lines_before_tail(session, cursor, end, query)
                yield b""  # the query is valid
                while not cursor.is_at(end) and (entries := await self._next(cursor, end)):
                    skipped, data = _matching(entries, query, skipped)
                    if data:
                        yield data

    async def _follow(self, session: str, query: LogQuery, user: str) -> AsyncIterator[bytes]:
        with self._reader_of(user), contextlib.closing(await self._cursor(session, query)) as cursor:
            with contextlib.closing(cursor.end()) as end:
                skipped = await self._lines_before_tail(session, cursor, end, query)
            yield b""  # the query is valid
            follower = None
            while follower is None:
                feed = self._feeds.get(cursor.path)
                if feed is not None:
                    entries, follower = await feed.join(cursor, query)
                    if not entries and follower is None:  # the feed is not there yet
                        await asyncio.sleep(LOOK_EVERY)
                else:
                    entries = await self._next(cursor)
                    if not entries and cursor.path not in self._feeds:
                        self._start_feed(session, cursor)
                skipped, data = _matching(entries, query, skipped)
                if data:
                    yield data
            cursor.close()
            assert feed is not None
            try:
                while (new := await follower.lines()) is not None:
                    yield new
            finally:
                feed.leave(follower)

    async def _next(self, cursor: LogCursor, until: LogCursor | None = None) -> list[Entry]:
        """Return the next entries, as `LogCursor.read`. One piece is read at a time, whoever reads."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, cursor.read, until)

    async def _lines_before_tail(self, session: str, cursor: LogCursor, end: LogCursor, query: LogQuery) -> int:
        """Return the number of matching lines before the last ones that are wanted.

        Raise an error if there is no such mesh or rank.
        """
        if query.tail is None and query.mesh is None:
            return 0
        sizes: dict[str, int] = {}
        found = 0
        with contextlib.closing(cursor.twin()) as ahead:
            while not ahead.is_at(end) and (entries := await self._next(ahead, end)):
                for _, entry in entries:
                    if "processes" in entry:
                        sizes[entry["mesh"]] = entry["processes"]
                    elif "unreadable" not in entry:  # the note of the mesh's size may have been unreadable
                        sizes[entry["mesh"]] = max(sizes.get(entry["mesh"], 0), entry["rank"] + 1)
                    found += query.matches(entry)
        _check_exists(session, query, sizes)
        return 0 if query.tail is None else max(0, found - query.tail)

    def _start_feed(self, session: str, cursor: LogCursor) -> None:
        """Begin to read the new lines of a session, from the place of a cursor on."""
        path = cursor.path

        def living() -> bool:
            return self._living.get(session) == path and not self._closing

        self._feeds[path] = LogFeed(cursor.twin(), self._next, living, ended=lambda: self._feeds.pop(path))

    @contextlib.contextmanager
    def _reader_of(self, user: str) -> Iterator[None]:
        if self._readers[user] >= MAX_FOLLOWERS:
            raise LimitReached(
                f"{MAX_FOLLOWERS} programs read logs of this gateway as {user!r} already: close one of them first"
            )
        self._readers[user] += 1
        try:
            yield
        finally:
            self._readers[user] -= 1
            if not self._readers[user]:
                del self._readers[user]

    async def _cursor(self, session: str, query: LogQuery) -> LogCursor:
        """Return the beginning of a session's log."""
        query.check()
        path = self._living.get(session) or self._ended.get(session)
        if path is None:
            raise UnknownSession(f"no log of a session named {session!r} is kept any more")
        return await asyncio.get_running_loop().run_in_executor(self._thread, LogCursor, path)


async def _begun(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Return lines once their query is known to be valid."""
    await anext(lines)
    return lines


def _matching(entries: Sequence[Entry], query: LogQuery, skipped: int) -> tuple[int, bytes]:
    """Return how many matching lines are still to be skipped, and those that are not."""
    lines = [line for line, entry in entries if query.matches(entry)]
    return max(0, skipped - len(lines)), b"".join(lines[skipped:])


def _check_exists(session: str, query: LogQuery, sizes: dict[str, int]) -> None:
    if query.mesh is None:
        return
    if query.mesh not in sizes and query.mesh != RUNS:
        known = ", ".join(repr(name) for name in sizes) or "none"
        raise NoSuchMesh(f"session {session!r} has no proc mesh named {query.mesh!r}; it has: {known}")
    size = sizes.get(query.mesh, 1)
    if query.rank is not None and not 0 <= query.rank < size:
        raise NoSuchRank(f"no rank {query.rank} in {query.mesh!r}: it has {size} processes, 0 to {size - 1}")
