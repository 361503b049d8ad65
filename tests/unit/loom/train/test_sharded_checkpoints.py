"""Checkpoints of tensors that several processes share, and folders that torch's own programs have written."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as save_by_torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from loom.errors import CheckpointBroken, CheckpointNotWritten, WrongArguments
from loom.process.listen import free_ports
from loom.train import CheckpointStore
from loom.train.checkpoints import store as module
from loom.train.loop.loop import Checkpointing
from tests.unit.loom.train.test_live_settings import Line, state_of

BOUND = 60.0
WHOLE = torch.arange(12.0).reshape(6, 2)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def shared(mesh: DeviceMesh, value: torch.Tensor = WHOLE) -> DTensor:
    return distribute_tensor(value.clone(), mesh, [Shard(0)])


def test_what_is_shared_is_read_as_a_whole_and_into_parts(mesh: DeviceMesh, tmp_path: Path) -> None:
    state = {"model": {"weight": shared(mesh)}, "own": torch.ones(2), "step": 3, "pair": (1, 2)}

    found = CheckpointStore(tmp_path).save(state, 3).wait(BOUND)

    whole = found.load()
    assert torch.equal(whole["model"]["weight"], WHOLE)
    assert torch.equal(whole["own"], torch.ones(2))
    assert (whole["step"], whole["pair"]) == (3, (1, 2))

    def place(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        like = state["model"]["weight"]  # type: ignore[index]
        return torch.empty_like(like) if name == "model.weight" else torch.empty(shape, dtype=dtype)

    parts = found.load(place)["model"]["weight"]
    assert isinstance(parts, DTensor)
    assert torch.equal(parts.to_local(), WHOLE)
    newest = CheckpointStore(tmp_path).newest()
    assert newest is not None
    assert newest.path == found.path


def test_a_shared_state_may_be_changed_as_soon_as_save_returns(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = shared(mesh)

    pending = CheckpointStore(tmp_path).save({"weight": weight}, 0)
    weight.to_local().zero_()

    assert torch.equal(pending.wait(BOUND).load()["weight"], WHOLE)


@pytest.mark.parametrize("fails", ["save_tensors", "CheckpointManifest"])
def test_a_failure_is_told_and_the_next_one_is_written(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    store = CheckpointStore(tmp_path)

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(module, fails, fail if fails == "save_tensors" else type("Full", (), {"write": fail}))
        with pytest.raises(CheckpointNotWritten, match="No space left"):
            store.save({"weight": shared(mesh)}, 1).wait(BOUND)

    store.save({"weight": shared(mesh)}, 2).wait(BOUND)
    assert [path.name for path in tmp_path.iterdir()] == ["000001-step-2"]


def save_plainly(folder: Path, state: dict[str, Any]) -> Path:
    save_by_torch(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


def test_a_folder_that_torch_has_written_is_found_and_read(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "train": {"step": 20, "tag": "a"}}
    for step in (10, 20):
        save_plainly(tmp_path / f"step-{step}", state)

    found = CheckpointStore(tmp_path).newest()

    assert found is not None
    assert (found.step, found.path.name, found.foreign) == (20, "step-20", True)
    loaded = found.load()
    torch.testing.assert_close(loaded["model"], dict(state["model"]), rtol=0, atol=0)
    torch.testing.assert_close(loaded["optimizer"]["state"]["0"], state["optimizer"]["state"][0], rtol=0, atol=0)
    assert loaded["train"] == {"step": 20, "tag": "a"}
    alone = CheckpointStore(tmp_path / "step-10").newest()
    assert alone is not None
    assert (alone.step, alone.path.name) == (10, "step-10")


def test_a_folder_of_torchs_that_lacks_a_part_is_passed_over(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_plainly(tmp_path / f"step-{step}", {"weight": WHOLE})
    (tmp_path / "step-30" / "__0_0.distcp").unlink()
    short = tmp_path / "step-20" / "__0_0.distcp"
    short.write_bytes(short.read_bytes()[:-50])

    found = CheckpointStore(tmp_path).newest()

    assert found is not None
    assert found.step == 10
    assert "is missing" in found.skipped[0].reason
    assert "bytes instead of" in found.skipped[1].reason


def test_loom_own_checkpoints_come_before_those_of_others(tmp_path: Path) -> None:
    save_plainly(tmp_path / "step-99", {"weight": WHOLE})
    store = CheckpointStore(tmp_path)
    store.save({"weight": WHOLE}, 1).wait(BOUND)

    found = store.newest()

    assert found is not None
    assert (found.step, found.foreign) == (1, False)


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harmed",)


def test_an_object_in_a_folder_of_torchs_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = save_plainly(tmp_path / "step-1", {"weight": WHOLE, "harm": Harmful()})
    found = CheckpointStore(folder).newest()
    assert found is not None

    with pytest.raises(CheckpointBroken, match="harm is an object, not read because it could run code"):
        found.load()

    assert not (tmp_path / "harmed").exists()


def test_a_training_begins_with_the_weights_of_another_program(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    save_plainly(tmp_path / "step-7", {"model": model.state_dict()})
    state = state_of(Line())
    state.job = type(state.job)(**{**vars(state.job), "checkpoints": str(tmp_path)})

    Checkpointing(state).restore()

    torch.testing.assert_close(dict(state.model.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    assert state.report.restored == "the weights of step-7, which another program has written"
    assert state.report.step == 0


def test_the_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    save_plainly(tmp_path / "step-7", {"model": {"other": WHOLE}})
    state = state_of(Line())
    state.job = type(state.job)(**{**vars(state.job), "checkpoints": str(tmp_path)})

    with pytest.raises(WrongArguments, match=r"of another model: it lacks .*'weight'\], and has \['other'\]"):
        Checkpointing(state).restore()


MEMBER = """
import sys
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from loom.train import CheckpointStore

rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = distributed.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
torch.manual_seed(0)
model = fully_shard(torch.nn.Linear(4, 6), mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
states = CheckpointStore(folder)
pending = [states.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step) for step in (0, 1)]
found = [one.wait(60) for one in pending][-1]

learned = list(model.parameters())
def place(name, shape, dtype):
    like = model.state_dict().get(name.removeprefix("model.")) if name.startswith("model.") else None
    if name.startswith("optimizer.state."):
        like = learned[int(name.split(".")[2])]
    shared = like is not None and like.shape == shape
    return torch.empty_like(like.detach()) if shared else torch.empty(shape, dtype=dtype)

parts, whole = found.load(place), found.load()
for name, one in model.state_dict().items():
    assert torch.equal(parts["model"][name].to_local(), one.to_local())
    assert torch.equal(whole["model"][name], one.full_tensor())
mean = optimizer.state_dict()["state"][0]["exp_avg"]
assert torch.equal(parts["optimizer"]["state"][0]["exp_avg"].to_local(), mean.to_local())
assert torch.equal(whole["optimizer"]["state"][0]["exp_avg"], mean.full_tensor())
distributed.barrier()
distributed.destroy_process_group()
print("same", len(list(found.path.glob("*.distcp"))))
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_processes_write_their_parts_and_read_them(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    commands = [[sys.executable, "-c", MEMBER, str(rank), str(port), str(tmp_path)] for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        run = functools.partial(subprocess.run, capture_output=True, text=True, timeout=200, check=False)
        done = list(pool.map(run, commands))

    assert [one.stdout.split() for one in done] == [["same", "2"]] * 2, [one.stderr for one in done]
