"""Lazy tensors for long, and through a connection that is cut all the time."""

from __future__ import annotations

import gc
import itertools
import os
import random
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

import loom
from loom import Actor, endpoint
from loom_proxy.local import LocalCluster
from tests.integration.calls.test_failures import driver_pid
from tests.support.network.chaos_proxy import ChaosProxy, Schedule

OPERATIONS = 1_000_000
FIRST = 200_000
"""Operations after which memory is measured first."""

CUTS = 1_000
GAP = (300, 12_000)
"""Bytes between two cuts."""

MOST_STEPS = 60_000


class Witness(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(hosts=1, gateway_options=["--session-linger", "60"]) as running:
        yield running


def step(lt: loom.tensors.Tensors, x: Any, w: Any, b: Any) -> Any:
    """A step of training with temporary tensors of several kinds; return the loss."""
    hidden = (x @ w + b).relu()
    loss = (hidden * hidden + hidden[:, 1:2]).mean() + 0.01 * (w * w).sum()
    loss.backward()
    with lt.no_grad():
        w -= 0.01 * w.grad
        b -= 0.01 * b.grad
    w.grad = b.grad = None
    return loss


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_million_operations_leave_memory_as_it_is(cluster: LocalCluster) -> None:
    with loom.connect(cluster.url, cluster.token) as job:
        lt = job.tensors()
        pids = {"laptop": os.getpid(), "driver": driver_pid(cluster, job)}
        pids["worker"] = job.meshes["tensors-processes"].spawn("witness", Witness).pid.call_one().get()
        w, b = lt.randn(8, 8, requires_grad=True), lt.zeros(8, requires_grad=True)
        x = lt.randn(4, 8)

        def after(operations: int) -> dict[str, int]:
            for number in itertools.count():
                loss = step(lt, x, w, b)
                if number % 1000 == 0:
                    loss.item()
                    if lt._dispatcher._encoder.next_id >= operations:
                        break
            del loss
            lt.synchronize()
            gc.collect()
            return {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}

        first, last = after(FIRST), after(OPERATIONS)
        for name, resident in first.items():
            assert abs(last[name] - resident) <= 0.1 * resident, f"{name}: {resident} bytes became {last[name]}"
        assert len(lt._dispatcher.held) < 100


def losses(lt: loom.tensors.Tensors, seed: int) -> Iterator[float]:
    """Train on data of a seed, which is sent for each step; yield each loss."""
    draw = random.Random(seed)
    lt.seed(seed)
    w, b = lt.randn(8, 8, requires_grad=True), lt.zeros(8, requires_grad=True)
    while True:
        x = lt.tensor([[draw.gauss(0.0, 1.0) for _ in range(8)] for _ in range(8)])
        yield step(lt, x, w, b).item()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_cuts_change_no_loss(cluster: LocalCluster) -> None:
    port = urlsplit(cluster.url).port
    assert port is not None
    found = []
    with ChaosProxy(port) as proxy, loom.connect(f"ws://127.0.0.1:{proxy.port}", cluster.token) as job:
        training = losses(job.tensors(), 4)
        proxy.attack(Schedule(4, CUTS, GAP))
        while not proxy.calm.is_set():
            found.append(next(training))
            assert len(found) < MOST_STEPS, f"only {proxy.cuts} cuts in {proxy.forwarded} bytes"
        found.append(next(training))
    assert proxy.cuts >= CUTS
    with loom.connect(cluster.url, cluster.token) as job:
        assert list(itertools.islice(losses(job.tensors(), 4), len(found))) == found
