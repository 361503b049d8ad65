"""Calls that a function or an actor makes on a process that dies while Monarch asks for its state."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import psutil
import pytest

import loom
from loom_proxy.local import LocalCluster
from tests.support.actors import Counter, Hang

BOUND = 30.0
"""Seconds that no wait may take."""

ASKED_WITHIN = 1.0
"""Seconds in which Monarch asks every process for its state: it does so every 250 ms. If it has not, it notices the
death itself, and the test tests less."""


def die_unanswered(pid: int) -> None:
    """Kill a process that owes Monarch an answer."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(ASKED_WITHIN)
    os.kill(pid, signal.SIGKILL)


def outcome(get: Any) -> str:
    try:
        return str(get())
    except loom.SupervisionError as error:
        return f"SupervisionError, {isinstance(error, RuntimeError)}, {'process' in str(error)}"
    except TimeoutError as error:
        return repr(error)


LOST = "SupervisionError, True, True"


def spawn_and_wait(procs: Any) -> dict[str, str]:
    return wait_in_every_way(procs, procs.spawn("counters", Counter), procs.spawn("hangs", Hang))


def wait_in_every_way(procs: Any, counters: Any, hangs: Any) -> dict[str, str]:
    """Returns how each way to call and to wait ends when the second of two processes dies."""
    pids = list(counters.pid.call().get(timeout=BOUND).values())
    victim, first = hangs.slice(hosts=1), counters.slice(hosts=0)
    calls = {
        "call": hangs.forever.call(),
        "call_one": victim.forever.call_one(),
        "choose": victim.forever.choose(),
        "stream": next(iter(victim.forever.stream())),
        "on a slice of processes": procs.slice(hosts=1).spawn("more", Hang).forever.call_one(),
        "waited for": victim.forever.call_one(),
        "completed": victim.forever.call_one(),
    }
    die_unanswered(pids[1])

    async def await_some() -> list[str]:
        async def awaited(future: Any) -> Any:
            return await future

        found = await asyncio.gather(
            *(asyncio.wait_for(awaited(calls[way]), BOUND) for way in ("call_one", "stream")),
            return_exceptions=True,
        )
        return [type(error).__name__ for error in found]

    found = {"await": ", ".join(asyncio.run(await_some()))}
    done, rest = loom.wait([calls["waited for"]], timeout=BOUND)
    found["wait"] = f"{len(done)} done, {len(rest)} not"
    (completed,) = loom.as_completed([calls["completed"]], timeout=BOUND)
    found["as_completed"] = outcome(lambda: completed.get(timeout=0.0))
    found |= {way: outcome(lambda future=future: future.get(timeout=BOUND)) for way, future in calls.items()}
    found["without a limit"] = outcome(victim.forever.call_one().get)
    found["later"] = outcome(lambda: counters.add.call(1).get(timeout=BOUND))
    found["the other process"] = outcome(lambda: first.add.call_one(1).get(timeout=BOUND) > 0)
    return found


EXPECTED = {
    "await": "SupervisionError, SupervisionError",
    "wait": "1 done, 0 not",
    "as_completed": LOST,
    **dict.fromkeys(("call", "call_one", "choose", "stream", "on a slice of processes", "waited for"), LOST),
    **dict.fromkeys(("completed", "without a limit", "later"), LOST),
    "the other process": "True",
}


def test_calls_on_processes_of_the_session_fail_in_every_way_to_wait(job: loom.Job) -> None:
    assert job.run(spawn_and_wait, job.hosts.spawn_procs(name="trainers")) == EXPECTED


def on_processes_of_its_own(hosts: Any) -> dict[str, str]:
    return spawn_and_wait(hosts.spawn_procs(name="trainers"))


@pytest.mark.slow
def test_calls_on_processes_that_a_function_started_fail_in_every_way_to_wait(job: loom.Job) -> None:
    assert job.run(on_processes_of_its_own, job.hosts) == EXPECTED


def kill_again_and_again(hosts: Any) -> list[str]:
    """A controller whose processes die, one mesh after the other."""
    story = []
    for attempt in range(3):
        counters = hosts.spawn_procs(name=f"attempt_{attempt}").spawn("counters", Counter)
        pids = list(counters.pid.call().get(timeout=BOUND).values())
        die_unanswered(pids[attempt % 2])
        story.append(outcome(lambda counters=counters: counters.add.call(1).get(timeout=BOUND)))
    return story


@pytest.mark.slow
def test_a_controller_starts_its_processes_again_and_again(job: loom.Job) -> None:
    assert job.run(kill_again_and_again, job.hosts) == [LOST] * 3


class Caller(loom.Actor):
    """Calls actors on meshes that it was sent."""

    @loom.endpoint
    async def wait_in_every_way(self, procs: Any, counters: Any, hangs: Any) -> dict[str, str]:
        return await asyncio.to_thread(wait_in_every_way, procs, counters, hangs)

    @loom.endpoint
    async def await_the_end_of(self, pid: int, hangs: Any, wait: bool) -> str:
        """Returns how an awaited call ends, on a process that dies while it waits, or before."""
        waiting = hangs.forever.call() if wait else None
        await asyncio.to_thread(die_unanswered, pid)
        try:
            await asyncio.wait_for((waiting or hangs.forever.call()).as_asyncio(), BOUND)
        except loom.SupervisionError:
            return LOST
        return "an answer"

    def __supervise__(self, failure: loom.MeshFailure) -> bool:
        return True


def caller_on(hosts: Any) -> Any:
    return hosts.slice(hosts=0).spawn_procs(name="callers").spawn("caller", Caller)


def have_it_wait(caller: Any, procs: Any) -> dict[str, str]:
    """Sends the caller meshes on some processes."""
    counters, hangs = procs.spawn("counters", Counter), procs.spawn("hangs", Hang)
    found: dict[str, str] = caller.wait_in_every_way.call_one(procs, counters, hangs).get(timeout=6 * BOUND)
    return found


@pytest.mark.slow
def test_calls_of_an_actor_fail_on_processes_that_it_was_sent(job: loom.Job) -> None:
    assert have_it_wait(caller_on(job.hosts), job.hosts.spawn_procs(name="trainers")) == EXPECTED


def spawn_both_and_wait(hosts: Any) -> dict[str, str]:
    return have_it_wait(caller_on(hosts), hosts.spawn_procs(name="trainers"))


@pytest.mark.slow
def test_calls_of_an_actor_fail_on_processes_that_a_function_started(job: loom.Job) -> None:
    assert job.run(spawn_both_and_wait, job.hosts) == EXPECTED


@pytest.mark.parametrize("wait", [True, False], ids=["waiting", "later"])
def test_an_actor_awaits_calls_on_processes_that_it_was_sent(job: loom.Job, wait: bool) -> None:
    procs = job.hosts.spawn_procs(name="trainers")
    pids = list(procs.spawn("counters", Counter).pid.call().get(timeout=BOUND).values())
    called = caller_on(job.hosts).await_the_end_of.call_one(pids[1], procs.spawn("hangs", Hang), wait)
    assert called.get(timeout=2 * BOUND) == LOST


class Controller(loom.Actor):
    @loom.endpoint
    def kill_again_and_again(self, hosts: Any) -> list[str]:
        return kill_again_and_again(hosts)

    @loom.endpoint
    def start_another(self, hosts: Any) -> list[int]:
        """Returns the processes of an actor that has started one more."""
        more: list[int] = controller_on(hosts).start.call_one(hosts).get(timeout=BOUND)
        return [os.getpid(), *more]

    @loom.endpoint
    def start(self, hosts: Any) -> list[int]:
        counters = hosts.spawn_procs(name="left").spawn("counters", Counter)
        return [os.getpid(), *counters.pid.call().get(timeout=BOUND).values()]

    def __supervise__(self, failure: loom.MeshFailure) -> bool:
        return True


def controller_on(hosts: Any) -> Any:
    return hosts.slice(hosts=0).spawn_procs(name="controller").spawn("controller", Controller)


@pytest.mark.slow
def test_a_controller_that_is_an_actor_starts_its_processes_again_and_again(job: loom.Job) -> None:
    controller = controller_on(job.hosts)
    assert controller.kill_again_and_again.call_one(job.hosts).get(timeout=6 * BOUND) == [LOST] * 3


async def bootstrap_of_a_coroutine() -> None:
    os.environ["FROM_THE_BOOTSTRAP"] = "a coroutine's"


def bootstrap() -> None:
    os.environ["FROM_THE_BOOTSTRAP"] = "a function's"


class Environment(loom.Actor):
    @loom.endpoint
    def get(self, name: str) -> str:
        return os.environ[name]


def spawn_with_bootstraps(hosts: Any) -> list[str]:
    found = []
    for function in (bootstrap, bootstrap_of_a_coroutine):
        procs = hosts.slice(hosts=0).spawn_procs({"gpus": 1}, function)
        found.append(procs.spawn("environment", Environment).get.call_one("FROM_THE_BOOTSTRAP").get(timeout=BOUND))
    return found


def test_a_function_spawns_processes_with_a_bootstrap_function(job: loom.Job) -> None:
    assert job.run(spawn_with_bootstraps, job.hosts) == ["a function's", "a coroutine's"]


def spawn_and_return_pids(hosts: Any) -> list[int]:
    counters = hosts.spawn_procs(name="left").spawn("counters", Counter)
    return [os.getpid(), *counters.pid.call().get(timeout=BOUND).values()]


@pytest.mark.parametrize("end", ["the session ends", "the driver is killed"])
def test_processes_that_a_function_started_end_with_the_driver(cluster: LocalCluster, end: str) -> None:
    job = loom.connect(cluster.url, cluster.token)
    driver, *pids = job.run(spawn_and_return_pids, job.hosts)
    end_all(job, driver if end == "the driver is killed" else None, pids)


@pytest.mark.parametrize("end", ["the session ends", "the driver is killed"])
def test_processes_that_actors_started_end_with_the_driver(cluster: LocalCluster, end: str) -> None:
    job = loom.connect(cluster.url, cluster.token)
    driver = job.run(os.getpid)
    pids = controller_on(job.hosts).start_another.call_one(job.hosts).get(timeout=BOUND)
    assert len(pids) == 4
    end_all(job, driver if end == "the driver is killed" else None, pids)


def end_all(job: loom.Job, killed: int | None, pids: list[int]) -> None:
    """Ends a session, perhaps by killing its driver, and with it these processes."""
    left = [psutil.Process(pid) for pid in pids]
    if killed is not None:
        os.kill(killed, signal.SIGKILL)
    job.close()
    _, alive = psutil.wait_procs(left, timeout=BOUND)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
