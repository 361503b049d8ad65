"""`loom.runs` on the laptop: what it asks for, and what becomes of the answers."""

from __future__ import annotations

import copy
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from loom.errors import BranchRefused
from loom.weaver.run_views import MetricSummary, RunComparison, RunDetails, RunRecord
from loom_proxy.weaver.methods import WeaverMethods
from loom_proxy.weaver.runs import TrainingRun

INFO = RunRecord("abc123", "train", "running", step=5, summary={"loss": MetricSummary(1.0, 0.5, 2.0, 5)}, note="n")
DETAILS = RunDetails(**{**vars(INFO), "config": {"lr": 0.1}}, metrics=("loss",), timeline=({"kind": "started"},))


class Weaver(WeaverMethods):
    """A weaver that has one run, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        super().__init__(self._answer)

    def _answer(self, operation: str, **arguments: Any) -> Any:
        self.asked.append((operation, {name: one for name, one in arguments.items() if one is not None}))
        answers: dict[str, Any] = {
            "runs": [RunRecord(**{**vars(INFO), "left_out": ("config",)}).to_body()],
            "run": DETAILS.to_body(),
            "compare_runs": RunComparison((INFO, INFO), {}, {}, {}, 3).to_body(),
            "run_history": [[1.0, 1, 2.0], [2.0, 2, "NaN"], [3.0, 1, 4.0], [4.0, None, 5.0]],
        }
        return answers.get(operation, RunRecord(**{**vars(INFO), "tags": ("best",)}).to_body())


def test_fields_of_a_list_are_there_and_others_are_asked_for_once() -> None:
    weaver = Weaver()
    (run,) = weaver.runs("tr*", tag="best", limit=5)

    assert weaver.asked == [("runs", {"run": "tr*", "tag": "best", "sort": "-began", "limit": 5})]
    assert (run.id, run.step, run.summary["loss"].min) == ("abc123", 5, 0.5)
    assert len(weaver.asked) == 1
    assert run.config == {"lr": 0.1}  # which the list had left out
    assert run.timeline == ({"kind": "started"},)
    assert [name for name, _ in weaver.asked] == ["runs", "run"]
    assert run.refresh() is run
    assert len(weaver.asked) == 3
    assert {"timeline", "history", "config"} <= set(dir(run))
    assert repr(run) == "<run abc123 'train': running at step 5>"
    with pytest.raises(AttributeError, match="a run has no 'speed'; it has id, name"):
        _ = run.speed
    assert copy.copy(run).id == "abc123"


def test_edits_and_comparisons_name_the_run() -> None:
    weaver = Weaver()
    run = weaver.run("train")
    other = TrainingRun(weaver._ask, RunRecord("def456", "train", "completed"))
    run.set_note("x")
    run.tag("best", remove=["old"])
    run.archive(back=True)
    run.remove()

    assert weaver.asked[1:] == [
        ("note_run", {"run": "abc123", "text": "x"}),
        ("tag_run", {"run": "abc123", "add": ["best"], "remove": ["old"]}),
        ("archive_run", {"run": "abc123", "back": True}),
        ("remove_run", {"run": "abc123"}),
    ]
    assert run.tags == ("best",)
    assert run.compare(other, step=3).step == 3
    assert weaver.asked[-1] == ("compare_runs", {"run": "abc123", "other": "def456", "step": 3})


def test_a_branch_is_the_run_that_the_weaver_answers_with() -> None:
    weaver = Weaver()

    branch = weaver.run("train").branch(step=900, set={"lr": "0.5x"}, replace=True)

    assert weaver.asked[1] == ("branch_run", {"run": "abc123", "step": 900, "set": {"lr": "0.5x"}, "replace": True})
    assert branch.tags == ("best",)


@pytest.mark.parametrize(
    ("state", "host", "refused"),
    [("completed", socket.gethostname(), False), ("completed", "elsewhere", True), ("running", "here", True)],
)
def test_an_ended_run_is_branched_on_its_host_alone(
    state: str, host: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended(Weaver):
        def _answer(self, operation: str, **arguments: Any) -> Any:
            if operation == "branch_run":
                raise BranchRefused("none of its processes lives")
            found = super()._answer(operation, **arguments)
            start = {"host": host, "folder": str(tmp_path)}
            return {**found, "state": state, "start": start} if operation == "run" else found

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        started.append(command[3:])
        failed = "--step" not in command
        return subprocess.CompletedProcess(command, int(failed), '{"run": "def456"}', "error: no checkpoint\n")

    started: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", run)
    weaver = Ended()
    if refused:
        with pytest.raises(BranchRefused, match="none of its processes lives"):
            weaver.run("train").branch()
        return

    weaver.run("train").branch(step=900, set={"lr": "0.5x", "on": True})

    words = ["branch", "abc123", "--detach", "--json", "--step", "900", "--set", "lr=0.5x", "--set", "on=true"]
    assert started == [words]
    assert weaver.asked[-1] == ("run", {"id": "def456"})
    with pytest.raises(BranchRefused, match="no checkpoint"):
        weaver.run("train").branch()


def test_runs_and_curves_become_data_frames() -> None:
    pandas = pytest.importorskip("pandas")
    weaver = Weaver()
    runs = weaver.runs()

    frame = runs.to_pandas()
    curve = runs[0].to_pandas()

    assert list(frame.index) == ["abc123"]
    assert frame.loc["abc123", "summary.loss"] == 1.0
    assert curve["loss"].loc[1] == 4.0  # the last time that the step was made
    assert pandas.isna(curve["loss"].loc[2])
    assert type(runs)().to_pandas().empty
