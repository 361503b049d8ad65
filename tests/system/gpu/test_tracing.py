"""What a real GPU does is in a trace."""

from __future__ import annotations

import pytest

import loom
from tests.integration.tracing.test_collecting import by_name, collect
from tests.support.gpus import needs_gpus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), needs_gpus()]


class Multiplying(loom.Actor):
    """Multiplies matrices on its GPU."""

    @loom.endpoint
    def multiply(self) -> float:
        import torch

        values = torch.ones(256, 256, device="cuda")
        return float((values @ values).sum())


def test_kernels_are_in_a_trace_at_the_time_of_the_call(job: loom.Job) -> None:
    worker = job.hosts.slice(hosts=0).spawn_procs(name="gpu").spawn("worker", Multiplying)
    assert worker.multiply.call_one().get() == 256.0**3
    process = by_name(collect(job, 1.0, lambda: worker.multiply.call_one().get(), kernels=True), "gpu[0]")
    assert process["problem"] is None
    records = process["records"]
    kernels = [record for record in records if record.get("kernel") == "kernel"]
    calls = [record for record in records if record["name"] == "actor"]
    copies = [record for record in records if record.get("kernel") == "gpu_memcpy"]
    assert kernels
    assert copies
    first = min(record["t"] for record in kernels)
    assert min(call["t"] for call in calls) - 0.1 <= first <= max(call["t"] for call in calls) + 1.0
    assert all(record["dur_ms"] > 0 for record in kernels)
