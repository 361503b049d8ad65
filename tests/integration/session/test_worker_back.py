"""Worker hosts that go and come back on the same address."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

import loom
from loom_proxy.local import LocalCluster
from tests.support.actors import Counter, Hang
from tests.support.processes import still_there
from tests.support.workers import workers_of

BOUND = 60.0
"""Seconds; far over what anything here takes, so that only a hang fails."""


def await_event(job: loom.Job, name: str, count: int = 1) -> None:
    """Wait until so many events of the name have come, old ones included."""
    seen = 0
    for event in job.events(timeout=BOUND):
        seen += event.name == name
        if seen == count:
            return
    raise AssertionError(f"{seen} events {name}, not {count}")


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_a_host_that_comes_back_is_used_again_by_the_session_and_by_new_ones(own_cluster: LocalCluster) -> None:
    with (
        loom.connect(own_cluster.url, own_cluster.token) as job,
        workers_of(own_cluster) as workers,
    ):
        old = job.hosts.spawn_procs().spawn("old", Counter)
        hang = job.hosts.spawn_procs().spawn("hang", Hang)
        assert list(old.add.call(1).get(BOUND).values()) == [1, 1]
        hanging = hang.slice(hosts=0).forever.call_one()
        hosts, extent = job.hosts, job.hosts.extent
        workers.kill(0)
        await_event(job, "host_lost")
        with pytest.raises(loom.SupervisionError):
            hanging.get(BOUND)
        gone = r"worker host 0 at tcp://\S+ \(its worker has ended\) is gone.*refresh_hosts"
        with pytest.raises(loom.SupervisionError, match=gone):
            job.hosts.spawn_procs().initialized.get(BOUND)
        living = job.living_hosts().spawn_procs().spawn("living", Counter)
        assert list(living.add.call(1).get(BOUND).values()) == [1]
        alone = job.hosts.slice(hosts=1).spawn_procs().spawn("alone", Counter)
        assert list(alone.add.call(1).get(BOUND).values()) == [1]

        assert job.refresh_hosts() == []

        workers.start(0)
        with loom.connect(own_cluster.url, own_cluster.token) as another:
            counters = another.hosts.spawn_procs().spawn("counters", Counter)
            assert list(counters.add.call(1).get(BOUND).values()) == [1, 1]
        assert job.refresh_hosts() == [0]
        await_event(job, "host_back")
        assert job.hosts is hosts
        assert job.hosts.extent == extent
        new = job.hosts.spawn_procs(per_host={"gpus": 2}).spawn("new", Counter, 5)
        assert list(new.add.call(1).get(BOUND).values()) == [6, 6, 6, 6]
        assert list(new.slice(hosts=0).add.call(1).get(BOUND).values()) == [7, 7]
        with pytest.raises(loom.SupervisionError):
            old.slice(hosts=0).add.call_one(1).get(BOUND)
        assert old.slice(hosts=1).add.call_one(1).get(BOUND) == 2
        assert job.refresh_hosts() == []


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_hosts_may_go_and_come_back_again_and_again(own_cluster: LocalCluster) -> None:
    with (
        loom.connect(own_cluster.url, own_cluster.token) as job,
        workers_of(own_cluster) as workers,
    ):
        lost = 0
        for round_, gone in enumerate([(1,), (1,), (0, 1)]):
            before = job.hosts.spawn_procs(name=f"before{round_}").spawn("counters", Counter)
            before.add.call(1).get(BOUND)
            for host in gone:
                workers.kill(host)
            lost += len(gone)
            await_event(job, "host_lost", lost)
            for host in gone:
                workers.start(host)

            assert job.refresh_hosts() == list(gone)

            procs = job.hosts.spawn_procs(name=f"after{round_}")
            counters = procs.spawn("counters", Counter)
            pids = list(counters.pid.call().get(BOUND).values())
            assert list(counters.add.call(1).get(BOUND).values()) == [1, 1]
            # A fault in what was spawned since is told, and harms nothing else.
            os.kill(pids[1], signal.SIGKILL)
            with pytest.raises(loom.SupervisionError):
                counters.slice(hosts=1).add.call_one(1).get(BOUND)
            assert counters.slice(hosts=0).add.call_one(1).get(BOUND) == 2
            procs.stop().exception(BOUND)
            assert still_there([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]) == []


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_host_that_comes_back_has_the_synced_folders(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "came_along.py").write_text("VERSION = 3\n")

    def version() -> int:
        import came_along  # type: ignore[import-not-found]

        return int(came_along.VERSION)

    class Importer(loom.Actor):
        @loom.endpoint
        def version(self) -> int:
            return version()

    cache = {"LOOM_CACHE": str(tmp_path / "cache")}
    with LocalCluster(hosts=2, env=cache) as cluster, loom.connect(cluster.url, cluster.token) as job:
        with workers_of(cluster) as workers, pytest.MonkeyPatch.context() as patched:
            patched.setenv("LOOM_CACHE", str(tmp_path / "another-cache"))  # of the worker that is started again
            job.sync(project)
            workers.kill(1)
            await_event(job, "host_lost")
            workers.start(1)

            assert job.refresh_hosts() == [1]

            importers = job.hosts.spawn_procs().spawn("importers", Importer)
            assert list(importers.version.call().get(BOUND).values()) == [3, 3]


@pytest.mark.slow
def test_a_worker_that_accepts_and_does_not_answer_stays_gone(own_cluster: LocalCluster) -> None:
    with (
        loom.connect(own_cluster.url, own_cluster.token) as job,
        workers_of(own_cluster) as workers,
    ):
        job.hosts.spawn_procs().spawn("counters", Counter).add.call(1).get(BOUND)
        workers.kill(1)
        await_event(job, "host_lost")
        host, port = own_cluster.workers[1].removeprefix("tcp://").split(":")
        with socket.create_server((host, int(port))):
            assert job.refresh_hosts() == []
        workers.start(1)
        assert job.refresh_hosts() == [1]
        counters = job.hosts.spawn_procs().spawn("counters", Counter)
        assert list(counters.add.call(1).get(BOUND).values()) == [1, 1]


def count_in_the_driver() -> int:
    """Have Monarch make an actor in the driver, which it does not any more where one has failed there."""
    import monarch.actor

    count: int = monarch.actor.this_proc().spawn("any", Counter).add.call_one(1).get(timeout=BOUND)
    return count


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_lives_on_other_hosts_goes_on_while_a_host_goes_and_comes_back(own_cluster: LocalCluster) -> None:
    with (
        loom.connect(own_cluster.url, own_cluster.token) as job,
        workers_of(own_cluster) as workers,
    ):
        living = []
        for lost in (1, 2):
            workers.kill(0)
            job.hosts.slice(hosts=0).spawn_procs(name=f"never{lost}")  # under way to a worker that is no more
            await_event(job, "host_lost", lost)
            workers.start(0)
            assert job.refresh_hosts() == [0]
            living.append(job.hosts.spawn_procs(name=f"after{lost}").spawn("counters", Counter))
            assert [list(each.slice(hosts=1).add.call(1).get(BOUND).values()) for each in living]

        assert [each.slice(hosts=1).add.call_one(1).get(BOUND) for each in living] == [3, 2]
        assert job.run(count_in_the_driver) == 1


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_host_that_returns_before_it_has_acknowledged_a_spawn_takes_nothing_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What its predecessor had not acknowledged is sent to it again, and comes back to Monarch's controllers."""
    monkeypatch.setenv("HYPERACTOR_MESSAGE_ACK_TIME_INTERVAL", "5s")
    with (
        LocalCluster(2) as cluster,
        workers_of(cluster) as workers,
        loom.connect(cluster.url, cluster.token) as job,
    ):
        counters = job.hosts.spawn_procs(name="procs").spawn("counters", Counter)
        assert list(counters.add.call(1).get(BOUND).values()) == [1, 1]
        workers.kill(0)
        await_event(job, "host_lost")
        workers.start(0)

        assert job.refresh_hosts() == [0]

        assert counters.slice(hosts=1).add.call_one(1).get(BOUND) == 2
        again = job.hosts.spawn_procs().spawn("again", Counter)
        assert list(again.add.call(1).get(BOUND).values()) == [1, 1]


@pytest.mark.guarantees("process link", "What lives beside a lost host goes on for good")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_lives_beside_a_lost_host_goes_on_for_good() -> None:
    """Monarch ends a minute later, or after two or three, what was spawned together with what is lost."""
    with (
        LocalCluster(2, gateway_options=["--worker-patience", "1"]) as cluster,
        workers_of(cluster) as workers,
        loom.connect(cluster.url, cluster.token) as job,
    ):
        counters = job.hosts.spawn_procs().spawn("counters", Counter)
        assert list(counters.add.call(1).get(BOUND).values()) == [1, 1]
        hang = job.hosts.spawn_procs().spawn("hang", Hang)
        assert len(hang.pid.call().get(BOUND)) == 2
        hanging = hang.slice(hosts=1).forever.call_one()
        workers.kill(0)
        await_event(job, "host_lost")

        with pytest.raises(TimeoutError):
            hanging.get(400)  # the longest of Monarch's own timeouts is 320 s then

        assert counters.slice(hosts=1).add.call_one(1).get(BOUND) == 2


class Asked(loom.Actor):
    """Tells how long Monarch tries to deliver a message."""

    @loom.endpoint
    def patience(self) -> str:
        return delivery_timeout()

    @loom.endpoint
    def log_level(self) -> str | None:
        return log_level()


def log_level() -> str | None:
    return os.environ.get("MONARCH_FILE_LOG")


def delivery_timeout() -> str:
    from monarch.config import get_global_config

    return str(get_global_config()["message_delivery_timeout"])


def test_the_driver_is_more_patient_than_processes(job: loom.Job) -> None:
    asked = job.hosts.spawn_procs().spawn("asked", Asked)

    assert set(asked.patience.call().get(BOUND).values()) == {"1m 30s"}
    assert "years" in job.run(delivery_timeout)


@pytest.mark.guarantees("nothing lost", "Calls leave no line in Monarch's own log, which has no limit")
def test_the_file_of_monarchs_log_gets_errors_only(job: loom.Job) -> None:
    """It grows by 100 MB an hour otherwise, and nothing shortens it."""
    asked = job.hosts.spawn_procs().spawn("asked", Asked)

    assert {*asked.log_level.call().get(BOUND).values(), job.run(log_level)} == {"error"}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_host_may_be_away_for_longer_than_monarch_waits_for_it(own_cluster: LocalCluster) -> None:
    with (
        loom.connect(own_cluster.url, own_cluster.token) as job,
        workers_of(own_cluster) as workers,
    ):
        job.hosts.spawn_procs().spawn("counters", Counter).add.call(1).get(BOUND)
        workers.kill(0)
        await_event(job, "host_lost")
        time.sleep(40)  # Monarch gives a connection up after 30
        workers.start(0)

        assert job.refresh_hosts() == [0]

        counters = job.hosts.spawn_procs(name="after").spawn("counters", Counter)
        assert list(counters.add.call(1).get(BOUND).values()) == [1, 1]
