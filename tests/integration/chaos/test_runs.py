"""Whole plans, carried out into training processes that are started again when they die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loom.chaos.plans import parse_plan
from loom.chaos.runs.observer import Life, Observer
from loom.chaos.runs.run import PlanExecution
from loom.chaos.runs.tracker import Struck, Tracker
from loom.chaos.runs.verdicts import lost_twice
from loom.errors import BadPlan
from loom.weaver.views import ReplicaInfo
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import TOKEN, Gateway, await_true, gateway_of
from tests.support.processes import STARTED_IN_TIME
from tests.support.weaver_training import training
from tests.support.weavers import await_weaver
from tests.system.chaos.restarted import restarted


@pytest.fixture(scope="module")
def gateway(cluster: LocalCluster) -> Iterator[Gateway]:
    with gateway_of(cluster, "--injectable") as running:
        await_weaver(WeaverProxy(running.url, TOKEN))
        yield running


@pytest.fixture
def weaver(gateway: Gateway) -> WeaverProxy:
    return WeaverProxy(gateway.url, TOKEN)


def trains(weaver: WeaverProxy, *replicas: str) -> None:
    await_true(lambda: all((found := weaver.replicas().get(one)) and found.step for one in replicas))


def loom_inject(gateway: Gateway, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LOOM_URL": gateway.url, "LOOM_TOKEN": TOKEN}
    command = [sys.executable, "-c", "from loom.cli import main; main()", "inject", *arguments]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=110)


PLAN = """\
name: all-at-once
seed: 11
watch: run_*
settle: 0.5 s
recovery: 20 s
faults:
  - fault: sigkill
    when: {step: 30}
    target: {replica: run_0}
    expect: [recovers within 15 s, detected within 1 s, at most 5 steps lost]
  - fault: slow_rank
    when: {event: recovered}
    target: {mesh: train, random: 1}
    for: 3 s # a process accounts for its time each second
    with: {seconds: 0.05}
  - fault: sigstop
    when: {event: recovered}
    target: run_1
    for: 3 s
    expect: detected within 10 s
  - {fault: dead_weaver, when: {event: recovered}}
expect:
  - loss falls
  - accuracy at least 50 %
  - no step lost twice
  - replicas agree
  - recovers within 20 s
"""


@pytest.mark.slow
def test_a_plan_is_carried_out_and_reported(gateway: Gateway, weaver: WeaverProxy, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    with restarted(weaver.address(), tmp_path, "run_0", "run_1") as (first, second):
        trains(weaver, "run_0", "run_1")

        done = loom_inject(gateway, tmp_path, "run", "plan.yaml", "--report", "out")

        assert done.returncode == 0, done.stdout + done.stderr
        assert (first.starts, second.starts) == (2, 1)
    report: dict[str, Any] = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["held"], report["seed"], report["text"]) == (True, 11, PLAN)
    kill, slow, stop, weaver_died = report["faults"]
    assert kill["fault"] == "sigkill"
    assert 0 < kill["detected"] < 1
    assert kill["steps_lost"] <= 5
    assert list(kill["evidence"]["run_0"]) == ["pid"]
    assert slow["removal"]
    assert stop["victims"][0]["detected_as"] in ("stalled", "recovering", "failed")
    assert stop["removal"]["run_1"]["was"]["state"] == "T"
    assert weaver_died["evidence"][""]["how"] == "was killed by SIGKILL"
    assert len(report["weavers"]) == 2
    for one in (kill, slow, stop):
        assert 0 < one["goodput"] <= 1
        assert one["goodput"] == one["spent"]["compute"] / sum(one["spent"].values())
    assert kill["spent"]["respawn"] > 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert text.startswith("# all-at-once: held")
    assert "| 1 |" in text
    if (tmp_path / "out" / "report.png").exists():
        assert (tmp_path / "out" / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_plan_that_does_not_hold_says_so_by_its_exit_code(
    gateway: Gateway, weaver: WeaverProxy, tmp_path: Path
) -> None:
    text = (
        "faults:\n  - {fault: exception, when: {time: 0}, target: gone_0}\n"
        "settle: 0\nrecovery: 300 ms\nwatch: gone_*\nexpect: [loss rises, recovers within 1 ms]\n"
    )
    (tmp_path / "plan.yaml").write_text(text)
    environment = {"LOOM_INJECTABLE": "1"}
    with injectable(environment), training(weaver.address(), "gone_0"):
        trains(weaver, "gone_0")

        done = loom_inject(gateway, tmp_path, "run", "plan.yaml", "--json")

    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert not report["held"]
    found = {one["expected"]: one for one in report["expectations"]}
    assert found["recovers within 1 ms"]["found"] == "never"
    assert not found["loss rises"]["held"]
    assert (tmp_path / "plan-0-report" / "report.md").exists()


class injectable:
    """What is started meanwhile has these variables in its environment."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._variables = variables

    def __enter__(self) -> None:
        os.environ.update(self._variables)

    def __exit__(self, *_: object) -> None:
        for name in self._variables:
            del os.environ[name]


def test_a_target_that_matches_nothing_is_refused_before_anything_is_touched(
    gateway: Gateway, weaver: WeaverProxy, tmp_path: Path
) -> None:
    text = (
        "faults:\n"
        "  - {fault: sigkill, when: {time: 0}, target: there_0}\n"
        "  - {fault: sigkill, when: {time: 0}, target: nobody_*}\n"
    )
    (tmp_path / "plan.yaml").write_text(text)
    with injectable({"LOOM_INJECTABLE": "1"}), training(weaver.address(), "there_0") as (there,):
        trains(weaver, "there_0")

        done = loom_inject(gateway, tmp_path, "run", "plan.yaml")
        checked = loom_inject(gateway, tmp_path, "check", "plan.yaml")

        assert done.returncode == checked.returncode == 2
        assert "plan.yaml:3:5: sigkill: the target (replica nobody_*) matches no replica that lives" in done.stderr
        assert checked.stderr == done.stderr
        assert there.process.poll() is None


def test_a_target_that_is_not_marked_is_refused_before_anything_is_touched(weaver: WeaverProxy) -> None:
    plan = parse_plan("faults:\n  - {fault: sigkill, when: {time: 0}, target: unmarked_0}\n", "p.yaml")
    with training(weaver.address(), "unmarked_0") as (unmarked,):
        trains(weaver, "unmarked_0")

        with pytest.raises(BadPlan, match=r"p\.yaml:2:5: sigkill: .* not marked as injectable: unmarked_0"):
            PlanExecution(plan, weaver).run()

        assert unmarked.process.poll() is None


def test_one_fault_is_injected_from_the_command_line(gateway: Gateway, weaver: WeaverProxy, tmp_path: Path) -> None:
    with injectable({"LOOM_INJECTABLE": "1"}), training(weaver.address(), "once_0") as (once,):
        trains(weaver, "once_0")

        nobody = loom_inject(gateway, tmp_path, "once", "sigkill")
        done = loom_inject(gateway, tmp_path, "once", "sigkill", "--replica", "once_*", "--json")

        assert nobody.returncode == 2
        assert "say whom sigkill is to strike" in nobody.stderr
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["evidence"] == {"once_0": {"pid": once.pid}}
        assert once.process.wait(STARTED_IN_TIME) == -9


def test_seeds_choose_the_same_times_and_victims() -> None:
    text = "faults:\n  - {fault: sigkill, when: {rate: 2 per minute, times: 5}}\nseed: %d\n"

    def times(seed: int) -> list[float]:
        return PlanExecution(parse_plan(text % seed), None)._pending[0].times  # type: ignore[arg-type]

    assert times(1) == times(1) != times(2)
    assert len(times(1)) == 5
    assert sorted(times(1)) == times(1)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(0, 50), (45, 100)], {}),
        ([(0, 50), (45, 60), (58, 90)], {}),
        ([(0, 50), (45, 48), (46, 90)], {"r": 46}),
        ([(0, 50), (51, 60)], {}),
        ([(0, 50), (None, None), (45, 60)], {}),
    ],
)
def test_steps_that_are_lost_twice_are_found(
    spans: list[tuple[int | None, int | None]], expected: dict[str, int]
) -> None:
    lives = [Life("r", float(number), first, last) for number, (first, last) in enumerate(spans)]

    assert lost_twice({"r": lives}) == expected


def test_a_dead_driver_is_recovered_from_when_somebody_trains_again_and_not_when_somebody_looks_after_it() -> None:
    plan = parse_plan("faults:\n  - {fault: dead_driver, when: {step: 1}, target: {mesh: train}}\n")
    observer = Observer(None)  # type: ignore[arg-type] # nobody is asked
    tracker = Tracker(observer, patience=60.0, report=lambda line: None)
    struck = Struck(plan.faults[0], time.time(), ["session-1"], [], groups=frozenset({"train"}))

    def sees(id: str, group: str) -> None:
        later = struck.at + 1
        observer.replicas = {id: ReplicaInfo(id, "running", group, step=0, registered=later)}
        tracker.follow(struck)

    sees("train_job", "train_jobs")
    assert struck.recovered is None
    sees("train_0", "train")
    assert struck.recovered is not None
