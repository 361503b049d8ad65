"""The real training on hosts of its own whose networks and disk break: what it has learnt in the end is right."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import loom
from loom.train import CheckpointStore, JobSummary
from loom.train.digits import DigitsTrainer
from tests.support.gateways import await_true
from tests.support.needs import skip_because
from tests.support.network.namespaces import FarCluster, missing
from tests.support.paths import EXAMPLES
from tests.system.chaos.digits_alike import DigitsAlike, alike_job, assert_agree, assert_as_without_faults
from tests.system.train.forks import mount_small_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(450)]

PLAN = EXAMPLES / "chaos" / "network-and-disk.yaml"

FOLDER = Path("/mnt/checkpoints")
"""Where the plan has the checkpoints."""

CLONE_FS, CLONE_NEWNS = 0x00000200, 0x00020000

STEPS = 1600
FEWER_STEPS = 1200
"""After as many, 97 % of the test digits are read."""
PACE = 0.05
CHECKPOINT_EVERY = 20

BEGUN_IN_TIME = 90.0
CARRIED_OUT_WITHIN = 250.0
"""Seconds, on a machine that does other things too."""


@pytest.fixture
def disk() -> Iterator[Path]:
    """The folder of the plan, on a file system of 64 megabytes that only this thread and what it starts see."""
    if reason := missing():
        skip_because(reason)
    with own_mounts():
        if not mount_small_disk(FOLDER.parent, "64m"):
            pytest.skip("this machine cannot mount a small file system")
        FOLDER.mkdir()
        yield FOLDER


@contextlib.contextmanager
def own_mounts() -> Iterator[None]:
    """Come back afterwards to the mounts that this thread sees now."""
    libc = ctypes.CDLL(None, use_errno=True)
    outside, folder = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC), os.getcwd()
    try:
        yield
    finally:
        # The threads that this one has started have its root and its folder, and stay where they are.
        came_back = libc.unshare(CLONE_FS) == 0 and libc.setns(outside, CLONE_NEWNS) == 0
        os.close(outside)
        assert came_back, os.strerror(ctypes.get_errno())
        os.chdir(folder)


@pytest.fixture
def far(disk: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FarCluster]:
    """A cluster on hosts of its own, three of them with a worker. The test runs on the laptop."""
    monkeypatch.setenv("LOOM_CHAOS_DIR", str(tmp_path / "keepers"))
    monkeypatch.setenv("LOOM_INJECTABLE", "1")
    with FarCluster(workers=3) as cluster, cluster.hosts.on("laptop"):
        yield cluster


def three_train(job: loom.Job) -> bool:
    return sum(one.state == "running" and bool(one.step) for one in job.weaver.replicas().values()) == 3


def carried_out(plan: Path, far: FarCluster, report: Path) -> dict[str, Any]:
    """Carry out a plan as anybody would; its report."""
    command = [sys.executable, "-c", "from loom.cli import main; main()", "inject", "run", str(plan)]
    done = subprocess.run(
        [*command, "--report", str(report)],
        env={**os.environ, "LOOM_URL": far.url, "LOOM_TOKEN": far.token},
        capture_output=True,
        text=True,
        timeout=CARRIED_OUT_WITHIN,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((report / "report.json").read_text())
    return found


NARRATED = ("bandwidth", "delay", "partition", "full_disk")
"""The faults whose removal says what they did."""


@pytest.mark.parametrize("trainer", [DigitsTrainer, DigitsAlike])
def test_what_is_learnt_is_right_whatever_happens_to_networks_and_the_disk(
    far: FarCluster, disk: Path, tmp_path: Path, trainer: type[DigitsTrainer]
) -> None:
    training = alike_job(STEPS, pace=PACE, checkpoints=str(disk), checkpoint_every=CHECKPOINT_EVERY)

    with loom.connect(far.url, far.token) as job:
        run = replace(training, trainer=trainer).start(job)
        await_true(lambda: three_train(job), BEGUN_IN_TIME)
        report = carried_out(PLAN, far, tmp_path / "report")
        summary: JobSummary = run.result(CARRIED_OUT_WITHIN)

    assert report["held"]
    faults = {one["fault"]: one for one in report["faults"]}
    assert list(faults) == [
        "loss", "bandwidth", "delay", "partition", "link_down", "full_disk", "corrupt_checkpoint"
    ]  # fmt: skip
    assert not any(one["failed"] for one in faults.values())
    removals = {kind: list(faults[kind]["removal"].values()) for kind in NARRATED}
    assert all(len(told) == 1 for told in removals.values()), faults
    narrow, held_up, cut, full = (told for (told,) in removals.values())
    assert narrow["was"]["qdisc"] == "tbf"
    assert held_up["delayed"] > 0
    assert cut["dropped"] > 0
    assert full["was"]["room"] == 0
    assert_the_disk_was_full_for_a_while(summary)
    newest = CheckpointStore(disk).newest()
    assert newest is not None
    assert (newest.step, newest.skipped) == (STEPS, ())
    if trainer is DigitsAlike:
        assert_as_without_faults(summary, STEPS)
    else:
        assert_agree(summary, STEPS)


def assert_the_disk_was_full_for_a_while(summary: JobSummary) -> None:
    failed = [event for event in summary.events if event.kind == "checkpoint_failed"]
    assert failed
    assert all("No space left on device" in event.data["reason"] for event in failed)
    assert any(
        event.kind == "checkpoint_written" and event.data["step"] > failed[-1].data["step"]
        for event in summary.events
    )


LONG = """\
name: long-partition
watch: train
until: finished
recovery: 60 s
within: 4 min
faults:
  - {fault: partition, when: {step: 100}, target: {replica: train_1}, for: 15 s, expect: detected within 5 s}
expect: [recovers within 30 s, no step lost twice, loss falls, replicas agree, accuracy at least 0.97]
"""


def test_a_group_that_is_cut_off_for_long_is_replaced_and_what_is_learnt_is_right(
    far: FarCluster, disk: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "long-partition.yaml"
    plan.write_text(LONG)
    training = alike_job(FEWER_STEPS, pace=PACE, checkpoints=str(disk), checkpoint_every=CHECKPOINT_EVERY)

    with loom.connect(far.url, far.token) as job:
        run = training.start(job)
        await_true(lambda: three_train(job), BEGUN_IN_TIME)
        report = carried_out(plan, far, tmp_path / "report")
        summary: JobSummary = run.result(CARRIED_OUT_WITHIN)

    assert report["held"]
    (failed,) = [event for event in summary.events if event.kind == "group_failed"]
    (restored,) = [event for event in summary.events if event.kind == "group_restored"]
    assert failed.replica == restored.replica == "train_1"
    assert "not answered" in failed.data["reason"]
    assert restored.data["pids"] != failed.data["pids"]
    assert restored.data["host"] != failed.data["host"]
    assert_as_without_faults(summary, FEWER_STEPS)
