"""Lazy tensors over a line that is slow."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlsplit

import pytest

import loom
from loom_proxy.local import LocalCluster
from tests.support.network.delay_proxy import DelayProxy

ROUND_TRIP = 0.1
"""Seconds: the line delays by 50 ms each way."""


def training(lt: Any) -> Any:
    """Return a function that does a step of a network of two layers, and reads the loss."""
    x, y = lt.randn(16, 8), lt.randn(16, 1)
    weights = [lt.randn(8, 8).requires_grad_(), lt.randn(8, 1).requires_grad_()]

    def step() -> float:
        began = time.perf_counter()
        loss = (x.matmul(weights[0]).relu().matmul(weights[1]) - y).pow(2).mean()
        loss.backward()
        with lt.no_grad():
            for each in weights:
                each.sub_(each.grad, alpha=1e-4)
                each.grad = None
        loss.item()
        return time.perf_counter() - began

    return step


@pytest.mark.slow
def test_a_training_step_that_reads_its_loss_costs_one_round_trip(cluster: LocalCluster) -> None:
    """Not a speed test: what waits for one answer more adds at least a whole round trip."""
    with DelayProxy(urlsplit(cluster.url).port or 0, ROUND_TRIP / 2) as line:
        with (
            loom.connect(cluster.url, cluster.token) as near,
            loom.connect(f"ws://127.0.0.1:{line.port}", cluster.token) as far,
        ):
            steps = [training(job.tensors()) for job in (near, far)]
            # Alternating, and the quickest of each: what else runs on the machine only ever adds.
            near_seconds, far_seconds = map(min, zip(*[[step() for step in steps] for _ in range(10)], strict=True))
    assert 0.5 * ROUND_TRIP <= far_seconds - near_seconds <= 1.5 * ROUND_TRIP
