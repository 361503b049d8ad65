"""The tuner on a run of another framework, which is known by its logs and takes changes under ``loom run``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loom.control.commands import Acknowledgement
from loom.errors import WrongArguments, WrongState
from loom.rl.diagnosis.frameworks import FRAMEWORKS
from loom.rl.tuning import foreign_target, target
from loom.rl.tuning.changes import NoChange
from loom.rl.tuning.foreign_changes import START_OPTIONS
from loom.rl.tuning.foreign_target import ForeignTarget
from loom.rl.tuning.ledger import Decision, Ledger
from loom.rl.tuning.target import RunEnded
from loom.rl.tuning.tuner import Tuner
from loom.weaver.states import ReplicaState
from loom.weaver.views import MetricPoint, ReplicaInfo, WeaverEvent
from tests.unit.loom.rl.diagnosis.foreign.formats import write
from tests.unit.loom.rl.diagnosis.foreign.simulation import simulate
from tests.unit.loom.rl.diagnosis.pipeline import Pipeline, Times

STEPS = 12


@dataclass
class Given:
    """The handle of a command."""

    id: str
    answers: dict[str, Acknowledgement]

    def get(self, timeout: float) -> dict[str, Acknowledgement]:
        return self.answers


class DriftingRun:
    """A run of prime-rl whose rollouts get staler; also the weaver, which lets it make a step with each look.

    The mismatch of its policies grows with staleness, and with the learning rate as far as ``helps`` says.
    """

    def __init__(self, folder: Path, helps: float = 1.0) -> None:
        self.log = folder / "metrics.jsonl"
        self.helps = helps
        self.number = 0
        self.factor: float | None = None
        self.state = ReplicaState.RUNNING
        self.given: list[dict[str, Any]] = []
        self.refusal: str | None = None
        self.happened: list[WeaverEvent] = []
        for _ in range(40):
            self._make_step()

    def _make_step(self) -> None:
        number, self.number = self.number, self.number + 1
        staleness = min(4.0, number / 8)
        rate = 1 - self.helps * (1 - (self.factor or 1.0))
        row = {
            "step": number,
            "time/step": 10.0 + 0.01 * (number % 3),
            "time/wait_for_policy": 0.1,
            "off_policy/mean": staleness,
            "mismatch_kl/all/mean": 0.002 * (1 + 0.3 * staleness**2) * rate * (1 + 0.01 * (number % 5)),
            "reward/all/mean": 0.5 + 0.01 * (number % 2),
        }
        with self.log.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def replicas(self) -> dict[str, ReplicaInfo]:
        self._make_step()
        handlers = {"learning_rate": "float", "learning_rate_factor": "float", "learning_rate_schedule": "float"}
        config = {"learning_rate": 1e-6, "learning_rate_factor": self.factor, "learning_rate_schedule": None}
        return {
            f"big_{rank}": ReplicaInfo(f"big_{rank}", self.state, "big", handlers=handlers, config=config)
            for rank in (0, 1)
        }

    def replica(self, id: str) -> ReplicaInfo:
        return self.replicas()[id]

    def history(
        self, replica: str, metric: str, since: float | None = None, until: float | None = None, points: int = 500
    ) -> list[MetricPoint]:
        return []

    def events(self, after: int | None = None, *, limit: int = 100) -> Iterator[WeaverEvent]:
        return iter([event for event in self.happened if event.id > (after or 0)])

    def update_config(self, target: str = "*", **config: Any) -> Given:
        assert target == "big"
        self.given.append(config)
        if self.refusal is not None:
            refused = Acknowledgement(False, 1, refused=dict.fromkeys(config, self.refusal))
            return Given("c", {"big_0": Acknowledgement(True, 1), "big_1": refused})
        self.factor = config.get("learning_rate_factor")
        return Given(f"c{len(self.given)}", {f"big_{rank}": Acknowledgement(True, 1) for rank in (0, 1)})


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "LOOK_EVERY", 0.0)
    monkeypatch.setattr(foreign_target, "READS", 0.0)


def tuner_of(run: DriftingRun, folder: Path) -> Tuner:
    target = ForeignTarget([run.log], weaver=run, name="big")
    return Tuner(target, Ledger(folder / "ledger", target.session), steps=STEPS)


@pytest.mark.guarantees("tuning", "A run of another framework that trains under `loom run` takes a change, too")
def test_a_drift_is_answered_by_a_lower_learning_rate_that_is_kept(tmp_path: Path) -> None:
    run = DriftingRun(tmp_path)

    (entry,) = tuner_of(run, tmp_path).tune(rounds=1)

    assert (entry.rule, entry.decision, entry.replica) == ("mismatch", Decision.KEPT, "big"), entry.why
    assert (entry.option, entry.old, entry.new) == ("learning_rate_factor", 1.0, 0.5)
    assert run.given == [{"learning_rate_factor": 0.5}]
    assert re.match(r"mismatch 0\.0\d+ → 0\.00\d+, ", entry.why)
    assert entry.before is not None
    assert entry.after is not None
    assert entry.after.mismatch == pytest.approx((entry.before.mismatch or 0) / 2, rel=0.1)
    assert entry.after.first > (entry.step or 0) >= 40


def test_what_does_not_help_is_taken_back_and_the_schedule_holds_again(tmp_path: Path) -> None:
    run = DriftingRun(tmp_path, helps=0.0)

    target = ForeignTarget([run.log], weaver=run, name="big")
    tuner = Tuner(target, Ledger(tmp_path / "ledger", "big"), steps=STEPS)

    (entry,) = tuner.tune(rounds=1)

    assert entry.decision is Decision.TAKEN_BACK
    assert run.given == [{"learning_rate_factor": 0.5}, {"learning_rate": None}]
    again = tuner.propose(target.whole)
    assert isinstance(again, NoChange)


def test_a_change_that_one_rank_refuses_is_refused(tmp_path: Path) -> None:
    run = DriftingRun(tmp_path)
    run.refusal = "the optimizer steps within the backward pass"

    (entry,) = tuner_of(run, tmp_path).tune(rounds=1)

    assert (entry.decision, entry.why) == (Decision.REFUSED, run.refusal)


def test_only_what_the_trainers_take_can_be_given_by_hand(tmp_path: Path) -> None:
    tuner = tuner_of(DriftingRun(tmp_path), tmp_path)

    assert tuner.given("learning_rate", 5e-7).replica == "big"
    with pytest.raises(WrongArguments, match="no option 'max_off_policy_steps'; it has learning_rate"):
        tuner.given("max_off_policy_steps", 4)


def test_changes_by_others_are_those_of_its_trainers(tmp_path: Path) -> None:
    run = DriftingRun(tmp_path)
    changes = {"learning_rate": {"old": 1e-6, "new": 2e-6}}
    run.happened = [
        WeaverEvent(5, 1.0, "applied", "big_1", {"command": "x", "changes": changes}),
        WeaverEvent(6, 2.0, "applied", "other_0", {"command": "y", "changes": changes}),
    ]

    assert ForeignTarget([run.log], weaver=run, name="big").changes_by_others(4) == ([run.happened[0]], 6)


def test_a_training_that_is_not_there_or_has_ended_is_named(tmp_path: Path) -> None:
    run = DriftingRun(tmp_path)

    with pytest.raises(WrongState, match=r"nothing named 'small' trains under `loom run`; .* yours: big$"):
        ForeignTarget([run.log], weaver=run, name="small")
    target = ForeignTarget([run.log], weaver=run, name="big")
    run.state = ReplicaState.FAILED
    with pytest.raises(RunEnded, match="'big' is failed"):
        target.step()


def test_steps_whose_length_the_logs_do_not_say_are_named(tmp_path: Path) -> None:
    rows = [{"step": step, "off_policy/mean": 1.0, "mismatch_kl/all/mean": 0.1} for step in range(9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    with pytest.raises(WrongState, match="do not say how long the steps 2 to 4 took"):
        ForeignTarget([tmp_path / "metrics.jsonl"]).measure(2, 4)


def test_logs_of_looms_own_are_refused(tmp_path: Path) -> None:
    logs = Pipeline(Times(), steps=20).write(tmp_path)

    with pytest.raises(WrongArguments, match=r"not those of another framework: .* with --session"):
        ForeignTarget(logs)


@pytest.mark.parametrize(
    ("framework", "cause", "says"),
    [
        ("verl", "small cache", "verl takes no changes while it runs. Start the next one with a higher "),
        ("TRL", "small cache", "Nothing that TRL takes while it runs answers it. Start the next one with a higher"),
        ("prime-rl", "deaf engine", "prime-rl takes a lower learning rate under `loom run`: name its replica"),
        ("SkyRL", "slow trainers", "SkyRL takes no changes while it runs. Add trainers"),
    ],
)
def test_where_there_is_no_door_it_says_so(framework: str, cause: str, says: str, tmp_path: Path) -> None:
    asynchronous = 1 if cause == "deaf engine" else 0
    target = ForeignTarget([write(simulate(cause, 1, asynchronous=asynchronous), framework, tmp_path)])

    proposed = Tuner(target, Ledger(tmp_path / "ledger", target.session)).propose(target.whole)

    assert isinstance(proposed, NoChange)
    assert says in proposed.why


def test_every_table_of_options_is_of_a_framework_and_has_its_sources() -> None:
    assert set(START_OPTIONS) <= {one.name for one in FRAMEWORKS}
    for options in START_OPTIONS.values():
        assert options.sources
        assert all(re.fullmatch(r"[0-9a-f]{40}", source.commit) for source in options.sources)
