"""The real training while Loom's own pieces die: what it has learnt in the end is what it would have learnt."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import loom
from loom.chaos.plans import parse_plan
from loom.chaos.runs.reports import Report
from loom.chaos.runs.run import PlanExecution
from loom.train import CheckpointStore, FaultTolerantJob, JobStatus, JobSummary, status
from loom_proxy.local import LocalCluster
from loom_proxy.runs import RunHandle
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import BOUND, TOKEN, Gateway, await_end, await_true, gateway_of
from tests.support.weavers import await_weaver
from tests.system.chaos.digits_alike import HASH_EVERY, alike_job, assert_as_without_faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(450)]

STEPS = 1200
PACE = 0.03
CHECKPOINT_EVERY = 50

BEGUN_IN_TIME = 90.0
FINISHED_IN_TIME = 200.0
"""Seconds, on a machine that does other things too."""


@pytest.fixture
def gateway(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    monkeypatch.setenv("LOOM_INJECTABLE", "1")
    with gateway_of(cluster) as running:
        yield running


def a_job(folder: Path) -> FaultTolerantJob:
    return alike_job(STEPS, pace=PACE, checkpoints=str(folder), checkpoint_every=CHECKPOINT_EVERY, injectable=True)


def status_of(job: loom.Job) -> JobStatus | None:
    try:
        found: JobStatus = job.run(status, "train")
        return found
    except loom.WrongArguments:  # it has not begun
        return None


def await_step(job: loom.Job, run: RunHandle, step: int) -> JobStatus:
    """Wait until a training has come so far."""
    found: list[JobStatus | None] = [None]

    def there() -> bool:
        assert not run.done(), run.result()
        found[0] = status_of(job)
        return found[0] is not None and found[0].step >= step

    await_true(there, BEGUN_IN_TIME)
    assert found[0] is not None
    return found[0]


def newest_step(folder: Path) -> int:
    newest = CheckpointStore(folder).newest()
    return 0 if newest is None else newest.step


def test_a_training_whose_driver_is_killed_is_started_again_and_goes_on_from_its_checkpoint(
    gateway: Gateway, tmp_path: Path
) -> None:
    weaver = WeaverProxy(gateway.url, TOKEN)
    with gateway.connect() as job:
        run = a_job(tmp_path).start(job)
        killed = await_step(job, run, STEPS // 3)

        weaver.inject("dead_driver", job.session)

        with pytest.raises(loom.SessionLost):
            run.result(BOUND)
    for group in (*killed.groups, *killed.spares):
        for pid in group.pids:
            await_end(pid)
    kept = newest_step(tmp_path)
    with gateway.connect() as job:
        summary: JobSummary = a_job(tmp_path).start(job).result(FINISHED_IN_TIME)

    assert kept % CHECKPOINT_EVERY == 0
    assert kept >= killed.step - 2 * CHECKPOINT_EVERY
    for report in summary.reports.values():
        assert re.fullmatch(rf"\d+-step-{kept}", report.restored.removeprefix("checkpoint "))
        assert report.restored_step == kept
    # One may be ahead when the others come, which take over its state.
    assert max(report.applied for report in summary.reports.values()) == STEPS - kept
    assert min(min(report.hashes) for report in summary.reports.values()) == kept + HASH_EVERY
    assert summary.failures == 0
    assert_as_without_faults(summary, STEPS)


def test_a_training_goes_on_without_its_gateway_and_the_next_one_finds_it(gateway: Gateway, tmp_path: Path) -> None:
    weaver = WeaverProxy(gateway.url, TOKEN)
    await_weaver(weaver)
    with gateway.connect() as job:
        run = a_job(tmp_path).start(job)
        before = await_step(job, run, STEPS // 4)
        driver = gateway.session(job.session)["pid"]

        pid = weaver.inject("dead_gateway", "*").evidence[""]["pid"]
        await_end(pid)
        kept = newest_step(tmp_path)
        await_true(lambda: newest_step(tmp_path) >= kept + 2 * CHECKPOINT_EVERY, BEGUN_IN_TIME)
        gateway.start()

        after = status_of(job)
        assert gateway.session(job.session)["pid"] == driver
        summary: JobSummary = run.result(FINISHED_IN_TIME)

    assert after is not None
    assert [group.pids for group in after.groups] == [group.pids for group in before.groups]
    assert summary.failures == 0
    assert {replica: report.restored_step for replica, report in summary.reports.items()} == {
        group.replica: group.report.restored_step for group in before.groups
    }
    assert_as_without_faults(summary, STEPS)


PLAN = """\
name: pieces
watch: train
until: finished
recovery: 60 s
within: 4 min
faults:
  - {fault: dead_gateway, when: {step: 150}, target: {mesh: train}}
  - {fault: dead_driver, when: {event: recovered, after: 3 s}, target: {mesh: train}}
expect: [recovers within 60 s, no step lost twice, loss falls, replicas agree, accuracy at least 0.97]
"""


class Operator:
    """Starts again whatever has died, as systemd or Kubernetes does for a gateway, and people for a training."""

    def __init__(self, gateway: Gateway, training: FaultTolerantJob) -> None:
        self._gateway = gateway
        self._training = training
        self.summaries: list[JobSummary] = []
        self.starts = 0
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self.summaries:
            with self._gateway.connect() as job:
                self.starts += 1
                run = self._training.start(job)
                try:
                    self.summaries.append(run.result(FINISHED_IN_TIME))
                except loom.SessionLost:
                    continue

    def wait(self) -> JobSummary:
        self._thread.join(FINISHED_IN_TIME)
        (summary,) = self.summaries
        return summary


def test_a_plan_kills_the_gateway_and_the_driver_of_a_training(gateway: Gateway, tmp_path: Path) -> None:
    weaver = WeaverProxy(gateway.url, TOKEN)
    await_weaver(weaver)
    operator = Operator(gateway, a_job(tmp_path))
    await_true(
        lambda: sum(bool(one.step) for one in weaver.replicas().values() if one.group == "train") == 3,
        BEGUN_IN_TIME,
    )

    run = PlanExecution(parse_plan(PLAN), weaver, report=lambda line: restart_gateway(line, gateway))
    run.run()
    summary = operator.wait()

    report = Report(run)
    assert report.ok, report.markdown()
    assert operator.starts == 2
    assert_as_without_faults(summary, STEPS)


def restart_gateway(line: str, gateway: Gateway) -> None:
    """Start the gateway again as soon as it is told that it was killed."""
    if line.startswith("dead_gateway strikes"):

        def start() -> None:
            process: Any = gateway._process
            process.wait(BOUND)
            gateway.start()

        threading.Thread(target=start, daemon=True).start()
