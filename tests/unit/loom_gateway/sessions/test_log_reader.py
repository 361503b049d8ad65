"""The log of a session whose lines were not all written whole."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from loom.errors import LimitReached
from loom_gateway.driver.output.spool import LogSpool
from loom_gateway.sessions import log_reader
from loom_gateway.sessions.log_reader import LogQuery, SessionLogs


def line(text: str, mesh: str = "trainers", rank: int = 0) -> dict[str, Any]:
    return {"time": 1.5, "mesh": mesh, "rank": rank, "place": "", "stream": "stdout", "text": text}


def written(text: str) -> bytes:
    return json.dumps(line(text)).encode() + b"\n"


def read(path: Path, query: LogQuery) -> list[dict[str, Any]]:
    logs = SessionLogs()
    logs.add("a", str(path))
    return [json.loads(found) for found in logs.read("a", query)]


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


def test_an_older_file_that_ends_in_half_a_line_hides_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    (tmp_path / "log.1").write_bytes(written("old") + b'{"time": 2.5, "mesh": "trai')
    path.write_bytes(written("new"))
    texts = [entry["text"] for entry in read(path, LogQuery())]
    assert [texts[0], texts[-1]] == ["old", "new"]


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


def test_followers_are_bounded_for_each_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "MAX_FOLLOWERS", 2)
    path = tmp_path / "log"
    path.write_bytes(written("before"))

    async def follow() -> None:
        logs = SessionLogs()
        logs.add("a", str(path))
        followers = [await logs.follow("a", LogQuery(), "ann") for _ in range(2)]
        for follower in followers:
            assert b"before" in await anext(follower)
        with pytest.raises(LimitReached, match="2 programs follow"):
            await logs.follow("a", LogQuery(), "ann")
        other = await logs.follow("a", LogQuery(), "bob")
        assert b"before" in await anext(other)
        await followers[0].aclose()  # type: ignore[attr-defined]
        again = await logs.follow("a", LogQuery(), "ann")
        assert b"before" in await anext(again)
        for follower in (followers[1], again, other):
            await follower.aclose()  # type: ignore[attr-defined]

    asyncio.run(follow())
