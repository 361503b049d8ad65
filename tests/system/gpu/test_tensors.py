"""Lazy tensors on a real GPU."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import loom
from loom.tensors import Replicate, Shard
from tests.integration.tensors.test_real_workers import Victim, read_for_ever
from tests.support.gateways import await_true
from tests.support.gpus import GPUS, needs_gpus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), needs_gpus()]


def losses(lt: Any, device: str | None, steps: int) -> list[Any]:
    """The losses of a small network, with torch or with lazy tensors."""
    here = {} if device is None else {"device": device}
    data = torch.linspace(-1, 1, 32 * 16, dtype=torch.float64).reshape(32, 16)
    x = lt.tensor(data.tolist(), dtype=lt.float64, **here)
    w = [lt.tensor((data[:16].t() * k).tolist(), dtype=lt.float64, requires_grad=True, **here) for k in (1, -2)]
    found = []
    for _ in range(steps):
        loss = (x.matmul(w[0]).tanh().matmul(w[1]) - x).pow(2).mean()
        loss.backward()
        with lt.no_grad():
            for each in w:
                each -= 0.1 * each.grad
                each.grad = None
        found.append(loss.item())
    return found


def test_a_network_trains_as_with_torch(job: loom.Job) -> None:
    lt = loom.tensors.on(job.hosts.slice(hosts=0).spawn_procs(name="one"))
    assert lt._dispatcher.began.get(60) == "cuda:0"
    expected = losses(torch, "cpu", 20)
    assert losses(lt, None, 20) == pytest.approx(expected, rel=1e-9)
    assert expected[-1] < expected[0]


def test_what_a_gpu_has_no_room_for_fails_alone(job: loom.Job) -> None:
    lt = job.tensors("full")
    small = lt.ones(3)
    huge = lt.empty(2 * GPUS[0].memory, dtype=lt.uint8)
    with pytest.raises(RuntimeError, match="out of memory"):
        huge.add(1).sum().item()
    assert small.add(1).tolist() == [2.0, 2.0, 2.0]


def test_a_weight_is_watched_without_a_wait(job: loom.Job) -> None:
    lt = job.tensors("watched")
    w = lt.linspace(-1, 1, 1001).requires_grad_()
    watch = lt.watch(w, "layer")
    (w * w).sum().backward()
    await_true(lambda: watch.newest is not None)
    weight = watch.newest.weight
    assert (weight.min, weight.max, sum(weight.histogram)) == (-1.0, 1.0, 1001)


def test_tensors_are_restored_with_their_random_numbers(job: loom.Job) -> None:
    lt = job.tensors("restored")
    w = lt.randn(1000)
    before = w.tolist()
    lt.checkpoint()
    after = lt.randn(5).tolist()
    os.kill(job.meshes["restored-processes"].spawn("victim", Victim).pid.call_one().get(), signal.SIGKILL)
    with pytest.raises(loom.SupervisionError):
        read_for_ever(w)
    lt.restore()
    assert w.tolist() == before
    assert lt.randn(5).tolist() == after


def test_after_a_wrong_index_the_checkpoint_is_there(job: loom.Job) -> None:
    lt = job.tensors("broken")
    rows = lt.ones(3, 2)
    lt.checkpoint()
    wrong, late = rows[lt.tensor([7])], lt.zeros(2)
    for each in (wrong, rows, lt.ones(2), late):
        with pytest.raises(
            loom.OperationFailed, match=r"device-side assert.* go on from a checkpoint with lt\.restore"
        ):
            each.tolist()
    with pytest.raises(loom.OperationFailed, match="device-side assert"):
        lt.synchronize()
    lt.restore()
    assert rows.add(1).tolist() == [[2.0, 2.0]] * 3
    with pytest.raises(loom.OperationFailed, match="made after the last checkpoint"):
        late.tolist()


class Waiting(loom.Actor):
    """Makes its process wait for each operation on the GPU."""

    @loom.endpoint
    def wait(self) -> None:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"


def test_a_wrong_index_names_its_line_where_each_operation_is_waited_for(job: loom.Job) -> None:
    procs = job.hosts.slice(hosts=0).spawn_procs(name="waiting")
    procs.spawn("waiting", Waiting).wait.call().get()
    lt = loom.tensors.on(procs)
    wrong = lt.ones(3, 2)[lt.tensor([7])]; here = sys._getframe().f_lineno  # fmt: skip  # noqa: E702
    wrong = wrong.add(1).sum()
    with pytest.raises(loom.OperationFailed, match=r"int64\[1\].* device-side assert") as caught:
        wrong.item()
    assert f"{Path(__file__).name}:{here}" in str(caught.value)


def test_processes_that_share_a_gpu_have_plain_tensors_and_spread_none(job: loom.Job) -> None:
    lt = loom.tensors.on(job.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 2 * len(GPUS)}, name="sharing"))
    x = lt.arange(6).reshape(2, 3)
    assert x.add(1).tolist() == [[1, 2, 3], [4, 5, 6]]
    with pytest.raises(loom.OperationFailed, match=f"processes 0 and {len(GPUS)} share the GPU"):
        x.float().redistribute([Shard(0)]).tolist()
    assert x.add(1).tolist() == [[1, 2, 3], [4, 5, 6]]


@needs_gpus(2)
def test_tensors_are_spread_over_the_gpus(job: loom.Job) -> None:
    lt = loom.tensors.on(job.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": len(GPUS)}, name="several"))
    whole = lt.randn(4 * len(GPUS), 3)
    x = whole.redistribute([Shard(0)])
    w = lt.ones(2, 3, requires_grad=True)
    (x @ w.t()).pow(2).sum().backward()
    assert x.tolist() == whole.tolist()
    assert (x.placements, w.grad.placements) == ((Shard(0),), (Replicate(),))
