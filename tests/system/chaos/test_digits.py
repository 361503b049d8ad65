"""The examples: replica groups learn to read digits while everything happens to them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import EXAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def carried_out(plan: str, folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Have the example carry a plan out; the report, and what the example prints."""
    chaos = EXAMPLES / "chaos"
    command = [sys.executable, str(chaos / "digits.py"), str(chaos / plan), "--report", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "report.json").read_text()), done.stdout


@pytest.mark.parametrize("seed", [7, 8])
def test_digits_are_learnt_whatever_happens(tmp_path: Path, seed: int) -> None:
    report, _ = carried_out("everything-digits.yaml", tmp_path, "--seed", str(seed))

    assert report["held"]
    assert len(report["faults"]) >= 12
    assert len({one["fault"] for one in report["faults"]}) >= 8
    assert not any(one["failed"] for one in report["faults"])


def test_digits_are_learnt_whatever_happens_to_processes(tmp_path: Path) -> None:
    report, said = carried_out("processes.yaml", tmp_path)

    assert report["held"]
    kinds = [one["fault"] for one in report["faults"]]
    assert kinds == ["sigkill", "exception", "sigstop", "slow_rank", "gil_deadlock", "segfault"]
    assert not any(one["failed"] for one in report["faults"])
    assert_learnt(said, 1200)


def test_a_kill_each_30_seconds_leaves_most_of_the_time_for_steps_that_count(tmp_path: Path) -> None:
    report, said = carried_out("killed-every-30s.yaml", tmp_path, "--steps", "2000")

    assert report["held"], report
    assert report["goodput"] >= 0.85
    assert [one["fault"] for one in report["faults"]] == ["sigkill"] * 3
    assert not any(one["failed"] for one in report["faults"])
    assert_learnt(said, 2000)


def test_digits_are_learnt_though_a_group_is_killed() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "fault_tolerant_digits.py")], capture_output=True, text=True, timeout=300
    )

    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert re.search(r"^killed process \d+, which was train_1$", said, re.MULTILINE)
    (missed,) = re.findall(r"^ +([\d.]+) s later train_1 is missed: process \d+ is gone$", said, re.MULTILINE)
    (back,) = re.findall(
        r"^ +([\d.]+) s later train_1 trains again, with the state of peers, at step \d+$", said, re.MULTILINE
    )
    assert float(missed) < 1.0
    assert float(missed) < float(back) < 5.0
    assert_learnt(said, 800)


def assert_learnt(said: str, steps: int) -> None:
    """The end was printed, and it was good."""
    assert re.search(rf"^{steps} steps in ", said, re.MULTILINE)
    assert re.search(r"^the parameters (of all groups )?are the same$", said, re.MULTILINE)
    (accuracy,) = re.findall(r"([\d.]+)% (?:of the test digits )?are read correctly$", said, re.MULTILINE)
    assert float(accuracy) >= 97
