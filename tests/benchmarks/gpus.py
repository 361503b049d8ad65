"""What Loom does with real GPUs of this machine, beside what torch does with them alone.

A tensor as the result of a call is measured from a GPU and from main memory, alternately; a step of a network in a
group over NCCL with FSDP2 and without; a step with lazy tensors and with torch itself in the worker.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import loom
from loom.devices import device_status
from tests.benchmarks.budgets import BudgetReport, Figure
from tests.benchmarks.machine import describe_machine
from tests.benchmarks.tensors import BATCH, WIDTH, Eager, train_lazily
from tests.support.gpus import GPUS
from tests.system.gpu.trainers import OnGpu
from tests.system.train.trainers import Watched, a_job

__all__ = ["GpusPlan", "measure"]

MIB = 1 << 20


@dataclass(frozen=True)
class GpusPlan:
    """How much is measured."""

    rounds: int = 3
    looks: int = 20
    """At the status of a GPU."""
    tensor_mib: int = 256
    steps: int = 100
    layers: int = 24
    """Of a transformer's width of 1024, in a group."""


class Holder(loom.Actor):
    """Gives and takes tensors, and keeps them in checkpoints."""

    @loom.endpoint
    def make(self, mib: int, device: str) -> Any:
        import torch

        found = torch.zeros(mib * MIB // 4, device=device)
        torch.cuda.synchronize()
        return found

    @loom.endpoint
    def take(self, values: Any) -> int:
        import torch

        torch.cuda.synchronize()
        return int(values.nbytes)

    @loom.endpoint
    def keep(self, mib: int, folder: str) -> tuple[float, float, float]:
        """Return the seconds that a checkpoint keeps the caller waiting, until it is written, and to load it."""
        import torch

        from loom.train import CheckpointStore

        state = {str(number): torch.randn(mib * MIB // 16, device="cuda") for number in range(4)}
        torch.cuda.synchronize()
        store = CheckpointStore(folder)
        began = time.perf_counter()
        pending = store.save(state, 1)
        copied = time.perf_counter()
        pending.wait()
        written = time.perf_counter()
        newest = store.newest()
        assert newest is not None
        again = {name: tensor.cuda() for name, tensor in newest.load().items()}
        torch.cuda.synchronize()
        loaded = time.perf_counter()
        assert all(torch.equal(again[name], tensor) for name, tensor in state.items())
        return copied - began, written - began, loaded - written


class Member(loom.Actor):
    """One of a group over NCCL, which it leaves no more."""

    @loom.endpoint
    def join(self) -> None:
        import torch
        from torch import distributed

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl")

    @loom.endpoint
    def reduce(self, mib: int, times: int) -> float:
        """Return the seconds of a sum over the group."""
        import torch
        from torch import distributed

        values = torch.ones(mib * MIB // 4, device="cuda")
        for number in range(-3, times):
            if number == 0:
                torch.cuda.synchronize()
                began = time.perf_counter()
            distributed.all_reduce(values)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / times

    @loom.endpoint
    def train(self, layers: int, steps: int, spread: bool) -> float:
        """Return the seconds of a step of a transformer's encoder, spread by FSDP2 or whole."""
        import torch
        from torch import distributed
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        with torch.device("cuda"):
            made = [torch.nn.TransformerEncoderLayer(1024, 16, 4096, 0.0, batch_first=True) for _ in range(layers)]
            model, data = torch.nn.Sequential(*made).bfloat16(), torch.randn(8, 512, 1024, dtype=torch.bfloat16)
        if spread:
            mesh = distributed.init_device_mesh("cuda", (distributed.get_world_size(),))
            for each in (*model, model):
                fully_shard(each, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        for step in range(-3, steps):
            if step == 0:
                torch.cuda.synchronize()
                began = time.perf_counter()
            model(data).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / steps


def measure(plan: GpusPlan, command: str, say: Callable[[str], object] = lambda text: None) -> BudgetReport:
    """Measure in a session of a cluster on this machine.

    Raises:
        SystemExit: there is no GPU.
    """
    if not GPUS:
        raise SystemExit("this machine has no GPU that NVML knows, with the extra gpu of monarch-loom")
    found: dict[tuple[str, str], list[float]] = {}
    with loom.local(hosts=1) as job:
        job.print_logs = False
        holder = job.hosts.spawn_procs(name="holders").spawn("holder", Holder)
        members = job.hosts.spawn_procs(per_host={"gpus": len(GPUS)}, name="group").spawn("members", Member)
        eager = job.hosts.spawn_procs(name="eager").spawn("eager", Eager)
        lt = job.tensors()
        members.join.call().get()
        _moved(holder, 1)
        eager.train.call_one(3).get()
        for number in range(plan.rounds):
            for name, measured in {
                "status": lambda: _looks(plan.looks),
                "calls": lambda: _moved(holder, plan.tensor_mib),
                "checkpoint": lambda: _kept(holder, 2 * plan.tensor_mib),
                "group": lambda: _in_group(members, plan),
                "lazy tensors": lambda: _lazily(lt, eager, plan.steps),
                "restart": lambda: _killed(job),
            }.items():
                say(f"round {number + 1} of {plan.rounds}: {name}")
                for (what, unit), value in measured().items():
                    say(f"{what}: {value:.4g} {unit}")
                    found.setdefault((what, unit), []).append(value)
    figures = tuple(Figure(name, unit, tuple(values)) for (name, unit), values in found.items())
    notes = (
        f"{len(GPUS)} GPU{'s' if len(GPUS) > 1 else ''}; a group over NCCL has a process on each",
        f"the transformer has {plan.layers} layers of 1024 in bfloat16, with batches of 8 by 512",
        f"lazy tensors train two layers of {WIDTH} by {WIDTH} with a batch of {BATCH}",
    )
    return BudgetReport("gpus", command, describe_machine(), asdict(plan), (), figures, notes)


def _looks(many: int) -> dict[tuple[str, str], float]:
    device_status(GPUS[:1])
    began = time.perf_counter()
    for _ in range(many):
        (status,) = device_status(GPUS[:1]).values()
        assert status.error is None
    return {("status of a GPU by NVML", "ms"): 1e3 * (time.perf_counter() - began) / many}


def _moved(holder: Any, mib: int) -> dict[tuple[str, str], float]:
    """Move a tensor to this process and back. It arrives where it was."""
    found = {}
    for device, where in (("cuda:0", "a GPU"), ("cpu", "main memory")):
        began = time.perf_counter()
        values = holder.make.call_one(mib, device).get()
        there = time.perf_counter()
        assert (str(values.device), holder.take.call_one(values).get()) == (device, mib * MIB)
        found[f"result of {mib} MiB in {where}", "ms"] = 1e3 * (there - began)
        found[f"argument of {mib} MiB in {where}", "ms"] = 1e3 * (time.perf_counter() - there)
    return found


def _kept(holder: Any, mib: int) -> dict[tuple[str, str], float]:
    with tempfile.TemporaryDirectory() as folder:
        copied, written, loaded = holder.keep.call_one(mib, folder).get()
    return {
        (f"checkpoint of {mib} MiB: the training waits", "s"): copied,
        (f"checkpoint of {mib} MiB: until it is written", "s"): written,
        (f"checkpoint of {mib} MiB: until it is on the GPU again", "s"): loaded,
    }


def _in_group(members: Any, plan: GpusPlan) -> dict[tuple[str, str], float]:
    def slowest(future: Any) -> float:
        return 1e3 * max(future.get().values())

    return {
        (f"NCCL: a sum of {plan.tensor_mib} MiB", "ms"): slowest(members.reduce.call(plan.tensor_mib, 20)),
        ("FSDP2: a step", "ms"): slowest(members.train.call(plan.layers, plan.steps // 5, True)),
        ("the same without FSDP2", "ms"): slowest(members.train.call(plan.layers, plan.steps // 5, False)),
    }


def _lazily(lt: Any, eager: Any, steps: int) -> dict[tuple[str, str], float]:
    return {
        ("lazy tensors: a training step", "ms"): 1e3 * train_lazily(lt, steps),
        ("the same with torch in the worker", "ms"): 1e3 * eager.train.call_one(steps).get(),
    }


def _killed(job: loom.Job) -> dict[tuple[str, str], float]:
    with tempfile.TemporaryDirectory() as folder:
        kept = {"checkpoints": folder, "checkpoint_every": 10, "backend": "nccl"}
        watched = Watched(job, a_job(1_000_000, 1, trainer=OnGpu, **kept))
        try:
            watched.await_event("checkpoint_written")
            killed = watched.kill("train_0")
            seconds = watched.await_event("group_restored").time - killed
        finally:
            watched.stop()
    return {("a killed group of loom.train, until it trains again", "s"): seconds}
