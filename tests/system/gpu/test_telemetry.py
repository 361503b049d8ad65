"""What NVML says of a real GPU reaches the weaver and `/metrics`."""

from __future__ import annotations

import re
import urllib.request
from typing import Any

import pytest

import loom
from loom.devices.failures import FailureWatch
from loom_proxy.local import LocalCluster
from tests.support.gateways import BOUND, await_true
from tests.support.gpus import GPUS, needs_gpus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), needs_gpus()]

HELD = 1 << 30
"""Bytes that each process holds on its GPU."""


class Busy(loom.Actor):
    """Keeps its GPU busy until it should stop."""

    @loom.endpoint
    def train(self) -> int:
        import torch

        device = f"cuda:{loom.current_rank().rank}"
        held = torch.empty(HELD, dtype=torch.uint8, device=device)
        values = torch.randn(4096, 4096, device=device)
        number = 0
        with loom.Threadlet() as threadlet:
            while not threadlet.should_stop:
                number += 1
                with threadlet.step(number):
                    values = torch.nn.functional.normalize(values @ values)
                    torch.cuda.synchronize(device)
        return held.nbytes


def test_each_process_reports_the_gpu_that_it_uses(cluster: LocalCluster, job: loom.Job) -> None:
    procs = job.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": len(GPUS)}, name="busy")
    training = procs.spawn("busy", Busy).train.call()
    await_true(lambda: len(job.weaver.replicas()) == len(GPUS))
    owned = {replica.rank: replica.devices for replica in job.weaver.replicas().values()}
    assert owned == {rank: (gpu.uuid,) for rank, gpu in enumerate(GPUS)}

    def statuses() -> list[dict[str, Any]]:
        return [job.weaver.devices()[gpu.uuid].status or {} for gpu in GPUS]

    await_true(lambda: all((one.get("utilization") or 0) > 0.5 for one in statuses()))
    for gpu, status in zip(GPUS, statuses(), strict=True):
        device = job.weaver.devices()[gpu.uuid]
        assert (device.kind, device.type, device.memory) == ("gpu", gpu.type, gpu.memory)
        assert str(device.state) == "active"
        assert HELD < status["memory_used"] < gpu.memory
        assert 10 < status["temperature"] < 100
        assert 50 < status["power"] < 2000
        assert status["sm_clock"] > 500_000_000
        assert status["memory_clock"] > 500_000_000
        assert not status["ecc_uncorrected"]
        assert any(one["memory"] is None or one["memory"] > HELD for one in status["processes"])

    asked = urllib.request.Request(cluster.url.replace("ws:", "http:") + "/metrics")
    asked.add_header("Authorization", f"Bearer {cluster.token}")
    with urllib.request.urlopen(asked, timeout=BOUND) as answer:
        page = answer.read().decode()
    for gpu in GPUS:
        (used,) = re.findall(rf'loom_device_memory_used_bytes{{[^}}]*"{gpu.uuid}"[^}}]*}} (\S+)', page)
        assert float(used) > HELD

    job.weaver.stop("*").get(BOUND)
    assert set(training.get(BOUND).values()) == {HELD}


def test_events_of_a_failing_gpu_are_waited_for() -> None:
    watch = FailureWatch(GPUS)
    try:
        assert watch.has_events
        assert watch.wait(0.1) == []
    finally:
        watch.close()
