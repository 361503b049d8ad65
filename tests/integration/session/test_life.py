"""A session lives as long as something of it does: a client, a run, a call, or a replica that makes steps."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import loom
from loom import Actor, endpoint
from loom.session_alive import AliveBecause, SessionLife
from loom_gateway.driver import lifetime as lifetimes
from loom_gateway.driver.lifetime import Lifetime
from loom_gateway.sessions.state_dir import DriverFiles
from loom_proxy.local import LocalCluster
from tests.integration.session.run_functions import wait_for
from tests.support.gateways import BOUND, TOKEN, Gateway, await_true, gateway_of
from tests.support.processes import run_loom

pytestmark = pytest.mark.timeout(180)

LINGER = 0.5

FOR_NOBODY = f"no client, and nothing under way, for {LINGER:g} s"


class Waiter(Actor):
    """Waits for a file."""

    @endpoint
    def wait_for(self, path: str) -> str:
        return wait_for(path)


class AsyncWaiter(Actor):
    """Waits for a file on an event loop."""

    @endpoint
    async def wait_for(self, path: str) -> str:
        return await wait_in_the_driver(path)


class Stepper(Actor):
    """Is a replica, and makes steps while a file is there."""

    @endpoint
    def begin(self, path: str) -> None:
        def steps() -> None:
            n = 0
            with loom.Threadlet() as threadlet:
                while True:  # until its process ends
                    if Path(path).exists():
                        n += 1
                        with threadlet.step(n):
                            pass
                    time.sleep(0.05)

        threading.Thread(target=steps, daemon=True).start()


async def wait_in_the_driver(path: str) -> str:
    return await asyncio.to_thread(wait_for, path)


@pytest.fixture(scope="module")
def gateway(cluster: LocalCluster) -> Iterator[Gateway]:
    with gateway_of(cluster, "--session-linger", str(LINGER)) as running:
        running.connect().close()  # the workers and a driver are there
        yield running


def spawn(job: loom.Job, kind: type[Actor] = Waiter) -> Any:
    actors = job.hosts.spawn_procs(name="procs").spawn("waiters", kind)
    actors.initialized.get(BOUND)
    return actors


def call(adverb: str, kind: type[Actor] = Waiter) -> Callable[[loom.Job, str], Any]:
    return lambda job, path: getattr(spawn(job, kind).slice(hosts=0).wait_for, adverb)(path)


def through_another_client(job: loom.Job, path: str) -> None:
    spawn(job)
    caller = loom.connect(job.url, TOKEN, session=job.session, mode="call")
    caller.meshes["waiters"].wait_for.call(path)
    caller.flush_logs()
    caller.detach()


UNDER_WAY = {
    "run": (lambda job, path: job.run(wait_for, path, detach=True), AliveBecause.RUN),
    "coroutine": (lambda job, path: job.run(wait_in_the_driver, path, detach=True), AliveBecause.RUN),
    "call": (call("call"), AliveBecause.CALL),
    "call_one": (call("call_one"), AliveBecause.CALL),
    "choose": (call("choose"), AliveBecause.CALL),
    "stream": (call("stream"), AliveBecause.CALL),
    "broadcast": (call("broadcast"), AliveBecause.CALL),
    "a broadcast on a loop": (call("broadcast", AsyncWaiter), AliveBecause.CALL),
    "an endpoint on a loop": (call("call", AsyncWaiter), AliveBecause.CALL),
    "another client's call": (through_another_client, AliveBecause.CALL),
}


QUICK = ("run", "call_one", "broadcast")
KINDS = [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in UNDER_WAY]


@pytest.mark.guarantees(
    "nothing lost",
    "A session lives as long as a run, a call or a replica of it goes on, and by `--session-max` at most",
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_under_way_keeps_a_session_alive(gateway: Gateway, tmp_path: Path, kind: str) -> None:
    begin, reason = UNDER_WAY[kind]
    job = gateway.connect()
    begin(job, str(tmp_path / "go"))
    life = job.detach()
    assert (life.because, life.until) == ((reason,), None)
    assert f"it ends {LINGER:g} s after that" in str(life)

    time.sleep(3 * LINGER + lifetimes.LOOK_FOR_WORK)
    shown = gateway.session(job.session)
    assert (shown["alive_because"], shown["lives_until"]) == ([reason.value], None)

    (tmp_path / "go").touch()
    assert gateway.ended(job.session)["reason"] == FOR_NOBODY


def test_a_run_goes_on_when_its_program_is_killed(gateway: Gateway, tmp_path: Path) -> None:
    go = tmp_path / "go"
    program = (
        "import loom, sys, tests.integration.session.run_functions as them\n"
        f"job = loom.connect({gateway.url!r}, {TOKEN!r})\n"
        f"job.run(them.wait_for, {str(go)!r}, detach=True, name='overnight')\n"
        "job.runs(); print(job.session, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as laptop:
        assert laptop.stdout is not None
        session = laptop.stdout.readline().strip()
        laptop.kill()
    time.sleep(3 * LINGER + lifetimes.LOOK_FOR_WORK)
    again = gateway.connect(session)
    go.touch()
    assert again.runs()["overnight"].result(BOUND) == str(go)
    again.close()


@pytest.mark.guarantees(
    "nothing lost",
    "A session lives as long as a run, a call or a replica of it goes on, and by `--session-max` at most",
)
@pytest.mark.slow
def test_a_replica_keeps_a_session_alive_by_steps_and_not_by_heartbeats(gateway: Gateway, tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    steps.touch()
    job = gateway.connect()
    job.hosts.spawn_procs(name="trainers").spawn("steppers", Stepper).begin.call(str(steps)).get(BOUND)
    await_true(lambda: any((one.step or 0) > 5 for one in job.weaver.replicas().values()))
    await_true(lambda: "replica" in gateway.session(job.session)["alive_because"])
    life = job.detach()
    assert AliveBecause.REPLICA in life.because

    time.sleep(2 * lifetimes.STEPS_APART)
    assert gateway.session(job.session)["alive_because"] == ["replica"]

    steps.unlink()  # its heartbeats go on
    stopped = time.time()
    ended = gateway.ended(job.session)
    assert ended["reason"] == FOR_NOBODY
    assert ended["ended_at"] - stopped < 2 * lifetimes.STEPS_APART


@pytest.mark.guarantees(
    "nothing lost",
    "A session lives as long as a run, a call or a replica of it goes on, and by `--session-max` at most",
)
def test_a_session_has_a_longest_time_whatever_goes_on_in_it(cluster: LocalCluster, tmp_path: Path) -> None:
    with gateway_of(cluster, "--session-max", "4") as gateway:
        job = gateway.connect(persist=True)
        handle = job.run(wait_for, str(tmp_path / "go"), detach=True)
        shown = gateway.session(job.session)
        assert shown["lives_until"] == pytest.approx(shown["created_at"] + 4, abs=2)
        reasons = {"client", "run", "persist"}
        await_true(lambda: set(gateway.session(job.session)["alive_because"]) == reasons)
        with pytest.raises(loom.LoomError, match="it had been open for 4 s, which is the gateway's --session-max"):
            handle.result(BOUND)
        assert "--session-max" in gateway.ended(job.session)["reason"]


def test_until_when_a_session_lives_is_told_everywhere(cluster: LocalCluster) -> None:
    with gateway_of(cluster, "--session-linger", "100") as gateway:
        job, lasting = gateway.connect(), gateway.connect(persist=True)
        assert gateway.session(job.session)["alive_because"] == ["client"]
        life = job.detach()
        assert life.because == (AliveBecause.LINGER,)
        assert life.until == pytest.approx(time.time() + 100, abs=10)
        assert str(life).startswith("it lives until 20")
        assert lasting.detach() == SessionLife((AliveBecause.PERSIST,), None, 100.0)
        assert job.detach() == SessionLife()  # it is not known any more

        await_true(lambda: gateway.session(job.session)["alive_because"] == ["linger"])
        assert gateway.session(job.session)["lives_until"] == pytest.approx(life.until, abs=5)
        environment = {**os.environ, "LOOM_URL": gateway.url, "LOOM_TOKEN": TOKEN, "COLUMNS": "240"}
        listed = run_loom("sessions", "list", env=environment)
        lines = {each: line for line in listed.stdout.splitlines() for each in line.split() if "session-" in each}
        assert "until 20" in lines[job.session]
        assert "persist" in lines[lasting.session]


# -- the rule, without a driver -----------------------------------------------------------------------------


class Clockwork:
    """A lifetime with a short linger time, and what it is told goes on."""

    def __init__(self, folder: Path, linger: float = 0.05, most: float = 0.0, idle: float = 0.0) -> None:
        self.lifetime = Lifetime(DriverFiles(str(folder / "driver-1")), linger, most=most, idle=idle)
        self.warned = asyncio.Queue[float]()
        self.lifetime.warn = self.warned.put_nowait
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.under_way: list[AliveBecause] = []
        self.lifetime.under_way = lambda: self.under_way
        self.lifetime.start(asyncio.get_running_loop(), self.ended.set_result)
        self.lifetime.opened(False)

    def leave(self) -> None:
        self.lifetime.client_came("one")
        self.lifetime.client_left("one")


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetimes, "LOOK_FOR_WORK", 0.01)


@pytest.mark.parametrize("linger", [0.05, 0.0])
async def test_the_linger_time_begins_when_the_last_run_ends(tmp_path: Path, linger: float) -> None:
    clockwork = Clockwork(tmp_path, linger)
    clockwork.under_way = [AliveBecause.RUN, AliveBecause.CALL]
    clockwork.leave()
    for _ in range(2):
        await asyncio.sleep(0.1)
        assert not clockwork.ended.done()
        assert clockwork.lifetime.life().because == clockwork.under_way
        clockwork.under_way.pop()
    began = time.monotonic()
    assert "nothing under way" in await asyncio.wait_for(clockwork.ended, BOUND)
    assert time.monotonic() - began >= linger * 0.8


async def test_a_session_whose_first_client_has_not_come_is_told_to_live_from_now_on(tmp_path: Path) -> None:
    clockwork = Clockwork(tmp_path, linger=60.0)
    until = clockwork.lifetime.life().until
    assert until is not None
    assert until - time.time() == pytest.approx(60.0, abs=5.0)


async def test_a_weaver_that_is_away_ends_no_session_whose_replicas_went_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifetimes, "STEPS_APART", 0.3)
    clockwork = Clockwork(tmp_path)
    clockwork.lifetime.replicas(0.0)
    clockwork.leave()
    for _ in range(60):
        clockwork.lifetime.replicas(None)
        await asyncio.sleep(0.01)
    assert clockwork.lifetime.life().because == [AliveBecause.REPLICA]
    clockwork.lifetime.replicas(float("inf"))  # it is back, and knows of no step
    await asyncio.wait_for(clockwork.ended, BOUND)


async def test_a_weaver_that_is_away_keeps_no_session_without_replicas(tmp_path: Path) -> None:
    clockwork = Clockwork(tmp_path)
    clockwork.lifetime.replicas(float("inf"))
    clockwork.leave()
    while not clockwork.ended.done():
        clockwork.lifetime.replicas(None)
        await asyncio.sleep(0.01)
    assert clockwork.ended.result() == "no client for 0.05 s"


async def test_the_longest_time_counts_from_the_opening(tmp_path: Path) -> None:
    clockwork = Clockwork(tmp_path, most=0.1)
    clockwork.lifetime.client_came("one")
    clockwork.lifetime.opened(True)  # by a later client, which changes nothing
    assert 0 < clockwork.lifetime.left <= 0.1
    assert clockwork.lifetime.life().until == pytest.approx(time.time() + 0.1, abs=1)
    assert "--session-max" in await asyncio.wait_for(clockwork.ended, BOUND)


async def test_an_idle_session_ends_after_a_warning_though_its_client_is_there(tmp_path: Path) -> None:
    clockwork = Clockwork(tmp_path, idle=0.4)
    clockwork.lifetime.client_came("one")
    clockwork.lifetime.opened(True)
    begun = [1]
    clockwork.lifetime.operations = lambda: begun[0]
    assert 0 < await asyncio.wait_for(clockwork.warned.get(), BOUND) <= 0.2
    begun[0] += 1  # in time
    assert 0 < await asyncio.wait_for(clockwork.warned.get(), BOUND) <= 0.2
    assert not clockwork.ended.done()
    until = clockwork.lifetime.life().until
    assert until is not None
    assert until <= time.time() + 1
    assert "--session-idle" in await asyncio.wait_for(clockwork.ended, BOUND)
    assert clockwork.warned.empty()


async def test_what_goes_on_keeps_an_idle_session_alive(tmp_path: Path) -> None:
    clockwork = Clockwork(tmp_path, idle=0.1)
    clockwork.lifetime.client_came("one")
    clockwork.under_way = [AliveBecause.RUN]
    await asyncio.sleep(0.3)
    assert not clockwork.ended.done()
    assert clockwork.lifetime.life().until is None
    for _ in range(30):
        clockwork.under_way = []
        clockwork.lifetime.replicas(0.0)
        await asyncio.sleep(0.01)
    assert not clockwork.ended.done()
    assert "--session-idle" in await asyncio.wait_for(clockwork.ended, BOUND)


@pytest.mark.slow
def test_a_session_that_nobody_uses_is_ended_and_its_client_was_warned(
    cluster: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    with gateway_of(cluster, "--session-idle", "3") as gateway:
        job = gateway.connect(persist=True)
        warned = next(event for event in job.events(BOUND) if event.name == "session_idle")
        assert 0 < warned.details["seconds"] <= 1.5
        shown = gateway.session(job.session)
        assert shown["alive_because"] == ["client", "persist"]
        assert shown["lives_until"] is not None
        assert list(job.events(BOUND))[-1].name == "ended"
        with pytest.raises(loom.SessionClosed, match="nothing happened in it for 3 s"):
            job.refresh_hosts()
        assert "--session-idle" in gateway.ended(job.session)["reason"]
        assert f"nothing happens in session {job.session}: it ends in" in caplog.text
