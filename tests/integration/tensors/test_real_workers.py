"""Lazy tensors in real actors, through a gateway."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import loom
from loom.rest_client import Gateway as Rest
from loom.tensors import Replicate, Shard
from loom_proxy.local import LocalCluster
from tests.support.gateways import await_true
from tests.support.listeners import listeners, unnamed
from tests.support.processes import tree


def test_what_is_queued_is_computed_in_the_cluster(job: loom.Job) -> None:
    lt = job.tensors("computed")
    x = lt.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    y = x.mul(x).add(1.0)
    assert y.shape == (2, 2)
    y.sum().backward()
    assert lt.fetch(y, x.grad) == ([[2.0, 5.0], [10.0, 17.0]], [[2.0, 4.0], [6.0, 8.0]])


@pytest.mark.slow
def test_many_commands_are_done_in_their_order(job: loom.Job) -> None:
    lt = job.tensors("order")
    total = lt.zeros(())
    for i in range(3000):
        total = total.add(i)
    assert total.item() == sum(range(3000))
    lt.synchronize()


def test_a_failure_names_the_line_that_queued_it_and_the_rest_lives(job: loom.Job) -> None:
    lt = job.tensors("failing")
    good = lt.ones(2)
    bad = lt.call("linalg.cholesky", lt.zeros(2, 2)); here = sys._getframe().f_lineno  # fmt: skip  # noqa: E702
    depends = lt.call("add", bad, good)
    assert good.tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError, match=r"linalg\.cholesky") as caught:
        depends.tolist()
    assert isinstance(caught.value, loom.LoomError)
    assert f"{Path(__file__).name}:{here}" in str(caught.value)
    assert good.add(1.0).tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="cholesky"):
        lt.synchronize()
    lt.synchronize()


@pytest.mark.slow
def test_tensors_are_spread_over_several_processes(job: loom.Job) -> None:
    lt = loom.tensors.on(job.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 2}, name="several"))
    whole = lt.randn(4, 3)
    x = whole.redistribute([Shard(0)])
    assert x.tolist() == whole.tolist()  # both have drawn the same: each gives rows of its own
    w = lt.ones(2, 3, requires_grad=True)
    loss = (x @ w.t()).pow(2).sum()
    loss.backward()
    found, columns = w.grad.tolist(), [sum(row) for row in whole.tolist()]
    expected = [
        sum(2 * total * row[k] for total, row in zip(columns, whole.tolist(), strict=True)) for k in range(3)
    ]
    assert found == [pytest.approx(expected, rel=1e-4)] * 2
    assert (x.placements, w.grad.placements, lt.mesh["gpus"]) == ((Shard(0),), (Replicate(),), 2)
    workers = tree(psutil.Process().pid)[1:]
    assert unnamed([one for one in listeners(workers) if one.kind == "TCP"]) == []


def test_another_program_finds_what_has_a_name(cluster: LocalCluster) -> None:
    first = loom.connect(cluster.url, cluster.token)
    lt = first.tensors()
    lt.named["w"] = lt.tensor([1.0, 2.0], requires_grad=True)
    lost = lt.ones(1)
    lt.synchronize()
    with loom.connect(cluster.url, cluster.token, session=first.session, take_over=True) as second:
        again = second.tensors()
        w = again.named["w"]
        assert (w.tolist(), w.requires_grad, list(again.named)) == ([1.0, 2.0], True, ["w"])
        with pytest.raises(KeyError):
            again.named["x"]
        del lost
        del again.named["w"]
        assert not again.named


def test_watched_weights_are_seen_by_whoever_sees_the_session(cluster: LocalCluster) -> None:
    rest = Rest(cluster.url, cluster.token)
    first = loom.connect(cluster.url, cluster.token)
    assert rest.tensors(first.session) == {"tensors": [], "left_out": 0}
    lt = first.tensors()
    model = lt.nn.Linear(3, 1)
    optimizer = lt.optim.SGD(model.parameters(), lr=0.1)
    watches = lt.watch(model, "net", bins=8)
    for _ in range(5):
        optimizer.zero_grad()
        model(lt.ones(4, 3)).sum().backward()
        optimizer.step()
    history = watches.history
    assert {name: [each.step for each in found] for name, found in history.items()} == {
        "net.weight": [1, 2, 3, 4, 5],
        "net.bias": [1, 2, 3, 4, 5],
    }
    assert [each.grad.norm for each in history["net.bias"]] == [4.0] * 5
    await_true(lambda: [one["gradients"] for one in rest.tensors(first.session)["tensors"]] == [5, 5])
    bias, weight = rest.tensors(first.session)["tensors"]
    assert (bias["name"], bias["grad_norms"]) == ("net.bias", [4.0] * 5)
    assert (sum(weight["weight"]["histogram"]), weight["mesh"]) == (3, "tensors")

    with loom.connect(cluster.url, cluster.token, session=first.session, take_over=True) as second:
        again = second.tensors()
        found = again.watched()
        assert list(found) == ["net.bias", "net.weight"]
        assert found.history == history
        w = again.ones(2, requires_grad=True)
        again.watch(w, "net.bias")
        (w * w).sum().backward()
        assert [each.step for each in found["net.bias"]] == [1, 2, 3, 4, 5, 6]
        assert "<svg" in found._repr_html_()


def test_the_laptop_needs_no_torch(cluster: LocalCluster) -> None:
    code = f"""
import sys
for name in ("torch", "numpy", "monarch"):
    sys.modules[name] = None
import loom
with loom.connect({cluster.url!r}, {cluster.token!r}) as job:
    lt = job.tensors()
    print(lt.ones(2, 2).add(1.0).sum().item())
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert told.stdout == "8.0\n", told.stderr


def in_the_cluster(procs: object) -> tuple[object, int, list[int]]:
    lt = loom.tensors.on(procs, "inside")
    x = lt.tensor([1.0, 2.0], requires_grad=True)
    watch = lt.watch(x, "x")
    for _ in range(600):
        y = x * x
    y.sum().backward()
    lt.synchronize()
    return x.grad.tolist(), lt._dispatcher.size, [each.step for each in watch]


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_function_in_the_cluster_has_them_too(job: loom.Job, gpus: int) -> None:
    procs = job.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": gpus}, name="near")
    assert job.run(in_the_cluster, procs) == ([2.0, 4.0], gpus, [1])


async def test_reads_are_awaited(job: loom.Job) -> None:
    lt = job.tensors("awaited")
    x = lt.arange(3)
    assert await x.atolist() == [0, 1, 2]
    assert await x.sum().aitem() == 3
    assert await lt.afetch(x + 1, x * 2) == ([1, 2, 3], [0, 2, 4])


class Victim(loom.Actor):
    @loom.endpoint
    def pid(self) -> int:
        return os.getpid()


def test_a_dead_process_is_said(job: loom.Job) -> None:
    procs = job.hosts.slice(hosts=0).spawn_procs(name="dying")
    lt = loom.tensors.on(procs)
    x = lt.ones(1)
    lt.synchronize()
    os.kill(procs.spawn("victim", Victim).pid.call_one().get(), signal.SIGKILL)
    with pytest.raises(loom.SupervisionError):
        x.item()
    with pytest.raises(loom.SupervisionError):
        x.add(1).item()


def read_for_ever(tensor: loom.tensors.Tensor) -> None:
    while True:
        tensor.tolist()


@pytest.mark.slow
def test_tensors_go_on_after_their_processes_have_died(job: loom.Job) -> None:
    lt = job.tensors("mortal", gpus=2)
    x, w = lt.tensor([[1.0], [2.0]], placements=[Shard(0)]), lt.ones(1, requires_grad=True)
    lt.named["w"] = w
    lt.checkpoint()
    (x * w).sum().backward()
    late = w.grad
    lt.synchronize()
    victims = job.meshes["mortal-processes"].spawn("victims", Victim)
    os.kill(victims.slice(gpus=1).pid.call_one().get(), signal.SIGKILL)
    with pytest.raises(loom.SupervisionError):
        read_for_ever(x)
    lt.restore()
    assert (x.tolist(), x.placements, w.tolist()) == ([[1.0], [2.0]], (Shard(0),), [1.0])
    with pytest.raises(RuntimeError, match="made after the last checkpoint"):
        late.tolist()
    assert list(job.tensors("mortal").named) == ["w"]  # another program would find the new ones
