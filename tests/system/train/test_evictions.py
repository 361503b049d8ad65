"""Workers are evicted, as when their spot machines are taken away: no step is lost, and none is made twice."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

import loom
from loom_proxy.local import LocalCluster
from tests.support.workers import workers_of
from tests.system.train.test_recovery import assert_exact
from tests.system.train.trainers import BOUND, Watched, a_job

pytestmark = pytest.mark.timeout(200)


@pytest.mark.guarantees("workers", "The eviction of a worker costs a job of `loom.train` no step")
@pytest.mark.slow
def test_the_group_of_an_evicted_worker_goes_on_elsewhere_and_loses_no_step(own_cluster: LocalCluster) -> None:
    with loom.connect(own_cluster.url, own_cluster.token) as job:
        watched = Watched(job, a_job(steps=100_000))
        watched.await_steps()
        evicted = next(replica for replica, host in watched.hosts().items() if host == 1)

        os.kill(own_cluster.pids[2], signal.SIGTERM)
        event = watched.await_event("group_evicted")
        watched.await_event("group_restored")
        watched.await_steps(10)
        hosts, failed = watched.hosts(), watched.events("group_failed")
        summary = watched.stop()

    assert (event.replica, failed, summary.failures) == (evicted, [], 0)
    assert set(hosts.values()) == {0}
    assert summary.reports[evicted].restored.startswith("peers, at step ")
    assert_exact(summary, groups=2)


@pytest.mark.guarantees("workers", "Nor does the eviction of all workers")
@pytest.mark.slow
def test_when_all_workers_are_evicted_training_goes_on_with_the_last_step(
    own_cluster: LocalCluster, tmp_path: Path
) -> None:
    with workers_of(own_cluster) as workers, loom.connect(own_cluster.url, own_cluster.token) as job:
        watched = Watched(job, a_job(steps=100_000, checkpoints=str(tmp_path), checkpoint_every=0))
        watched.await_steps()
        processes = [psutil.Process(pid) for pid in own_cluster.pids[1:]]

        for process in processes:
            process.terminate()
        watched.await_event("group_evicted", 2)
        psutil.wait_procs(processes, BOUND)
        last = max(event.data["step"] for event in watched.events("group_evicted"))
        for host in range(2):
            workers.start(host)
        # A worker of a loaded machine may not answer at the first time.
        watched.await_true(lambda: job.refresh_hosts() is not None and bool(watched.events("group_restored")))
        restored = watched.await_event("group_restored")
        watched.await_steps(10)
        summary = watched.stop()

    assert restored.data["restored"].startswith("checkpoint ")
    assert restored.data["step"] == last
    assert_exact(summary, groups=2)
