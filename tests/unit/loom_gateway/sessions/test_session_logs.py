"""The logs of sessions in their files, which are bounded."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from typing import Any

import pytest

import loom
from loom_gateway.driver.output.spool import LogSpool
from loom_gateway.sessions.logs import KEEP_ENDED, LogQuery, SessionLogs


def entry(text: str, rank: int = 0) -> dict[str, Any]:
    return {"time": 0.0, "mesh": "trainers", "rank": rank, "place": "", "stream": "stdout", "text": text}


def read(logs: SessionLogs, session: str, query: LogQuery) -> list[bytes]:
    async def all_pieces() -> bytes:
        return b"".join([piece async for piece in await logs.read(session, query)])

    return asyncio.run(all_pieces()).splitlines()


def texts(lines: list[bytes]) -> list[str]:
    return [json.loads(line)["text"] for line in lines]


def test_the_spool_is_bounded_and_knows_its_meshes_after_a_turn(tmp_path: Any) -> None:
    path = str(tmp_path / "s.log")
    with closing(LogSpool(path, limit=4096)) as spool:
        spool.add_processes("trainers", 2)
        for number in range(200):
            spool.append([entry(f"line {number}")])
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2 * 4096
    logs = SessionLogs()
    logs.add("s", path)
    kept = texts(read(logs, "s", LogQuery(mesh="trainers", rank=0)))
    assert kept == [f"line {number}" for number in range(200 - len(kept), 200)]
    assert len(kept) > 30
    assert texts(read(logs, "s", LogQuery(tail=2))) == ["line 198", "line 199"]
    assert read(logs, "s", LogQuery(tail=0)) == []
    with pytest.raises(loom.NoSuchRank):
        read(logs, "s", LogQuery(mesh="trainers", rank=2))


async def test_following_misses_nothing_when_the_file_turns(tmp_path: Any) -> None:
    path = str(tmp_path / "s.log")
    logs = SessionLogs()
    seen: list[str] = []
    with closing(LogSpool(path, limit=2000)) as spool:
        logs.add("s", path)
        following = await logs.follow("s", LogQuery())
        for number in range(0, 60, 10):  # each ten are less than a file
            spool.append(entry(f"line {n}") for n in range(number, number + 10))
            seen += texts((await anext(following)).splitlines())
    logs.ended("s", path)
    async for piece in following:
        seen += texts(piece.splitlines())
    assert seen == [f"line {n}" for n in range(60)]


def test_a_disk_that_takes_nothing_costs_the_history_only(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    spool = LogSpool(str(tmp_path / "nowhere" / "s.log"))
    for _ in range(3):
        spool.append([entry("lost")])
    assert len(caplog.records) == 1


@pytest.mark.guarantees("nothing lost", "The logs of ended sessions are bounded, for each user and in all")
def test_logs_of_ended_sessions_are_kept_for_a_while(tmp_path: Any) -> None:
    logs = SessionLogs()
    for number in range(KEEP_ENDED + 1):
        path = tmp_path / f"{number}.log"
        with closing(LogSpool(str(path))) as spool:
            spool.append([entry("kept")])
        logs.add(str(number), str(path))
        logs.ended(str(number), str(path))
    assert not (tmp_path / "0.log").exists()
    with pytest.raises(loom.UnknownSession, match="no log of a session named '0' is kept any more"):
        read(logs, "0", LogQuery())
    assert texts(read(logs, "1", LogQuery())) == ["kept"]


@pytest.mark.guarantees(
    "users", "A user who ends many sessions pushes out neither the reasons nor the logs of another's"
)
def test_a_user_who_ends_many_sessions_pushes_out_no_other_users_logs(tmp_path: Any) -> None:
    logs = SessionLogs()
    for number in range(KEEP_ENDED + 2):
        path = tmp_path / f"{number}.log"
        with closing(LogSpool(str(path))) as spool:
            spool.append([entry("kept")])
        logs.ended(str(number), str(path), "ann" if number == 0 else "bob")
    assert texts(read(logs, "0", LogQuery())) == ["kept"]
    assert not (tmp_path / "1.log").exists()
