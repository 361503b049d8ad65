"""Calls of eight sessions beside thousands of connections without a token: ``python -m tests.benchmarks siege``.

For each kind of connection (`tests.benchmarks.hostile`, a process of its own), and from one address and from many,
calls are measured while the connections are held, and without any before and after. Newcomers come in meanwhile.
"""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import psutil

import loom
from loom import Actor, endpoint
from loom.rest_client import Gateway
from loom_proxy.local import LocalCluster
from tests.benchmarks.budgets import BudgetReport, Figure
from tests.benchmarks.hostile import KINDS
from tests.benchmarks.machine import describe_machine
from tests.benchmarks.report import Ratio
from tests.benchmarks.written import BUDGETS

__all__ = ["SiegePlan", "measure"]

NAME = "call beside 2,000 hostile connections"

BOUND = 60.0
"""Seconds that a call or a newcomer may take at most."""

SLACK = 8
"""Descriptors that a calm gateway may have more than at the beginning, of connections that end by themselves."""

WARM_UP = 50
"""Calls of each session before the first that counts."""


CALM = 60.0
"""Seconds that the gateway has to close what hostile connections have left."""


@dataclass(frozen=True)
class SiegePlan:
    """How much is measured."""

    rounds: int = 2
    connections: int = 2000
    sessions: int = 8
    seconds: float = 3.0
    """How long calls are measured beside each kind of connection, and between two kinds."""
    hosts: tuple[int, ...] = (1, 200)
    """From how many addresses the connections come."""
    kinds: tuple[str, ...] = tuple(KINDS)


class Echo(Actor):
    @endpoint
    def echo(self, value: int) -> int:
        return value


def measure(plan: SiegePlan, command: str, progress: Callable[[str], object]) -> BudgetReport:
    """Measure calls beside each kind of connection, and beside none before and after each."""
    ratios: dict[tuple[int, str], list[float]] = {}
    idle, newcomers, memory = [], [], []
    with ExitStack() as opened:
        cluster = opened.enter_context(LocalCluster(1))
        echoes = opened.enter_context(_sessions(cluster, plan.sessions))
        begins = {
            hosts: opened.enter_context(_hostile(cluster.url, plan.connections, hosts)) for hosts in plan.hosts
        }
        gateway = psutil.Process(cluster.pids[0])
        assert _come(cluster)
        calm = gateway.num_fds() + SLACK
        for number, hosts in itertools.product(range(plan.rounds), plan.hosts):
            idle.append(_p99(echoes, plan.seconds))
            for kind in plan.kinds:
                progress(f"round {number + 1} of {plan.rounds}: {kind}, from {hosts} addresses")
                begins[hosts](kind)
                besieged = _p99(echoes, plan.seconds)
                newcomers.append(_come(cluster))
                memory.append(gateway.memory_info().rss / 2**20)
                begins[hosts]("")
                _await_calm(gateway, calm)
                idle.append(_p99(echoes, plan.seconds))
                # Both sides of it, so that the machine's drift cancels.
                ratios.setdefault((hosts, kind), []).append(2 * besieged / (idle[-2] + idle[-1]))
    bound = BUDGETS[NAME].value
    budgets = tuple(
        Ratio(NAME, f"p99, {kind}, {hosts} addresses / none", "at most", bound, tuple(found))
        for (hosts, kind), found in ratios.items()
    )
    figures = (
        Figure("a call beside none", "p99, ms", tuple(1000 * each for each in idle)),
        Figure("a newcomer", "s to be answered over REST and a WebSocket", tuple(newcomers)),
        Figure("the gateway beside them", "MiB resident", tuple(memory)),
    )
    return BudgetReport("siege", command, describe_machine(), asdict(plan), budgets, figures)


@contextmanager
def _sessions(cluster: LocalCluster, count: int) -> Iterator[list[Any]]:
    jobs = []
    try:
        echoes = []
        for _ in range(count):
            jobs.append(loom.connect(cluster.url, cluster.token))
            echoes.append(jobs[-1].hosts.spawn_procs(per_host={"gpus": 1}).spawn("echo", Echo))
        for _ in range(WARM_UP):
            for echo in echoes:
                echo.echo.call_one(1).get()
        yield echoes
    finally:
        for job in jobs:
            job.close()


@contextmanager
def _hostile(url: str, count: int, hosts: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that begins a kind of connection; "" ends all."""
    command = [sys.executable, "-m", "tests.benchmarks.hostile", url, str(count), str(hosts)]
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdin is not None
    assert program.stdout is not None

    def begin(kind: str) -> None:
        assert program.stdin is not None
        assert program.stdout is not None
        print(kind or "none", file=program.stdin, flush=True)
        assert program.stdout.readline() == "begun\n"

    try:
        yield begin
    finally:
        program.stdin.close()
        try:
            program.wait(10.0)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()
        program.stdout.close()


def _await_calm(gateway: psutil.Process, descriptors: int) -> None:
    """Wait until a gateway has no more than so many descriptors."""
    end = time.monotonic() + CALM
    while gateway.num_fds() > descriptors:
        assert time.monotonic() < end, f"the gateway keeps {gateway.num_fds()} descriptors, and had {descriptors}"
        time.sleep(0.1)


def _p99(echoes: list[Any], seconds: float) -> float:
    """Call the sessions in turns, one call at a time; return the 99th percentile in seconds."""
    times = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times) < 2:
        for echo in echoes:
            start = time.perf_counter()
            assert echo.echo.call_one(len(times)).get(BOUND) == len(times)
            times.append(time.perf_counter() - start)
    return statistics.quantiles(times, n=100)[98]


def _come(cluster: LocalCluster) -> float:
    """Return how long a newcomer takes, over REST and with a WebSocket."""
    start = time.monotonic()
    assert Gateway(cluster.url, cluster.token, timeout=BOUND).sessions()
    try:
        loom.connect(cluster.url, cluster.token, session="nobody", timeout=BOUND)
    except loom.UnknownSession:
        return time.monotonic() - start
    raise AssertionError("there is no such session")
