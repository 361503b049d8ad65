"""A disk that takes nothing for a while ends no weaver, loses no report, and is told."""

from __future__ import annotations

import asyncio
import sqlite3
import time

import pytest

from loom.errors import Unavailable
from loom.weaver.server import user_weaver
from loom.weaver.storage import writer
from loom.weaver.storage.store import Commit
from tests.unit.loom.weaver.running import Running, running

FULL = ["database or disk is full", "disk I/O error", "attempt to write a readonly database",
        "unable to open database file"]  # fmt: skip

STALE = "Stale file handle"
"""The words of a volume of a network that is away."""


class Disk:
    """A stand-in for a disk, which takes commits or does not."""

    def __init__(self, weaver: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reason = ""
        store = weaver.admin._store
        write = store.write

        def write_if_there_is_room(commit: Commit) -> None:
            if self.reason:
                raise OSError(self.reason) if self.reason == STALE else sqlite3.OperationalError(self.reason)
            write(commit)

        monkeypatch.setattr(writer, "RETRY", 0.02)
        monkeypatch.setattr(store, "write", write_if_there_is_room)


@pytest.mark.guarantees(
    "disk and clock",
    "A full disk ends no weaver: it refuses commands with the reason, answers questions, and stores what "
    "was reported once there is room",
)
@pytest.mark.parametrize("reason", [*FULL, STALE])
async def test_reports_wait_for_room_and_are_stored_once(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as weaver:
        disk = Disk(weaver, monkeypatch)
        link = await weaver.threadlet()
        disk.reason = reason
        for number in range(1, 6):
            link.send("status", [[number, time.time(), number, None, None, {"loss": 1.0 / number}, None]])
        await weaver.until(lambda: weaver.admin.weaver.undurable is not None)

        status = await weaver.client.ask("status")
        assert status["undurable_reason"] == reason
        with pytest.raises(Unavailable, match="was not done"):
            await weaver.client.do("command", "anna", kind="pause")
        assert (await weaver.client.ask("replica", id="train_0"))["step"] == 5

        disk.reason = ""
        while (await link.receive("stored"))[1] != 5:
            pass
        history = await weaver.client.ask("history", replica="train_0", metric="loss")
        assert [step for _, step, _ in history] == [1, 2, 3, 4, 5]
        assert (await weaver.client.ask("status"))["undurable_since"] is None
        (event,) = await weaver.client.ask("events", kind="undurable")
        assert (event["reason"], event["since"]) == (reason, status["undurable_since"])
        await weaver.client.do("command", "anna", kind="pause")


@pytest.mark.guarantees(
    "disk and clock",
    "A full disk ends no weaver: it refuses commands with the reason, answers questions, and stores what "
    "was reported once there is room",
)
async def test_what_has_no_room_waits_in_the_process_that_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_weaver, "MOST_UNSTORED", 3)
    async with running() as weaver:
        disk = Disk(weaver, monkeypatch)
        link = await weaver.threadlet()
        disk.reason = FULL[0]
        sent = 0
        while not weaver.admin.weaver.reports.held:
            sent += 1
            link.send("status", [[sent, time.time(), sent, None, None, {"loss": 1.0}, None]])
            await asyncio.sleep(0.01)
        taken = weaver.admin.weaver.reports.taken

        disk.reason = ""
        with pytest.raises(EOFError):  # so that the threadlet sends again what was not stored
            await link.receive("nothing")
        await weaver.until(lambda: weaver.admin.weaver.undurable is None)
        (event,) = await weaver.client.ask("events", kind="undurable")
        assert event["replicas"] == ["train_0"]
        assert taken < sent
        assert (await weaver.client.ask("replica", id="train_0"))["seq"] == taken
        again = await weaver.threadlet()
        again.send("status", [[taken + 1, time.time(), 9, None, None, {"loss": 1.0}, None]])
        stored = 0
        while stored != taken + 1:  # the reports before may be acknowledged first
            stored = (await again.receive("stored"))[1]
        assert (await weaver.client.ask("replica", id="train_0"))["seq"] == taken + 1


async def test_a_store_that_is_broken_ends_the_weaver(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(commit: Commit) -> None:
        raise sqlite3.DatabaseError("malformed")

    async with running() as weaver:
        link = await weaver.threadlet()
        monkeypatch.setattr(weaver.admin._store, "write", fail)
        link.send("status", [[1, time.time(), 1, None, None, {"loss": 1.0}, None]])
        await weaver.until(lambda: weaver.server.users.ended.is_set())
        assert str(weaver.server.users.failure) == "malformed"
