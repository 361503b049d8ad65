"""The facts of a run's start: what is told, what is hidden, and that nothing of it harms the training."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from loom.control.frame import Frame
from loom.control.run_start import MAX_FACTS, StartFacts
from loom.threadlet import start_facts
from loom.threadlet.start_facts import HIDDEN, bounded, gather, own_start, tell, without_secrets


@pytest.mark.parametrize(
    ("argument", "hidden"),
    [
        ("--api-key=abc", "--api-key=***"),
        ("--hf_token abc", "--hf_token ***"),
        ("--password --verbose", "--password --verbose"),
        ("WANDB_API_KEY=abc", "WANDB_API_KEY=***"),
        ("postgres://ann:secret@db/runs", "postgres://***@db/runs"),
        ("hf_abcdefghijkl", HIDDEN),
        ("--url=https://h/?key=sk-abcdefghijkl", "--url=https://h/?key=***"),
    ],
)
def test_values_that_look_like_secrets_are_hidden(argument: str, hidden: str) -> None:
    assert without_secrets(["python", *argument.split(), "train.py"]) == ["python", *hidden.split(), "train.py"]


@pytest.mark.parametrize(
    "argument",
    ["--tokenizer gpt2", "--max_new_tokens 5", "--pad_token <pad>", "--eos-token=</s>", "--author ann", "lr=0.1"],
)
def test_other_values_are_told(argument: str) -> None:
    assert without_secrets(argument.split()) == argument.split()


@pytest.mark.parametrize("module", ["loom_gateway.driver", "monarch._src.actor.bootstrap_main"])
def test_the_command_of_a_session_is_not_told(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the cluster's: it names sockets and workers, and nothing that the user has written."""
    monkeypatch.delenv("LOOM_RUN_COMMAND", raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", module, "--socket", "/run/driver.sock"])
    assert "command" not in gather("host", [])
    monkeypatch.setenv("LOOM_RUN_COMMAND", '["python", "train.py"]')
    assert gather("host", [])["command"] == ["python", "train.py"]


def test_the_id_of_a_start_is_that_of_loom_run_or_of_a_step_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOM_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PTY_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert own_start() is None
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert own_start() is None  # several starts may be within a job
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert own_start() == "slurm-12-0"
    monkeypatch.setenv("SLURM_PTY_PORT", "1234")
    assert own_start() is None
    monkeypatch.delenv("SLURM_PTY_PORT")
    monkeypatch.setenv("SLURM_STEP_ID", "4294967291")  # a batch script
    assert own_start() is None
    monkeypatch.setenv("LOOM_RUN_ID", "my run!")
    assert own_start() == "my_run_"


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=ann", "-c", "user.email=ann@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


def code_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(folder / "train.py"), raising=False)
    facts = gather("host", [])
    return facts.get("commit"), facts.get("clean")


def test_the_commit_of_the_program_is_told_and_whether_its_files_are_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert code_of(tmp_path, monkeypatch) == (None, None)
    git(tmp_path, "init")
    assert code_of(tmp_path, monkeypatch) == (None, None)
    (tmp_path / "train.py").write_text("1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    commit, clean = code_of(tmp_path, monkeypatch)
    (tmp_path / "untracked").touch()
    untracked = code_of(tmp_path, monkeypatch)
    (tmp_path / "train.py").write_text("2\n")

    assert len(commit) == 40
    assert clean is True
    assert untracked == (commit, True)
    assert code_of(tmp_path, monkeypatch) == (commit, False)


def test_a_repository_runs_no_program_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init")
    (tmp_path / "train.py").write_text("1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    git(tmp_path, "config", "core.fsmonitor", f"touch {tmp_path / 'ran'}; true")

    code_of(tmp_path, monkeypatch)

    assert not (tmp_path / "ran").exists()


def test_a_git_that_hangs_or_is_missing_leaves_the_code_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\nsleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setattr(start_facts, "GIT_WITHIN", 0.1)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert "commit" not in gather("host", [])
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert "commit" not in gather("host", [])


def test_the_command_of_loom_run_goes_before_the_process_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOOM_RUN_COMMAND", raising=False)
    assert gather("host", [])["command"] == without_secrets(sys.orig_argv)
    for garbage in ("", "{", "5"):
        monkeypatch.setenv("LOOM_RUN_COMMAND", garbage)
        assert gather("host", [])["command"] == without_secrets(sys.orig_argv)
    monkeypatch.setenv("LOOM_RUN_COMMAND", json.dumps(["torchrun", "--api-key", "x"]))
    assert gather("host", [])["command"] == ["torchrun", "--api-key", HIDDEN]


def test_the_tree_of_a_synced_folder_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/cache/trees/" + "a1" * 32 + "/src"])
    assert gather("host", [])["tree"] == "a1" * 32


def test_facts_that_are_too_large_are_cut_or_left_out() -> None:
    facts = bounded({"folder": "x" * 9000, "command": ["y" * 9000] * 5000, "host": "h", "clean": True})

    assert facts["folder"] == "x" * 4096
    assert "command" not in facts
    assert StartFacts.from_body(StartFacts(facts).to_body()).facts == facts
    assert len(StartFacts(facts).to_body()[1]) < MAX_FACTS


def test_they_are_told_from_a_thread_of_their_own_and_errors_stay_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told, came = [], threading.Event()

    def send(frame: Frame) -> None:
        told.append((frame, threading.current_thread().name))
        came.set()

    tell(send, "host", ["H100"])
    assert came.wait(30)
    ((frame, name),) = told
    assert isinstance(frame, StartFacts)
    assert frame.facts["gpus"] == ["H100"]
    assert name == "loom-start"

    monkeypatch.setattr(start_facts, "gather", lambda *_: 1 / 0)
    tell(send, "host", [])
    for thread in threading.enumerate():
        if thread.name == "loom-start":
            thread.join(30)
    assert "cannot be described" in caplog.text
    assert len(told) == 1


def test_code_that_was_brought_has_the_facts_of_where_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"commit": "c0ffee", "clean": False, "tree": "0" * 64, "other": 1}
    monkeypatch.setenv("LOOM_RUN_CODE", json.dumps(told))
    facts = gather("host", [])
    assert (facts["commit"], facts["clean"], facts["tree"], "other" in facts) == ("c0ffee", False, "0" * 64, False)
    for garbage in ("", "[1]", "{"):
        monkeypatch.setenv("LOOM_RUN_CODE", garbage)
        assert gather("host", []).get("commit") != "c0ffee"
