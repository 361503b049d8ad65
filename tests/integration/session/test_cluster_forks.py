"""Forks and signals in a session's processes: children end by themselves, and nothing there waits without end."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import multiprocessing
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
from monarch.actor import Channel, this_host

import loom
import loom.driver_api
from loom import Actor, endpoint
from loom.errors import InForkedChild
from loom_proxy.local import LocalCluster
from loom_proxy.notebook.cells import CellView, start
from tests.integration.session.run_functions import IN_TIME, go_on_for_ever, until_it_prints
from tests.support.actors import Counter

HANGS = 10.0  # seconds after which a child counts as one that never ends


def code_of(pid: int) -> int | str:
    """Return the exit code of a child; "hangs" if it does not end."""
    child = os.pidfd_open(pid)
    ended = select.select([child], [], [], HANGS)[0]
    os.close(child)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if ended else "hangs"


def leave(how: str) -> str:
    if how.startswith("exit "):
        sys.exit({"exit None": None, "exit 3": 3, "exit why": "why"}[how])
    if how == "raise":
        raise ValueError("in the child")
    if how == "at exit":
        atexit.register(lambda: os._exit(7))
    if how == "interrupt":
        raise KeyboardInterrupt
    return how


ENDS = {"exit None": 0, "exit 3": 3, "exit why": 1, "raise": 1, "at exit": 7, "interrupt": 1, "return": 0}


class Forks(Actor):
    @endpoint
    def fork(self, how: str) -> int | str:
        pid = os.fork()
        return leave(how) if pid == 0 else code_of(pid)

    @endpoint
    def use_a_pool(self) -> list[int]:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            return pool.map(abs, [-1, -2])

    @endpoint
    def call_in_a_child(self, counters: Any) -> str:
        return in_child(lambda: counters.add.call(1).get())


class AsyncForks(Actor):
    @endpoint
    async def fork(self, how: str) -> int | str:
        pid = os.fork()
        return leave(how) if pid == 0 else await asyncio.to_thread(code_of, pid)

    @endpoint
    async def run_a_loop(self) -> int | str:
        pid = os.fork()
        if pid == 0:
            asyncio.run(asyncio.sleep(0.001))
            sys.exit(5)
        return await asyncio.to_thread(code_of, pid)

    @endpoint
    async def await_in_a_child(self) -> int | str:
        pid = os.fork()
        if pid == 0:
            await asyncio.sleep(0.001)
        return 0 if pid == 0 else await asyncio.to_thread(code_of, pid)


class RemoteForks:
    def fork(self, how: str) -> int | str:
        pid = os.fork()
        return leave(how) if pid == 0 else code_of(pid)


@pytest.mark.parametrize("actor", [Forks, pytest.param(AsyncForks, marks=pytest.mark.slow)])
def test_a_child_of_an_endpoint_ends_with_it_and_answers_nothing(tidied: loom.Job, actor: Any) -> None:
    forks = tidied.hosts.slice(hosts=0).spawn_procs().spawn("forks", actor)

    assert {how: forks.fork.call_one(how).get(IN_TIME) for how in ENDS} == ENDS
    if actor is AsyncForks:
        assert forks.run_a_loop.call_one().get(IN_TIME) == 5
        assert forks.await_in_a_child.call_one().get(IN_TIME) == 1
    else:
        assert forks.use_a_pool.call_one().get(IN_TIME) == [1, 2]
    assert forks.fork.call_one("return").get(IN_TIME) == 0


@pytest.mark.slow
def test_a_child_of_a_deployed_class_ends_with_the_method(tidied: loom.Job) -> None:
    with loom.cls(RemoteForks).to(tidied) as remote:
        assert {how: remote.fork(how) for how in ENDS} == ENDS


# -- what multiprocessing takes along ---------------------------------------------------------------------------


def squares_of_children(method: str) -> tuple[list[int], bool]:
    """Send a function and a class that are in no module of the cluster to processes, and back."""

    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

    with ProcessPoolExecutor(2, multiprocessing.get_context(method)) as pool:  # type: ignore[attr-defined]
        points = list(pool.map(lambda x: Point(x * x), range(3)))
    return [point.x for point in points], all(type(point) is Point for point in points)


class Pools(Actor):
    @endpoint
    def squares(self, method: str) -> tuple[list[int], bool]:
        return squares_of_children(method)


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(method, marks=pytest.mark.slow) for method in ("spawn", "forkserver"))]
)
def test_functions_and_classes_of_a_script_reach_its_processes(tidied: loom.Job, method: str) -> None:
    pools = tidied.hosts.slice(hosts=0).spawn_procs().spawn("pools", Pools)

    assert tidied.run(squares_of_children, method) == ([0, 1, 4], True)
    assert pools.squares.call_one(method).get(60) == ([0, 1, 4], True)


# -- children that use what is their parent's ------------------------------------------------------------------


def in_child(look: Callable[[], object]) -> str:
    """Return the name of what a function raises in a forked child, else the repr of what it returns."""
    source, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            try:
                outcome = repr(look())
            except BaseException as error:  # noqa: BLE001
                outcome = type(error).__name__ + ": " + str(error)
            os.write(end, outcome.encode())
        os._exit(0)
    os.close(end)
    code = code_of(pid)
    with open(source) as file:
        return file.read() if code == 0 else str(code)


async def _await(future: Any) -> Any:
    return await future


def uses_in_children(counters: Any, procs: Any, hosts: Any) -> dict[str, str]:
    session = loom.driver_api.session()
    future, (port, receiver) = counters.add.call(1), Channel[int].open()
    uses: dict[str, Callable[[], object]] = {
        "call": lambda: counters.add.call(1),
        "call, waiting": lambda: counters.add.call(1).get(),
        "call_one": lambda: counters.slice(hosts=0).add.call_one(1).get(),
        "choose": lambda: counters.add.choose(1).get(),
        "broadcast": lambda: counters.add.broadcast(1),
        "stream": lambda: [each.get() for each in counters.add.stream(1)],
        "a future": future.get,
        "a future's exception": lambda: (_ for _ in ()).throw(future.exception()),
        "await": lambda: asyncio.run(_await(future)),
        "spawn": lambda: procs.spawn("more", Counter, 1),
        "spawn_procs": lambda: hosts.spawn_procs(),
        "stop": lambda: procs.stop().get(),
        "send": lambda: port.send(1),
        "receive": lambda: receiver.recv().get(),
        "open": lambda: Channel[int].open(),
        "this_host": lambda: this_host().spawn_procs(),
        "session": loom.driver_api.session,
        "the weaver": lambda: session.ask_weaver("status", {}),
        "a command": lambda: session.begin("status", {}, 1.0).result(1),
        "its address": session.weaver_address,
        "local procs": lambda: session.spawn_procs("more", 0, {"gpus": 1}, print),
    }
    return {name: in_child(use) for name, use in uses.items()}


def test_a_child_of_a_run_is_told_that_meshes_and_session_are_its_parents(tidied: loom.Job) -> None:
    procs = tidied.hosts.spawn_procs(name="procs")
    counters = procs.spawn("counters", Counter, 10)

    said = tidied.run(uses_in_children, counters, procs, tidied.hosts)

    assert {name: text for name, text in said.items() if not text.startswith("InForkedChild: ")} == {}
    assert all("open a session here with loom.connect()" in text for text in said.values())
    assert sorted(counters.add.call(1).get(IN_TIME).values()) == [12, 12]


@pytest.mark.slow
def test_a_child_of_an_actor_is_told_so_too(tidied: loom.Job) -> None:
    counters = tidied.hosts.spawn_procs(name="procs").spawn("counters", Counter, 10)
    forks = tidied.hosts.slice(hosts=0).spawn_procs().spawn("forks", Forks)

    assert forks.call_in_a_child.call_one(counters).get(IN_TIME).startswith(InForkedChild.__name__)


def test_a_child_of_a_run_may_have_a_session_of_its_own(cluster: LocalCluster, tidied: loom.Job) -> None:
    def connect(url: str, token: str) -> str:
        def look() -> int:
            with loom.connect(url, token) as job:
                return job.run(len, "abc")

        return in_child(look)

    assert tidied.run(connect, cluster.url, cluster.token) == "3"


# -- signals where there are none ------------------------------------------------------------------------------

TIMERS: dict[str, Callable[[], object]] = {
    "signal": lambda: signal.signal(signal.SIGALRM, lambda number, frame: None),
    "alarm": lambda: signal.alarm(1),
    "setitimer": lambda: signal.setitimer(signal.ITIMER_REAL, 0.01),
    "setitimer, again": lambda: signal.setitimer(signal.ITIMER_PROF, 0.01, 0.01),
    "wakeup": lambda: signal.set_wakeup_fd(-1),
    "asyncio": lambda: asyncio.run(_add_handler()),
}


async def _add_handler() -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)


def refusals(ways: Iterable[str] = TIMERS) -> dict[str, str]:
    """Return what each way to a signal says, and see that a time limit that was refused can be taken back."""
    said = {}
    for name in ways:
        try:
            said[name] = repr(TIMERS[name]())
        except (ValueError, RuntimeError) as error:
            said[name] = str(error)
    assert signal.alarm(0) == 0
    assert signal.setitimer(signal.ITIMER_REAL, 0) == (0.0, 0.0)
    return said


class Limits(Actor):
    @endpoint
    def refusals(self) -> dict[str, str]:
        return refusals()


class AsyncLimits(Actor):
    @endpoint
    async def refusals(self) -> dict[str, str]:
        return refusals(name for name in TIMERS if name != "asyncio")


class RemoteLimits:
    def refusals(self) -> dict[str, str]:
        return refusals()


def in_sync_endpoint(job: loom.Job) -> Any:
    return job.hosts.slice(hosts=0).spawn_procs().spawn("limits", Limits).refusals.call_one().get(IN_TIME)


def in_async_endpoint(job: loom.Job) -> Any:
    return job.hosts.slice(hosts=0).spawn_procs().spawn("limits", AsyncLimits).refusals.call_one().get(IN_TIME)


def in_deployed_class(job: loom.Job) -> Any:
    with loom.cls(RemoteLimits).to(job) as remote:
        return remote.refusals()


def in_deployed_function(job: loom.Job) -> Any:
    with loom.fn(refusals).to(job) as remote:
        return remote()


def in_second_run(job: loom.Job) -> Any:
    first = job.run(go_on_for_ever, detach=True)
    until_it_prints(first, "begun")
    try:
        return job.run(refusals)
    finally:
        first.cancel()
        first.exception(IN_TIME)


@pytest.mark.parametrize(
    "place",
    [
        in_sync_endpoint,
        in_second_run,
        *(
            pytest.param(place, marks=pytest.mark.slow)
            for place in (in_async_endpoint, in_deployed_class, in_deployed_function)
        ),
    ],
)
def test_a_place_without_signals_says_at_the_line_what_to_do_instead(
    tidied: loom.Job, place: Callable[[loom.Job], dict[str, str]]
) -> None:
    said = place(tidied)

    wrong = {name: text for name, text in said.items() if "(multiprocessing, subprocess)" not in text}
    assert wrong == {}
    assert tidied.run(len, "abc") == 3


@pytest.mark.slow
def test_a_cell_beside_a_run_says_so_too(tidied: loom.Job) -> None:
    first = tidied.run(go_on_for_ever, detach=True)
    until_it_prints(first, "begun")
    source = "import signal\nsignal.alarm(0)\nsignal.alarm(1)"
    try:
        with pytest.raises(ValueError, match=r"alarm only works in main thread; .*\(multiprocessing, subprocess\)"):
            CellView(start(tidied, source), lambda record: None, interrupting=True).follow(IN_TIME)
    finally:
        first.cancel()
        first.exception(IN_TIME)
