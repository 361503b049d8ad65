"""Sessions that come and go for long: memory, descriptors, processes and files return to where they began."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

import loom
from loom_gateway.sessions.manager import HELD
from loom_proxy.local import LocalCluster
from tests.integration.calls.test_failures import rest
from tests.support.actors import Counter

BOUND = 60.0
"""Seconds that an operation may take while eight sessions start at once on two cores."""

LONG = (600, 200)
SHORT = (60, 20)
"""Seconds, and sessions that are opened meanwhile."""

AT_ONCE = 8

ROUND = 6.0
"""Seconds between two rounds of work of a session."""

DESCRIPTORS = 16
"""By which a process may have more: connections that are about to be closed, and sockets to the spare driver."""

MEMORY = 24 << 20
"""Bytes by which a process may grow in a short test, besides what its sessions cost a worker with Monarch alone.

The allocators settle within some 20 MiB; the sessions' results, 4 MiB each, would be far over it if they were kept.
"""

SETTLED = 8 << 20
"""Bytes by which a process may grow in the second half of a long test, besides that cost.

By then the allocators have settled, and what the gateway keeps of ended sessions is at its bound: the last hundred.
A worker grows as long as there are sessions, by what Monarch keeps of each.
"""

PARTS = 8
"""Parts of a long test, each with the median of the processes' memory."""


class Held(NamedTuple):
    """What a gateway or a worker has, besides itself."""

    memory: int
    """Bytes, resident."""
    descriptors: int
    processes: int
    """Its descendants."""


def held(pid: int) -> Held:
    process = psutil.Process(pid)
    return Held(process.memory_info().rss, process.num_fds(), len(process.children(recursive=True)))


def folder(cluster: LocalCluster) -> Path:
    """Of the gateway, which has its drivers' files."""
    drivers = psutil.Process(cluster.pids[0]).children()
    folders = {Path(part).parent for driver in drivers for part in driver.cmdline() if part.endswith(".sock")}
    assert len(folders) == 1
    return folders.pop()


def sockets(cluster: LocalCluster) -> int:
    """Socket files of the gateway's drivers."""
    return len(list(folder(cluster).glob("*.sock")))


def kept_ports(cluster: LocalCluster) -> int:
    """Ports of drivers, of those that ended too: the gateway keeps the last ones bound, each with a descriptor."""
    return min(len((folder(cluster) / "ports").read_text().split()), HELD)


NATIVE_RUNS = 3

NATIVE_SHARE = 4
"""A native run has a fourth of the sessions, for time; what it costs a worker is divided by the rounds."""


def native_growth(sessions: int, rounds: int) -> float:
    """Bytes by which a worker grows with each of the rounds of sessions of Monarch's own, without Loom: the most.

    Runs that do the same, each with workers of its own and nothing beside it, differ by half and more: when a
    worker's allocator takes more from the system is chance. Growth that any run of Monarch alone has, too, is not
    Loom's. Of a run the mean of its two workers counts.
    """
    share = max(sessions // NATIVE_SHARE, 2 * AT_ONCE)
    command = [sys.executable, "-m", "tests.support.native_sessions", str(share), str(rounds * share // sessions)]
    runs = []
    for _ in range(NATIVE_RUNS):
        ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=20 * BOUND)
        runs.append(statistics.mean(max(int(number), 0) for number in re.findall(r"-?\d+", ended.stdout)))
    print("natively", ", ".join(f"{run / 1024:.0f}" for run in runs), "KiB a round")
    return max(runs)


def settle(cluster: LocalCluster, files: int | None = None) -> None:
    """Wait until all sessions have ended, the gateway has its weaver and one warm driver, and workers nothing.

    Args:
        files: how many socket files there are then; None: any number.
    """
    until = time.monotonic() + BOUND
    while left := _left(cluster, files):
        assert time.monotonic() < until, f"after {BOUND:g} s there are {left}"
        time.sleep(0.1)


def _left(cluster: LocalCluster, files: int | None) -> dict[str, Any]:
    gateway, *workers = (psutil.Process(pid) for pid in cluster.pids)
    status = rest(cluster, "/api/v1/status")
    children = [child for worker in workers for child in worker.children()]
    if len(gateway.children()) != 2:
        children += gateway.children()
    found = {"sessions": status["sessions"], "no spare": not status["spare_ready"], "processes": children}
    if not any(found.values()) and files is not None and sockets(cluster) != files:
        found["sockets"] = sockets(cluster)
    return {what: there for what, there in found.items() if there}


def session(cluster: LocalCluster, seconds: float) -> int:
    """Open a session, work in it every so often, close it; how many rounds of work there were."""
    never = threading.Event()
    until = time.monotonic() + seconds
    rounds = 0
    data = os.urandom(4 << 20)
    with loom.connect(cluster.url, cluster.token, timeout=BOUND) as job:
        while True:
            procs = job.hosts.spawn_procs(per_host={"gpus": 1})
            counters = procs.spawn("counters", Counter, rounds)
            assert list(counters.add.call(1).get(timeout=BOUND).values()) == [rounds + 1] * 2
            assert counters.slice(hosts=1).echo.call_one(data).get(timeout=BOUND) == data
            procs.stop().get(timeout=BOUND)
            rounds += 1
            left = until - time.monotonic()
            if left <= 0:
                return rounds
            never.wait(min(left, ROUND))


def medians(course: Sequence[int], parts: int) -> list[float]:
    """Return the median of each part of a course."""
    size = len(course) / parts
    return [statistics.median(course[round(n * size) : round((n + 1) * size)]) for n in range(parts)]


@pytest.fixture
def gateway_of_its_own() -> Iterator[LocalCluster]:
    with LocalCluster(hosts=2) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("seconds", "sessions"), [SHORT, LONG], ids=["short", "long"])
def test_sessions_that_come_and_go_leave_nothing(
    gateway_of_its_own: LocalCluster, seconds: float, sessions: int
) -> None:
    cluster = gateway_of_its_own
    each = seconds * AT_ONCE / sessions
    samples: list[tuple[int, ...]] = []  # the memory of each process, whenever a session has ended

    def work(_: int) -> int:
        rounds = session(cluster, each)
        samples.append(tuple(held(pid).memory for pid in cluster.pids))
        return rounds

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda _: session(cluster, 0), range(2 * AT_ONCE)))  # what is made once is made now
        settle(cluster)
        files, ports, before = sockets(cluster), kept_ports(cluster), [held(pid) for pid in cluster.pids]
        rounds = sum(pool.map(work, range(sessions)))
    settle(cluster, files)
    ports = kept_ports(cluster) - ports
    after = [held(pid) for pid in cluster.pids]
    native = native_growth(sessions, rounds)
    print(f"{sessions} sessions, {rounds} rounds of work")
    names = ["gateway", "worker 0", "worker 1"]
    more = zip([0, native, native], [ports, 0, 0], strict=True)
    courses = [medians(course, PARTS) for course in zip(*samples, strict=True)]
    for name, was, is_now, (cost, kept), course in zip(names, before, after, more, courses, strict=True):
        grown, allowed = is_now.memory - was.memory, MEMORY + rounds * cost
        if (seconds, sessions) == LONG:
            grown, allowed = round(course[-1] - course[PARTS // 2 - 1]), SETTLED + rounds * cost / 2
        print(
            f"{name}: {was.memory >> 20} → {is_now.memory >> 20} MiB, in parts "
            f"{', '.join(f'{part / (1 << 20):.1f}' for part in course)}; {grown / (1 << 20):.1f} MiB of at most "
            f"{allowed / (1 << 20):.1f}; {was[1:]} → {is_now[1:]}, of which {kept} more ports"
        )
        assert is_now.processes == was.processes
        assert is_now.descriptors <= was.descriptors + kept + DESCRIPTORS
        assert grown <= allowed


FLAT = 1.10
"""By which a process of a session that goes on for long may grow once it has warmed up."""

SAMPLES = 20

MESHES = 20
"""Actor meshes of a round."""

NATIVE_ROUNDS = 60


def native_round_growth(hosts: Any, rounds: int, pids: dict[str, int], data: bytes) -> dict[str, float]:
    """Return the bytes by which each process grows with a round of Monarch alone.

    ``data``: what a call on a slice carries there and back. Of Monarch's growth, such calls are a third.

    torchmonarch 0.7 frees neither an actor mesh in its root client nor a proc mesh in a worker whole. Run in the
    driver.
    """
    from loom_gateway.driver.monarch.mesh_table import release

    processes = {name: psutil.Process(pid) for name, pid in pids.items()}
    sizes = []
    for _ in range(rounds):
        procs = hosts.spawn_procs(per_host={"gpus": 1})
        for number in range(MESHES):
            actors = procs.spawn(f"native {number}", Counter)
            actors.add.call(1).get()
            part = actors.slice(hosts=1)
            part.echo.call_one(data).get()
            actors.stop().get()
            release([actors, part])
        procs.stop().get()
        release([procs])
        sizes.append({name: process.memory_info().rss for name, process in processes.items()})
    skipped = rounds // 3  # in which the allocators settle
    grown = {name: max(0.0, (sizes[-1][name] - sizes[skipped][name]) / (rounds - 1 - skipped)) for name in pids}
    workers = [size for name, size in grown.items() if name.startswith("worker")]
    # The workers do the same, and allocators grow in steps: the mean says more than either.
    return {name: statistics.mean(workers) if name.startswith("worker") else size for name, size in grown.items()}


def resident(pids: dict[str, int]) -> dict[str, int]:
    return {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}


@pytest.mark.guarantees(
    "nothing lost",
    "Laptop, gateway and driver of a session that remakes its meshes for 30 minutes stay as large as they "
    "are, within 10 % and what Monarch alone keeps",
)
@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seconds", [300, 1800], ids=["5 minutes", "30 minutes"])
def test_a_session_that_remakes_its_meshes_stays_as_large_as_it_is(
    gateway_of_its_own: LocalCluster, seconds: float
) -> None:
    """Of the second half, the end is compared with the beginning, by medians: allocators settle in the first.

    The driver and the workers may grow by what the same rounds cost Monarch alone, too.
    """
    cluster = gateway_of_its_own
    data = os.urandom(1 << 20)
    with loom.connect(cluster.url, cluster.token, timeout=BOUND) as job:
        monarchs = {"driver": job.run(os.getpid)}
        monarchs |= {f"worker {number}": pid for number, pid in enumerate(cluster.pids[1:])}
        native = job.run(native_round_growth, job.hosts, NATIVE_ROUNDS, monarchs, data)
        pids = {"laptop": os.getpid(), "gateway": cluster.pids[0], **monarchs}
        samples: list[dict[str, int]] = []
        began = time.monotonic()
        rounds = 0
        while (gone := time.monotonic() - began) < seconds:
            procs = job.hosts.spawn_procs(per_host={"gpus": 1}, name=f"procs {rounds}")
            for number in range(MESHES):
                actors = procs.spawn(f"counters {rounds} {number}", Counter, number)
                assert list(actors.add.call(1).get(timeout=BOUND).values()) == [number + 1] * 2
                assert actors.slice(hosts=1).echo.call_one(data).get(timeout=BOUND) == data
                actors.stop().get(timeout=BOUND)
            procs.stop().get(timeout=BOUND)
            job.run(len, data)
            rounds += 1
            if gone > seconds / 2:
                samples.append(resident(pids))
    assert len(samples) >= 2 * SAMPLES, f"only {rounds} rounds in {seconds:g} s"
    apart = len(samples) - SAMPLES  # rounds between the medians
    print(f"{rounds} rounds; natively", {name: f"{grown / 1024:.0f} KiB a round" for name, grown in native.items()})
    for name in pids:
        first, last = (
            statistics.median(sample[name] for sample in part) for part in (samples[:SAMPLES], samples[-SAMPLES:])
        )
        print(f"{name}: {first / 2**20:.0f} → {last / 2**20:.0f} MiB")
        assert last <= first * FLAT + apart * native.get(name, 0.0), name
