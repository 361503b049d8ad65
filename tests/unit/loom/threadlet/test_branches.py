"""A process of a branch: it takes the branch's values before its first step, by a command that the weaver knows."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from loom.branches import launch
from loom.branches.branch import BRANCH_VARIABLE, Branch, own_branch
from loom.branches.checkpoints import CheckpointLayout
from loom.branches.command import BranchStart
from tests.unit.loom.threadlet.fake_weaver import FakeWeaver, Make


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The variables of a branch with half the rate."""
    branch = Branch("first", 900, "/c/900", "/c", "/own", kept={"clip": 2.0}, changes={"learning_rate": "0.5x"})
    monkeypatch.setenv(BRANCH_VARIABLE, branch.to_text())
    monkeypatch.setenv("LOOM_RUN_PARENT", "branch:first:900")
    own_branch.cache_clear()
    yield
    own_branch.cache_clear()


@pytest.mark.usefixtures("half")
def test_values_apply_before_the_first_step_without_the_weaver(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet(config={"learning_rate": 0.2, "clip": 1.0}, run="second")
    got: list[tuple[str, float]] = []
    made.handler("learning_rate")(lambda value: got.append(("learning_rate", value)))
    made.handler("clip")(lambda value: got.append(("clip", value)))

    with made.step(901):
        assert sorted(got) == [("clip", 2.0), ("learning_rate", 0.1)]

    connection, hello = weaver.welcome()
    assert (hello["parent"], hello["start"]) == ("branch:first:900", "second")
    assert hello["branch_config"] == {"clip": 2.0, "learning_rate": "0.5x"}
    connection.send("command", "branch-second", "update_config", hello["branch_config"])
    step, made_of_it = connection.ack("branch-second")
    assert step == 901
    assert made_of_it["ok"]
    assert made_of_it["changes"] == {"clip": {"old": 1.0, "new": 2.0}, "learning_rate": {"old": 0.2, "new": 0.1}}
    assert len(got) == 2


@pytest.mark.usefixtures("half")
def test_a_program_that_asks_for_updates_gets_resolved_values(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet(config={"learning_rate": 0.2}, run="second")

    update = made.get_config_update()

    assert update is not None
    assert update["params"] == {"clip": 2.0, "learning_rate": 0.1}


@pytest.mark.usefixtures("half")
def test_a_value_without_a_handler_is_refused_and_said(
    weaver: FakeWeaver, threadlet: Make, caplog: pytest.LogCaptureFixture
) -> None:
    made = threadlet(run="second")
    made.handler("clip")(lambda value: None)

    made.check_and_apply_updates()

    assert "the branch of first begins without a value: learning_rate: no handler for it" in caplog.text


def test_a_variable_that_describes_no_branch_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("no json", "[]", '{"run": "x"}'):
        monkeypatch.setenv(BRANCH_VARIABLE, text)
        own_branch.cache_clear()
        assert own_branch() is None
    own_branch.cache_clear()


def test_a_process_that_cannot_start_a_branch_refuses_it(weaver: FakeWeaver, threadlet: Make) -> None:
    threadlet()
    connection, _ = weaver.welcome()

    ident = weaver.command(connection, "branch", run="first", replace=False)

    _, answer = connection.ack(ident)
    assert not answer["ok"]
    assert "the run was not started by `loom run`" in answer["reason"]


def test_a_branch_that_ends_at_once_is_refused_and_one_in_its_place_is_answered_at_once(
    weaver: FakeWeaver, threadlet: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text("no such option\n")
    branch = Branch("first", 900, "/c/900", "/c", "/own")
    start = BranchStart(("train",), "/", "train-at-900", "new", branch, CheckpointLayout.TRAINER)

    def launched(params: object, config: object) -> tuple[BranchStart, subprocess.Popen[bytes], Path]:
        return start, subprocess.Popen(["false"]), tmp_path / "log"

    monkeypatch.setattr(launch, "launch", launched)
    threadlet()
    connection, _ = weaver.welcome()

    beside = weaver.command(connection, "branch", replace=False)
    _, answer = connection.ack(beside)
    assert answer["reason"] == f"it ended with exit code 1: no such option (see {tmp_path / 'log'})"
    _, answer = connection.ack(weaver.command(connection, "branch", replace=True))
    assert answer["ok"]
    assert (answer["evidence"]["name"], answer["evidence"]["step"]) == ("train-at-900", 900)
