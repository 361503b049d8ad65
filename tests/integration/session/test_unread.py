"""A result that has arrived and was not read outlives the program that it was for."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import loom
from loom_proxy.local import LocalCluster
from loom_proxy.session.waits import SOON, TOGETHER
from tests.support.actors import Counter, open_gate
from tests.support.gateways import BOUND, attach, await_true

pytestmark = pytest.mark.timeout(120)

HEAD = """
import asyncio, sys, loom
from tests.support.actors import Counter
job = loom.connect({url!r}, {token!r}{options})
procs = job.hosts.slice(hosts=0).spawn_procs(per_host={{"gpus": 2}}, name="procs")
counters = procs.spawn("counters", Counter, 10)
one = counters.slice(gpus=0)
print(job.session, flush=True)
"""

TOLD = """
while len(job._calls.reads): pass
job.flush_logs()
"""
"""Waits until the driver knows what was read, which it is told without being asked."""

TAIL = """
loom.wait(unread, timeout=60)
print("done", flush=True)
sys.stdin.read()
"""


@contextmanager
def killed(cluster: LocalCluster, program: str, options: str = "") -> Iterator[str]:
    """Run a program until it has all of its answers, and kill it; the name of its session."""
    text = HEAD.format(url=cluster.url, token=cluster.token, options=options) + textwrap.dedent(program) + TAIL
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as laptop:
        assert laptop.stdout is not None
        session = laptop.stdout.readline().strip()
        assert laptop.stdout.readline().strip() == "done"
        laptop.kill()
    yield session


def collected(job: loom.Job) -> dict[str, list[Any]]:
    """The values, or errors, of the undelivered calls, by endpoint and adverb."""
    found: dict[str, list[Any]] = {}
    for call in job.undelivered():
        for future in call.futures:
            error = future.exception(BOUND)
            value = type(error).__name__ if error is not None else future.get(BOUND)
            values = list(value.values()) if call.adverb == "call" and error is None else [value]
            found.setdefault(f"{call.endpoint}.{call.adverb}", []).extend(values)
    return found


PROGRAMS: dict[str, tuple[str, dict[str, list[Any]]]] = {
    "call": ("unread = [counters.add.call(3)]", {"add.call": [13, 13]}),
    "call_one": ("unread = [one.add.call_one(n) for n in range(3)]", {"add.call_one": [10, 11, 13]}),
    "choose": ("unread = [one.echo.choose('x')]", {"echo.choose": ["x"]}),
    "stream": (
        "unread = list(counters.echo.stream('x')); loom.wait(unread); unread[1].get()",
        {"echo.stream": ["x"]},
    ),
    "a slice": ("unread = [counters.slice(gpus=1).add.call(3)]", {"add.call": [13]}),
    "a broadcast, which has no answer": (
        "counters.add.broadcast(3); unread = [one.value.call_one()]",
        {"value.call_one": [13]},
    ),
    "a method of an ordinary class": (
        """
        class Doubler:
            def double(self, number): return 2 * number
        doubler = loom.cls(Doubler).to(job)
        doubling = doubler.double(4, async_=True)
        unread = list(job._calls._waiting.values())
        """,
        {"run.call_one": [8]},
    ),
    "a call that could not be made": (
        """
        gone = procs.spawn("gone", Counter)
        gone.stop().get()
        unread = [gone.add.call(1)]
        """,
        {"add.call": ["SupervisionError"]},
    ),
    "an error": ("unread = [counters.fail.call('bad')]", {"fail.call": ["ActorError"]}),
    "large": ("unread = [one.echo.call_one(b'x' * (3 << 20))]", {"echo.call_one": [b"x" * (3 << 20)]}),
    "some were read": (
        """
        unread = [one.echo.call_one(n) for n in range(200)]
        for future in unread[:198]: future.get()
        """,
        {"echo.call_one": [198, 199]},
    ),
    "read in every way": (
        """
        async def read(future): return await future
        def look(future): seen.append(future.result())
        seen = []
        futures = [one.echo.call_one(n) for n in range(5)]
        futures[0].get(); futures[1].result(); futures[2].exception(); asyncio.run(read(futures[3]))
        futures[4].add_done_callback(look)
        unread = [one.echo.call_one("unread")]
        """,
        {"echo.call_one": ["unread"]},
    ),
    "a callback that does not look": (
        "unread = [one.echo.call_one(1)]; unread[0].add_done_callback(lambda future: None)",
        {"echo.call_one": [1]},
    ),
}
QUICK = ("call", "large", "some were read")
KINDS = [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in PROGRAMS]


@pytest.mark.guarantees(
    "nothing lost",
    "A result that has arrived in part, or was not read, when its program died is found by the next one; "
    "of those that had been delivered only so many are kept",
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transport", ["websocket", pytest.param("http", marks=pytest.mark.slow)])
def test_what_arrived_and_was_not_read_is_found_by_the_next_program(
    cluster: LocalCluster, transport: str, kind: str
) -> None:
    program, unread = PROGRAMS[kind]
    program = textwrap.dedent(program) + TOLD
    with killed(cluster, program, f", transport={transport!r}") as name:
        # Nobody notices at once that a client over HTTP is gone.
        with loom.connect(cluster.url, cluster.token, session=name, take_over=True) as job:
            assert collected(job) == unread
            assert job.undelivered() == []


@pytest.mark.slow
def test_a_run_whose_result_has_arrived_is_found_by_its_name(cluster: LocalCluster) -> None:
    with killed(cluster, 'unread = [job.run(abs, -3, detach=True, name="three").future]') as name:
        with attach(cluster, name) as job:
            assert job.runs()["three"].result(BOUND) == 3


def test_what_was_dropped_by_name_is_found_by_no_later_program(cluster: LocalCluster) -> None:
    with killed(cluster, "unread = [counters.add.call(3), one.echo.call_one('kept')]") as name:
        job = attach(cluster, name)
        dropped, _ = job.undelivered()
        dropped.drop()
        assert [call.endpoint for call in job.undelivered()] == ["echo"]
        for again in (dropped.drop, dropped.future.get):
            with pytest.raises(loom.OperationFailed, match="it may have been collected or dropped already"):
                again()
        job.detach()
        with attach(cluster, name) as after:
            assert collected(after) == {"echo.call_one": ["kept"]}


@pytest.mark.slow
def test_an_answer_that_comes_after_its_call_was_dropped_is_kept_for_nobody(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    pipes = [str(tmp_path / name) for name in "abc"]
    for pipe in pipes:
        os.mkfifo(pipe)
    program = f"""
    from tests.support.actors import Gate
    gates = procs.spawn("gates", Gate).slice(gpus=0)
    waiting = [gates.wait.call_one([{pipes[0]!r}]), *gates.wait.stream([{pipes[1]!r}])]
    job._calls.flush()
    unread = [one.echo.call_one("read")]
    unread[0].get()
    """
    with killed(cluster, textwrap.dedent(program) + TOLD) as name:
        job = attach(cluster, name)
        assert [call.adverb for call in job.undelivered()] == ["call_one", "stream"]
        for call in job.undelivered():
            call.drop()
        job.detach()
        with attach(cluster, name) as after:
            assert after.undelivered() == []
            last = after.meshes["gates"].slice(gpus=0).wait.call_one([pipes[2]])  # which is answered after both
            after._calls.flush()
            for pipe in pipes:
                open_gate(pipe)
            assert last.get(BOUND) == "open"
            assert after.undelivered() == []


def test_what_the_next_program_does_not_read_either_is_found_by_the_one_after_it(cluster: LocalCluster) -> None:
    with killed(cluster, "unread = [counters.add.call(3)]") as name:
        job = attach(cluster, name)
        (call,) = job.undelivered()
        loom.wait(call.futures, timeout=BOUND)
        job.detach()
        with attach(cluster, name) as after:
            assert collected(after) == {"add.call": [13, 13]}


def test_a_program_that_leaves_in_order_leaves_nothing_that_it_has_read(cluster: LocalCluster) -> None:
    job = loom.connect(cluster.url, cluster.token)
    counters = job.hosts.spawn_procs(name="procs").spawn("counters", Counter)
    for number in range(5):
        counters.add.call(number).get(BOUND)
    unread = counters.echo.call("unread")
    loom.wait([unread], timeout=BOUND)
    job.detach()
    with attach(cluster, job.session) as after:
        assert set(collected(after)) == {"echo.call"}


def test_the_driver_is_told_of_many_reads_at_once(cluster: LocalCluster) -> None:
    told: list[int] = []
    with loom.connect(cluster.url, cluster.token) as job:
        reads = job._calls.reads
        send = reads._send
        reads._send = lambda answers, at_once: (told.append(len(answers)), send(answers, at_once))[1]
        one = job.hosts.slice(hosts=0).spawn_procs(name="procs").spawn("counters", Counter)
        one.value.call_one().get(BOUND)
        began = time.monotonic()
        for number in range(4 * TOGETHER):
            one.echo.call_one(number).get(BOUND)
        assert len(told) <= 6 + (time.monotonic() - began) / SOON
        await_true(lambda: sum(told) == 4 * TOGETHER + 1)


def test_what_a_program_that_calls_beside_has_not_read_goes_to_the_one_that_drives(
    cluster: LocalCluster,
) -> None:
    with loom.connect(cluster.url, cluster.token) as job:
        job.hosts.slice(hosts=0).spawn_procs(name="procs").spawn("counters", Counter, 10).value.call().get(BOUND)
        program = f"""
        import loom, sys
        job = loom.connect({cluster.url!r}, {cluster.token!r}, session={job.session!r}, mode="call")
        counters = job.meshes["counters"]
        counters.echo.call_one("read").get()
        unread = [counters.echo.call_one("unread"), counters.add.call(1)]
        loom.wait(unread)
        while len(job._calls.reads): pass
        job.flush_logs()
        print("done", flush=True)
        sys.stdin.read()
        """
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as beside:
            assert beside.stdout is not None
            assert beside.stdout.readline().strip() == "done"
            assert job.undelivered() == []
            beside.kill()
        await_true(lambda: len(job.undelivered()) == 2)
        assert collected(job) == {"echo.call_one": ["unread"], "add.call": [11]}
        assert job.undelivered() == []
