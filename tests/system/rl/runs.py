"""A run of `loom.rl`, as a test looks at it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

import loom
from loom.rl import Orchestrator, RunSummary, StepRecord, arithmetic_run
from loom.train import status
from loom_proxy.runs import RunHandle

BOUND = 120.0
FINISHED_IN_TIME = 500.0
"""Seconds that a whole run may take on a machine that does other things too."""


class WatchedRun:
    """A run in a session, in a folder of this machine, which a function makes of the folder and settings."""

    def __init__(
        self, job: loom.Job, folder: Path, make: Callable[..., Orchestrator] = arithmetic_run, **settings: Any
    ) -> None:
        self.job = job
        self.folder = folder
        self.run: RunHandle = job.run(make(folder, **settings).run, detach=True, name="rl")

    def records(self) -> list[StepRecord]:
        path = self.folder / "steps.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [StepRecord(**json.loads(line)) for line in lines]

    def await_step(self, step: int) -> None:
        """Wait until the orchestrator has made this step."""
        self.await_true(lambda: any(one.step >= step for one in self.records()), f"step {step}")

    def await_true(self, condition: Callable[[], bool], what: str, bound: float = BOUND) -> None:
        until = time.monotonic() + bound
        while not condition():
            assert not self.run.done(), f"it is over: {self.run.exception()}"
            assert time.monotonic() < until, f"{what} never came; {self.records()[-1:]}"
            time.sleep(0.05)

    def pids(self, role: str) -> list[int]:
        """Return the living processes of a role, by the events that they have recorded."""
        roles = [
            (int(path.stem.rpartition("-")[2]), _role(path)) for path in (self.folder / "timing").glob("*.jsonl")
        ]
        return [pid for pid, found in roles if found == role and _lives(pid)]

    def servers(self) -> list[int]:
        """Return the vLLM servers of the run, by their model."""
        model = str(self.folder / "model")
        found = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                command = one.cmdline()
                if (
                    {"serve", model} <= set(command)
                    and "/bin/sh" not in command[0]
                    and one.pid == os.getpgid(one.pid)
                ):
                    found.append(one.pid)
        return found

    def kill_generator(self) -> int:
        """Kill one of the generators; return its pid."""
        pid = self.pids("generator")[0]
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_trainer(self, replica: str) -> None:
        """Kill the process of a replica."""
        (pid,) = next(one.pids for one in self.job.run(status, "trainer").groups if one.replica == replica)
        os.kill(pid, signal.SIGKILL)

    def result(self) -> RunSummary:
        summary: RunSummary = self.run.result(FINISHED_IN_TIME)
        return summary


def _role(path: Path) -> str:
    with path.open() as file:
        line = file.readline()
    return str(json.loads(line)["role"]) if line.endswith("\n") else ""


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_exact(summary: RunSummary, steps: int) -> None:
    """Each step was made once, and each of its rollouts was trained on once."""
    assert [one.step for one in summary.steps] == list(range(steps))
    assert summary.trained == sum(one.rollouts for one in summary.steps)
    assert (summary.training.ending, summary.training.steps) == ("finished", steps)
