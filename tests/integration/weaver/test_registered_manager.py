"""A user's own torchft scripts in the weaver: real managers, a real lighthouse, and processes that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

import loom
from loom.train.registration import LEFT_QUORUM
from tests.support.gateways import BOUND, await_true
from tests.support.paths import ROOT
from tests.support.weavers import await_weaver

pytest.importorskip("torchft")

pytestmark = pytest.mark.timeout(400)

STARTS = 120.0
"""Seconds that scripts have to import torch, one beside the other, and to make a step."""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def lighthouse() -> Iterator[str]:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=200, quorum_tick_ms=20, heartbeat_timeout_ms=1000
    )
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


@pytest.fixture
def start(job: loom.Job, lighthouse: str) -> Iterator[Start]:
    """Starts a script as a group, and returns once its replica is in the weaver."""
    environment = {**os.environ, "LOOM_WEAVER": await_weaver(job.weaver)}
    with ExitStack() as running:

        def begin(replica: str, *device: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "tests.support.torchft_script", replica, lighthouse, *device]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
            running.callback(end, process)
            return process

        yield begin


def end(process: subprocess.Popen[str]) -> None:
    with process:
        process.kill()


def has(job: loom.Job, replica: str, **metrics: float) -> bool:
    """Whether a replica has made a step, and its newest metrics are these."""
    found = job.weaver.replicas().get(replica)
    return bool(found is not None and found.step and metrics.items() <= found.metrics.items())


@pytest.mark.slow
def test_a_script_reports_its_steps_and_participants_and_takes_commands(job: loom.Job, start: Start) -> None:
    first, second = (f"ddp_{job.session}_{number}" for number in (0, 1))
    processes = [start(name) for name in (first, second)]
    await_true(lambda: all(has(job, name, participants=2.0) for name in (first, second)), STARTS)
    group = f"ddp_{job.session}"

    taken = job.weaver.update_config(group, learning_rate=0.25).get(BOUND)
    replica = job.weaver.replica(first)

    assert {name: one.changes["learning_rate"].new for name, one in taken.items()} == {first: 0.25, second: 0.25}
    assert len({one.step for one in taken.values()}) == 1
    assert replica.group == group
    assert replica.metrics["commits"] > 0
    assert replica.metrics["batches_committed"] >= replica.metrics["commits"]
    assert "failed_commits" in replica.metrics

    processes[1].send_signal(signal.SIGKILL)
    await_true(lambda: has(job, first, participants=1.0), STARTS)
    assert job.weaver.replica(second).state == "failed"

    start(second)
    await_true(lambda: all(has(job, name, participants=2.0) for name in (first, second)), STARTS)
    behind = job.weaver.replica(second)
    assert behind.step is not None
    assert behind.step > behind.metrics["commits"]  # it went on from the other group's state

    job.weaver.stop(group).get(BOUND)
    await_true(lambda: all(job.weaver.replica(name).state == "finished" for name in (first, second)), STARTS)
    assert processes[0].wait(BOUND) == 0


@pytest.mark.slow
def test_a_replica_whose_device_fails_leaves_its_quorum_starts_again_and_heals(job: loom.Job, start: Start) -> None:
    first, second = (f"ft_{job.session}_{number}" for number in (0, 1))
    device = f"GPU-{job.session}"
    processes = [start(first), start(second, device)]
    await_true(lambda: all(has(job, name, participants=2.0) for name in (first, second)), STARTS)
    job.weaver.update_config(f"ft_{job.session}", learning_rate=0.25).get(BOUND)
    failed_at = job.weaver.replica(first).step or 0

    job.weaver.report_device_failure(device, "Xid 79")

    assert processes[1].wait(STARTS) == LEFT_QUORUM
    await_true(lambda: job.weaver.replica(second).state == "failed")
    assert "left its quorum after step" in str(job.weaver.replica(second).died_of)
    await_true(lambda: has(job, first, participants=1.0), STARTS)
    assert processes[0].poll() is None

    processes[1] = start(second, device)  # its launcher knows no other place
    await_true(lambda: all(has(job, name, participants=2.0) for name in (first, second)), STARTS)
    again = job.weaver.replica(second)
    assert (again.step or 0) > failed_at
    await_true(lambda: job.weaver.replica(second).config.get("learning_rate") == 0.25)  # which the other one has
    assert (again.step or 0) > again.metrics["commits"]  # it went on from the other group's state

    def told() -> list[str]:
        refused = job.weaver.events(kind="refused", replica=second)
        return [one.data["reason"] for one in refused if one.data["do"] == "device_failed"]

    await_true(lambda: len(told()) == 1)
    assert "had failed before this process was started on it" in told()[0]

    job.weaver.stop(f"ft_{job.session}").get(BOUND)
    assert [process.wait(BOUND) for process in processes] == [0, 0]
