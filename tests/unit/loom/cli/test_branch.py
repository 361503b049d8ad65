"""``loom branch``: what it refuses and says before anything starts, with a stand-in for the weaver."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loom.cli import branch as command
from loom.control.commands import Acknowledgement
from loom.errors import BranchRefused, NotFound, WrongArguments
from loom.weaver.run_views import RunDetails
from loom.weaver.views import WeaverEvent
from tests.unit.loom.branches.test_checkpoints import trainer


class Weaver:
    """A stand-in for the weaver, with one run."""

    def __init__(self, details: RunDetails, living: tuple[str, ...] = ()) -> None:
        self.details = details
        self.living = living
        self.given: list[tuple[str, list[str]]] = []
        self.ends = True

    def replicas(self) -> dict[str, Any]:
        return {"train_0": SimpleNamespace(handlers={"weight_decay": "float"})}

    def runs(self, run: str | None = None, **_: Any) -> list[Any]:
        return [SimpleNamespace(info=SimpleNamespace(name=name)) for name in self.living]

    def run(self, run: str) -> Any:
        return SimpleNamespace(info=SimpleNamespace(state="running"))

    def status(self) -> dict[str, Any]:
        return {"event": 7}

    def events(self, after: int, follow: bool, kind: str) -> Iterator[WeaverEvent]:
        assert (after, follow) == (7, True)
        for run in ("other", "first"):
            if run == "other" or self.ends:
                yield WeaverEvent(8, 1.0, kind, None, {"run": run, "state": "stopped"})
        threading.Event().wait()  # what comes later is waited for

    def command(self, kind: str, target: list[str]) -> Any:
        self.given.append((kind, target))
        made = Acknowledgement.failed("it saves nothing") if kind == "save" else Acknowledgement(True)
        return SimpleNamespace(get=lambda timeout: {"train_0": made})


def details(folder: Path, **more: Any) -> RunDetails:
    start = {"folder": str(folder), "host": "node7", "command": ["python", "train.py"], **more.pop("start", {})}
    config = {"learning_rate": 0.1, "checkpoint_folder": str(folder / "out")}
    change = {"kind": "command", "do": "update_config", "applied": 1, "step": 10, "changes": {"clip": {"new": 2}}}
    given: dict[str, Any] = {"start": start, "config": config, "timeline": (change,), **more}
    return RunDetails("first", "train", "completed", members=({"replica": "train_0", "state": "running"},), **given)


def plan(parent: RunDetails, **more: Any) -> Any:
    given: dict[str, Any] = {
        "step": None,
        "changes": {},
        "arguments": [],
        "command": [],
        "checkpoints": None,
        **more,
    }
    return command._plan(parent, **given)


def test_it_keeps_what_was_set_and_takes_the_last_checkpoint(tmp_path: Path) -> None:
    for step in (5, 30):
        trainer(tmp_path / "out", step)

    start = plan(details(tmp_path), arguments=["--fast"], changes={"learning_rate": "0.5x"})

    assert start.command == ("python", "train.py", "--fast")
    assert (start.branch.step, start.branch.config) == (30, {"clip": 2, "learning_rate": "0.5x"})
    assert start.branch.known["clip"] == 2
    assert plan(details(tmp_path), step=29).branch.config == {}
    assert plan(details(tmp_path), command=["sh", "x.sh"]).command == ("sh", "x.sh")


def test_runs_that_cannot_start_again_here_are_refused(tmp_path: Path) -> None:
    trainer(tmp_path / "out", 30)
    spawned = {"command": ["python", "-c", "…", "--multiprocessing-fork"]}
    for parent, why in (
        (details(tmp_path, start={"command": []}), "told no command.*after --"),
        (details(tmp_path, start=spawned), "told no command"),
        (details(tmp_path / "missing"), "started on 'node7'.*which is not here.*call `loom branch first` there"),
        (details(tmp_path, start={"command": ["x", "--token=***"]}), "--token is a secret"),
    ):
        with pytest.raises(BranchRefused, match=why):
            plan(parent)
    with pytest.raises(NotFound, match="elsewhere"):
        plan(details(tmp_path), checkpoints=str(tmp_path / "elsewhere"))


def test_a_run_of_a_session_is_branched_there_or_by_the_program_that_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path / "out", 30)
    parent = details(tmp_path / "a folder of its host", session="s")
    parent.config["checkpoint_folder"] = str(tmp_path / "out")
    asked: list[Any] = []

    def branched(*wanted: Any) -> Any:
        asked.append(wanted)
        return SimpleNamespace(id="new", name="train-at-30")

    weaver: Any = Weaver(parent)
    weaver.run = lambda name: SimpleNamespace(branch=branched)

    command._begin_in_session(weaver, parent, 40, {"learning_rate": "0.5x"}, False, True)

    assert asked == [(40, {"learning_rate": "0.5x"}, False)]
    assert json.loads(capsys.readouterr().out) == {"run": "new", "name": "train-at-30", "session": "s"}
    again = plan(parent, command=["python", "program.py"])
    assert (again.command, again.folder) == (("python", "program.py"), os.getcwd())


def test_only_keys_that_the_run_has_are_set(tmp_path: Path) -> None:
    parent = details(tmp_path)
    weaver: Any = Weaver(parent)

    command._check_keys(weaver, parent, {"learning_rate": 1, "weight_decay": 1, "clip": 1})
    with pytest.raises(WrongArguments, match=r"set lerning: run 'first' has no such key; it has .*weight_decay"):
        command._check_keys(weaver, parent, {"lerning": 1})


def test_its_name_is_no_other_runs(tmp_path: Path) -> None:
    trainer(tmp_path / "out", 30)
    parent = details(tmp_path)
    weaver: Any = Weaver(parent, ("train-at-30", "train"))

    def named(name: str | None, replaces: bool) -> str:
        return str(command._named(weaver, parent, plan(parent), name, replaces).name)

    assert named(None, False) == "train-at-30-2"
    assert named(None, True) == named("train", True) == "train"
    assert named("half", False) == "half"
    with pytest.raises(BranchRefused, match="a run named 'train' lives"):
        named("train", False)


def test_a_second_host_joins_the_branch_that_the_first_one_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(tmp_path / "out", 30)
    parent = details(tmp_path)
    weaver: Any = Weaver(parent, ("train-at-30",))
    monkeypatch.setenv("LOOM_RUN_ID", "both")

    def run(id: str) -> Any:
        if id != "both":
            raise NotFound(id)
        return SimpleNamespace(info=SimpleNamespace(name="train-at-30"))

    weaver.run = run
    start = plan(parent)
    assert (start.id, command._named(weaver, parent, start, None, False).name) == ("both", "train-at-30")
    monkeypatch.setenv("LOOM_RUN_ID", "first")  # that of the run itself, as in one of its processes
    assert plan(parent).id != "first"


def test_other_code_than_the_runs_is_said(tmp_path: Path) -> None:
    trainer(tmp_path / "out", 30)

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def told(**start: Any) -> list[str]:
        parent = details(tmp_path, start=start)
        return command._code_differences(parent, plan(parent))

    (tmp_path / "train.py").write_text("1")
    git("init", "-q")
    git("add", "train.py")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")

    assert told() == told(commit=commit, clean=True) == []
    (tmp_path / "train.py").write_text("2")
    assert told(commit=commit, clean=False) == [
        "the run began with changes that no commit has",
        "files differ from the commit now",
    ]
    git("commit", "-qam", "second")
    assert told(commit=commit, clean=True) == [
        f"the code is at commit {git('rev-parse', 'HEAD')[:12]}, and was at {commit[:12]}"
    ]


def test_the_run_saves_and_ends_before_another_takes_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = details(tmp_path)
    weaver: Any = Weaver(parent)

    command._end(weaver, parent, 5)

    assert weaver.given == [("save", ["train_0"]), ("stop", ["train_0"])]
    told = capsys.readouterr().err
    assert "train saves no checkpoint before it stops: train_0: it saves nothing" in told
    assert "train first has ended: stopped" in told
    weaver.ends = False
    with pytest.raises(BranchRefused, match="has not ended in 0 s: nothing was started"):
        command._end(weaver, parent, 0)


def test_a_branch_in_the_background_that_ends_before_it_registers_is_refused_at_once(tmp_path: Path) -> None:
    trainer(tmp_path / "out", 30)
    parent = details(tmp_path)
    weaver: Any = Weaver(parent)
    weaver.ends = False
    start = plan(parent, command=["sh", "-c", "echo no such option; exit 3"])

    with pytest.raises(BranchRefused, match="it ended with exit code 3: no such option"):
        command._begin(weaver, start, {}, False)


def test_a_dry_run_tells_what_it_would_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path / "out", 30)
    parent = details(tmp_path, start={"command": ["python", "train.py", "--api-key=x"]})
    start = plan(parent, changes={"learning_rate": "0.5x"}).with_name("half")

    command._show(parent, start, {"learning_rate": "0.5x"}, False, False)
    text = capsys.readouterr().out
    command._show(parent, start, {"learning_rate": "0.5x"}, True, True)

    assert "would start half from step 30 of train first, beside it" in text
    assert "--api-key=***" in text
    assert '  learning_rate = "0.5x" of its value there\n' in text
    assert "  clip = 2, as it was set in the run\n" in text
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["replace"], told["kept"]) == (30, True, {"clip": 2})
    assert not list(tmp_path.glob("out-branch-*"))
