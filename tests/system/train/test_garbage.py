"""A neighbour who sends garbage to every port of a `loom.local` that trains, and holds many connections to each."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

import loom
from loom_proxy.local import LocalCluster
from tests.support.garbage import held, pieces, send
from tests.support.listeners import Listener, listeners
from tests.support.processes import tree
from tests.system.train.trainers import Watched, a_job

CROWD = 500
GROWTH = 64 << 20  # bytes of memory that a process may have more afterwards
DESCRIPTORS = 16  # descriptors that it may have more

GLOO = 3 * CROWD
"""The same, of a process that trains: gloo keeps each connection that ends without its handshake."""


@pytest.fixture
def local() -> Iterator[LocalCluster]:
    with LocalCluster(hosts=2) as running:
        yield running


@pytest.mark.guarantees(
    "ports",
    "Garbage, half frames and 500 connections at every port of a training end no process, and training goes on",
)
@pytest.mark.slow
def test_garbage_at_every_port_ends_nothing_and_training_goes_on(local: LocalCluster) -> None:
    with loom.connect(local.url, local.token) as job:
        watched = Watched(job, a_job(steps=1_000_000))
        watched.await_steps()
        processes = tree(psutil.Process().pid)[1:]
        found = [one for one in listeners(processes) if one.kind == "TCP"]
        before = {process.pid: (process.memory_info().rss, process.num_fds()) for process in processes}
        pids = watched.pids()

        for seed, listener in enumerate(found):
            torment(listener, seed)
        watched.await_steps()

        assert watched.pids() == pids, found
        assert [process for process in processes if not process.is_running()] == []
        watched.await_true(lambda: not grown(processes, before))
        watched.stop()


def torment(listener: Listener, seed: int) -> None:
    for piece in pieces(seed):
        send(listener, piece)
    send(listener, b"GET / HTTP/1.1\r\nHost: localhost\r\n", slowly=True)
    for piece in (b"", b"\0\0\0\x10half"):
        with held(listener, CROWD, piece):
            pass


def grown(processes: list[psutil.Process], before: dict[int, tuple[int, int]]) -> list[str]:
    """The processes that hold more than before."""
    found = []
    for process in processes:
        memory, descriptors = before[process.pid]
        trains = "monarch._src.actor.bootstrap_main" in process.cmdline()
        more = GLOO if trains else DESCRIPTORS
        if process.memory_info().rss > memory + GROWTH or process.num_fds() > descriptors + more:
            found.append(" ".join(process.cmdline()))
    return found
