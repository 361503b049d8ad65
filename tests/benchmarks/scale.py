"""What sessions, replicas and laptops cost each process of a large cluster: ``python -m tests.benchmarks scale``.

A weaver, session hosts and gateways are real processes, each started as its command starts it. First some real
sessions are measured, whose drivers are most of a session's cost. Then stand-ins take the place of many drivers
(`tests.benchmarks.stand_in_drivers`), threadlets are simulated (`tests.benchmarks.crowd`), and so are laptops
(`tests.benchmarks.laptops`). Each kind of load comes on top of the one before, so that differences are its cost.
"""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from loom import Actor, endpoint
from loom.token_file import ADMIN
from loom.weaver.keys import Keys, secret_in
from loom_proxy.local import LocalCluster
from tests.benchmarks.budgets import BudgetReport, Figure
from tests.benchmarks.caller_process import CallerError, CallerProcess
from tests.benchmarks.machine import cpu_seconds, describe_machine
from tests.benchmarks.report import percentile
from tests.support.gateways import TOKEN
from tests.support.paths import ROOT
from tests.support.session_hosts import HostedCluster

__all__ = ["ScalePlan", "measure"]

BOUND = 60.0
"""Seconds; far over what anything takes, so that only a hang fails."""

LARGE = 100_000
"""Replicas of the cluster for which figures are computed."""

UNLIMITED = ("--connection-rate", "0", "--max-sessions", "0")
"""Options of gateways, without the limits: all laptops have one address and one user here."""

KINDS = ("weaver", "host", "gateway")


@dataclass(frozen=True)
class ScalePlan:
    """How much is measured."""

    sessions: int = 1000
    replicas: int = 10_000
    """Of which each reports once a second."""
    laptops: int = 200
    gateways: int = 16
    hosts: int = 4
    real: int = 8
    """Sessions with real drivers."""
    calls: int = 200
    """Of each of these."""
    stay: float = 5.0
    """Seconds after which a laptop leaves, and comes back by another gateway."""
    per_second: float = 2.0
    """Calls of a laptop that is there."""
    windows: int = 3
    window: float = 6.0
    """Seconds of each figure."""


class Count(Actor):
    @endpoint
    def one(self) -> int:
        return 1


@dataclass(frozen=True)
class Load:
    """What the processes of each kind used under one load, together."""

    cores: Mapping[str, tuple[float, ...]]
    """Cores in each window."""
    memory: Mapping[str, float]
    """Bytes in proportion: a page that n processes share counts as 1/n of it."""
    per_second: Mapping[str, tuple[float, ...]]
    """What the simulated clients counted a second, in each window."""


class Cluster:
    """The processes, by kind."""

    def __init__(self, plan: ScalePlan, hosted: HostedCluster) -> None:
        self._plan = plan
        self.hosted = hosted

    def _pids(self) -> dict[str, list[int]]:
        members = {"weaver": [self.hosted.weaver], "host": self.hosted.hosts, "gateway": self.hosted.gateways}
        return {kind: [one.process.pid for one in some] for kind, some in members.items()}

    def used(self) -> dict[str, float]:
        """Return the CPU seconds of each kind so far."""
        return {kind: sum(map(cpu_seconds, pids)) for kind, pids in self._pids().items()}

    def load(self, count: Callable[[], Mapping[str, float]] = dict) -> Load:
        """Measure for the plan's windows.

        Args:
            count: returns what has been counted so far.
        """
        cores: dict[str, list[float]] = {kind: [] for kind in KINDS}
        counted: dict[str, list[float]] = {}
        for _ in range(self._plan.windows):
            before, seen, start = self.used(), count(), time.monotonic()
            time.sleep(self._plan.window)
            now, later, seconds = self.used(), count(), time.monotonic() - start
            for kind in KINDS:
                cores[kind].append((now[kind] - before[kind]) / seconds)
            for name in seen:
                counted.setdefault(name, []).append((later[name] - seen[name]) / seconds)
        memory = {kind: sum(map(_memory, pids)) for kind, pids in self._pids().items()}
        return Load(
            {kind: tuple(each) for kind, each in cores.items()},
            memory,
            {name: tuple(each) for name, each in counted.items()},
        )


def _memory(pid: int) -> float:
    """Return the bytes of a process, with its part of those that it shares (Linux)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(float(line.split()[1]) for line in lines if line.startswith("Pss:"))


@dataclass(frozen=True)
class Real:
    """Sessions with real drivers; each figure is of one of them."""

    opened: tuple[float, ...]
    """Seconds until the session was open."""
    memory: tuple[float, ...]
    """Bytes of the driver, after calls."""
    idle: tuple[float, ...]
    """Cores of the driver while nothing happens."""
    call: Mapping[str, float]
    """CPU seconds of a call, for each kind of process."""


def measure(plan: ScalePlan, command: str, say: Callable[[str], object] = lambda text: None) -> BudgetReport:
    """Measure each load on top of the one before.

    Raises:
        CallerError: the simulated clients failed.
    """
    with ExitStack() as running:
        say("starting a weaver, session hosts and gateways")
        workers = running.enter_context(LocalCluster(1)).workers
        hosted = running.enter_context(HostedCluster(workers, plan.hosts, plan.gateways, gateway_options=UNLIMITED))
        cluster = Cluster(plan, hosted)
        say(f"{plan.real} real sessions")
        real = _real(plan, cluster)
        say("no session")
        loads = {"nothing": cluster.load()}
        say(f"{plan.sessions:,} sessions of stand-ins")
        listed = running.enter_context(_stand_ins(plan, hosted))
        loads["sessions"] = cluster.load()
        say(f"{plan.replicas:,} replicas")
        crowd = running.enter_context(
            CallerProcess("threadlets", "tests.benchmarks.crowd", (_threadlet_address(hosted),))
        )
        crowd.await_ready()
        crowd.ask("join", count=plan.replicas)
        crowd.ask("keep_reporting")
        time.sleep(2.0)  # until the first reports are stored
        weaver = psutil.Process(hosted.weaver.process.pid)
        loads["replicas"] = cluster.load(
            lambda: {
                "stored": crowd.ask("stored"),
                "sent": crowd.ask("sent"),
                "disk": weaver.io_counters().write_bytes,
            }
        )
        say(f"{plan.laptops} laptops that come and go")
        urls = [f"ws://{gateway.address}" for gateway in hosted.gateways]
        laptops = running.enter_context(
            CallerProcess("laptops", "tests.benchmarks.laptops", (TOKEN, str(plan.sessions), *urls))
        )
        laptops.await_ready()
        laptops.ask("begin", count=plan.laptops, stay=plan.stay, per_second=plan.per_second)
        time.sleep(plan.stay)  # until all have come
        waits: list[float] = []

        def seen() -> dict[str, float]:
            told = laptops.ask("seen")
            waits.extend(told.pop("waits"))
            return dict(told, stored=crowd.ask("stored"))

        seen()
        waits.clear()
        loads["laptops"] = cluster.load(seen)
        if any(loads["laptops"].per_second["failures"]):
            raise CallerError("laptops failed to connect, or a call of theirs did")
    return _report(plan, command, real, loads, listed, waits)


def _threadlet_address(hosted: HostedCluster) -> str:
    key = Keys(secret_in(hosted.folder / "weaver-secret")).of(ADMIN)
    return f"tcp://{hosted.weaver.address}/{key}"


def _real(plan: ScalePlan, cluster: Cluster) -> Real:
    hosted, opened = cluster.hosted, []
    with ExitStack() as jobs:
        counters = []
        for _ in range(plan.real):
            start = time.monotonic()
            job = jobs.enter_context(hosted.connect(timeout=BOUND))
            opened.append(time.monotonic() - start)
            counters.append(job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("count", Count))
        for counter in counters:
            counter.one.call_one().get(BOUND)
        listed = [one["pid"] for one in hosted.rest("/api/v1/sessions")["sessions"]]
        drivers = [driver.pid for host in hosted.hosts for driver in host.drivers() if driver.pid in listed]
        before = {pid: cpu_seconds(pid) for pid in drivers}
        time.sleep(plan.window)
        idle = tuple((cpu_seconds(pid) - before[pid]) / plan.window for pid in drivers)
        used, of_drivers, start = cluster.used(), sum(map(cpu_seconds, drivers)), time.monotonic()
        for _ in range(plan.calls):
            for future in [counter.one.call_one() for counter in counters]:
                future.get(BOUND)
        seconds, calls = time.monotonic() - start, plan.calls * plan.real
        call = {"driver": (sum(map(cpu_seconds, drivers)) - of_drivers - sum(idle) * seconds) / calls}
        call |= {kind: (now - used[kind]) / calls for kind, now in cluster.used().items()}
        memory = tuple(map(_memory, drivers))
    return Real(tuple(opened), memory, idle, call)


@contextmanager
def _stand_ins(plan: ScalePlan, hosted: HostedCluster) -> Iterator[float]:
    """Start the session hosts again with many sessions; yield the seconds in which a gateway lists all."""
    each = -(-plan.sessions // plan.hosts)
    stand_ins = []
    try:
        for number, host in enumerate(hosted.hosts):
            host.end()
            for driver in psutil.process_iter(["cmdline"]):  # the warm ones for next sessions
                if any(str(hosted.folder / host.name) in part for part in driver.info["cmdline"] or []):
                    driver.kill()
            count = max(0, min(each, plan.sessions - number * each))
            folder = str(hosted.folder / host.name)
            command = [sys.executable, "-m", "tests.benchmarks.stand_in_drivers", folder, str(number * each)]
            one = subprocess.Popen(
                [*command, str(count)], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            stand_ins.append(one)
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
            host.start()
        yield _await_listed(plan, hosted)
    finally:
        for one in stand_ins:
            one.kill()
            one.communicate()


def _await_listed(plan: ScalePlan, hosted: HostedCluster) -> float:
    until = time.monotonic() + BOUND
    while time.monotonic() < until:
        complete = True
        for gateway in hosted.gateways:
            start = time.monotonic()
            complete &= len(hosted.rest("/api/v1/sessions", gateway)["sessions"]) == plan.sessions
            seconds = time.monotonic() - start
        if complete:
            return seconds
        time.sleep(0.2)
    raise CallerError(f"the gateways do not know {plan.sessions} sessions")


def _difference(more: Load, less: Load, kind: str, each: float, unit: float = 1e6) -> tuple[float, ...]:
    """Return what a load costs a kind of process by one of ``each``, by window."""
    base = sorted(less.cores[kind])[len(less.cores[kind]) // 2]
    return tuple((cores - base) / each * unit for cores in more.cores[kind])


def _grown(more: Load, less: Load, kind: str, each: float) -> tuple[float, ...]:
    """Return the KiB by which a kind of process has grown, by one of ``each``."""
    return ((more.memory[kind] - less.memory[kind]) / each / 1024,)


def _report(
    plan: ScalePlan,
    command: str,
    real: Real,
    loads: Mapping[str, Load],
    listed: float,
    waits: Sequence[float],
) -> BudgetReport:
    nothing, sessions, replicas, laptops = (loads[name] for name in ("nothing", "sessions", "replicas", "laptops"))
    told = plan.sessions * plan.gateways  # by a host to a gateway
    mebibytes, seconds = 1 << 20, laptops.per_second
    figures = [
        Figure("real session, opened", "s", real.opened),
        Figure("real session, its driver", "MiB", tuple(one / mebibytes for one in real.memory)),
        Figure("real session, its driver, idle", "µs of CPU a second", tuple(one * 1e6 for one in real.idle)),
        *(
            Figure(f"call in a real session, {kind}", "µs of CPU", (one * 1e6,))
            for kind, one in real.call.items()
            if kind != "weaver"
        ),
        *(
            Figure(f"{kind}, without a session", "MiB each", (nothing.memory[kind] / count / mebibytes,))
            for kind, count in (("weaver", 1), ("host", plan.hosts), ("gateway", plan.gateways))
        ),
        Figure("session, its host", "KiB", _grown(sessions, nothing, "host", plan.sessions)),
        Figure(
            "session, its host, for each gateway",
            "µs of CPU a second",
            _difference(sessions, nothing, "host", told),
        ),
        Figure("session, each gateway", "KiB", _grown(sessions, nothing, "gateway", told)),
        Figure("session, each gateway", "µs of CPU a second", _difference(sessions, nothing, "gateway", told)),
        Figure(f"list of {plan.sessions:,} sessions", "s", (listed,)),
        Figure("replica, the weaver", "KiB", _grown(replicas, sessions, "weaver", plan.replicas)),
        Figure(
            "replica at 1 Hz, the weaver",
            "µs of CPU a second",
            _difference(replicas, sessions, "weaver", plan.replicas),
        ),
        Figure(
            "replica at 1 Hz, to the weaver",
            "bytes a second",
            tuple(one / plan.replicas for one in replicas.per_second["sent"]),
        ),
        Figure(
            "replica at 1 Hz, to its disk",
            "bytes a second",
            tuple(one / plan.replicas for one in replicas.per_second["disk"]),
        ),
        *(
            Figure(f"reports stored, {load}", "of those due", tuple(one / plan.replicas for one in found["stored"]))
            for load, found in (("replicas", replicas.per_second), ("replicas and laptops", seconds))
        ),
        Figure("laptops, connections", "a second", seconds["connections"]),
        Figure("laptops, calls", "a second", seconds["calls"]),
        Figure(
            "laptop comes and stays, with its calls, gateway",
            "ms of CPU",
            _by_visit(laptops, replicas, "gateway"),
        ),
        Figure("laptop comes and stays, with its calls, host", "ms of CPU", _by_visit(laptops, replicas, "host")),
        Figure("laptop, until it is welcome, p50", "ms", (percentile(waits, 50) * 1e3,)),
        Figure("laptop, until it is welcome, p99", "ms", (percentile(waits, 99) * 1e3,)),
        *_large(plan, real, loads),
    ]
    notes = (
        f"{plan.sessions:,} sessions of stand-ins for drivers on {plan.hosts} session hosts, "
        f"{plan.gateways} gateways, {plan.replicas:,} simulated replicas of one user, "
        f"{plan.laptops} simulated laptops",
        f"computed for {LARGE:,} replicas: as many sessions, laptops and gateways by replica as here",
        "memory of a process is in proportion: a page that n processes share counts as 1/n",
    )
    return BudgetReport("scale", command, describe_machine(), asdict(plan), (), tuple(figures), notes)


def _by_visit(more: Load, less: Load, kind: str) -> tuple[float, ...]:
    """Return the milliseconds of CPU of one visit of a laptop, by window."""
    base = sorted(less.cores[kind])[len(less.cores[kind]) // 2]
    visits = more.per_second["connections"]
    return tuple((cores - base) / each * 1e3 for cores, each in zip(more.cores[kind], visits, strict=True))


def _large(plan: ScalePlan, real: Real, loads: Mapping[str, Load]) -> list[Figure]:
    """Compute what the large cluster needs, from medians."""
    nothing, sessions, replicas, laptops = (loads[name] for name in ("nothing", "sessions", "replicas", "laptops"))
    times = LARGE / plan.replicas

    def middle(values: Sequence[float]) -> float:
        return sorted(values)[len(values) // 2]

    def median(load: Load, kind: str) -> float:
        return middle(load.cores[kind])

    telling = median(sessions, "host") - median(nothing, "host")
    learning = median(sessions, "gateway") - median(nothing, "gateway")
    drivers = plan.sessions * times * middle(real.memory)
    computed: list[tuple[str, str, float]] = [
        ("weaver", "cores", (median(replicas, "weaver") - median(sessions, "weaver")) * times),
        ("weaver", "GiB", (replicas.memory["weaver"] - sessions.memory["weaver"]) * times / 2**30),
        ("to the weaver", "MB a second", middle(replicas.per_second["sent"]) * times / 1e6),
        ("to its disk", "MB a second", middle(replicas.per_second["disk"]) * times / 1e6),
        ("drivers", "GiB", drivers / 2**30),
        ("drivers, idle", "cores", plan.sessions * times * middle(real.idle)),
        # Each host tells each gateway of each session: sessions and gateways are both so many times more.
        ("hosts, which tell gateways of sessions", "cores", telling * times**2),
        ("gateways, which are told", "cores", learning * times**2),
        ("hosts, calls of laptops", "cores", (median(laptops, "host") - median(replicas, "host")) * times),
        ("gateways, calls of laptops", "cores", (median(laptops, "gateway") - median(replicas, "gateway")) * times),
        ("gateways, without sessions", "GiB", nothing.memory["gateway"] * times / 2**30),
    ]
    return [Figure(f"{LARGE:,} replicas: {what}", unit, (value,)) for what, unit, value in computed]
