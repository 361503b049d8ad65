"""Connections between a driver and its workers that are reset all the time: Monarch's own, and process links."""

from __future__ import annotations

import os
import random
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

import loom
from loom import driver_api
from loom_proxy.logs import LogLine
from tests.integration.session.test_exactly_once import WINDOW, Ledger, Pair, check, turn
from tests.support.needs import skipped_if
from tests.support.network.namespaces import WORKER_PORT, FarCluster, missing

pytestmark = [skipped_if(missing()), pytest.mark.slow, pytest.mark.timeout(900)]

OPERATIONS = 20_000
CUTS = 1_000
SEED = 11

BOUND = 120.0


class Printing(Ledger):
    """A ledger that prints each number, too."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = loom.current_rank().rank  # in the whole mesh; calls on a slice have another

    @loom.endpoint
    def enter(self, number: int, padding: bytes) -> tuple[int, bytes]:
        print(f"{self.rank} {number}")
        if number != self.next and len(self.wrong) < 20:
            self.wrong.append((self.next, number))
        self.next = number + 1
        return number, padding


@pytest.fixture
def far() -> Iterator[FarCluster]:
    with FarCluster() as cluster:
        yield cluster


def links_port() -> int:
    port: int = driver_api.session()._context.link_address.port  # type: ignore[attr-defined]
    return port


class Lines:
    """The connections of a driver with its workers' hosts."""

    def __init__(self, far: FarCluster, job: loom.Job, rng: random.Random) -> None:
        self._far = far
        self._driver = psutil.Process(job.run(os.getpid))
        self._links = job.run(links_port)
        self._workers = [far.hosts.address(worker) for worker in far.hosts.workers]
        self._rng = rng
        self.cut: Counter[str] = Counter()

    def cut_one(self) -> None:
        """Reset one of them, of a kind that is as likely as each other."""
        kinds: dict[str, list[Any]] = {}
        with self._far.hosts.on("gateway"):  # psutil reads the table of the thread's own network
            connections = self._driver.net_connections("tcp")
        for connection in connections:
            if connection.status == psutil.CONN_ESTABLISHED and connection.raddr.ip in self._workers:
                kinds.setdefault(self._kind(connection), []).append(connection)
        kind = self._rng.choice(sorted(kinds))
        chosen = self._rng.choice(sorted(kinds[kind], key=lambda one: (one.raddr, one.laddr)))
        if self._far.hosts.reset("gateway", tuple(chosen.laddr), tuple(chosen.raddr)):
            self.cut[kind] += 1

    def _kind(self, connection: Any) -> str:
        if connection.laddr.port == self._links:
            return "link"
        return "worker" if connection.raddr.port == WORKER_PORT else "process"


@pytest.mark.guarantees(
    "process link",
    "1,000 resets of Monarch's connections and the lines under 20,000 operations neither lose, double nor "
    "reorder one, nor a printed line",
)
def test_a_thousand_resets_of_the_lines_to_workers_lose_double_and_reorder_nothing(far: FarCluster) -> None:
    rng = random.Random(SEED)
    under_way: deque[Pair] = deque()
    printed: dict[str, list[int]] = {"0": [], "1": []}

    def note(line: LogLine) -> None:
        rank, number = line.text.split()
        printed[rank].append(int(number))

    with far.connected() as job:
        job.on_log(note)
        ledgers = job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("ledgers", Printing)
        lines = Lines(far, job, rng)
        done = number = 0
        while done < OPERATIONS or lines.cut.total() < CUTS:
            pairs = turn(ledgers, number, rng.randbytes(rng.randint(0, 600)))
            under_way += pairs
            done += len(pairs)
            number += 1
            while len(under_way) > WINDOW:
                check(under_way.popleft())
            if lines.cut.total() < min(CUTS, done * CUTS // OPERATIONS):
                lines.cut_one()
        for pair in under_way:
            check(pair)
        reports = list(ledgers.report.call().get(timeout=BOUND).values())
        job.flush_logs(BOUND)
        lost = [event.name for event in job.events(timeout=0) if "lost" in event.name or event.name == "failure"]

    print(f"{done} operations, {dict(lines.cut)}")
    assert reports == [(number, [])] * 2
    assert printed == {rank: list(range(number)) for rank in printed}
    assert lost == []
    assert min(lines.cut[kind] for kind in ("link", "worker", "process")) > CUTS // 10
