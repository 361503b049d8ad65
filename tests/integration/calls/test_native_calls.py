"""Calls that a function in the driver makes on a process that dies while Monarch asks for its state."""

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


def wait_in_every_way(procs: Any) -> dict[str, str]:
    """Returns how each way to call and to wait ends when the second of two processes dies."""
    counters, hangs = procs.spawn("counters", Counter), procs.spawn("hangs", Hang)
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
    assert job.run(wait_in_every_way, job.hosts.spawn_procs(name="trainers")) == EXPECTED


def on_processes_of_its_own(hosts: Any) -> dict[str, str]:
    return wait_in_every_way(hosts.spawn_procs(name="trainers"))


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


def test_a_controller_starts_its_processes_again_and_again(job: loom.Job) -> None:
    assert job.run(kill_again_and_again, job.hosts) == [LOST] * 3


class Controller(loom.Actor):
    @loom.endpoint
    def kill_again_and_again(self, hosts: Any) -> list[str]:
        return kill_again_and_again(hosts)

    def __supervise__(self, failure: loom.MeshFailure) -> bool:
        return True


@pytest.mark.slow
def test_a_controller_that_is_an_actor_starts_its_processes_again_and_again(job: loom.Job) -> None:
    """Monarch itself has to give up each process: no lifeline tells an actor."""
    controller = job.hosts.slice(hosts=0).spawn_procs(name="controller").spawn("controller", Controller)
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
    left = [psutil.Process(pid) for pid in pids]
    if end == "the driver is killed":
        os.kill(driver, signal.SIGKILL)
    job.close()
    _, alive = psutil.wait_procs(left, timeout=BOUND)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
