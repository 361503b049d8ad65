"""Three hosts that are far from the gateway, from the laptop and from each other, on lines that lose packets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import loom
from tests.support.actors import Counter
from tests.support.needs import skipped_if
from tests.support.network.namespaces import FarCluster, missing
from tests.system.train.test_recovery import assert_exact
from tests.system.train.trainers import Watched, a_job

pytestmark = [
    skipped_if(missing()),
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.guarantees(
        "process link",
        "Three hosts that are 100 ms apart, on lines that lose a packet of a hundred, work and train",
    ),
]

ONE_WAY = 0.05
"""Seconds from a host to the bridge between them: there and back between a worker and the gateway it is 100 ms."""

BOUND = 120.0
"""Seconds; far over what anything here takes, so that only a hang fails."""


class Speaker(loom.Actor):
    @loom.endpoint
    def say(self, lines: int) -> str:
        for number in range(lines):
            print(f"line {number}")
        import synced_module  # type: ignore[import-not-found]

        return str(synced_module.NAME)


@pytest.fixture(scope="module")
def far() -> Iterator[FarCluster]:
    with FarCluster(delay=ONE_WAY, workers=3, apart=ONE_WAY) as cluster:
        cluster.hosts.lose_everywhere(1)
        yield cluster


@pytest.fixture
def job(far: FarCluster) -> Iterator[loom.Job]:
    with far.connected() as job:
        yield job


def assert_nothing_lost(job: loom.Job) -> None:
    names = [event.name for event in job.events(timeout=0)]
    assert not {"process_lost", "host_lost", "actors_lost", "failure", "disconnected"}.intersection(names)


def test_processes_calls_code_and_output(job: loom.Job, tmp_path: Path) -> None:
    (tmp_path / "synced_module.py").write_text("NAME = 'from the laptop'\n" + "# padding\n" * 100_000)
    lines: list[tuple[int, str]] = []
    job.on_log(lambda line: lines.extend((rank, line.text) for rank in line.ranks))
    job.sync(tmp_path)
    procs = job.hosts.spawn_procs(per_host={"gpus": 2})

    said = procs.spawn("speakers", Speaker).say.call(100).get(BOUND)
    counters = procs.spawn("counters", Counter)
    calls = [counters.add.call(1) for _ in range(100)]
    sums = [list(call.get(BOUND).values()) for call in calls]
    large = bytes(range(256)) * 4096
    echoed = counters.slice(hosts=2, gpus=0).echo.call_one(large).get(BOUND)
    job.flush_logs(BOUND)

    assert list(said.values()) == ["from the laptop"] * 6
    assert sums == [[number] * 6 for number in range(1, 101)]
    assert echoed == large
    by_rank = {rank: [text for of, text in lines if of == rank] for rank in range(6)}
    assert by_rank == {rank: [f"line {number}" for number in range(100)] for rank in range(6)}
    procs.stop().get(BOUND)
    assert_nothing_lost(job)


def test_training(job: loom.Job) -> None:
    # A group that the line holds up is left out, and takes over the state some steps later.
    watched = Watched(job, a_job(steps=100_000, groups=3, hash_every=1))
    watched.await_steps(30)
    watched.kill("train_1")
    restored = watched.await_event("group_restored")
    watched.await_steps(10)
    failed = watched.events("group_failed")
    discarded = {group.replica: group.report.discarded for group in watched.status().groups}
    summary = watched.stop()

    assert (restored.replica, len(failed), summary.failures) == ("train_1", 1, 1), failed
    print(f"steps that were made again: {discarded}")
    assert_exact(summary, groups=3)
