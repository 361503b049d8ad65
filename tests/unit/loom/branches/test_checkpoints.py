"""The checkpoints of each layout, as they lie on the disk."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from loom.branches.checkpoints import CheckpointLayout, checkpoints_in, choose, part_of_checkpoint
from loom.errors import NotFound


def trainer(folder: Path, step: int) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return path


def distributed(folder: Path, name: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / ".metadata").write_bytes(b"")
    return folder / name


def steps(folder: Path) -> list[tuple[int, CheckpointLayout]]:
    return [(one.step, one.layout) for one in checkpoints_in(folder)]


def test_those_of_the_trainer_are_whole_with_their_state(tmp_path: Path) -> None:
    trainer(tmp_path, 900)
    trainer(tmp_path, 1000)
    (tmp_path / "checkpoint-1100").mkdir()
    (trainer(tmp_path, 1200) / "trainer_state.json").write_text("{")

    assert steps(tmp_path) == [(900, CheckpointLayout.TRAINER), (1000, CheckpointLayout.TRAINER)]


def test_those_of_lightning_name_their_step_inside(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()

    def save(path: Path, step: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "callbacks": {"x": OrderedDict(path=Path("a"))},
            "state_dict": model.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        torch.save({**state, "global_step": step, "device": torch.device("cpu"), "type": torch.float32}, path)

    save(tmp_path / "lightning_logs" / "version_0" / "checkpoints" / "epoch=1-step=40.ckpt", 40)
    save(tmp_path / "last.ckpt", 50)
    (tmp_path / "epoch=2-step=60.ckpt").mkdir()  # of several processes
    (tmp_path / "cut.ckpt").write_bytes(b"PK")

    assert [step for step, layout in steps(tmp_path) if layout is CheckpointLayout.LIGHTNING] == [40, 50, 60]


def test_reading_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"evil": Evil(), "global_step": 3}, tmp_path / "a.ckpt")

    assert [step for step, _ in steps(tmp_path)] == [3]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "step"),
    [("step-900", 900), ("step_0900", 900), ("900", 900), ("epoch1-step900", 900), ("it1_900", 900)],
)
def test_those_of_distributed_checkpoints_have_the_step_in_the_name(tmp_path: Path, name: str, step: int) -> None:
    distributed(tmp_path, name)
    (tmp_path / "step-1000").mkdir()  # is being written

    assert steps(tmp_path) == [(step, CheckpointLayout.DISTRIBUTED)]


def test_distributed_checkpoints_that_belong_together_are_one(tmp_path: Path) -> None:
    for part in ("model", "optimizer_0"):
        distributed(tmp_path / "step_40", part)

    distributed(tmp_path / "ckpt-2", "step-50")  # a folder of checkpoints, and none itself

    assert steps(tmp_path) == [(40, CheckpointLayout.DISTRIBUTED), (50, CheckpointLayout.DISTRIBUTED)]
    assert steps(tmp_path / "ckpt-2") == [(50, CheckpointLayout.DISTRIBUTED)]
    assert part_of_checkpoint(str(tmp_path / "step_40" / "model")) == "model"
    assert part_of_checkpoint(str(tmp_path / "step_40")) == part_of_checkpoint(str(tmp_path / "missing")) == ""


def test_those_of_a_store_are_listed_by_their_manifests(tmp_path: Path) -> None:
    store = pytest.importorskip("loom.train.checkpoints.store").CheckpointStore(tmp_path)
    for step in (900, 1000):
        store.save({"step": step}, step).wait()

    assert steps(tmp_path) == [(900, CheckpointLayout.STORE), (1000, CheckpointLayout.STORE)]


def test_the_last_one_at_or_before_the_step_is_chosen(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for step in (300, 600):
        trainer(first, step)
    trainer(second, 900)
    folders = [str(first), str(second)]

    assert choose(folders, 899, "r")[0].step == 600
    assert choose(folders, 900, "r") == (checkpoints_in(second)[0], str(second))
    assert choose(folders, None, "r")[0].step == 900


def test_without_one_the_error_lists_those_that_there_are(tmp_path: Path) -> None:
    for step in (300, 1600):
        trainer(tmp_path, step)

    with pytest.raises(NotFound, match=r"at or before step 299: there are those of steps 300, 1,600 in "):
        choose([str(tmp_path)], 299, "r")
    with pytest.raises(NotFound, match="there is none in no folder"):
        choose([], None, "r")
