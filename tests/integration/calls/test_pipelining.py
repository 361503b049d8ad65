"""Spawn, spawn, call are sent without waiting: seen through a line with a long delay, and one without answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import loom
from loom import Actor, endpoint
from loom_proxy.local import LocalCluster
from tests.support.actors import Counter
from tests.support.gateways import BOUND, await_true
from tests.support.network.delay_proxy import DelayProxy, Link

ROUND_TRIP = 0.2
"""Seconds."""


class OneWay(DelayProxy):
    """A line that can be made to carry nothing to the client."""

    def __init__(self, port: int) -> None:
        super().__init__(port, 0.0)
        self._links: list[Link] = []

    async def _forward(self, link: Link) -> None:
        self._links.append(link)
        await super()._forward(link)

    def hold_answers(self) -> None:
        self._loop.call_soon_threadsafe(lambda: [link.answers.clear() for link in self._links])

    def let_go(self) -> None:
        self._loop.call_soon_threadsafe(lambda: [link.answers.set() for link in self._links])


class Marker(Actor):
    """Leaves a sign that it was called."""

    def __init__(self, path: str) -> None:
        self.path = path

    @endpoint
    def leave(self) -> str:
        Path(self.path).touch()
        return self.path


def gateway_port(cluster: LocalCluster) -> int:
    port = urlsplit(cluster.url).port
    assert port is not None
    return port


def test_a_chain_runs_though_no_answer_has_come(cluster: LocalCluster, tmp_path: Path) -> None:
    sign = tmp_path / "called"
    with (
        OneWay(gateway_port(cluster)) as line,
        loom.connect(f"ws://127.0.0.1:{line.port}", cluster.token) as job,
    ):
        job.hosts.spawn_procs().initialized.get(timeout=BOUND)
        line.hold_answers()

        markers = job.hosts.spawn_procs().spawn("markers", Marker, str(sign))
        called = markers.slice(hosts=0).leave.call_one()
        await_true(sign.exists)

        assert not called.done()
        line.let_go()
        assert called.get(timeout=BOUND) == str(sign)


def chain(job: loom.Job) -> None:
    procs = job.hosts.spawn_procs(per_host={"gpus": 1})
    counters = procs.spawn("counters", Counter, 1)
    assert list(counters.slice(hosts=slice(0, 1)).add.call(2).get(timeout=60).values()) == [3]


def seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_chain_costs_one_round_trip_more_on_a_slow_line(cluster: LocalCluster) -> None:
    """Not a speed test: waiting for an answer between two steps would add at least a whole round trip."""
    with DelayProxy(gateway_port(cluster), ROUND_TRIP / 2) as line:
        with (
            loom.connect(cluster.url, cluster.token) as near,
            loom.connect(f"ws://127.0.0.1:{line.port}", cluster.token) as far,
        ):
            for job in (near, far):
                chain(job)
            # Alternating, and the quickest of each: what else runs on the machine only ever adds.
            pairs = [(seconds(lambda: chain(near)), seconds(lambda: chain(far))) for _ in range(20)]
    near_seconds, far_seconds = map(min, zip(*pairs, strict=True))
    assert far_seconds - near_seconds <= 1.5 * ROUND_TRIP
