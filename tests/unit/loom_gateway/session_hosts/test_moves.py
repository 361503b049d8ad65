"""Copies of sessions at other session hosts, and who takes a session over; the sessions are stand-ins."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loom.errors import LimitReached, ProtocolMismatch, WeaverUnavailable, WrongState
from loom.weaver.server import session_leases
from loom_gateway.session_hosts import moves as module
from loom_gateway.session_hosts.host import SessionHost
from loom_gateway.session_hosts.line import Line
from loom_gateway.session_hosts.moves import Copies, Moves
from loom_gateway.sessions.ended_sessions import EndedSession
from loom_gateway.sessions.lease_file import LeaseFile, now
from loom_gateway.sessions.manager import SessionManager
from loom_gateway.sessions.restarts import MovedElsewhere
from loom_gateway.sessions.state_dir import DriverFiles, DriverRecord, LastWords, StateFolder
from loom_gateway.workers.sources import WorkerHosts, parse_source
from tests.unit.loom.weaver.running import Running, running

KEY = "k" * 32

BOUND = 60.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in (module, session_leases):
        monkeypatch.setattr(owner, "LEASE", 1.2)
        monkeypatch.setattr(owner, "SLACK", 0.3)
    monkeypatch.setattr(module, "HOLD_EVERY", 0.05)
    monkeypatch.setattr(module, "LOOK_EVERY", 0.05)
    monkeypatch.setattr(module, "ANSWERS_WITHIN", 0.8)


class Driver:
    """A stand-in for a driver with functions."""

    def __init__(self, folder: Path, name: str, left: bytes) -> None:
        self.record = DriverRecord(1, 1, name, user="ann", boot="one")
        self.files = DriverFiles(str(folder / f"driver-{name}"))
        Path(self.files.restart).write_bytes(left)
        self.exited = asyncio.Event()
        self.signals: list[int] = []

    def signal(self, number: int) -> None:
        self.signals.append(number)
        self.exited.set()


class Sessions:
    """A stand-in for a manager of sessions."""

    def __init__(self, path: Path) -> None:
        self.folder = StateFolder(str(path), None)
        path.mkdir()
        self.lease = ""
        self.may_go_on: Callable[[str, int], Any]
        self.own: dict[str, Any] = {}
        self.taken: asyncio.Queue[tuple[DriverRecord, bytes]] = asyncio.Queue()

    def open(self, name: str, left: bytes = b"function") -> Driver:
        driver = Driver(Path(self.folder.path), name, left)
        self.own[name] = SimpleNamespace(name=name, driver=driver)
        return driver

    def sessions(self) -> list[Any]:
        return [one for one in self.own.values() if not isinstance(one, EndedSession)]

    def find(self, name: str) -> Any:
        return self.own.get(name)

    async def take_over(self, record: DriverRecord, left: Path) -> None:
        content = await asyncio.to_thread(left.read_bytes)
        self.own[record.session] = SimpleNamespace(name=record.session, driver=SimpleNamespace(record=record))
        self.own[record.session].driver.files = SimpleNamespace(leaves_functions=lambda: False)
        self.taken.put_nowait((record, content))


class Host:
    """A session host without drivers, in this process."""

    def __init__(self, folder: Path, weaver: Running, addresses: Path) -> None:
        self.sessions = Sessions(folder)
        peers = WorkerHosts([parse_source(f"file:{addresses}")])
        manager = cast(SessionManager, self.sessions)
        self.moves = Moves(manager, weaver.client, KEY, peers)
        self.host = SessionHost(manager, KEY, self.moves)
        self.listener = socket.create_server(("127.0.0.1", 0))
        with addresses.open("a") as file:
            file.write(f"tcp://127.0.0.1:{self.listener.getsockname()[1]}\n")

    @property
    def copies(self) -> list[str]:
        folder = Path(self.sessions.folder.path) / "copies"
        return sorted(path.stem for path in folder.glob("*/*.json"))

    @property
    def lease(self) -> LeaseFile:
        return LeaseFile(self.sessions.lease)

    @property
    def lines(self) -> list[Line]:
        opened = [peer._line for peer in self.moves._peers.all() if peer._line is not None]
        return [*self.host.server._lines, *opened]

    @property
    def held_until(self) -> float:
        return float(Path(self.sessions.lease).read_text())

    def end(self) -> None:
        """Be gone, as a process that is killed."""
        self.host.server.close()
        self.moves.close()


@contextlib.asynccontextmanager
async def hosts(folder: Path, weaver: Running, count: int = 2) -> AsyncIterator[list[Host]]:
    addresses = folder / "addresses"
    made = [Host(folder / f"host{number}", weaver, addresses) for number in range(count)]
    for host in made:
        await host.host.start(host.listener)
    try:
        yield made
    finally:
        lines = [line for host in made for line in host.lines]
        for host in made:
            host.end()
        await asyncio.gather(*(task for host in made for task in host.moves._tasks), return_exceptions=True)
        for line in lines:  # a graceful end of TLS takes turns that the loop of the test has not
            line.abort()
        await asyncio.wait_for(asyncio.gather(*(line.closed for line in lines)), BOUND)


async def is_away(*_: Any, **__: Any) -> Any:
    raise WeaverUnavailable("the weaver is away")


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(int(BOUND / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not come to that")


async def test_a_copy_is_with_the_other_hosts_as_long_as_there_are_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART", 1000)
    async with running() as weaver, hosts(tmp_path, weaver, 3) as (first, *others):
        driver = first.sessions.open("session-1", bytes(range(256)) * 100)
        await until(lambda: all(host.copies == ["session-1"] for host in others))
        assert first.copies == []
        ((_, record, left),) = others[0].moves._copies.of(first.moves.name)
        assert (record.user, left.read_bytes()) == ("ann", bytes(range(256)) * 100)

        os.unlink(driver.files.restart)
        await until(lambda: all(host.copies == [] for host in others))


async def test_the_sessions_of_a_host_that_is_gone_go_on_on_one_other(tmp_path: Path) -> None:
    async with running() as weaver, hosts(tmp_path, weaver, 3) as (first, *others):
        first.sessions.open("session-1")
        others[0].sessions.open("session-2")
        await until(lambda: all("session-1" in host.copies for host in others))

        first.end()

        await until(lambda: not any("session-1" in host.copies for host in others))
        ((record, left),) = [host.sessions.taken.get_nowait() for host in others if host.sessions.taken.qsize()]
        assert (record.session, record.user, record.moves, left) == ("session-1", "ann", 1, b"function")
        # Its own host learns of it when it is back.
        with pytest.raises(MovedElsewhere):
            await first.moves._await_right("session-1", 0)
        await others[0].moves._await_right("session-2", 0)


async def test_a_driver_is_killed_whose_session_is_another_hosts(tmp_path: Path) -> None:
    async with running() as weaver, hosts(tmp_path, weaver) as (first, second):
        driver = first.sessions.open("session-1")
        await second.sessions.take_over(DriverRecord(1, 1, "session-1", moves=1), Path(driver.files.restart))
        await until(lambda: driver.signals == [signal.SIGKILL])


@pytest.mark.parametrize(
    ("moves", "reason", "goes_on"), [(2, "", False), (0, "", True), (0, "a user ended it", False)]
)
async def test_a_session_that_has_ended_elsewhere_ends_unless_only_a_driver_before_was_lost(
    tmp_path: Path, moves: int, reason: str, goes_on: bool
) -> None:
    async with running() as weaver, hosts(tmp_path, weaver, 1) as (only,):
        record = DriverRecord(1, 1, "session-1", moves=moves)
        only.sessions.own["session-1"] = EndedSession.of(record, LastWords(reason), "was killed", [], "log")
        told = await only.moves.methods["hold"]("a", {"sessions": {"session-1": 1}})
        assert told == ([] if goes_on else ["session-1"])


async def test_a_host_has_its_sessions_as_long_as_the_weaver_or_all_others_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as weaver, hosts(tmp_path, weaver) as (first, second):
        first.sessions.open("session-1")
        await until(lambda: second.copies == ["session-1"])

        asked = weaver.client.ask_for
        monkeypatch.setattr(weaver.client, "ask_for", is_away)
        until_then = first.held_until
        await until(lambda: first.held_until > until_then + module.LEASE)
        await first.moves._await_right("session-1", 0)
        second.end()

        await until(first.lease.is_over)
        with pytest.raises(WeaverUnavailable, match="neither the weaver nor all other session hosts"):
            await first.moves._await_right("session-1", 0)
        monkeypatch.setattr(weaver.client, "ask_for", asked)
        await until(lambda: not first.lease.is_over())


async def test_without_another_host_the_weaver_alone_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as weaver, hosts(tmp_path, weaver, 1) as (only,):
        await until(lambda: Path(only.sessions.lease).exists())
        monkeypatch.setattr(weaver.client, "ask_for", is_away)
        await until(only.lease.is_over)


async def test_copies_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    async with running() as weaver, hosts(tmp_path, weaver, 1) as (only,):
        about = {"session": "s-1", "record": {"session": "s-1"}, "at": 0, "size": 1, "part": b"."}
        for change, why in (
            ({"session": "../s"}, "has the name"),
            ({"record": {"session": "other"}}, "has the name"),
            ({"part": "text"}, "'part' is 'text'"),
        ):
            with pytest.raises(ProtocolMismatch, match=why):
                await only.moves.methods["copy"]("a", {**about, **change})
        with pytest.raises(WrongState, match="begins at 5, and 0 bytes"):
            await only.moves.methods["copy"]("a", {**about, "at": 5, "size": 9})
        with pytest.raises(LimitReached, match="1024 MiB"):
            await only.moves.methods["copy"]("a", {**about, "size": module.MOST_BYTES + 1})
        with pytest.raises(ProtocolMismatch, match="'sessions' is missing"):
            await only.moves.methods["hold"]("a", {})
        assert only.copies == []


def test_a_host_was_not_silent_while_this_one_did_not_listen(tmp_path: Path) -> None:
    copies = Copies(tmp_path)
    copies.hear("a", [])
    copies._heard["a"] -= 50
    copies._since -= 100
    copies.note_held_up(45)
    assert 5 <= copies.silence("a") < 30
    assert copies.silence("b") < 80


def test_a_lease_that_nobody_has_is_not_over(tmp_path: Path) -> None:
    lease = LeaseFile(str(tmp_path / "lease"))
    assert not lease.is_over()
    lease.extend(now() + 60)
    assert not lease.is_over()
    lease.extend(now() - 1)
    assert lease.is_over()
    Path(lease.path).write_text("nonsense")
    assert not lease.is_over()


async def test_a_lease_is_extended_by_all_who_ask_at_once_and_not_made_shorter(tmp_path: Path) -> None:
    async with running() as weaver, hosts(tmp_path, weaver, 1) as (only,):
        for _ in range(20):
            await asyncio.gather(*(only.moves._await_right(f"session-{one}", 0) for one in range(10)))
        await until(lambda: only.held_until == only.moves._until)
