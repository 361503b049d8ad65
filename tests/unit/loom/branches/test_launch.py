"""The start of a branch in the background, by a process of the run that is branched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loom.branches.launch import Launcher, branch_name, launch, why_ended
from loom.errors import BranchRefused
from tests.unit.loom.branches.test_checkpoints import trainer

WRITES = (
    "import json, os, sys; names = ('LOOM_RUN', 'LOOM_RUN_ID', 'LOOM_RUN_PARENT', 'SECRET', 'RANK');"
    "told = {name: os.environ.get(name) for name in names};"
    "pid, _, folder = os.environ['LOOM_RUN_LAUNCHER'].partition(' ');"
    "assert (int(pid), folder) == (os.getpid(), os.getcwd());"
    "open(sys.argv[1] + '/told', 'w').write(json.dumps(told)); sys.exit('the end')"
)


@pytest.fixture
def above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A stand-in for what ``loom run`` became, of which this process is a rank."""
    command = [sys.executable, "-c", WRITES, "out"]
    monkeypatch.setenv("LOOM_RUN_ID", "first")
    monkeypatch.setenv("LOOM_RUN_COMMAND", json.dumps(command))
    environment = {**os.environ, "SECRET": "known to it"}
    with subprocess.Popen(["sleep", "60"], env=environment) as process:
        monkeypatch.setenv("LOOM_RUN_LAUNCHER", f"{process.pid} {tmp_path}")
        monkeypatch.setenv("RANK", "0")
        trainer(tmp_path / "out", 30)
        yield process
        process.kill()


def params(**more: Any) -> dict[str, Any]:
    told = {
        "run": "first",
        "name": "train",
        "id": "new",
        "step": 40,
        "set": {},
        "timeline": [],
        "known": {},
        "taken": [],
    }
    return {**told, **more}


def test_it_starts_with_the_launchers_environment_and_folder(
    above: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    start, process, log = launch(params(taken=["train-at-30"]), {"checkpoint_folder": str(tmp_path / "out")})

    process.wait(30)
    assert start.branch.step == 30
    assert json.loads((tmp_path / "out-branch-new" / "told").read_text()) == {
        "LOOM_RUN": "train-at-30-2",
        "LOOM_RUN_ID": "new",
        "LOOM_RUN_PARENT": "branch:first:30",
        "SECRET": "known to it",
        "RANK": None,
    }
    assert why_ended(process, log) == f"it ended with exit code 1: the end (see {log})"


def test_in_the_place_of_the_run_it_waits_for_the_launchers_end(
    above: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    start, process, _ = launch(params(replace=True), {"checkpoint_folder": str(tmp_path / "out")})

    assert start.name == "train"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    above.kill()
    above.wait(30)
    assert process.wait(30) == 1
    assert (tmp_path / "out-branch-new" / "told").exists()


def test_a_process_that_does_not_know_its_launcher_refuses(
    above: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.delenv("LOOM_RUN_COMMAND")
        with pytest.raises(BranchRefused, match="was not started by `loom run`"):
            Launcher.of_this_process()
    with monkeypatch.context() as patched:
        patched.setenv("WORLD_SIZE", "4")
        patched.setenv("LOCAL_WORLD_SIZE", "2")
        with pytest.raises(BranchRefused, match="on several hosts"):
            Launcher.of_this_process()
    with monkeypatch.context() as patched:
        patched.setenv("LOOM_RUN_ID", "another")
        with pytest.raises(BranchRefused, match="another one has its number"):
            Launcher.of_this_process()
    above.kill()
    above.wait(30)
    with pytest.raises(BranchRefused, match=f"process {above.pid}, is gone from here"):
        Launcher.of_this_process()


def test_a_branch_gets_a_name_that_no_run_has() -> None:
    assert branch_name("train", 9, []) == "train-at-9"
    assert branch_name("train", 9, ["train-at-9", "train-at-9-3"]) == "train-at-9-2"
    assert branch_name("train", 9, ["train-at-9", "train-at-9-2"]) == "train-at-9-3"
