"""The log of a session whose lines were not all written whole."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from loom.errors import LimitReached, WrongArguments
from loom_gateway.driver.output.collector import LONGEST_LINE
from loom_gateway.driver.output.spool import LogSpool
from loom_gateway.sessions import log_reader
from loom_gateway.sessions import logs as session_logs
from loom_gateway.sessions.log_reader import MOST, PIECE, LogCursor
from loom_gateway.sessions.logs import LogQuery, SessionLogs


def line(text: str, mesh: str = "trainers", rank: int = 0) -> dict[str, Any]:
    return {"time": 1.5, "mesh": mesh, "rank": rank, "place": "", "stream": "stdout", "text": text}


def written(text: str) -> bytes:
    return json.dumps(line(text)).encode() + b"\n"


def read(path: Path, query: LogQuery) -> list[dict[str, Any]]:
    async def all_pieces() -> bytes:
        logs = SessionLogs()
        logs.add("a", str(path))
        return b"".join([piece async for piece in await logs.read("a", query)])

    return [json.loads(found) for found in asyncio.run(all_pieces()).splitlines()]


@pytest.mark.guarantees(
    "nothing lost", "A line that was not written whole is left out of a session's log, and said"
)
@pytest.mark.parametrize(
    "torn",
    [b'{"time": 2.5, "mesh": "trai\n', b'{"text": "\xe2\x80\n', b"17\n", b'{"time": 2.5}\n', b"\x00\x00\n"],
    ids=["half a line", "half a letter", "a number", "half an entry", "a hole"],
)
def test_a_line_that_was_not_written_whole_is_left_out_and_said(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(written("before") + torn + written("after"))
    found = read(path, LogQuery(mesh="trainers", rank=0))
    assert [entry["text"] for entry in found[::2]] == ["before", "after"]
    assert found[1]["text"] == f"… a line of {len(torn)} bytes was not written whole, and is left out …"
    assert (found[1]["mesh"], found[1]["time"], found[1]["unreadable"]) == ("loom", 1.5, len(torn))


def test_a_run_has_only_its_own_lines(tmp_path: Path) -> None:
    lines = [line("no run", "driver"), {**line("one", "driver"), "run": 1}, {**line("other", "driver"), "run": 2}]
    path = tmp_path / "log"
    path.write_bytes(b"".join(json.dumps(one).encode() + b"\n" for one in (*lines, line("a process"))))
    assert [entry["text"] for entry in read(path, LogQuery(run=1))] == ["one"]
    assert [entry["text"] for entry in read(path, LogQuery(mesh="driver", run=2))] == ["other"]
    assert read(path, LogQuery(run=3)) == []
    with pytest.raises(WrongArguments):
        read(path, LogQuery(mesh="trainers", run=1))


def test_an_older_file_that_ends_in_half_a_line_hides_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    (tmp_path / "log.1").write_bytes(written("old") + b'{"time": 2.5, "mesh": "trai')
    path.write_bytes(written("new"))
    texts = [entry["text"] for entry in read(path, LogQuery())]
    assert [texts[0], texts[-1]] == ["old", "new"]


@pytest.mark.guarantees("nothing lost", "After a full disk the log goes on with a whole line")
def test_after_a_full_disk_the_next_line_begins_a_new_one(tmp_path: Path) -> None:
    class NearlyFull:
        """A file that takes ten bytes more and then, until there is room, none."""

        def __init__(self, file: Any) -> None:
            self.file, self.room = file, 10

        def write(self, data: bytes) -> int:
            if not self.room:
                raise OSError(28, "No space left on device")
            taken = data[: self.room]
            self.room -= len(taken)
            return int(self.file.write(taken))

    path = tmp_path / "log"
    spool = LogSpool(str(path))
    spool.append([line("before")])
    whole = spool._file
    spool._file = NearlyFull(whole)  # type: ignore[assignment]
    spool.append([line("lost")])
    spool._file = whole
    spool.append([line("after")])
    spool.close()
    assert [entry["text"] for entry in read(path, LogQuery())][::2] == ["before", "after"]


def test_the_longest_line_of_a_driver_is_read_whole_in_small_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    spool = LogSpool(str(path))
    longest = "\0" * LONGEST_LINE  # of which each character takes six bytes as JSON
    spool.append([line(longest) for _ in range(10)])
    spool.close()
    parsed: list[int] = []
    read_entry = log_reader._entry

    def counted(one: bytes) -> dict[str, Any] | None:
        parsed.append(len(one))
        return read_entry(one)

    monkeypatch.setattr(log_reader, "_entry", counted)

    cursor = LogCursor(str(path))
    sizes = []
    while entries := cursor.read():
        assert {entry["text"] for _, entry in entries} == {longest}
        sizes.append(sum(len(one) for one, _ in entries))
    assert len(parsed) == 10
    assert max(sizes) <= 128 << 10
    cursor.close()

    path.write_bytes(b"[" + b"[]," * 100_000 + b"[]]\n")
    assert all("unreadable" in entry for entry in read(path, LogQuery()))
    assert max(parsed) <= 128 << 10


@pytest.mark.guarantees("strangers", "Followers of logs are bounded, for each user")
def test_followers_are_bounded_for_each_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_logs, "MAX_FOLLOWERS", 2)
    path = tmp_path / "log"
    path.write_bytes(written("before"))

    async def follow() -> None:
        logs = SessionLogs()
        logs.add("a", str(path))
        followers = [await logs.follow("a", LogQuery(), "ann") for _ in range(2)]
        for follower in followers:
            assert b"before" in await anext(follower)
        with pytest.raises(LimitReached, match="2 programs read"):
            await logs.follow("a", LogQuery(), "ann")
        with pytest.raises(LimitReached, match="2 programs read"):
            await logs.read("a", LogQuery(), "ann")
        other = await logs.follow("a", LogQuery(), "bob")
        assert b"before" in await anext(other)
        await followers[0].aclose()  # type: ignore[attr-defined]
        again = await logs.follow("a", LogQuery(), "ann")
        assert b"before" in await anext(again)
        for follower in (followers[1], again, other):
            await follower.aclose()  # type: ignore[attr-defined]

    asyncio.run(follow())


def texts(piece: bytes) -> list[str]:
    return [json.loads(found)["text"] for found in piece.splitlines() if found]


async def next_text(follower: AsyncIterator[bytes]) -> str:
    """Return the next lines of a follower that are no sign of life, as one text."""
    while not (found := texts(await anext(follower))):
        pass
    return " ".join(found)


@pytest.mark.guarantees("strangers", "Followers of a log share one reader")
async def test_followers_of_a_log_share_one_reader(tmp_path: Path) -> None:
    path = tmp_path / "log"
    spool = LogSpool(str(path))
    spool.append([line("old")])
    logs = SessionLogs()
    logs.add("a", str(path))
    followers = [await logs.follow("a", LogQuery(), f"user {number % 4}") for number in range(40)]
    for follower in followers:
        assert await next_text(follower) == "old"
    waiting = [asyncio.ensure_future(next_text(follower)) for follower in followers]
    await until(lambda: len(open_files(path)) == 2)  # the writer's, and one for all readers
    spool.append([line("new")])
    assert await asyncio.gather(*waiting) == ["new"] * 40
    for follower in followers:
        await follower.aclose()  # type: ignore[attr-defined]
    await until(lambda: len(open_files(path)) == 1)
    spool.close()


async def until(what: Callable[[], bool]) -> None:
    for _ in range(3000):  # 30 s
        if what():
            return
        await asyncio.sleep(0.01)
    pytest.fail("not within 30 s")


def open_files(path: Path) -> list[str]:
    """Return this process's descriptors of a file."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}") == str(path):
                found.append(descriptor)
        except FileNotFoundError:  # that of the folder itself
            continue
    return found


@pytest.mark.guarantees(
    "strangers", "A follower that is slow loses lines, is told so, and costs the others nothing"
)
@pytest.mark.slow
async def test_a_slow_follower_loses_lines_and_is_told_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_logs, "BUFFER", 1000)
    path = tmp_path / "log"
    spool = LogSpool(str(path))
    spool.append([line("old")])
    logs = SessionLogs()
    logs.add("a", str(path))
    slow, quick = [await logs.follow("a", LogQuery()) for _ in range(2)]
    for follower in (slow, quick):
        assert await next_text(follower) == "old"
    waiting = [asyncio.ensure_future(next_text(follower)) for follower in (slow, quick)]
    await until(lambda: [len(feed._followers) for feed in logs._feeds.values()] == [2])
    spool.append([line("line 0")])
    assert await asyncio.gather(*waiting) == ["line 0"] * 2
    for number in range(1, 50):
        spool.append([line(f"line {number}")])
        assert await next_text(quick) == f"line {number}"
    spool.close()
    logs.ended("a", str(path))
    note, *rest = [text async for piece in slow for text in texts(piece)]
    assert rest == [f"line {number}" for number in range(50 - len(rest), 50)]
    assert note == f"… {49 - len(rest)} lines came faster than they were read, and are left out …"
    assert len(rest) < 12


async def test_followers_that_come_while_a_log_turns_miss_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_logs, "LOOK_EVERY", 0.001)
    monkeypatch.setattr(session_logs, "LOOK_EVERY", 0.001)
    randomly = random.Random(8)
    path = tmp_path / "log"
    spool = LogSpool(str(path), limit=2000)  # some twenty lines
    spool.append([line("0")])
    logs = SessionLogs()
    logs.add("a", str(path))

    async def follow() -> list[str]:
        return [text async for piece in await logs.follow("a", LogQuery()) for text in texts(piece)]

    following = []
    for number in range(1, 400):
        if number % 20 == 0:
            following.append(asyncio.ensure_future(follow()))
        spool.append([line(str(number))])
        await asyncio.sleep(randomly.choice([0, 0, 0.002]))
    spool.close()
    logs.ended("a", str(path))
    for seen in await asyncio.gather(*following):
        assert seen[-1] == "399"
        for before, after in itertools.pairwise(seen):
            if (before + after).isdecimal():  # else a note says that some are missing
                assert int(after) == int(before) + 1


def test_a_reader_that_misses_a_whole_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(written("first"))
    cursor = LogCursor(str(path))
    assert [entry["text"] for _, entry in cursor.read()] == ["first"]
    for text in ("second", "third", "fourth"):
        os.replace(path, tmp_path / "log.1")
        path.write_bytes(written(text))
    found = []
    while entries := cursor.read():
        found += [entry["text"] for _, entry in entries]
    assert found == ["… lines came faster than they were read, and are left out …", "third", "fourth"]
    cursor.close()


def test_a_log_that_turns_twice_while_it_is_opened_is_read_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    path.write_bytes(written("first"))
    texts_to_come = ["second", "third"]
    open_file = log_reader._open_if_there

    def turn_before_the_older_is_opened(name: str) -> Any:
        while name.endswith(".1") and texts_to_come:
            os.replace(path, name)
            path.write_bytes(written(texts_to_come.pop(0)))
        return open_file(name)

    monkeypatch.setattr(log_reader, "_open_if_there", turn_before_the_older_is_opened)
    assert [entry["text"] for entry in read(path, LogQuery())] == ["second", "third"]


@pytest.mark.guarantees("strangers", "A log that user code has made huge fills no memory of the gateway")
def test_a_file_that_user_code_has_made_huge_fills_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\n")
    os.truncate(path, 1 << 30)  # a hole: no disk is used
    with path.open("ab") as file:
        file.write(b"\n" + written("last"))
    tracemalloc.start()
    try:
        found = read(path, LogQuery())
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found[-1]["text"] == "last"
    assert len(found) <= MOST // PIECE + 2
    assert most < 4 * PIECE


@pytest.mark.parametrize("size", [2 << 20, pytest.param(8 << 20, marks=pytest.mark.slow)])
async def test_a_large_log_is_read_as_fast_as_it_is_taken_and_never_gathered(tmp_path: Path, size: int) -> None:
    path = tmp_path / "log"
    block = b"".join(written(f"{number:0200}") for number in range(1000))
    blocks = size // len(block)
    for part in (f"{path}.1", str(path)):
        with open(part, "wb") as file:  # noqa: ASYNC230
            for _ in range(blocks):
                file.write(block)
    logs = SessionLogs()
    logs.add("a", str(path))
    pieces, lines = 0, 0
    tracemalloc.start()
    try:
        for query in (LogQuery(), LogQuery(mesh="trainers", tail=1500 * blocks)):
            async for piece in await logs.read("a", query):
                assert len(piece) <= PIECE
                pieces, lines = pieces + 1, lines + piece.count(b"\n")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert lines == 3500 * blocks
    assert pieces > 25 * (size >> 20)
    assert most < 16 * PIECE


async def test_a_log_that_grows_while_it_is_read_comes_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(written("before") * 2000)
    logs = SessionLogs()
    logs.add("a", str(path))
    lines = b""
    async for piece in await logs.read("a", LogQuery(tail=1500)):
        lines += piece
        with path.open("ab") as file:
            file.write(written("later") * 2000)

    assert lines == written("before") * 1500


@pytest.mark.guarantees("nothing lost", "The logs of ended sessions are bounded, for each user and in all")
def test_logs_of_many_users_are_bounded_in_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_logs, "KEEP_IN_ALL", 10)
    logs = SessionLogs()
    for number in range(30):
        path = tmp_path / f"{number}.log"
        path.write_bytes(written("kept"))
        logs.ended(str(number), str(path), "ann" if 20 <= number < 25 else f"user {number}")
    kept = sorted(int(path.stem) for path in tmp_path.iterdir())
    assert len(kept) == 10
    assert kept[-1] == 29
    assert not {20, 21, 22, 23} & set(kept)  # the oldest of the user with the most go first
