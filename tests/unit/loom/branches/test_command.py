"""The command of a run, made ready to start again."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from loom.branches.branch import BRANCH_VARIABLE, Branch
from loom.branches.command import BranchStart, branch_start, checkpoint_folders, completed
from loom.errors import BranchRefused, NotFound
from tests.unit.loom.branches.test_checkpoints import distributed, trainer


def start(tmp_path: Path, *command: str, step: int | None = None, folder: str = "out") -> BranchStart:
    unplaced = Branch("first", 0, "", "", "")
    return branch_start(unplaced, command, str(tmp_path), "half", "new", step, [str(tmp_path / folder)])


def test_secrets_come_from_arguments_and_variables() -> None:
    told = ["env", "API_KEY=***", "train.py", "--hf_token", "***", "--wandb-key=***", "--lr=1"]

    made = completed(told, ["--hf_token=a", "API_KEY=b"], {"WANDB_KEY": "c", "HF_TOKEN": "not asked"})

    assert made == ["env", "API_KEY=b", "train.py", "--hf_token", "a", "--wandb-key=c", "--lr=1"]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            ["train.py", "--hf_token", "***"],
            r"--hf_token is a secret.*--argument '--hf_token=…', or as the variable HF_T",
        ),
        (["API_KEY=***"], "API_KEY is a secret"),
        (["train.py", "https://***@host/data"], "argument 1, .* has a secret.*give the whole command, after --"),
        (["train.py", "***"], "argument 1"),
    ],
)
def test_a_secret_that_is_not_given_is_refused_by_name(told: list[str], said: str) -> None:
    with pytest.raises(BranchRefused, match=said):
        completed(told, (), {})


def test_arguments_take_the_place_of_those_with_their_names() -> None:
    told = ["train.py", "--lr", "1", "--fast", "--size=2", "--deep", "--", "--lr=9"]

    made = completed(told, ["--lr=3", "--fast", "--size=4", "--deep=5", "--new=6", "--flag"], {})

    assert made == ["train.py", "--lr", "3", "--fast", "--size=4", "--deep=5", "--", "--lr=9", "--new=6", "--flag"]


def test_the_run_tells_its_folder_or_its_options_do(tmp_path: Path) -> None:
    for name in ("out", "data", "ckpt"):
        (tmp_path / name).mkdir()
    command = ["python", "train.py", "ckpt", "--output_dir", "out", "--data_dir=data", "--save-dir=missing"]

    assert checkpoint_folders({"checkpoint_folder": "/told"}, command, str(tmp_path)) == ["/told"]
    assert checkpoint_folders({}, command, str(tmp_path)) == [str(tmp_path / "ckpt"), str(tmp_path / "out")]


def test_a_command_that_names_the_folder_or_a_checkpoint_names_the_branchs(tmp_path: Path) -> None:
    for step in (300, 600):
        trainer(tmp_path / "out", step)
    own = str(tmp_path / "out-branch-new")
    command = ["train.py", "--output_dir=out", "--resume", "out/checkpoint-600", "--final", "out/final"]

    made = start(tmp_path, *command, step=599)

    chosen = str(tmp_path / "out" / "checkpoint-300")
    assert made.command == ("train.py", f"--output_dir={own}", "--resume", chosen, "--final", "out/final")
    assert (made.branch.step, made.branch.checkpoint, made.branch.own, made.branch.given) == (
        300,
        chosen,
        own,
        True,
    )
    assert not start(tmp_path, "train.py", "--output_dir=out").branch.given
    filled = start(tmp_path, "train.py", "--from={checkpoint}", "--first={step}", "--to={folder}")
    assert filled.command[2:] == ("--first=600", f"--to={own}")
    with pytest.raises(NotFound):
        start(tmp_path, "train.py", step=1)


def test_the_branch_keeps_the_files_of_its_checkpoint_and_the_run_keeps_its_own(tmp_path: Path) -> None:
    path = distributed(tmp_path / "out", "step-30")
    (path / "rank").mkdir()
    (path / "rank" / "tensors").write_bytes(b"weights")

    made = start(tmp_path, "train.py", "--resume={checkpoint}").prepare()
    again = start(tmp_path, "train.py", "--resume={checkpoint}").prepare()  # another node of the job

    kept = tmp_path / "out-branch-new" / "beginning" / "step-30"
    assert made.branch.checkpoint == again.branch.checkpoint == str(kept)
    assert made.command == ("train.py", f"--resume={kept}")
    assert os.path.samefile(tmp_path / "out-branch-new" / "step-30", kept)  # where a script looks for it
    for child in ("rank/tensors", ".metadata"):
        (path / child).unlink()
    assert (kept / "rank" / "tensors").read_bytes() == b"weights"


def test_a_run_that_keeps_its_checkpoints_where_it_starts_has_its_branches_in_there(tmp_path: Path) -> None:
    trainer(tmp_path, 30)

    made = start(tmp_path, "train.py", folder=".")

    branch = made.branch
    assert branch.own == str(tmp_path / "branch-new")
    assert branch.redirected(str(tmp_path)) == branch.own
    assert branch.redirected(str(tmp_path / "final")) == str(tmp_path / "branch-new" / "final")
    assert branch.redirected(f"{branch.own}/final") == f"{branch.own}/final"
    assert branch.redirected("/elsewhere") == "/elsewhere"


def test_its_processes_know_what_they_are(tmp_path: Path) -> None:
    trainer(tmp_path / "out", 30)

    made = start(tmp_path, "train.py").with_values({"clip": 1}, {"clip": 1, "rate": 2}).variables()

    assert (made["LOOM_RUN_ID"], made["LOOM_RUN_PARENT"]) == ("new", "branch:first:30")
    assert json.loads(made["LOOM_RUN_COMMAND"]) == ["train.py"]
    assert Branch.read(made[BRANCH_VARIABLE]).config == {"clip": 1}


def test_a_folder_that_cannot_be_made_refuses_the_branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer(tmp_path / "out", 30)
    made = start(tmp_path, "train.py")

    def is_read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", is_read_only)
    with pytest.raises(BranchRefused, match="out-branch-new' cannot be made: Read-only file system"):
        made.prepare()
