"""Lazy tensors that go on in other processes, from a checkpoint."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

import loom
from loom.tensors import Shard
from loom.tensors.tensors import Tensors
from tests.support.near_tensors import NearWorker, NearWorkers


@pytest.fixture
def lt() -> Tensors:
    return Tensors(NearWorker(), lambda procs: NearWorker())


def test_every_tensor_is_what_it_was(lt: Tensors, tmp_path: Path) -> None:
    w = lt.tensor([1.0, 2.0], requires_grad=True)
    view = w.detach()[1:]
    old = lt.ones(3)
    assert lt.checkpoint(str(tmp_path)) > 0
    del old
    with lt.no_grad():
        w += 10.0
    assert w.tolist() == [11.0, 12.0]
    late = w.detach() * 2.0
    lt.restore()
    assert repr(w) == "tensor(shape=[2], dtype=float32, requires_grad=True)"  # not the elements of before
    assert (w.tolist(), view.tolist()) == ([1.0, 2.0], [2.0])
    with pytest.raises(RuntimeError, match="made after the last checkpoint") as caught:
        (late + w.detach()).tolist()
    assert isinstance(caught.value, loom.OperationFailed)
    view.mul_(5.0)  # it still is a view
    assert w.tolist() == [1.0, 10.0]
    del late, caught
    lt.synchronize()
    assert len(lt._dispatcher._workers.values.tensors) == 3  # a view keeps what it is a view of


def test_training_goes_on_from_there_as_it_did(lt: Tensors, tmp_path: Path) -> None:
    lt.seed(1)
    x, w = lt.rand(8, 4), lt.rand(4, 1, requires_grad=True)
    optimizer = lt.optim.SGD([w], lr=0.1, momentum=0.9)

    @lt.compile
    def doubled(tensor: Any) -> Any:
        return tensor * 2.0

    def step() -> float:
        loss = ((doubled(x) + 0.1 * lt.randn(8, 4)) @ w).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss)

    for _ in range(5):
        step()
    lt.checkpoint(str(tmp_path))
    first = [step() for _ in range(4)]
    lt.restore()
    assert [step() for _ in range(4)] == first


def test_names_come_along(lt: Tensors, tmp_path: Path) -> None:
    lt.named["w"] = lt.tensor([3.0])
    lt.checkpoint(str(tmp_path))
    lt.restore()
    values = lt._dispatcher._workers.values
    assert {name: tensor.tolist() for name, (tensor, _) in values.kept.items()} == {"w": [3.0]}


def test_what_has_failed_stays_failed(lt: Tensors, tmp_path: Path) -> None:
    bad = lt.call("linalg.cholesky", lt.zeros(2, 2))
    lt.checkpoint(str(tmp_path))
    lt.restore()
    with pytest.raises(RuntimeError, match="cholesky"):
        bad.tolist()


def test_the_last_checkpoint_stays_until_the_next_is_whole(lt: Tensors, tmp_path: Path) -> None:
    w = lt.ones(1)
    for _ in range(4):
        w = w + 1.0
        lt.checkpoint(str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2
    w.add_(1.0)
    unwritable = tmp_path / "file"
    unwritable.write_text("")
    with pytest.raises(OSError, match="the tensors were not saved: process 0"):
        lt.checkpoint(str(unwritable))
    lt.restore()
    assert w.tolist() == [5.0]


def test_a_checkpoint_that_is_not_there_is_named(lt: Tensors, tmp_path: Path) -> None:
    with pytest.raises(loom.Invalid, match=r"call checkpoint\(\)"):
        lt.restore()
    lt.checkpoint(str(tmp_path))
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.raises(loom.Invalid, match=r"process 0: its host has no checkpoint .*path that the hosts"):
        lt.restore()


def test_processes_of_another_number_are_refused(tmp_path: Path) -> None:
    with NearWorkers({"gpus": 2}) as others:
        lt = Tensors(NearWorker(), lambda procs: others)
        lt.ones(1)
        lt.checkpoint(str(tmp_path))
        with pytest.raises(loom.Invalid, match=r"'gpus': 2.*not .*'gpus': 1"):
            lt.restore()


def test_the_files_of_a_host_are_its_users_own(
    lt: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    w = lt.ones(1)
    lt.checkpoint()
    (folder,) = tmp_path.iterdir()
    assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o700, os.getuid())
    lt.restore()
    assert w.tolist() == [1.0]


def test_tensors_that_are_spread_are_restored(tmp_path: Path) -> None:
    data = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    with contextlib.ExitStack() as stack:
        meshes = [stack.enter_context(NearWorkers({"gpus": 2})) for _ in range(2)]
        lt = Tensors(meshes.pop(), lambda procs: meshes.pop())
        w = lt.tensor(data, placements=[Shard(0)])
        whole, view = lt.ones(2), w[0]
        lt.checkpoint(str(tmp_path))
        names = sorted(each.name.partition("-")[2] for each in tmp_path.iterdir())
        assert names == ["part-0.pt", "part-1.pt", "whole.pt"]
        w.mul_(2.0)
        lt.restore()
        assert (w.tolist(), w.placements, whole.tolist()) == (data, (Shard(0),), [1.0] * 2)
        assert (w @ w.t()).sum().item() == 225.0
        with pytest.raises(RuntimeError, match="a view of a tensor that is spread is in no checkpoint"):
            view.tolist()


def test_leaves_keep_their_gradients_and_graphs_are_lost(lt: Tensors, tmp_path: Path) -> None:
    w = lt.tensor([1.0, 2.0], requires_grad=True)
    (w * w).sum().backward()
    loss = (w * 3).sum()
    lt.checkpoint(str(tmp_path))
    lt.restore()
    assert (w.grad.tolist(), loss.item()) == ([2.0, 4.0], 9.0)
    (w * w).sum().backward()
    assert w.grad.tolist() == [4.0, 8.0]
    loss.backward()
    with pytest.raises(RuntimeError, match="graph of a tensor was lost"):
        w.grad.tolist()


def test_hooks_are_there_again(lt: Tensors, tmp_path: Path) -> None:
    w = lt.tensor([1.0, 2.0], requires_grad=True)
    w.register_hook(lambda grad: grad * 10)
    lt.checkpoint(str(tmp_path))
    lt.restore()
    (w * 2).sum().backward()
    assert w.grad.tolist() == [20.0, 20.0]
