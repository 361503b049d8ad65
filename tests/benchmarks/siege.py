"""Calls of eight sessions beside thousands of connections without a token: ``python -m tests.benchmarks siege``.

For each kind of connection (`tests.benchmarks.hostile`, a process of its own), and from one address and from many,
calls are measured without the connections and while they are held. Newcomers come in meanwhile.
"""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import loom
from loom import Actor, endpoint
from loom.rest import Gateway
from loom_proxy.local import LocalCluster
from tests.benchmarks.budgets import BudgetReport, Figure
from tests.benchmarks.hostile import KINDS
from tests.benchmarks.machine import describe_machine
from tests.benchmarks.report import Ratio
from tests.benchmarks.written import BUDGETS

__all__ = ["SiegePlan", "measure"]

NAME = "call beside 2,000 hostile connections"

WARM_UP = 50
"""Calls of each session before the first that counts."""


@dataclass(frozen=True)
class SiegePlan:
    """How much is measured."""

    connections: int = 2000
    sessions: int = 8
    seconds: float = 5.0
    """How long calls are measured beside each kind of connection."""
    hosts: tuple[int, ...] = (1, 200)
    """From how many addresses the connections come."""


class Echo(Actor):
    @endpoint
    def echo(self, value: int) -> int:
        return value


def measure(plan: SiegePlan, command: str, progress: Callable[[str], object]) -> BudgetReport:
    """Measure calls beside each kind of connection, in turns with calls beside none."""
    ratios: dict[str, list[float]] = {kind: [] for kind in KINDS}
    newcomers = []
    with LocalCluster(1) as cluster, _sessions(cluster, plan.sessions) as echoes:
        for hosts in plan.hosts:
            with _hostile(cluster.url, plan.connections, hosts) as begin:
                for kind in KINDS:
                    progress(f"{kind}, from {hosts} addresses: without")
                    idle = _p99(echoes, plan.seconds)
                    progress(f"{kind}, from {hosts} addresses: beside them")
                    begin(kind)
                    ratios[kind].append(_p99(echoes, plan.seconds) / idle)
                    newcomers.append(_come(cluster))
                    begin("")
    bound = BUDGETS[NAME].value
    budgets = tuple(
        Ratio(NAME, f"p99, {kind} / none", "at most", bound, tuple(found)) for kind, found in ratios.items()
    )
    figures = (Figure("a newcomer", "s to connect and be answered", tuple(newcomers)),)
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


def _p99(echoes: list[Any], seconds: float) -> float:
    """Call the sessions in turns, one call at a time; return the 99th percentile in seconds."""
    times = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times) < 2:
        for echo in echoes:
            start = time.perf_counter()
            assert echo.echo.call_one(len(times)).get() == len(times)
            times.append(time.perf_counter() - start)
    return statistics.quantiles(times, n=100)[98]


def _come(cluster: LocalCluster) -> float:
    """Return how long a newcomer takes, over REST and with a WebSocket."""
    start = time.monotonic()
    assert Gateway(cluster.url, cluster.token, timeout=60.0).sessions()
    try:
        loom.connect(cluster.url, cluster.token, session="nobody", timeout=60.0)
    except loom.UnknownSession:
        return time.monotonic() - start
    raise AssertionError("there is no such session")
