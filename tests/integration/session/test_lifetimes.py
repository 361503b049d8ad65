"""For how long a session lives, who ends it, and what is told of it afterwards."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import loom
from loom.wire.handshake import Hello
from loom.wire.stream import unnumbered_frame
from loom_gateway.driver import lifetime as lifetimes
from loom_gateway.driver.lifetime import Lifetime
from loom_gateway.driver.output.own_log import KEPT, LIMIT, cut
from loom_gateway.sessions.ended_sessions import KEEP, KEEP_IN_ALL, EndedSession, EndedSessions
from loom_gateway.sessions.state_dir import DriverFiles, LastWords
from loom_proxy.local import LocalCluster
from tests.support.actors import Counter
from tests.support.gateways import BOUND, TOKEN, Gateway, await_end, await_true, gateway_of
from tests.support.processes import run_loom
from tests.support.raw_client import websocket

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def gateway(cluster: LocalCluster) -> Iterator[Gateway]:
    """Its sessions live for a second without a client."""
    with gateway_of(cluster, "--session-linger", "1") as running:
        yield running


# -- without a client ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_session_ends_without_a_client_and_without_a_gateway(gateway: Gateway) -> None:
    job = gateway.connect()
    pids = list(job.hosts.spawn_procs().spawn("counters", Counter).pid.call().get(BOUND).values())
    pids.append(gateway.session(job.session)["pid"])
    job.detach()

    gateway.end(signal.SIGKILL)

    for pid in pids:
        await_end(pid)
    assert gateway.sockets() == []
    gateway.start()
    ended = gateway.ended(job.session)
    assert (ended["reason"], ended["exit_code"]) == ("no client for 1 s", 0)
    with pytest.raises(loom.UnknownSession, match="no client for 1 s"):
        gateway.connect(job.session)


def test_a_session_that_is_to_persist_outlives_one_that_is_not(gateway: Gateway) -> None:
    lasting, brief = gateway.connect(persist=True), gateway.connect()
    assert gateway.session(lasting.session)["persist"]
    assert not gateway.session(brief.session)["persist"]
    assert lasting._connection.welcome.linger == 0
    assert brief._connection.welcome.linger == 1
    pid = gateway.session(brief.session)["pid"]
    lasting.detach()
    brief.detach()
    await_end(pid)

    gateway.end(signal.SIGKILL)
    gateway.start()

    assert gateway.session(lasting.session)["persist"]
    with gateway.connect(lasting.session) as again:
        assert again._connection.welcome.linger == 0


@pytest.mark.guarantees(
    "strangers",
    "A client that leaves between its hello and the welcome, or a gateway that stops then, leaves no "
    "connection to a driver and no session that nobody knows",
)
@pytest.mark.parametrize("persist", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_session_whose_client_left_before_it_was_open_ends(gateway: Gateway, persist: bool) -> None:
    gateway.connect().close()  # the workers and a driver are there
    for _ in range(2):
        with websocket(gateway.url, TOKEN) as client:
            client.send(b"".join(unnumbered_frame(Hello(persist=persist).message())))
            client.socket.shutdown(socket.SHUT_RDWR)

    with gateway.connect() as job:
        await_true(lambda: [each["name"] for each in gateway.rest("/sessions")["sessions"]] == [job.session])
        mine = gateway.session(job.session)["pid"]
        # A spare is left at most.
        await_true(lambda: len({driver.pid for driver in gateway.drivers()} - {mine}) <= 1)


def test_a_later_client_may_have_a_session_persist(cluster: LocalCluster) -> None:
    with gateway_of(cluster) as gateway:  # whose sessions live until the next client comes, however late it is
        job = gateway.connect()
        job.detach()
        again = gateway.connect(job.session, persist=True)
        again.detach()
        assert gateway.session(job.session)["persist"]
        with gateway.connect(job.session) as last:
            assert last._connection.welcome.linger == 0


@pytest.mark.slow
def test_of_two_meshes_of_one_name_a_later_client_finds_the_newer(gateway: Gateway) -> None:
    job = gateway.connect()
    job.hosts.spawn_procs(name="procs").spawn("counters", Counter, 1).add.call(0).get(BOUND)
    job.hosts.spawn_procs(name="procs").spawn("counters", Counter, 2).add.call(0).get(BOUND)
    job.detach()
    with gateway.connect(job.session) as again:
        assert list(again.meshes["counters"].add.call(0).get(BOUND).values()) == [2, 2]


# -- why it ended -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_gateway_tells_why_each_session_has_ended(gateway: Gateway) -> None:
    jobs = {name: gateway.connect() for name in ("closed", "rest", "killed", "told", "alone")}
    pids = {name: gateway.session(job.session)["pid"] for name, job in jobs.items()}

    jobs["closed"].close()
    gateway.rest(f"/sessions/{jobs['rest'].session}", "DELETE")
    os.kill(pids["killed"], signal.SIGKILL)
    os.kill(pids["told"], signal.SIGTERM)
    jobs["alone"].detach()

    for pid in pids.values():
        await_end(pid)
    for name, reason, code in (
        ("closed", "the client closed it", 0),
        ("rest", "it was ended over REST", 0),
        ("killed", "its driver was killed by SIGKILL", -9),
        ("told", "the driver was told to stop (SIGTERM)", 0),
        ("alone", "no client for 1 s", 0),
    ):
        ended = gateway.ended(jobs[name].session)
        assert (ended["reason"], ended["exit_code"]) == (reason, code)
        assert ended["created_at"] <= ended["ended_at"]
        jobs[name].close()
    assert [s["name"] for s in gateway.rest("/sessions")["sessions"]] == []
    assert gateway.rest("/sessions")["ended"] == []
    environment = {**os.environ, "LOOM_URL": gateway.url, "LOOM_TOKEN": TOKEN, "COLUMNS": "200"}
    shown = run_loom("status", env=environment)
    for job in jobs.values():
        assert job.session in shown.stdout
    assert "its driver was killed by SIGKILL" in shown.stdout


def test_the_next_gateway_has_the_log_of_a_session_that_has_ended(gateway: Gateway) -> None:
    with gateway.connect() as job:
        job.run(print, "this was printed")
        job.flush_logs()
    gateway.ended(job.session)
    gateway.end(signal.SIGKILL)
    gateway.start()
    environment = {**os.environ, "LOOM_URL": gateway.url, "LOOM_TOKEN": TOKEN}
    logs = run_loom("logs", "--session", job.session, env=environment)
    assert "this was printed" in logs.stdout


def ended(number: int, user: str = "ann") -> EndedSession:
    return EndedSession(f"session-{number}", "because", 0, 1.0, 2.0, user, False, "", "/nowhere.log")


async def test_the_last_hundred_are_remembered_also_by_the_next_gateway(tmp_path: Path) -> None:
    path = str(tmp_path / "ended.json")
    sessions = EndedSessions(path)
    for number in range(KEEP + 5):
        sessions.add(ended(number))
    await sessions.write()
    assert EndedSessions(path).all() == sessions.all()
    assert [session.name for session in sessions.all()] == [f"session-{n}" for n in range(5, KEEP + 5)]
    assert sessions.get("session-0") is None


@pytest.mark.guarantees(
    "users", "A user who ends many sessions pushes out neither the reasons nor the logs of another's"
)
@pytest.mark.slow
def test_a_user_who_ends_many_sessions_pushes_out_no_other_users(tmp_path: Path) -> None:
    sessions = EndedSessions(str(tmp_path / "ended.json"))
    sessions.add(ended(0, "bob"))
    for number in range(1, KEEP_IN_ALL + KEEP):
        sessions.add(ended(number, f"user {number % 4}"))
    assert sessions.get("session-0") is not None
    assert len(sessions.all()) <= KEEP_IN_ALL


@pytest.mark.parametrize("text", ["", "null", "[1]", '[{"name": "x"}]'])
async def test_what_cannot_be_read_of_those_that_have_ended_is_left(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ended.json"
    path.write_text(text)
    sessions = EndedSessions(str(path))
    assert sessions.all() == []
    sessions.add(ended(1))
    await sessions.write()
    assert EndedSessions(str(path)).all() == [ended(1)]


def test_a_session_that_was_lost_is_told_apart_from_one_that_was_ended() -> None:
    lost = replace(ended(1), lost=True, exit_code=-9, output="its last line").error()
    assert isinstance(lost, loom.SessionLost)
    assert (lost.exit_code, lost.output) == (-9, "its last line")
    assert "its last line" in str(lost)
    assert isinstance(ended(1).error(), loom.UnknownSession)


# -- a driver's lifetime ------------------------------------------------------------------------------------


class Ending:
    """Takes note of why a driver is to end."""

    def __init__(self) -> None:
        self.reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def __call__(self, reason: str) -> None:
        self.reason.set_result(reason)


def lifetime_of(folder: Path, linger: float) -> tuple[Lifetime, Ending]:
    lifetime = Lifetime(DriverFiles(str(folder / "driver-1")), linger)
    ending = Ending()
    lifetime.start(asyncio.get_running_loop(), ending)
    return lifetime, ending


async def turns() -> None:
    """Let the loop do what was asked of it."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_the_last_client_to_leave_begins_the_linger_time(tmp_path: Path) -> None:
    lifetime, ending = lifetime_of(tmp_path, 0.01)
    lifetime.opened(False)
    lifetime.client_came("one")
    lifetime.client_came("two")
    lifetime.client_left("one")
    lifetime.client_left("a stranger")
    await turns()
    assert lifetime._timer is None
    lifetime.client_left("two")
    assert await asyncio.wait_for(ending.reason, BOUND) == "no client for 0.01 s"


async def test_a_client_that_comes_in_time_stops_the_linger_time(tmp_path: Path) -> None:
    lifetime, ending = lifetime_of(tmp_path, 3600.0)
    assert lifetime.opened(False) == 3600.0
    lifetime.client_came("one")
    lifetime.client_left("one")
    await turns()
    assert lifetime._timer is not None
    lifetime.client_came("two")
    await turns()
    assert lifetime._timer is None
    assert not ending.reason.done()


@pytest.mark.guarantees("drivers", "A session that no client can reach ends, also if it persists")
async def test_a_session_that_no_client_can_reach_ends_though_it_persists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifetimes, "LOOK_EVERY", 0.001)
    lifetime, ending = lifetime_of(tmp_path, 3600.0)
    path = tmp_path / "driver-1.sock"
    path.touch()
    lifetime.opened(True)
    lifetime.client_came("one")
    await turns()
    lifetime.watch_socket()
    path.unlink()
    await asyncio.sleep(0.02)
    assert not ending.reason.done()  # the client is there, and may go on
    lifetime.client_left("one")
    assert "its socket was removed" in await asyncio.wait_for(ending.reason, BOUND)


async def test_a_look_that_fails_is_not_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetimes, "LOOK_FOR_WORK", 0.01)
    monkeypatch.setattr(lifetimes, "LOOK_EVERY", 0.01)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    lifetime, ending = lifetime_of(tmp_path, 0.01)
    looks = itertools.count(1)

    def fails(*args: object) -> Any:
        if next(looks) < 4:
            raise MemoryError
        return []

    monkeypatch.setattr(lifetime, "under_way", fails)
    lifetime.opened(False)
    lifetime.client_came("one")
    lifetime.client_left("one")
    assert "no client" in await asyncio.wait_for(ending.reason, BOUND)


async def test_a_look_at_the_socket_that_fails_is_not_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifetimes, "LOOK_EVERY", 0.01)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    lifetime, ending = lifetime_of(tmp_path, 3600.0)
    looks, plain = itertools.count(1), lifetimes.is_gone

    def fails(path: str) -> bool:
        if next(looks) < 4:
            raise MemoryError
        return plain(path)

    monkeypatch.setattr(lifetimes, "is_gone", fails)
    lifetime.opened(True)
    asyncio.get_running_loop().call_soon(lifetime.watch_socket)
    assert "its socket was removed" in await asyncio.wait_for(ending.reason, BOUND)


async def test_what_persists_goes_on_to_do_so(tmp_path: Path) -> None:
    lifetime, _ = lifetime_of(tmp_path, 0.0)
    assert 0 < lifetime.opened(False) < 1
    assert lifetime.opened(True) == 0.0
    assert lifetime.opened(False) == 0.0
    lifetime.client_came("one")
    lifetime.client_left("one")
    await turns()
    assert lifetime._timer is None


async def test_a_driver_without_a_session_does_not_linger(tmp_path: Path) -> None:
    lifetime, _ = lifetime_of(tmp_path, 0.0)
    lifetime.client_left("one that was refused")
    await turns()
    assert lifetime._timer is None


async def test_a_session_that_is_ending_takes_nobody(tmp_path: Path) -> None:
    lifetime, _ = lifetime_of(tmp_path, 1.0)
    lifetime.check_goes_on("session-1")
    lifetime.ends("the client closed it")
    with pytest.raises(loom.UnknownSession, match="'session-1' is ending: the client closed it"):
        lifetime.check_goes_on("session-1")


async def test_a_driver_that_gets_a_signal_says_what_the_gateway_meant_by_it(tmp_path: Path) -> None:
    lifetime, ending = lifetime_of(tmp_path, 1.0)
    DriverFiles(str(tmp_path / "driver-1")).write_last_words(LastWords("it was ended over REST"))
    lifetime.end_on_signal(signal.SIGTERM)
    assert await ending.reason == "it was ended over REST"


# -- a driver's output --------------------------------------------------------------------------------------


def test_the_output_of_a_driver_stays_small_and_keeps_its_end(tmp_path: Path) -> None:
    files = DriverFiles(str(tmp_path / "driver-1"))
    descriptor = os.open(files.output, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        os.write(descriptor, b"few\n")
        cut(descriptor)
        assert files.last_output() == ["few"]
        os.write(descriptor, b"".join(b"line %d\n" % n for n in range(LIMIT // 8)))
        cut(descriptor)
        assert os.path.getsize(files.output) == KEPT
        os.write(descriptor, b"the last line\n")
    finally:
        os.close(descriptor)
    lines = files.last_output()
    assert len(lines) == 50
    assert lines[-2:] == [f"line {LIMIT // 8 - 1}", "the last line"]


def test_a_driver_keeps_its_own_output_small(gateway: Gateway) -> None:
    with gateway.connect() as job:
        (driver,) = [d for d in gateway.drivers() if d.pid == gateway.session(job.session)["pid"]]
        path = driver.cmdline()[driver.cmdline().index("--socket") + 1].removesuffix(".sock") + ".out"

        def print_much() -> None:
            os.write(1, b"x" * (1 << 20) + b"\n")
            os.write(2, b"y" * (1 << 20) + b"\n")

        job.run(print_much)
        await_true(lambda: os.path.getsize(path) <= LIMIT)
        assert psutil.pid_exists(driver.pid)
        assert os.stat(path).st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_a_session_that_has_ended_keeps_nothing_open_in_the_gateway(cluster: LocalCluster) -> None:
    with gateway_of(cluster) as gateway:
        folder = Path(f"/proc/{gateway.announced['pid']}/fd")

        def pipes() -> int:
            return sum(os.readlink(link).startswith("pipe:") for link in folder.iterdir())

        def begin_and_end() -> None:
            job = gateway.connect()
            job.close()
            gateway.ended(job.session)
            await_true(lambda: gateway.rest("/status")["spare_ready"])

        begin_and_end()
        before = pipes()
        for _ in range(4):
            begin_and_end()

        await_true(lambda: pipes() <= before)
