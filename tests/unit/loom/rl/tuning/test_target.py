"""What the tuner reads of a run: its state and metrics from the weaver, its steps from the session's log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loom.control.commands import Acknowledgement
from loom.errors import WeaverUnavailable, WrongState
from loom.rl.tuning import target
from loom.rl.tuning.target import RunEnded, TunedRun
from loom.weaver.states import ReplicaState
from loom.weaver.views import MetricPoint, ReplicaInfo, WeaverEvent
from tests.unit.loom.rl.diagnosis.pipeline import Pipeline, Times


class Given:
    def __init__(self, id: str, answers: dict[str, Acknowledgement]) -> None:
        self.id = id
        self._answers = answers

    def get(self, timeout: float) -> dict[str, Acknowledgement]:
        return self._answers


class StandIn:
    """A weaver with the replicas of one run."""

    def __init__(self) -> None:
        self.replica_of_run = ReplicaInfo(
            "orchestrator",
            ReplicaState.RUNNING,
            session="rl",
            step=20,
            config={"async_level": 1},
            metrics={"reward": 1},
        )
        self.job = ReplicaInfo("trainer_job", ReplicaState.RUNNING, session="rl", metrics={"groups": 2})
        self.given: list[tuple[str, dict[str, Any]]] = []
        self.happened: list[WeaverEvent] = []
        self.away = 0

    def replicas(self) -> dict[str, ReplicaInfo]:
        if self.away:
            self.away -= 1
            raise WeaverUnavailable("the weaver is away")
        return {one.id: one for one in (self.replica_of_run, self.job)}

    def replica(self, id: str) -> ReplicaInfo:
        return self.replicas()[id]

    def history(
        self, replica: str, metric: str, since: float | None = None, until: float | None = None, points: int = 500
    ) -> list[MetricPoint]:
        if metric == "loss":
            return []
        return [MetricPoint(float(step), step, step / 10) for step in range(20)]

    def events(self, after: int | None = None, *, limit: int = 100) -> Iterator[WeaverEvent]:
        return iter([event for event in self.happened if event.id > (after or 0)])

    def update_config(self, target: str = "*", **config: Any) -> Given:
        self.given.append((target, config))
        known = target in self.replicas()
        return Given("c1", {target: Acknowledgement(True, 21)} if known else {})


def log(folder: Path) -> list[dict[str, Any]]:
    """The lines of 20 steps, as a session's log has them."""
    lines = [
        line.split(None, 2)[2]
        for path in Pipeline(Times(), steps=20).write(folder)
        for line in path.read_text().splitlines()
    ]
    return [{"text": text, "mesh": "driver", "place": ""} for text in lines]


@pytest.fixture
def weaver() -> StandIn:
    return StandIn()


@pytest.fixture
def run(weaver: StandIn, tmp_path: Path) -> TunedRun:
    lines = log(tmp_path)
    return TunedRun(weaver, lambda tail: lines[-tail:] if tail else lines, "rl")


def test_a_session_without_a_run_is_named(weaver: StandIn) -> None:
    with pytest.raises(WrongState, match="session 'other' has no replica 'orchestrator'"):
        TunedRun(weaver, list, "other")


def test_the_configuration_has_the_number_of_groups(run: TunedRun) -> None:
    assert run.config() == {"async_level": 1, "groups": 2}
    assert run.metric("reward") == 1.0
    assert run.metric("none") is None


def test_steps_are_cut_out_of_the_log(run: TunedRun) -> None:
    measured, found = run.measure(5, 9)

    assert found.metrics["step_s"].count == 5
    assert (measured.first, measured.last, measured.loss) == (5, 9, None)
    assert measured.reward == pytest.approx(0.7)
    assert measured.steps_per_hour == pytest.approx(3600 / found.metrics["step_s"].mean)


def test_lines_that_come_late_are_waited_for(
    weaver: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "LOOK_EVERY", 0.001)
    lines = log(tmp_path)
    asked = iter(range(5))

    def logs(tail: int | None) -> list[dict[str, Any]]:
        return lines if next(asked) == 4 else []

    measured, _ = TunedRun(weaver, logs, "rl").measure(5, 9)
    assert (measured.first, measured.last) == (5, 9)


def test_steps_that_the_log_does_not_have_are_named(run: TunedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "LOOK_EVERY", 0.001)
    monkeypatch.setattr(target, "LATE", 0.01)
    with pytest.raises(WrongState, match="does not have the steps 15 to 25 of the run: start its Orchestrator"):
        run.measure(15, 25)


def test_a_weaver_that_is_away_for_a_while_is_waited_for(
    run: TunedRun, weaver: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "LOOK_EVERY", 0.001)
    weaver.away = 3
    assert run.step() == 19

    monkeypatch.setattr(target, "AWAY", 0.0)
    weaver.away = 1
    with pytest.raises(WeaverUnavailable):
        run.step()


def test_the_end_of_the_run_ends_a_wait(run: TunedRun, weaver: StandIn) -> None:
    weaver.replica_of_run = ReplicaInfo("orchestrator", ReplicaState.FINISHED, session="rl", step=20)
    with pytest.raises(RunEnded, match="is finished, at step 20"):
        run.await_step(30)


def test_a_change_goes_to_its_replica_and_is_no_change_by_others(run: TunedRun, weaver: StandIn) -> None:
    assert run.apply("groups", 3, "trainer_job").step == 21
    assert run.apply("groups", 3, "nobody").reason == "there is no replica 'nobody'"
    assert weaver.given[0] == ("trainer_job", {"groups": 3})

    changes = {"batch": {"old": 64, "new": 32}}
    weaver.happened = [
        WeaverEvent(5, 1.0, "applied", "trainer_job", {"command": "c1", "changes": changes}),
        WeaverEvent(6, 2.0, "applied", "orchestrator", {"command": "c2", "changes": changes}),
        WeaverEvent(7, 3.0, "applied", "orchestrator", {"command": "c3", "changes": {}}),
        WeaverEvent(8, 4.0, "state", "orchestrator", {}),
    ]
    assert run.changes_by_others(4) == ([weaver.happened[1]], 8)
    assert run.newest_event() == 8
