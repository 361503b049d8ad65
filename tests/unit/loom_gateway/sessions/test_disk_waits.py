"""A disk that is slow holds up what has to be written, and not the event loop that relays."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from loom.errors import Unavailable
from loom.process import state_file
from loom.process.child import Child
from loom.token_file import Token
from loom_gateway.access.sign_ins import SignIns
from loom_gateway.access.token_authority import TokenMemory
from loom_gateway.sessions.driver_process import DriverProcess, OwnDriver
from loom_gateway.sessions.ended_sessions import EndedSession, EndedSessions
from loom_gateway.sessions.manager import SessionManager
from loom_gateway.sessions.state_dir import DriverFiles, DriverRecord
from loom_gateway.workers.sources import FileWorkers, WorkerHosts, WorkerList
from loom_gateway.workers.watcher import WorkerWatch

BOUND = 20.0


class Disk:
    """A disk whose syncs wait until a test lets them go on."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.threads: list[threading.Thread] = []

    def sync(self, _: int) -> None:
        self.threads.append(threading.current_thread())
        assert self.goes_on.wait(BOUND)

    async def is_synced_beside(self, work: Any) -> None:
        """Assert that work waits for the disk, and that the event loop does not."""
        waiting = asyncio.ensure_future(work)
        while not self.threads:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert not waiting.done()
        self.goes_on.set()
        await asyncio.wait_for(waiting, BOUND)
        assert threading.main_thread() not in self.threads


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    slow = Disk()
    monkeypatch.setattr(state_file.os, "fsync", slow.sync)
    yield slow
    slow.goes_on.set()


class Driver(DriverProcess):
    """A record without a process."""

    def abandon(self) -> None:
        pass

    def signal(self, number: int) -> None:
        pass


def driver(folder: Path) -> DriverProcess:
    return Driver(DriverFiles(str(folder / "driver")), DriverRecord(1, 0, session="s", user="ann"))


async def test_a_session_is_shared_beside_the_loop_and_shares_at_once_are_all_kept(
    tmp_path: Path, disk: Disk
) -> None:
    session: Any = SimpleNamespace(driver=driver(tmp_path))
    manager: Any = SimpleNamespace()

    async def share() -> None:
        users = ("bob", "eve", "joe")
        await asyncio.gather(*(SessionManager.share(manager, session, user, "view") for user in users))

    await disk.is_synced_beside(share())

    assert session.driver.record.shared == {"bob": "view", "eve": "view", "joe": "view"}
    assert session.driver.files.read_record().shared == session.driver.record.shared


async def test_a_change_that_has_begun_is_finished_though_its_client_leaves(tmp_path: Path, disk: Disk) -> None:
    process = driver(tmp_path)
    noting = asyncio.ensure_future(process.note(lambda _: {"persist": True}))
    while not disk.threads:  # noqa: ASYNC110
        await asyncio.sleep(0)
    noting.cancel()
    disk.goes_on.set()
    await process.note(lambda record: {"session": f"{record.session}-{record.persist}"})

    assert process.files.read_record().session == "s-True"


async def test_a_record_that_cannot_be_written_is_not_changed(tmp_path: Path) -> None:
    process = driver(tmp_path / "missing")
    with pytest.raises(Unavailable, match="cannot write its state folder"):
        await process.note(lambda _: {"persist": True})
    assert not process.record.persist


async def test_an_end_is_written_down_beside_the_loop(tmp_path: Path, disk: Disk) -> None:
    ended = EndedSessions(str(tmp_path / "ended"))
    ended.add(EndedSession("s", "it ended", 0, 1.0, 2.0, "ann", False, "", ""))
    await disk.is_synced_beside(ended.write())

    assert EndedSessions(str(tmp_path / "ended")).all() == ended.all()


async def test_who_signs_out_waits_for_the_disk_and_nobody_else(tmp_path: Path, disk: Disk) -> None:
    disk.goes_on.set()
    sign_ins = SignIns(str(tmp_path / "page.json"))
    begun, text = sign_ins.begin(Token("1", "name", "view", "", 0.0), "key", False)
    disk.goes_on.clear()
    disk.threads.clear()
    await disk.is_synced_beside(sign_ins.end(begun))

    with pytest.raises(Exception, match="was signed out"):
        SignIns(str(tmp_path / "page.json")).read(text)


async def test_a_new_driver_is_written_down_beside_the_loop_before_it_is_released(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[bool] = []
    monkeypatch.setattr(Child, "release", lambda _: released.append(disk.goes_on.is_set()))
    files = DriverFiles(str(tmp_path / "driver"))
    await disk.is_synced_beside(OwnDriver.start("the driver", files, ["true"]))

    assert released == [True]


async def test_a_driver_that_nobody_waits_for_any_more_is_ended(tmp_path: Path, disk: Disk) -> None:
    before = psutil.Process().children()
    starting = asyncio.ensure_future(
        OwnDriver.start("the driver", DriverFiles(str(tmp_path / "driver")), ["sleep", "60"])
    )
    while not disk.threads:  # noqa: ASYNC110
        await asyncio.sleep(0)
    (child,) = set(psutil.Process().children()) - set(before)
    starting.cancel()
    disk.goes_on.set()

    await asyncio.to_thread(child.wait, BOUND)


async def test_a_driver_is_told_to_end_beside_the_loop(tmp_path: Path, disk: Disk) -> None:
    process = driver(tmp_path)
    process.exited.set()
    await disk.is_synced_beside(process.end("it was ended over REST"))

    assert process.files.read_last_words().reason == "it was ended over REST"


async def test_workers_are_published_beside_the_loop_and_only_then_complete(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "workers").write_text("tcp://127.0.0.1:1\n")
    hosts = WorkerHosts([("workers", FileWorkers(tmp_path / "workers"))])
    watch = WorkerWatch(hosts, str(tmp_path / "list"))
    watch.start()
    await disk.is_synced_beside(watch.there())

    assert WorkerList.read(watch.path) == hosts.listed()
    watch.close()


async def test_leased_workers_are_published_beside_the_loop(tmp_path: Path, disk: Disk) -> None:
    session: Any = SimpleNamespace(driver=driver(tmp_path))
    session.driver.record = replace(session.driver.record, hosts=[1])
    manager: Any = SimpleNamespace(sessions=lambda: [session])
    workers = WorkerList(["tcp://a:1", "tcp://b:1"], {"workers": [0, 1]})
    await disk.is_synced_beside(SessionManager._publish_leased(manager, workers))

    listed = WorkerList.read(session.driver.files.workers)
    assert listed is not None
    assert "tcp://b:1" in listed.addresses


async def test_revocations_are_remembered_beside_the_loop(tmp_path: Path, disk: Disk) -> None:
    known = TokenMemory(str(tmp_path / "known"))
    known.note([Token("1", "one", "view", "", 0.0, revoked=1.0)])
    await disk.is_synced_beside(asyncio.wrap_future(known.written))
    known.note([Token("2", "two", "view", "", 0.0, revoked=1.0)])
    known.written.result(BOUND)

    assert TokenMemory(str(tmp_path / "known")).revoked == {"1", "2"}
