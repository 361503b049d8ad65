"""Forked children of a program that has a session: they leave it to their parent, and can open their own."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

import loom
from loom.errors import InForkedChild
from loom_proxy.local import LocalCluster
from tests.integration.session.run_functions import IN_TIME
from tests.support.actors import Counter


def in_child(look: Callable[[], Any], leave: Callable[[], object] = lambda: os._exit(0)) -> Any:
    """Return what a function returns, or raises, in a forked child of this process, which then ends in some way."""
    source, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            try:
                outcome = look()
            except BaseException as error:  # noqa: BLE001
                outcome = error
            os.write(end, pickle.dumps(outcome))
            os.close(end)
            leave()
        os._exit(1)
    os.close(end)
    with open(source, "rb") as file:
        data = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return pickle.loads(data)


def raised(look: Callable[[], Any]) -> Any:
    """Return the class and text of what a function raises; what it returns otherwise."""
    try:
        return look()
    except Exception as error:  # noqa: BLE001
        return type(error), str(error)


@pytest.fixture(scope="module")
def counters(shared: loom.Job) -> Any:
    return shared.hosts.spawn_procs(name="procs").spawn("counters", Counter, 10)


USES: dict[str, Callable[[loom.Job, Any, Any], object]] = {
    "a call": lambda job, counters, future: counters.add.call(1).get(IN_TIME),
    "a broadcast": lambda job, counters, future: counters.add.broadcast(1),
    "a stream": lambda job, counters, future: list(counters.add.stream(1)),
    "a future": lambda job, counters, future: future.get(IN_TIME),
    "a future's exception": lambda job, counters, future: _raise(future.exception(IN_TIME)),
    "a future, awaited": lambda job, counters, future: asyncio.run(_await(future)),
    "a run": lambda job, counters, future: job.run(len, "abc"),
    "a detached run": lambda job, counters, future: job.run(len, "abc", detach=True),
    "the runs": lambda job, counters, future: job.runs(),
    "a spawn": lambda job, counters, future: job.hosts.spawn_procs(),
    "a stop": lambda job, counters, future: counters.stop().get(IN_TIME),
    "the logs": lambda job, counters, future: job.flush_logs(),
}


def _raise(error: BaseException) -> None:
    raise error


async def _await(future: Any) -> Any:
    return await future


@pytest.mark.parametrize("use", USES)
def test_a_child_that_uses_its_parents_session_is_told_whose_it_is(
    shared: loom.Job, counters: Any, use: str
) -> None:
    future = shared.run(time.sleep, 0.5, detach=True).future

    def look() -> Any:
        return raised(lambda: USES[use](shared, counters, future))

    kind, text = in_child(look)
    assert kind is InForkedChild
    assert f"session {shared.session!r} belongs to process {os.getpid()}" in text
    assert f"loom.connect(session={shared.session!r}, mode='call')" in text
    future.get(IN_TIME)
    assert sorted(counters.add.call(0).get(IN_TIME).values()) == [10, 10]


LEAVES: dict[str, Callable[[], object]] = {
    "os._exit": lambda: os._exit(0),
    "sys.exit": lambda: _exit_as_a_program(),
}


def _exit_as_a_program() -> None:
    """Run the functions of `atexit` and finalizers, as a child that returns from its program does."""
    import atexit
    import gc

    atexit._run_exitfuncs()
    gc.collect()
    os._exit(0)


@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.parametrize("transport", ["websocket", "http"])
def test_a_child_that_closes_its_parents_job_ends_nothing(
    cluster: LocalCluster, transport: str, leave: str
) -> None:
    with loom.connect(cluster.url, cluster.token, transport=transport) as job:
        arrived = job.run(len, "abc", detach=True).future
        arrived.get(IN_TIME)
        ends: list[Callable[[], object]] = [job.close, job.detach, lambda: job.__exit__(), lambda: None]
        for end in ends:
            future = job.run(time.sleep, 0.1, detach=True).future

            def look(end: Callable[[], object] = end) -> tuple[int, bool]:
                end()
                return arrived.get(IN_TIME), job.closed

            assert in_child(look, LEAVES[leave]) == (3, True)
            future.get(IN_TIME)
            assert job.run(len, "abcd") == 4
        assert [event.name for event in job.events(timeout=0)] == []
        assert not job.closed


def test_children_open_sessions_of_their_own_as_a_preloaded_server_does(cluster: LocalCluster) -> None:
    with loom.connect(cluster.url, cluster.token) as job:
        counters = job.hosts.spawn_procs(name="procs").spawn("counters", Counter, 10)
        counters.add.call(0).get(IN_TIME)

        def serve() -> Any:
            with loom.connect(cluster.url, cluster.token, session=job.session, mode="call") as own:
                found: Any = own.meshes["counters"]
                return sorted(found.add.call(1).get(IN_TIME).values())

        results: list[Any] = []
        for _ in range(3):
            results.append(in_child(serve))
        assert results == [[11, 11], [12, 12], [13, 13]]
        assert sorted(counters.add.call(0).get(IN_TIME).values()) == [13, 13]


def _double(number: int) -> int:
    return 2 * number


def test_a_pool_and_processes_of_a_program_leave_its_session_alone(tidied: loom.Job) -> None:
    context = multiprocessing.get_context("fork")
    calling = threading.Event()

    def call() -> None:
        while not calling.is_set():
            assert tidied.run(len, "abc") == 3

    thread = threading.Thread(target=call)
    thread.start()
    try:
        for _ in range(3):
            with context.Pool(2) as pool:
                assert pool.map(_double, range(10)) == [2 * number for number in range(10)]
    finally:
        calling.set()
        thread.join(IN_TIME)
    assert not thread.is_alive()
    assert tidied.run(len, "abc") == 3


class _Squares:
    """A data set of `torch.utils.data`."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index * index


@pytest.mark.slow
def test_the_workers_of_a_data_loader_leave_the_session_alone(tidied: loom.Job) -> None:
    data = pytest.importorskip("torch.utils.data")
    loader = data.DataLoader(_Squares(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    for batch in loader:
        assert tidied.run(len, batch.tolist()) == 2
    assert tidied.run(len, "abc") == 3


@pytest.mark.slow
def test_a_child_of_a_program_with_a_local_cluster_leaves_it_running() -> None:
    program = """
        import os, sys, loom
        with loom.local(hosts=1) as job:
            assert job.run(len, "abc") == 3
            for leave in (lambda: sys.exit(0), lambda: os._exit(0)):
                pid = os.fork()
                if pid == 0:
                    leave()
                assert os.waitpid(pid, 0)[1] == 0
                assert job.run(len, "abc") == 3
            print("alive", job.run(len, "abc"))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "alive 3\n"), done.stderr


def test_a_child_that_outlives_its_parent_does_not_keep_the_connection_open(cluster: LocalCluster) -> None:
    program = f"""
        import os, time, loom
        job = loom.connect({cluster.url!r}, {cluster.token!r})
        if os.fork() == 0:
            time.sleep(1000)
        print(job.session, flush=True)
        time.sleep(1000)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        session = parent.stdout.readline().strip()
        (child,) = psutil.Process(parent.pid).children()
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + IN_TIME
        try:
            while True:  # until the session has no client any more
                with contextlib.suppress(loom.SessionInUse):
                    with loom.connect(cluster.url, cluster.token, session=session) as job:
                        assert job.run(len, "abc") == 3
                    break
                assert time.monotonic() < deadline
            assert child.is_running()
        finally:
            child.kill()
