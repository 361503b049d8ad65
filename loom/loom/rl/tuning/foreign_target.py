"""`ForeignTarget`: a run of another framework, whose logs say its steps and whose trainers take changes."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loom.control.commands import Acknowledgement
from loom.errors import WrongArguments, WrongState
from loom.rl.diagnosis.analysis import analyze
from loom.rl.diagnosis.diagnosis import Finding
from loom.rl.diagnosis.result import Analysis
from loom.rl.diagnosis.signals import Signal
from loom.rl.tuning.changes import NoChange, OptionChange
from loom.rl.tuning.foreign_changes import FACTOR, foreign_change
from loom.rl.tuning.ledger import Measurement
from loom.rl.tuning.target import ANSWER_TIMEOUT, RunEnded, TunedRun, TunedWeaver
from loom.weaver.states import LIVING
from loom.weaver.views import ReplicaInfo, WeaverEvent

READS = 10.0
"""While steps are waited for, the logs are read anew after so many times the time that reading them took."""
RATE = "learning_rate"


class ForeignTarget(TunedRun):
    """A run of another framework.

    Args:
        logs: its logs, files and folders.
        framework: the name of the framework; recognized by its names if None.
        weaver: the weaver; None if the run is not to be changed.
        name: the name of the training under ``loom run``; needed with a weaver.

    Raises:
        WrongArguments: the logs are not those of another framework.
        WrongState: nothing of that name trains.
    """

    def __init__(
        self,
        logs: Sequence[Path],
        framework: str | None = None,
        weaver: TunedWeaver | None = None,
        name: str | None = None,
    ) -> None:
        self._paths = list(logs)
        self._named = framework
        self._changed = 0
        """The step from which on the run is as it is now."""
        self._before: Mapping[str, Any] = {}
        self._read_again = 0.0
        self.whole = self._analyse()
        """The analysis of the whole logs."""
        history = self.whole.measured.history
        if history is None:
            raise WrongArguments(
                f"the logs are not those of another framework: {self.whole.sources[0]}. For a run of loom.rl name "
                "its session with --session"
            )
        self._newest = history.steps[-1].number if history.steps else -1
        self.framework = history.framework
        self._name = name
        self.session = name or logs[0].name
        self.command_ids = set()
        if weaver is not None:
            self._weaver = weaver
            self._trainers()

    def _analyse(self, steps: range | None = None) -> Analysis:
        began = time.monotonic()
        found = analyze(self._paths, framework=self._named, steps=steps)
        self._read_again = time.monotonic() + READS * (time.monotonic() - began)
        return found

    def _trainers(self) -> list[ReplicaInfo]:
        """Return the living replicas of the training."""
        known = self._patiently(self._weaver.replicas).values()
        ours = [one for one in known if self._name in (one.id, one.group)]
        living = [one for one in ours if one.state in LIVING]
        if not ours:
            others = ", ".join(sorted({one.group or one.id for one in known if one.state in LIVING})) or "none"
            raise WrongState(
                f"nothing named {self._name!r} trains under `loom run`; living trainings of yours: {others}"
            )
        if not living:
            raise RunEnded(f"{self._name!r} is {ours[0].state.value}, at step {ours[0].step}")
        return living

    def config(self) -> Mapping[str, Any]:
        """Return the keys that the trainers take, with their values; none if the run is not to be changed."""
        if self._name is None:
            return {}
        first = self._trainers()[0]
        return {key: first.config.get(key) for key in first.handlers}

    def step(self) -> int:
        """Return the newest step that is surely complete, by the logs.

        Raises:
            RunEnded: the training has ended.
        """
        if self._name is not None:
            self._trainers()
        if time.monotonic() >= self._read_again:
            history = self._analyse().measured.history
            if history is not None and history.steps:
                self._newest = history.steps[-1].number
        return self._newest - 1  # more lines of the newest one may come

    def metric(self, name: str) -> float | None:
        """Return None: no process is added to such a run."""
        return None

    def apply(self, option: str, value: Any, replica: str) -> Acknowledgement:
        """Change an option in all trainers at a step boundary, and wait until they say so or one refuses.

        The step of the answer is that of the logs. ``replica`` does not count: a ledger may name another run's.

        Raises:
            WaitTimeout: there is no acknowledgement within `ANSWER_TIMEOUT` seconds.
        """
        self._before = self.config()
        command = self._weaver.update_config(self.taker(option), **{option: value})
        self.command_ids.add(command.id)
        answers: dict[str, Acknowledgement] = command.get(ANSWER_TIMEOUT)
        if not answers:
            return Acknowledgement.failed(f"there is no replica {self._name!r}")
        answer = min(answers.values(), key=lambda one: one.ok)  # the first refusal, if there is one
        self._changed = self._newest_now() + 1
        return replace(answer, step=self._changed)

    def _newest_now(self) -> int:
        self._read_again = 0.0
        return self.step() + 1

    def undo(self, change: OptionChange) -> Acknowledgement:
        """Give an option its old value again; a learning rate that its schedule gave follows it again."""
        key, at, which = change.option.partition("@")
        if key in (RATE, FACTOR) and self._before.get(f"{RATE}_schedule{at}{which}") is None:
            return self.apply(f"{RATE}{at}{which}", None, change.replica)
        return super().undo(change)

    def changes_by_others(self, after: int) -> tuple[list[WeaverEvent], int]:
        """Return the changes of the trainers after an event that others gave, and the id of the newest event."""
        found, newest = super().changes_by_others(after)
        ours = {one.id for one in self._trainers()}
        return [event for event in found if event.replica in ours], newest

    def newest_event(self) -> int:
        """Return the id of the newest event, 0 if there is none."""
        return 0 if self._name is None else super().newest_event()

    def measure(self, first: int, last: int) -> tuple[Measurement, Analysis]:
        """Return what some steps came to, and the analysis of all since the last change.

        Raises:
            WrongState: the logs do not say how long these steps took.
        """
        found = self._analyse(range(first, last + 1))
        history = found.measured.history
        if history is None or "step_s" not in found.metrics:
            raise WrongState(f"the logs of {self.session!r} do not say how long the steps {first} to {last} took")
        rewards = [reward for (reward,) in history.values(Signal.REWARD)]
        since = self._analyse(range(min(self._changed, first), last + 1))
        return Measurement.of(first, last, found, rewards, []), since

    def change_for(
        self, finding: Finding, found: Analysis, tried: Container[tuple[str, str]]
    ) -> OptionChange | NoChange:
        """Return the change that answers a finding, or why there is none."""
        return foreign_change(finding, self.framework, self.config(), self._name, tried)

    def taker(self, option: str) -> str:
        """Return the name of the training."""
        return self._name or ""
