"""What the weaver can take, on one core: status reports a second, and replicas.

The weaver is a process of its own, as a gateway starts it; threadlets are simulated by `tests.benchmarks.crowd`, in
another process, over TCP. Commands are given over the unix socket, as the gateway does.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from loom.control.frame import pack_value
from loom.weaver.storage.store import Store, journal_head
from tests.benchmarks import steering
from tests.benchmarks.budgets import BudgetReport, Figure
from tests.benchmarks.caller_process import CallerProcess
from tests.benchmarks.machine import cpu_seconds, describe_machine
from tests.benchmarks.report import Ratio, budgeted, percentile
from tests.unit.loom.weaver.raw_threadlet import RawGateway, WeaverProcess, running_weaver

__all__ = ["Busy", "Load", "Steady", "WeaverPlan", "load_report", "measure"]

PER_SECOND = 20_000
"""Status reports that one core of the weaver has to take a second."""

COMMAND_P99_MS = 100.0
"""In which a command is acknowledged while the most replicas report, at p99."""

FLAT = 1.25
"""What a report may cost with the most replicas, in what it costs with fewer."""

STORED = 0.95
"""Of the reports due, those that are stored in each window."""

ASK_EVERY = 0.01
"""Seconds from one answer to the next request."""


@dataclass(frozen=True)
class WeaverPlan:
    """How much is measured."""

    rounds: int = 3
    seconds: float = 10.0
    """How long the weaver is kept busy for one figure."""
    per_second: int = PER_SECOND
    busy_replicas: int = 200
    """How many send these reports."""
    together: int = 5
    """Reports in a frame there: a threadlet sends those of 50 ms together."""
    replicas: tuple[int, ...] = (100, 1000, 10_000)
    """Of which each reports once a second, in a frame of its own."""
    steady: float = 150.0
    """How long the most replicas report in one run: after one and two minutes something is due for all of them."""
    window: float = 10.0
    """Seconds of it for one figure."""
    commands: int = 100
    """Commands applied by a real training process, in each round."""
    kills: int = 3
    """Processes that are killed, in each round."""


@dataclass(frozen=True)
class Load:
    """The weaver under a load of reports."""

    reports: int
    seconds: float
    """Until all were stored."""
    cpu_seconds: float
    """That the weaver's process used."""
    crowd_cpu_seconds: float
    """That the simulated threadlets used."""
    command_seconds: tuple[float, ...] = ()
    """From giving a command to one replica to having its acknowledgement, while as many reports came again."""
    broadcast_seconds: float = 0.0
    """From giving a command to all replicas to having all acknowledgements."""

    @property
    def per_core(self) -> float:
        """Reports a second that one core could take."""
        return self.reports / self.cpu_seconds

    @property
    def microseconds(self) -> float:
        """CPU time of a report, with the heartbeats that come meanwhile."""
        return self.cpu_seconds / self.reports * 1e6


@dataclass(frozen=True)
class Busy:
    """The loads of one round."""

    throughput: Load
    by_replicas: dict[int, Load]


@dataclass(frozen=True)
class Steady:
    """The weaver while the most replicas report once a second for long, with one watcher."""

    stored: tuple[float, ...]
    """Reports stored in each window, of those due."""
    cores: tuple[float, ...]
    """Cores that the weaver used in each window."""
    waits: tuple[float, ...]
    """Seconds until a small request was answered."""


def measure(plan: WeaverPlan, command: str, say: Callable[[str], object] = lambda text: None) -> BudgetReport:
    """Measure everything in each round.

    Raises:
        CallerError: the simulated threadlets failed.
    """
    rounds, applied, failed = [], [], []
    for number in range(1, plan.rounds + 1):
        where = f"round {number} of {plan.rounds}"
        say(f"{where}: {plan.per_second:,} reports a second")
        throughput = _throughput(plan)
        by_replicas = {}
        for count in plan.replicas:
            say(f"{where}: {count:,} replicas")
            by_replicas[count] = _replicas(plan, count)
        rounds.append(Busy(throughput, by_replicas))
        say(f"{where}: commands to a real training process, and dead processes")
        with steering.running() as cluster:
            applied.append(cluster.commands(plan.commands))
            failed.append(cluster.kills(plan.kills))
    say(f"{max(plan.replicas):,} replicas for {plan.steady:g} s")
    return load_report(plan, command, rounds, applied, failed, commit_seconds(), measure_steady(plan))


def load_report(
    plan: WeaverPlan,
    command: str,
    rounds: Sequence[Busy],
    applied: Sequence[steering.Commands],
    failed: Sequence[Sequence[float]],
    commits: dict[str, list[float]],
    steady: Steady,
) -> BudgetReport:
    """Set what was measured beside its budgets."""
    most = max(plan.replicas)

    def of_most(figure: Callable[[Load], float]) -> tuple[float, ...]:
        return tuple(figure(one.by_replicas[most]) for one in rounds)

    def cost(one: Busy, count: int) -> float:
        return one.by_replicas[count].microseconds

    budgets = (
        Ratio(
            "status reports",
            "a second of one core's time",
            "at least",
            PER_SECOND,
            tuple(one.throughput.per_core for one in rounds),
        ),
        Ratio(
            "status reports stored",
            "a second, of those sent",
            "at least",
            0.95 * plan.per_second,
            tuple(one.throughput.reports / one.throughput.seconds for one in rounds),
        ),
        Ratio(
            f"command, p99, {most:,} replicas",
            "ms to its acknowledgement",
            "at most",
            COMMAND_P99_MS,
            of_most(lambda load: percentile(load.command_seconds, 99) * 1e3),
        ),
        Ratio(
            f"{most:,} replicas, CPU",
            "cores of the weaver",
            "at most",
            1.0,
            of_most(lambda load: load.cpu_seconds / load.seconds),
        ),
        *(
            Ratio(
                "CPU of a report",
                f"{most:,} / {fewer:,} replicas",
                "at most",
                FLAT,
                tuple(cost(one, most) / cost(one, fewer) for one in rounds),
            )
            for fewer in sorted(plan.replicas)[:-1]
        ),
        Ratio(
            f"reports stored, {most:,} replicas",
            f"of those due in {plan.window:g} s, least",
            "at least",
            STORED,
            (min(steady.stored),),
        ),
        Ratio(
            "command to applied, p50",
            "ms, with steps of 1 ms",
            "at most",
            20.0,
            tuple(percentile(one.applied, 50) * 1e3 for one in applied),
        ),
        budgeted(
            "dead process to failed",
            "dead to failed, median",
            "s to its event",
            [percentile(one, 50) for one in failed],
        ),
    )
    figures = [
        Figure("command to applied, p99", "ms", tuple(percentile(one.applied, 99) * 1e3 for one in applied)),
        Figure("command to acknowledged, p50", "ms", tuple(percentile(one.known, 50) * 1e3 for one in applied)),
        Figure("dead to failed, slowest", "s", tuple(max(one) for one in failed)),
        Figure(
            f"report, {plan.busy_replicas} replicas, {plan.together} together",
            "µs of CPU",
            tuple(one.throughput.microseconds for one in rounds),
        ),
    ]
    with_watcher = f"{most:,} replicas, one watcher"
    figures += [
        Figure(f"reports stored, {with_watcher}", "of those due", steady.stored),
        Figure(f"weaver, {with_watcher}", "cores", steady.cores),
        Figure(f"small request, p50, {with_watcher}", "ms", (percentile(steady.waits, 50) * 1e3,)),
        Figure(f"small request, slowest, {with_watcher}", "ms", (max(steady.waits) * 1e3,)),
    ]
    for what, seconds in commits.items():
        figures.append(Figure(f"commit of a {what}, p50", "ms", (percentile(seconds, 50) * 1e3,)))
    for count in plan.replicas:
        loads = [one.by_replicas[count] for one in rounds]
        name = f"{count:,} replicas"
        figures += [
            Figure(f"report, {name}", "µs of CPU", tuple(one.microseconds for one in loads)),
            Figure(
                f"command, p50, {name}",
                "ms",
                tuple(percentile(one.command_seconds, 50) * 1e3 for one in loads),
            ),
            Figure(f"command to all {name}", "ms", tuple(one.broadcast_seconds * 1e3 for one in loads)),
        ]
    notes = (
        "reports have a step and 2 metrics; the CPU of a report has the heartbeats and devices that come meanwhile",
        "simulated threadlets, in a process of their own, took "
        + ", ".join(f"{each:.2f}" for each in of_most(lambda load: load.crowd_cpu_seconds / load.seconds))
        + f" cores for {most:,} replicas",
    )
    return BudgetReport("weaver", command, describe_machine(), asdict(plan), budgets, tuple(figures), notes)


def commit_seconds(count: int = 200) -> dict[str, list[float]]:
    """Return the seconds of commits of a command, which wait for the disk, and of a report, which do not."""
    found: dict[str, list[float]] = {"command": [], "report": []}
    with TemporaryDirectory(prefix="loom-benchmark-") as folder, closing(Store(Path(folder) / "store")) as store:
        for number in range(count):
            for what, seconds in found.items():
                if what == "command":
                    store.put(
                        "commands", f"{number:032}", {"id": f"{number:032}", "params": {"learning_rate": 0.1}}
                    )
                else:
                    rows = [[number, 0.0, number, None, None, {"loss": 0.5}, None]]
                    store.log(journal_head("train_0", "instance") + pack_value(rows))
                start = time.perf_counter()
                store.write(store.begin())
                seconds.append(time.perf_counter() - start)
    return found


def _throughput(plan: WeaverPlan) -> Load:
    with _crowd(plan.busy_replicas) as (weaver, crowd):
        return _loaded(weaver, crowd, plan.seconds, plan.per_second, plan.together)


def _replicas(plan: WeaverPlan, count: int) -> Load:
    with _crowd(count) as (weaver, crowd), closing(weaver.gateway()) as gateway:
        load = _loaded(weaver, crowd, plan.seconds, count, 1)
        replicas = random.Random(0)

        def give() -> None:
            id = f"train_{replicas.randrange(count)}"
            assert _command(gateway, id)[id]["ok"]

        with _Repeated(give, ASK_EVERY) as commands:
            _loaded(weaver, crowd, plan.seconds, count, 1)
        start = time.monotonic()
        outcomes = _command(gateway, "*")
        assert len(outcomes) == count
        assert all(one["ok"] for one in outcomes.values())
        took = time.monotonic() - start
    return replace(load, command_seconds=tuple(commands.seconds), broadcast_seconds=took)


def measure_steady(plan: WeaverPlan) -> Steady:
    """Measure the weaver while the most replicas report, with one watcher."""
    count = max(plan.replicas)
    stored, cores = [], []
    with _crowd(count) as (weaver, crowd), _watching(weaver.gateway()), closing(weaver.gateway()) as gateway:
        crowd.ask("keep_reporting")
        time.sleep(min(2.0, plan.window))  # until the first reports are stored
        with _Repeated(lambda: gateway.ask("policies"), ASK_EVERY) as requests:
            for _ in range(round(plan.steady / plan.window)):
                before, cpu, start = crowd.ask("stored"), cpu_seconds(weaver.pid), time.monotonic()
                time.sleep(plan.window)
                seconds = time.monotonic() - start
                stored.append((crowd.ask("stored") - before) / seconds / count)
                cores.append((cpu_seconds(weaver.pid) - cpu) / seconds)
    return Steady(tuple(stored), tuple(cores), tuple(requests.seconds))


@contextmanager
def _watching(gateway: RawGateway) -> Iterator[None]:
    """Watch, and throw away what comes."""
    gateway.watch()

    def read() -> None:
        with contextlib.suppress(OSError):
            while gateway.socket.recv(1 << 18):
                pass

    thread = threading.Thread(target=read, name="watcher", daemon=True)
    thread.start()
    try:
        yield
    finally:
        gateway.socket.shutdown(socket.SHUT_RDWR)
        thread.join()
        gateway.close()


@contextmanager
def _crowd(count: int) -> Iterator[tuple[WeaverProcess, CallerProcess]]:
    with running_weaver() as weaver:
        with CallerProcess("threadlets", "tests.benchmarks.crowd", (weaver.address,)) as crowd:
            crowd.await_ready()
            crowd.ask("join", count=count)
            yield weaver, crowd


def _loaded(weaver: WeaverProcess, crowd: CallerProcess, seconds: float, per_second: float, together: int) -> Load:
    cpu = cpu_seconds(weaver.pid)
    sent = crowd.ask("report", seconds=seconds, per_second=per_second, together=together)
    cpu = cpu_seconds(weaver.pid) - cpu
    return Load(sent["reports"], sent["until_stored"], cpu, sent["cpu_seconds"])


class _Repeated(threading.Thread):
    """Does something again and again, at least twice, and measures how long it takes; a context manager."""

    def __init__(self, do: Callable[[], object], pause: float) -> None:
        super().__init__(daemon=True)
        self.seconds: list[float] = []
        self._do = do
        self._pause = pause
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(self._pause) or len(self.seconds) < 2:
            start = time.monotonic()
            self._do()
            self.seconds.append(time.monotonic() - start)

    def __enter__(self) -> _Repeated:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


def _command(gateway: RawGateway, target: str) -> dict[str, Any]:
    given = gateway.ask("command", kind="update_config", params={"learning_rate": 0.1}, target=target)
    outcomes: dict[str, Any] = gateway.ask("command_state", id=given["id"], timeout=30)["outcomes"]
    return outcomes
