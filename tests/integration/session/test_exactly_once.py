"""Operations through connections that are cut all the time: each runs once, in its place, and is answered."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil
import pytest

import loom
from loom import Actor, endpoint
from loom_proxy.local import LocalCluster
from tests.integration.calls.test_failures import driver_pid
from tests.support.network.chaos_proxy import ChaosProxy, Schedule

BOUND = 60.0
"""Seconds that an operation may take: many reconnections, each after a pause that grows."""

WINDOW = 32
"""Operations that are under way at once."""


class Load(NamedTuple):
    """What is asked for, and how often it is cut.

    A frame has to pass between two cuts sooner or later, since what was cut off is sent again as it was: one of
    small operations has a whole window of them at most, and one of large ones 512 KiB.
    """

    operations: int
    cuts: int
    seed: int
    padding: int = 600
    """Bytes of an argument and of its result, at most."""
    gap: tuple[int, int] = (300, 24_000)
    """Bytes between two actions of the proxy. A handshake has 1,500, so that some are in the midst of one."""
    growth: int = 64 << 20
    """Bytes by which a process may grow: over what it keeps for one window, and far below all that is sent."""


class Ledger(Actor):
    """Writes down what does not come when it has to."""

    def __init__(self) -> None:
        self.next = 0
        self.wrong: list[tuple[int, int]] = []

    @endpoint
    def enter(self, number: int, padding: bytes) -> tuple[int, bytes]:
        if number != self.next and len(self.wrong) < 20:
            self.wrong.append((self.next, number))
        self.next = number + 1
        return number, padding

    @endpoint
    def report(self) -> tuple[int, list[tuple[int, int]]]:
        return self.next, self.wrong


@pytest.fixture
def short_lived() -> Iterator[LocalCluster]:
    """A cluster whose sessions end soon without a client: the proxy opens some by replaying a first hello."""
    with LocalCluster(hosts=2, gateway_options=["--session-linger", "60"]) as running:
        yield running


Pair = tuple[Any, Any]
"""The future of an operation and what it has to give; None twice for one that has no answer."""


def turn(ledgers: Any, number: int, padding: bytes) -> list[Pair]:
    """Enter a number into both ledgers, one way or another."""
    if number % 4 == 1:
        return [(ledgers.enter.call(number, padding), [(number, padding)] * 2)]
    if number % 4 == 3:
        ledgers.enter.broadcast(number, padding)
        return [(None, None)]
    return [(ledgers.slice(hosts=host).enter.call_one(number, padding), (number, padding)) for host in (0, 1)]


def check(pair: Pair) -> None:
    future, expected = pair
    if future is not None:
        got = future.get(timeout=BOUND)
        assert (list(got.values()) if isinstance(got, loom.ValueMesh) else got) == expected


def attack(cluster: LocalCluster, load: Load) -> None:
    port = urlsplit(cluster.url).port
    assert port is not None
    rng = random.Random(load.seed)
    under_way: deque[Pair] = deque()
    done = 0
    with ChaosProxy(port) as proxy, loom.connect(f"ws://127.0.0.1:{proxy.port}", cluster.token) as job:
        pids = {"laptop": os.getpid(), "gateway": cluster.pids[0], "driver": driver_pid(cluster, job)}
        resident: dict[str, list[int]] = {name: [] for name in pids}
        ledgers = job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("ledgers", Ledger)
        proxy.attack(Schedule(load.seed, load.cuts, load.gap))
        for number in itertools.count():
            pairs = turn(ledgers, number, rng.randbytes(rng.randint(0, load.padding)))
            under_way += pairs
            done += len(pairs)
            while len(under_way) > WINDOW:
                check(under_way.popleft())
            if number % (load.operations // 20) == 0:
                for name, pid in pids.items():
                    resident[name].append(psutil.Process(pid).memory_info().rss)
            if done >= load.operations and proxy.calm.is_set():
                break
            assert done < 10 * load.operations, f"only {proxy.cuts} cuts in {proxy.forwarded} bytes"
        for pair in under_way:
            check(pair)
        reports = list(ledgers.report.call().get(timeout=BOUND).values())
        events = Counter(event.name for event in job.events(timeout=0.1))
    growth = {name: taken[-1] - taken[len(taken) // 5] for name, taken in resident.items()}
    print(f"{done} operations, {proxy.cuts} cuts, {proxy.links} connections, {proxy.forwarded} bytes")
    print({action.value: count for action, count in proxy.done.items()}, dict(events), growth)
    assert reports == [(number + 1, [])] * 2
    assert proxy.cuts == load.cuts
    assert events["disconnected"] == events["resumed"] > load.cuts // 4  # a cut in a handshake is no disconnection
    assert all(grown < load.growth for grown in growth.values()), growth


def test_20_cuts_of_400_operations(short_lived: LocalCluster) -> None:
    attack(short_lived, Load(400, cuts=20, seed=7))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "load",
    [
        pytest.param(Load(20_000, cuts=1000, seed=2), id="small"),
        pytest.param(
            Load(600, cuts=60, seed=3, padding=1 << 20, gap=(1000, 8 << 20), growth=192 << 20), id="large"
        ),
    ],
)
def test_cuts_of_operations(short_lived: LocalCluster, load: Load) -> None:
    attack(short_lived, load)
