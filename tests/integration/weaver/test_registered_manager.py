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
from tests.support.gateways import BOUND, await_true
from tests.support.paths import ROOT
from tests.support.weavers import await_weaver

pytest.importorskip("torchft")

pytestmark = pytest.mark.timeout(400)

STARTS = 120.0
"""Seconds that scripts have to import torch, one beside the other, and to make a step."""

Start = Callable[[str], subprocess.Popen[str]]


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

        def begin(replica: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "tests.support.torchft_script", replica, lighthouse]
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
