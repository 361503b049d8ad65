"""The settings of a branch of a job: what it takes over, and what it may change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loom.errors import BranchRefused, NotFound
from loom.train.model import TrainerModel
from loom.train.spec import JobSpec


def store(folder: Path, step: int) -> None:
    """Write what a whole checkpoint looks like from outside."""
    written = folder / f"00000-step-{step}"
    written.mkdir(parents=True)
    (written / "manifest.json").write_text(json.dumps({"step": step}))


def a_job(folder: Path | None, groups: int = 2) -> JobSpec:
    return JobSpec(TrainerModel, groups=groups, checkpoints=None if folder is None else str(folder))


def asked(**more: Any) -> dict[str, Any]:
    told = {"run": "first", "name": "train", "id": "new", "step": 40, "set": {}, "timeline": [], "taken": []}
    return {**told, "known": {"learning_rate": 0.1}, **more}


def change(step: int, **values: Any) -> dict[str, Any]:
    changes = {key: {"old": None, "new": value} for key, value in values.items()}
    return {"do": "update_config", "applied": 1, "step": step, "changes": changes}


def test_a_branch_has_a_name_a_folder_and_the_number_of_groups_of_its_own(tmp_path: Path) -> None:
    store(tmp_path / "kept", 30)
    timeline = [change(10, batch_size=64, groups=3, drain_host=1), change(35, batch_size=8)]

    made = a_job(tmp_path / "kept").branched(asked(set={"learning_rate": "0.5x"}, timeline=timeline))

    assert (made.name, made.groups, made.start_id) == ("train-at-30", 3, "new")
    assert made.checkpoints == str(tmp_path / "kept-branch-new")
    assert made.branch is not None
    assert made.branch.config == {"batch_size": 64, "learning_rate": "0.5x"}
    assert str(made.parent) == "branch:first:30"
    assert made.for_trainers().branch is made.branch
    assert made.branch.without_values().config == {}
    assert list((tmp_path / "kept-branch-new" / "beginning").iterdir())


def test_a_branch_that_cannot_be_is_refused_before_it_leaves_anything(tmp_path: Path) -> None:
    store(tmp_path / "kept", 30)
    job = a_job(tmp_path / "kept")

    for wanted, why in (
        ({"replace": True}, "beside it"),
        ({"set": {"drain_host": 1}}, "set drain_host: the branch of a job changes learning_rate, .* or groups"),
        ({"set": {"groups": "0.5x"}}, "set groups: a number from 1 on"),
    ):
        with pytest.raises(BranchRefused, match=why):
            job.branched(asked(**wanted))
    with pytest.raises(BranchRefused, match="writes no checkpoints"):
        a_job(None).branched(asked())
    with pytest.raises(NotFound, match="no checkpoint at or before step 9"):
        job.branched(asked(step=9))
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]
