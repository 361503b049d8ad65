"""``loom demo`` and ``examples/train_digits.py``, run as a newcomer runs them, and broken in the middle."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator

import psutil
import pytest
from rich.console import Console

from loom.cli.demo import LiveDisplay, sentence
from loom.cli.demo_training import (
    DemoProgress,
    Event,
    LearningRateChanged,
    ProcessKilled,
    describe,
    exit_code,
    summarize,
)
from loom.errors import MissingDependency
from loom.train import JobEvent
from tests.support.paths import EXAMPLES
from tests.support.processes import HIDDEN, run, still_there

LOOM = "from loom.cli import main; main()"
EXAMPLE = EXAMPLES / "train_digits.py"
MARK = "LOOM_TEST_MARK"
FINISHED_IN_TIME = 200
"""Seconds that a whole training may take on a machine that does other things too."""

EVENTS: list[Event] = [
    JobEvent(1.0, "group_trains", "digits_0", {"host": 0, "pids": [11]}),
    JobEvent(1.0, "group_trains", "digits_1", {"host": 1, "pids": [12]}),
    DemoProgress(10, 2.0, 0.50, 1000.0, 1.0),
    LearningRateChanged(10, 0.1, 0.02),
    JobEvent(2.0, "checkpoint_written", "digits_0", {"step": 5}),
    ProcessKilled(3.0, 10, 1, 12),
    JobEvent(3.25, "group_failed", "digits_1", {"reason": "process 12 is gone"}),
    JobEvent(5.0, "group_restored", "digits_1", {"step": 11, "restored": "peers, at step 11", "seconds": 1.75}),
    DemoProgress(15, 1.0, 0.94, 3000.0, 3.0),
    DemoProgress(20, 0.5, 0.96, 2000.0, 2.0),
]


@pytest.fixture
def marked_environment() -> Iterator[dict[str, str]]:
    """An environment by which everything that a program started can be found, whoever its parent is now."""
    environment = {**os.environ, MARK: uuid.uuid4().hex}
    environment.pop("LOOM_URL", None)
    yield environment
    still_there(marked(environment), timeout=0)


def marked(environment: dict[str, str]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == environment[MARK]:
                found.append(process)
        except psutil.Error:  # it has just ended, or is somebody else's
            continue
    return found


def run_to_the_end(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=FINISHED_IN_TIME,
        env=env,
    )


def start_demo(*arguments: str, env: dict[str, str]) -> subprocess.Popen[str]:
    """Start the demo as the leader of its own process group, as a terminal does."""
    return subprocess.Popen(
        [sys.executable, "-c", LOOM, "demo", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env=env,
    )


def read_until(process: subprocess.Popen[str], beginning: str) -> None:
    assert process.stdout
    for line in process.stdout:
        if line.startswith(beginning):
            return
    pytest.fail(f"the demo ended with code {process.wait()} before it printed {beginning!r}")


# -- the whole job ----------------------------------------------------------------------------------------------


@pytest.mark.timeout(FINISHED_IN_TIME + 20)
@pytest.mark.slow
def test_the_demo_loses_a_process_recovers_and_reaches_95_percent(marked_environment: dict[str, str]) -> None:
    ended = run_to_the_end("-c", LOOM, "demo", "--json", env=marked_environment)

    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout)
    assert summary["accuracy"] >= 0.95
    assert summary["steps"] == 300
    assert summary["learning_rates"] == [0.1, 0.02]
    failure = summary["failure"]
    assert failure["error"] == "group_failed"
    assert failure["message"] == f"process {failure['pid']} is gone"
    assert 165 <= failure["step"] < 300
    assert failure["resumed_from_step"] >= failure["step"]
    assert failure["lost_steps"] == 0
    assert failure["noticed_seconds"] < failure["recovery_seconds"]
    assert marked(marked_environment) == []


@pytest.mark.slow
@pytest.mark.timeout(FINISHED_IN_TIME + 20)
def test_a_demo_that_learns_too_little_exits_with_1(marked_environment: dict[str, str]) -> None:
    few = ("--no-failure", "--steps", "10", "--hosts", "1", "--procs", "2", "--json")

    ended = run_to_the_end("-c", LOOM, "demo", *few, env=marked_environment)

    assert ended.returncode == 1, ended.stderr
    summary = json.loads(ended.stdout)
    assert summary["accuracy"] < 0.95
    assert summary["failure"] is None
    assert marked(marked_environment) == []


@pytest.mark.slow
@pytest.mark.timeout(FINISHED_IN_TIME + 20)
def test_the_example_loses_a_process_recovers_and_reaches_95_percent(marked_environment: dict[str, str]) -> None:
    ended = run_to_the_end(str(EXAMPLE), env=marked_environment)

    assert ended.returncode == 0, ended.stderr
    assert "What the laptop sees is a" in ended.stdout
    assert ended.stdout.count("epoch 23 ") == 2  # before the failure, and again from the checkpoint
    assert marked(marked_environment) == []


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 120


# -- broken in the middle ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(FINISHED_IN_TIME + 20)
def test_sigkill_while_it_trains_leaves_no_process(marked_environment: dict[str, str]) -> None:
    with start_demo("--no-failure", "--steps", "1000000", env=marked_environment) as demo:
        read_until(demo, "step")
        started = marked(marked_environment)
        # The demo, two workers, the gateway, the driver, four training processes and the job's lighthouse.
        assert len(started) >= 10

        demo.kill()

        assert still_there(started) == []
        assert marked(marked_environment) == []


@pytest.mark.slow
@pytest.mark.timeout(FINISHED_IN_TIME + 20)
def test_ctrl_c_while_it_trains_ends_everything_and_exits_with_130(marked_environment: dict[str, str]) -> None:
    arguments = ("--no-failure", "--steps", "1000000", "--hosts", "1", "--procs", "2")
    with start_demo(*arguments, env=marked_environment) as demo:
        read_until(demo, "step")

        os.killpg(demo.pid, signal.SIGINT)

        assert demo.wait(timeout=30) == 130
        assert marked(marked_environment) == []


def test_without_the_extras_it_exits_with_4_and_names_what_to_install() -> None:
    ended = run("-c", HIDDEN.format(module="torch") + LOOM, "demo")

    assert ended.returncode == 4
    assert ended.stderr.count("\n") == 1
    assert "pip install 'monarch-loom[all]'" in ended.stderr
    assert MissingDependency.code not in ended.stdout


# -- what is shown ----------------------------------------------------------------------------------------------


def test_the_summary_adds_up_the_events() -> None:
    summary = summarize(EVENTS, hosts=1, procs=2, connected_seconds=1.0, seconds=9.0)

    assert (summary.steps, summary.accuracy, summary.loss) == (20, 0.96, 0.5)
    assert (summary.samples_per_second, summary.call_ms) == (2000.0, 2.0)
    assert summary.learning_rates == [0.1, 0.02]
    assert summary.failure is not None
    assert (summary.failure.pid, summary.failure.message) == (12, "process 12 is gone")
    assert (summary.failure.noticed_seconds, summary.failure.recovery_seconds) == (0.25, 1.75)
    assert (summary.failure.resumed_from_step, summary.failure.lost_steps) == (11, 0)


def test_a_process_that_is_not_replaced_before_the_end_is_in_the_summary() -> None:
    summary = summarize(EVENTS[:7] + EVENTS[-1:], hosts=1, procs=2, connected_seconds=1.0, seconds=9.0)

    assert summary.failure is not None
    assert (summary.failure.resumed_from_step, summary.failure.recovery_seconds) == (None, None)
    assert "took its place" not in describe(summary)
    assert "took its place 1.8 s later" in describe(summarize(EVENTS, 1, 2, 1.0, 9.0))


@pytest.mark.parametrize(("last", "code"), [(DemoProgress(20, 0.5, 0.95, 1.0, 1.0), 0), (EVENTS[-2], 1)])
def test_the_exit_code_says_whether_95_percent_were_reached(last: Event, code: int) -> None:
    summary = summarize([*EVENTS, last], hosts=1, procs=2, connected_seconds=1.0, seconds=9.0)

    assert exit_code(summary) == code
    assert ("--steps" in describe(summary)) is bool(code)


def test_every_event_has_a_sentence() -> None:
    sentences = [sentence(event) for event in EVENTS]

    assert all(sentences)
    assert sentences[6] == "digits_1 is lost: process 12 is gone; the others go on"


def test_a_terminal_shows_the_table_the_failure_and_the_recovery() -> None:
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=120, height=30, highlight=False)

    with LiveDisplay(console) as display:
        for event in EVENTS:
            display.show(event)

    shown = terminal.getvalue()
    assert "test accuracy" in shown
    assert "learning rate 0.1 → 0.02" in shown
    assert "What the job sees" in shown
    assert "process 12 is gone" in shown
    assert "with the state of peers, at step 11" in shown


@pytest.mark.slow
@pytest.mark.timeout(FINISHED_IN_TIME + 60)
def test_the_rl_demo_learns_by_reward(marked_environment: dict[str, str]) -> None:
    ran = run_to_the_end("-c", LOOM, "demo", "rl", "--json", env=marked_environment)

    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["reward"] >= 0.9 > 0.3 > found["steps"][0]["reward"]
