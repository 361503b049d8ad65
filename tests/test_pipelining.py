"""Spawn, spawn, call are sent without waiting: seen through a line with a long delay."""

from __future__ import annotations

import time
from collections.abc import Callable
from urllib.parse import urlsplit

import loom
from loom_proxy.local import LocalCluster
from tests.actors import Counter
from tests.delay_proxy import DelayProxy

ROUND_TRIP = 0.2
"""Seconds."""


def chain(job: loom.Job) -> None:
    procs = job.hosts.spawn_procs(per_host={"gpus": 1})
    counters = procs.spawn("counters", Counter, 1)
    assert list(counters.slice(hosts=slice(0, 1)).add.call(2).get(timeout=60).values()) == [3]


def seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def test_a_chain_costs_one_round_trip_more_on_a_slow_line(cluster: LocalCluster) -> None:
    """Not a speed test: waiting for an answer between two steps would add at least a whole round trip."""
    port = urlsplit(cluster.url).port
    assert port is not None
    with DelayProxy(port, ROUND_TRIP / 2) as line:
        with (
            loom.connect(cluster.url, cluster.token) as near,
            loom.connect(f"ws://127.0.0.1:{line.port}", cluster.token) as far,
        ):
            for job in (near, far):
                chain(job)
            # Alternating, and the quickest of each: what else runs on the machine only ever adds.
            pairs = [(seconds(lambda: chain(near)), seconds(lambda: chain(far))) for _ in range(7)]
    near_seconds, far_seconds = map(min, zip(*pairs, strict=True))
    assert far_seconds - near_seconds <= 1.5 * ROUND_TRIP
