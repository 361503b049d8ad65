"""The feed of a session's log: its new lines are read once for all who follow it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from loom.errors import WrongArguments
from loom.process import tasks
from loom_gateway.sessions.log_cursor import Entry, LogCursor, LogEntry, left_out

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
