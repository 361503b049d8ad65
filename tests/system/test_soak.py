"""Sessions that come and go for long: memory, descriptors, processes and files return to where they began."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
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
from tests.support.heap import heap, heap_environment
from tests.support.native_sessions import NativeCluster

BOUND = 60.0
"""Seconds that an operation may take while eight sessions start at once on two cores."""

LONG = (600, 192, 8)
SHORT = (60, 16, 2)
"""Seconds, sessions that are opened meanwhile, and parts: Monarch alone does the same after each part."""

AT_ONCE = 8

ROUND = 6.0
"""Seconds between two rounds of work of a session."""

DESCRIPTORS = 16
"""By which a process may have more: connections that are about to be closed, and sockets to the spare driver."""

SETTLED = 8 << 20
"""Bytes by which the gateway may grow in the second half.

By then the allocators have settled, and what the gateway keeps of ended sessions is at its bound: the last hundred.
"""

BUFFERED = 5 << 20
"""Bytes that a worker may have in the buffers of its connections: a result of 4 MiB and some."""

OF_NATIVE = 1.25
"""By which a worker may grow more than with Monarch alone, whose growth depends on the number of messages."""


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


def session(cluster: LocalCluster, seconds: float) -> list[float]:
    """Open a session, work in it every so often, close it. Return the seconds that each round of work took."""
    never = threading.Event()
    until = time.monotonic() + seconds
    rounds: list[float] = []
    data = os.urandom(4 << 20)
    with loom.connect(cluster.url, cluster.token, timeout=BOUND) as job:
        while True:
            began = time.monotonic()
            procs = job.hosts.spawn_procs(per_host={"gpus": 1})
            counters = procs.spawn("counters", Counter, len(rounds))
            assert list(counters.add.call(1).get(timeout=BOUND).values()) == [len(rounds) + 1] * 2
            assert counters.slice(hosts=1).echo.call_one(data).get(timeout=BOUND) == data
            rounds.append(time.monotonic() - began)
            procs.stop().get(timeout=BOUND)
            left = until - time.monotonic()
            if left <= 0:
                return rounds
            never.wait(min(left, ROUND))


@pytest.fixture
def gateway_of_its_own() -> Iterator[LocalCluster]:
    with LocalCluster(hosts=2) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("seconds", "sessions", "parts"), [SHORT, LONG], ids=["short", "long"])
def test_sessions_that_come_and_go_leave_nothing(seconds: float, sessions: int, parts: int) -> None:
    """A worker may grow as Monarch alone does with the same sessions, which take turns with Loom's.

    torchmonarch 0.7 keeps a worker's connections to the clients and processes that it has had. Each has two queues,
    of 17 KiB and 17 KiB more after each 32 messages, up to some of them. Questions for the state of processes, four
    a second, are such messages, so the meshes of Monarch alone live as long as Loom's.
    """
    each, share = seconds * AT_ONCE / sessions, sessions // parts
    samples: list[tuple[int, ...]] = []  # after each part: the gateway's memory, and the heaps of all workers
    rounds: list[int] = []
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        sockets_of_heaps = Path(name)
        environment = heap_environment(sockets_of_heaps)
        native = stack.enter_context(NativeCluster(environment))
        cluster = stack.enter_context(LocalCluster(hosts=2, env=environment))
        pool = stack.enter_context(ThreadPoolExecutor(AT_ONCE))
        workers = [*cluster.pids[1:], *native.pids]
        for _ in range(2):  # what is made once is made now
            list(pool.map(lambda _: session(cluster, 0), range(AT_ONCE)))
            list(pool.map(lambda _: native.session([0.0], ROUND), range(AT_ONCE)))
        settle(cluster)
        files, ports, before = sockets(cluster), kept_ports(cluster), [held(pid) for pid in cluster.pids]
        for _ in range(parts):
            done = list(pool.map(lambda _: session(cluster, each), range(share)))
            settle(cluster, files)
            list(pool.map(lambda took: native.session(took, ROUND), done))
            native.settle()
            rounds.append(sum(map(len, done)))
            heaps = [heap(sockets_of_heaps, pid) for pid in workers]
            samples.append((held(cluster.pids[0]).memory, *heaps))
        ports = kept_ports(cluster) - ports
        after = [held(pid) for pid in cluster.pids]
    half = parts // 2
    names = ["gateway", "worker 0", "worker 1", "Monarch's own 0", "Monarch's own 1"]
    grown = [last - middle for last, middle in zip(samples[-1], samples[half - 1], strict=True)]
    print(f"{sessions} sessions, {rounds} rounds of work in the parts")
    for who, course, more in zip(names, zip(*samples, strict=True), grown, strict=True):
        sizes = ", ".join(f"{size / 2**20:.1f}" for size in course)
        print(f"{who}: {sizes} MiB; second half {more / 2**10 / sum(rounds[half:]):.0f} KiB a round")
    natives = max(0, *grown[3:])
    for who, was, now, more, kept in zip(names[:3], before, after, grown[:3], (ports, 0, 0), strict=True):
        allowed = SETTLED if who == "gateway" else BUFFERED + OF_NATIVE * natives
        print(f"{who}: {more / 2**20:.1f} MiB of at most {allowed / 2**20:.1f}; {was} → {now}, {kept} more ports")
        assert now.processes == was.processes
        assert now.descriptors <= was.descriptors + kept + DESCRIPTORS
        assert more <= allowed


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
