"""Lost hosts and broken networks of real workers, injected through a gateway."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import loom
from loom.chaos.host import processes
from loom.chaos.host.processes import state_of
from loom.chaos.plans import parse_plan
from loom.chaos.runs.reports import Report
from loom.chaos.runs.run import PlanExecution
from loom.errors import FaultRefused
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.actors import Counter
from tests.support.gateways import BOUND, await_true
from tests.support.needs import skip_because
from tests.support.network.namespaces import FarCluster, missing
from tests.support.processes import still_there

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


class Trains(loom.Actor):
    """Trains on nothing, until told to stop."""

    @loom.endpoint
    def train(self) -> int:
        step = 0
        with loom.Threadlet() as threadlet:
            while not threadlet.should_stop:
                with threadlet.step(step) as told:
                    time.sleep(0.01)
                    told.metrics["loss"] = 1.0 / (1 + step)
                step += 1
        return step


def replicas_of(job: loom.Job, name: str) -> tuple[str, str]:
    """Two replicas that train, on a host each."""
    trained: Any = job.hosts.as_injectable().spawn_procs(name=name).spawn("trains", Trains).train.call()
    trained.add_done_callback(lambda done: None)
    found = (f"{name}_0@{job.session}", f"{name}_1@{job.session}")
    await_true(lambda: all((one := job.weaver.replicas().get(id)) and one.step for id in found))
    return found


def test_a_lost_host_is_lost_with_its_processes_and_comes_back(
    own_cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOM_CHAOS_DIR", str(tmp_path / "keepers"))
    with loom.connect(own_cluster.url, own_cluster.token) as job:
        one, other = replicas_of(job, "lost")
        struck = job.weaver.replica(one)

        evidence = job.weaver.inject("lost_host", one, 1.0).get(BOUND)[one].evidence

        assert evidence["worker"] in own_cluster.pids[1:]
        await_true(lambda: job.weaver.replica(one).state == "failed")
        assert state_of(evidence["worker"]) in (None, "Z")
        assert still_there([psutil.Process(struck.pid)] if psutil.pid_exists(struck.pid) else []) == []
        assert job.weaver.replica(other).state == "running"
        await_true(lambda: all(worker["reachable"] for worker in status(job)["workers"]))
        with loom.connect(own_cluster.url, own_cluster.token) as another:
            counters = another.hosts.spawn_procs().spawn("counters", Counter)
            assert list(counters.add.call(1).get(BOUND).values()) == [1, 1]
        came = [one for one in psutil.process_iter(["cmdline"]) if is_worker(one, own_cluster.workers)]
        assert len(came) == 2
    own_cluster.close()
    assert still_there(came) == [], "the worker that came back goes on"


def status(job: loom.Job) -> dict[str, Any]:
    from loom.rest_client import Gateway

    return Gateway(job.url, job.token).status()


def is_worker(process: psutil.Process, addresses: list[str]) -> bool:
    line = process.info["cmdline"] or []
    return processes.WORKER_MODULE in line and any(address in line for address in addresses)


def test_a_process_of_no_worker_has_no_host_to_lose() -> None:
    with pytest.raises(FaultRefused, match="started by no worker"):
        processes.lose_host(psutil.Process().pid)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FarCluster]:
    if reason := missing():
        skip_because(reason)
    monkeypatch.setenv("LOOM_CHAOS_DIR", str(tmp_path / "keepers"))
    with FarCluster() as cluster, cluster.hosts.on("laptop"):
        yield cluster


NETWORK = """\
name: network
watch: far_*
settle: 0
recovery: 30 s
faults:
  - {fault: loss, when: {step: 20}, target: far_1, for: 1 s, with: {percent: 20}}
  - {fault: bandwidth, when: {event: recovered}, target: far_1, for: 1 s, with: {megabits: 1}}
  - {fault: partition, when: {event: recovered}, target: far_1, for: 4 s, expect: detected within 5 s}
  - {fault: link_down, when: {event: recovered}, target: far_1, for: 1 s}
expect: [recovers within 30 s, loss falls]
"""


def test_the_networks_of_hosts_break_and_are_whole_again(far: FarCluster) -> None:
    with loom.connect(far.url, far.token) as job:
        one, other = replicas_of(job, "far")
        text = NETWORK.replace("far_1", other)

        run = PlanExecution(parse_plan(text), WeaverProxy(far.url, far.token))
        run.run()

        report = Report(run)
        assert report.ok, report.markdown()
        loss, bandwidth, partition, link = run.struck
        assert loss.removal[other]["dropped"] > 0
        assert bandwidth.removal[other]["was"]["qdisc"] == "tbf"
        assert partition.victims[0].detected_as in ("recovering", "stalled")
        assert partition.removal[other]["dropped"] > 0
        assert "UP" not in link.removal[other]["was"]["flags"]
        assert job.weaver.replica(one).state == job.weaver.replica(other).state == "running"
