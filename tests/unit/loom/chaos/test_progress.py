"""A run while it goes on: what its faults and expectations come to, and that it can be cancelled."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from loom.chaos.plans import parse_plan
from loom.chaos.runs.progress import FaultState, PlanProgress
from loom.chaos.runs.run import PlanExecution
from loom.chaos.runs.tracker import Struck
from loom.control.commands import Acknowledgement
from loom.errors import BadPlan
from loom.weaver.states import ReplicaState
from loom.weaver.views import GoodputRecord, MetricPoint, ReplicaInfo, WeaverEvent

BOUND = 20.0


class Injection:
    """A fault that the one replica has at once."""

    def __init__(self, id: str) -> None:
        self.id = id

    def done(self) -> bool:
        return True

    def outcomes(self) -> Mapping[str, Acknowledgement]:
        return {"train_0": Acknowledgement(True, evidence={"pid": 7})}

    @property
    def evidence(self) -> Mapping[str, Mapping[str, Any]]:
        return {"train_0": {"pid": 7}}


class Weaver:
    """Stands in for a weaver with one replica that trains."""

    def __init__(self) -> None:
        self.injected: list[str] = []
        self.removed: list[str] = []

    def status(self) -> Mapping[str, Any]:
        return {"weaver": "w", "time": time.time(), "event": 0}

    def replicas(self) -> Mapping[str, ReplicaInfo]:
        step = int(time.time() * 100)
        replica = ReplicaInfo(
            "train_0", ReplicaState.RUNNING, "train", step=step, reported=time.time(), injectable=True
        )
        return {"train_0": replica}

    def events(self, after: int) -> list[WeaverEvent]:
        return []

    def history(self, replica: str, metric: str, *, since: float, points: int) -> list[MetricPoint]:
        return [MetricPoint(since + number, number, 1.0 / (number + 1)) for number in range(10)]

    def goodput(self) -> Mapping[str, GoodputRecord]:
        return {}

    def inject(
        self,
        fault: str,
        target: str | list[str],
        duration: float | None,
        params: dict[str, Any],
        id: str | None = None,
    ) -> Injection:
        self.injected.append(fault)
        return Injection(f"injection-{len(self.injected)}")

    def remove_injection(self, id: str) -> None:
        self.removed.append(id)


PLAN = """
faults:
  - fault: slow_rank
    when: {time: 0 s}
    target: train_0
    for: 600 s
    expect: [recovers within 5 s, detected within 1 s]
  - {fault: sigkill, when: {rate: 1 per hour, times: 3}, target: train_0}
expect: [loss falls, goodput at least 50 %]
"""


def test_a_run_is_followed_and_removes_its_faults_when_it_is_cancelled() -> None:
    weaver, progress, lines = Weaver(), PlanProgress(), list[str]()
    injected = threading.Event()

    def looked() -> None:
        progress.look(run)
        if run.struck:
            injected.set()

    run = PlanExecution(parse_plan(PLAN), weaver, lines.append, looked)
    thread = threading.Thread(target=run.run)
    thread.start()
    assert injected.wait(BOUND)
    going = progress.now
    run.cancel("it was cancelled")
    run.cancel("again")
    thread.join(BOUND)

    assert not thread.is_alive()
    assert (weaver.injected, weaver.removed) == (["slow_rank"], ["injection-1"])
    slow, kill = going.faults
    assert (slow.state, slow.struck, slow.injection) == (FaultState.PRESENT, ("train_0",), "injection-1")
    assert (kill.state, kill.times, kill.at) == (FaultState.WAITING, 3, None)
    assert {one.expected: one.held for one in going.expectations} == {
        "recovers within 5 s": None,
        "detected within 1 s": None,
        "loss falls": True,
        "goodput at least 50 %": False,
    }
    assert not any(one.final for one in going.expectations)
    assert not progress.end(run)
    assert all(one.final for one in progress.now.expectations)
    cut = [one.found for one in progress.now.expectations if one.expected == "the plan is carried out"]
    assert cut == ["it was cancelled"]
    assert lines == ["slow_rank strikes train_0"]


def struck(**known: Any) -> PlanExecution:
    """A run with one fault, of which something is known."""
    run = PlanExecution(parse_plan(PLAN), Weaver())
    run.observer.begin()
    run.began = run.observer.now()
    made = Struck(run.plan.faults[0], run.began, ["train_0"], [], frozenset(("train",)))
    for name, value in known.items():
        setattr(made, name, value)
    run.struck.append(made)
    return run


@pytest.mark.parametrize(
    ("known", "state", "recovers", "detected"),
    [
        ({"recovered": 2.0, "detected": 0.5}, FaultState.RECOVERED, (True, True), (True, True)),
        ({"recovered": 9.0, "detected": 3.0}, FaultState.RECOVERED, (False, True), (False, True)),
        ({"detected": 0.5, "over": 0.0}, FaultState.OVER, (False, True), (True, True)),
        ({"given_up": True, "over": 0.0}, FaultState.GIVEN_UP, (False, True), (False, True)),
        ({"failed": "nobody has it"}, FaultState.NOT_INJECTED, (False, True), (False, True)),
        ({}, FaultState.PRESENT, (None, False), (None, False)),
    ],
)
def test_an_expectation_of_a_fault_is_open_until_nothing_can_change_it(
    known: dict[str, Any], state: FaultState, recovers: tuple[bool | None, bool], detected: tuple[bool | None, bool]
) -> None:
    progress = PlanProgress()
    progress.look(struck(**known))

    assert progress.now.faults[0].state is state
    of_fault = {one.expected: (one.held, one.final) for one in progress.now.expectations if one.fault == 0}
    assert of_fault == {"recovers within 5 s": recovers, "detected within 1 s": detected}


def test_a_plan_whose_names_stand_for_too_much_is_refused() -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    for before, name in zip("abcdef", "bcdefg", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]")

    with pytest.raises(BadPlan, match="the plan has more than 50000 values"):
        parse_plan("\n".join(lines))
