"""Tensors of a GPU as arguments and results of calls."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

import loom
from loom.devices.use import nvml
from loom_proxy.local import LocalCluster
from tests.support.gpus import GPUS, needs_gpus
from tests.support.processes import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), needs_gpus()]

LARGE = 16 << 20
"""Elements of a tensor of several chunks."""


class Holder(loom.Actor):
    """Gives and takes tensors on its GPU."""

    @loom.endpoint
    def make(self, count: int) -> Any:
        import torch

        return torch.arange(count, dtype=torch.float32, device="cuda:0")

    @loom.endpoint
    def inside(self) -> Any:
        import torch

        column = torch.arange(6, device="cuda:0").reshape(2, 3)[:, 1]
        weight = torch.nn.Parameter(torch.ones(2, device="cuda:0", dtype=torch.bfloat16))
        return {"turned": torch.arange(6, device="cuda:0").reshape(2, 3).t(), "rest": [column, weight]}

    @loom.endpoint
    def total(self, values: Any) -> tuple[str, float]:
        return str(values.device), float(values.double().sum())

    @loom.endpoint
    def of_another(self, other: Any) -> tuple[str, float]:
        values = other.make.call_one(1000).get()
        return str(values.device), float(values.sum())

    @loom.endpoint
    def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def holder(job: loom.Job) -> Any:
    return job.hosts.slice(hosts=0).spawn_procs(name="holders").spawn("holder", Holder)


def test_a_tensor_stays_on_the_gpu_of_its_number(job: loom.Job, holder: Any) -> None:
    made = holder.make.call_one(LARGE).get()
    assert made.device == torch.device("cuda:0")
    assert torch.equal(made, torch.arange(LARGE, dtype=torch.float32, device="cuda:0"))

    found = holder.inside.call_one().get()
    column, weight = found["rest"]
    assert {found["turned"].device.type, column.device.type, weight.device.type} == {"cuda"}
    assert (found["turned"].stride(), found["turned"].tolist()) == ((1, 3), [[0, 3], [1, 4], [2, 5]])
    assert column.tolist() == [1, 4]
    assert (type(weight), weight.dtype, weight.tolist()) == (torch.nn.Parameter, torch.bfloat16, [1.0, 1.0])

    assert holder.total.call_one(made[:1000]).get() == ("cuda:0", 499500.0)
    other = job.hosts.slice(hosts=1).spawn_procs(name="others").spawn("other", Holder)
    assert holder.of_another.call_one(other).get() == ("cuda:0", 499500.0)


def test_only_processes_that_compute_have_a_context_on_the_gpu(job: loom.Job, holder: Any) -> None:
    holder.make.call_one(LARGE).get()
    pynvml = nvml()
    handle = pynvml.nvmlDeviceGetHandleByUUID(GPUS[0].uuid)
    there = {one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    if holder.pid.call_one().get() not in there:
        pytest.skip("NVML has other numbers for processes than this machine, as in a container")
    assert job.run(os.getpid) not in there


def test_a_laptop_without_a_gpu_gets_it_in_main_memory(cluster: LocalCluster) -> None:
    program = (
        "import json, os, loom, torch\n"
        "from tests.system.gpu.test_calls import Holder\n"
        "with loom.connect(os.environ['URL'], os.environ['TOKEN']) as job:\n"
        "    holder = job.hosts.slice(hosts=0).spawn_procs(name='far').spawn('far', Holder)\n"
        "    made = holder.make.call_one(1000).get()\n"
        "    weight = holder.inside.call_one().get()['rest'][1]\n"
        "    print(json.dumps([str(made.device), made.sum().item(), type(weight).__name__, str(weight.device)]))\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "URL": cluster.url, "TOKEN": str(cluster.token)}
    finished = run("-c", program, env=environment)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout.splitlines()[-1]) == ["cpu", 499500.0, "Parameter", "cpu"]


class InGroup(loom.Actor):
    """One of a group over NCCL."""

    @loom.endpoint
    def train(self, steps: int) -> tuple[float, list[float]]:
        """Return a sum over the group, and the losses of a network that FSDP2 spreads over it."""
        import torch
        from torch import distributed
        from torch.distributed.fsdp import fully_shard

        rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(rank)
        distributed.init_process_group("nccl")  # by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
        try:
            total = torch.full((), rank + 1.0, device="cuda")
            distributed.all_reduce(total)
            mesh = distributed.init_device_mesh("cuda", (distributed.get_world_size(),))
            return total.item(), losses("cuda", steps, lambda model: fully_shard(model, mesh=mesh))
        finally:
            distributed.destroy_process_group()


def losses(device: str, steps: int, spread: Any = lambda model: model) -> list[float]:
    """Return the losses of a small network in float64."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)).double()
    data = torch.randn(32, 64, dtype=torch.float64)
    spread(model.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        loss = model(data.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_processes_form_a_group_over_nccl_in_which_fsdp2_trains(job: loom.Job) -> None:
    procs = job.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": len(GPUS)}, name="group")
    told = procs.spawn("group", InGroup).train.call(10).get()
    expected = losses("cpu", 10)
    for total, found in told.values():
        assert total == sum(range(1, len(GPUS) + 1))
        assert found == pytest.approx(expected, rel=1e-9)
    assert expected[-1] < expected[0]
