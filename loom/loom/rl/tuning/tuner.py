"""`Tuner`: proposes changes of a running run, tries them one at a time, and keeps the helpful ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from loom.errors import LoomError, WaitTimeout, WrongArguments, because
from loom.rl.diagnosis.result import Analysis
from loom.rl.tuning.changes import (
    HIGHEST_LEVEL,
    LEAST,
    ORCHESTRATOR,
    Goal,
    NoChange,
    OptionChange,
)
from loom.rl.tuning.ledger import Decision, Ledger, LedgerEntry, Measurement
from loom.rl.tuning.target import RunEnded, TunedRun

SETTLES = 2
"""Steps after a change that are not measured, besides the steps under way."""
STARTS = 5
"""Steps at the beginning of a run that are not measured."""
COMES_WITHIN = 180.0
"""Seconds in which a new generator or group takes part."""
LOOK_EVERY = 0.5
SLOWER = 0.5
"""The share of steps an hour that a better quality may cost."""
BETTER = 0.9
"""The share of a value up to which it may fall to count as better."""
WORSE_REWARD = 0.05
"""By how much the mean reward may fall, besides three standard errors."""
WORSE_TRUNCATION = 10.0
"""By how many percent of the completions truncation may grow."""
COUNTED = {"generators": "generators", "groups": "trainers"}
"""Options whose effect comes later, and the metric that shows it."""


@dataclass(frozen=True)
class Judgement:
    """Whether a change is kept, and why."""

    kept: bool
    why: str


def judge(change: OptionChange, before: Measurement, after: Measurement) -> Judgement:
    """Return whether a change stays, by the measurements before and after."""
    gain = after.faster_than(before)
    if before.reward is not None and after.reward is not None:
        fall = before.reward - after.reward
        if fall > WORSE_REWARD + 3 * (before.reward_error**2 + after.reward_error**2) ** 0.5:
            return Judgement(False, f"The mean reward falls from {before.reward:.3f} to {after.reward:.3f}.")
    if change.goal is not Goal.SPEED:
        return _judge_quality(change.goal, gain, before, after)
    more = (after.trunc_pct or 0.0) - (before.trunc_pct or 0.0)
    if more > WORSE_TRUNCATION:
        return Judgement(False, f"{more:.0f} % more of the completions are truncated.")
    noise = 2 * (before.error**2 + after.error**2) ** 0.5 / before.step_seconds
    if gain < LEAST:
        return Judgement(False, f"{gain:+.0%} steps an hour: at least {LEAST:+.0%} is wanted.")
    if gain < noise:
        return Judgement(False, f"{gain:+.0%} steps an hour, which may be chance: the steps differ much.")
    return Judgement(True, f"{gain:+.0%} steps an hour.")


def _judge_quality(goal: Goal, gain: float, before: Measurement, after: Measurement) -> Judgement:
    old, new = getattr(before, goal.value), getattr(after, goal.value)
    if old is None or new is None:
        return Judgement(False, f"The log does not have {goal.value}.")
    told = f"{goal.value} {old:.3g} → {new:.3g}, {gain:+.0%} steps an hour."
    return Judgement(new <= BETTER * old and gain >= -SLOWER, told)


class Tuner:
    """Tunes one run.

    Args:
        run: the run.
        ledger: where every change is noted.
        steps: steps that are measured before a change and after it.
        say: called with each thing that happens, as one line.
    """

    def __init__(
        self, run: TunedRun, ledger: Ledger, *, steps: int = 20, say: Callable[[str], object] = lambda line: None
    ) -> None:
        if steps < 2:
            raise WrongArguments(f"{steps} steps are too few to measure: take 2 at least")
        self._run = run
        self._ledger = ledger
        self._steps = steps
        self._say = say
        self._since = STARTS  # the first step that is as the run is now
        self._tried: set[tuple[str, str]] = set()
        self._event = run.newest_event()

    def look(self) -> tuple[Measurement, Analysis]:
        """Measure the steps that were made last, after waiting for as many as that takes.

        Raises:
            RunEnded: the run ends before.
        """
        first = max(self._since, self._run.step() - self._steps + 1)
        self._run.await_step(first + self._steps - 1)
        last = self._run.step()
        return self._run.measure(last - self._steps + 1, last)

    def propose(self, found: Analysis) -> OptionChange | NoChange | None:
        """Return the change that the most important finding asks for, or why there is none; None without a finding.

        A change that was taken back is not proposed again; the next finding takes its turn.
        """
        first: NoChange | None = None
        for finding in found.findings:
            if not finding.over_bound:
                continue
            proposed = self._run.change_for(finding, found, self._tried)
            if isinstance(proposed, OptionChange):
                return proposed
            first = first or proposed
        return first

    def note(self, proposed: OptionChange | NoChange, before: Measurement | None = None) -> LedgerEntry:
        """Note a proposal that is not applied."""
        if isinstance(proposed, NoChange):
            entry = LedgerEntry(time.time(), proposed.rule, Decision.NONE, proposed.why, before=before)
        else:
            entry = _entry(proposed, Decision.PROPOSED, proposed.why, before=before)
        return self._ledger.add(entry)

    def tune(self, rounds: int) -> list[LedgerEntry]:
        """Try changes, one after the other, until nothing is found, or ``rounds`` were tried; return them.

        Raises:
            RunEnded: the run ends before.
        """
        made: list[LedgerEntry] = []
        while len(made) < rounds:
            before, found = self.look()
            proposed = self.propose(found)
            if proposed is None:
                break
            if isinstance(proposed, NoChange):
                made.append(self.note(proposed, before))
                break
            made.append(self.attempt(proposed, before))
        return made

    def given(self, option: str, new: Any) -> OptionChange:
        """Return the change that somebody proposes by hand.

        Raises:
            WrongArguments: the run has no such option.
        """
        config = self._run.config()
        if option not in config:
            raise WrongArguments(f"the run has no option {option!r}; it has {', '.join(sorted(config))}")
        return OptionChange(option, config[option], new, "given", "Given by hand.", replica=self._run.taker(option))

    def attempt(self, change: OptionChange, before: Measurement) -> LedgerEntry:
        """Apply a change, measure it, and keep it or take it back.

        Raises:
            RunEnded: the run ends before; the change stays as the run has no more steps.
        """
        self._tried.add(change.key)
        expected = "" if change.expected is None else f", {change.expected:+.0%} steps an hour expected"
        self._say(f"{change.rule}: {change}{expected}")
        had = self._count(change)
        try:
            answer = self._run.apply(change.option, change.new, change.replica)
        except WaitTimeout as error:
            self._take_back(change)
            return self._add(_entry(change, Decision.REFUSED, str(error), before=before))
        if not answer.ok:
            why = answer.refused.get(change.option) or answer.reason or "the run did not say why"
            return self._add(_entry(change, Decision.REFUSED, why, before=before))
        self._say(f"applied with step {answer.step}")
        try:
            missing = self._await_effect(change, had)
            after = None if missing else self._measure_after(change, answer.step)
        except RunEnded:
            self._add(_entry(change, Decision.GIVEN, "The run ended before it was measured.", answer.step, before))
            raise
        except BaseException as error:  # also Ctrl-C: nothing stays that was not measured
            self._take_back(change)
            why = f"It was not measured: {str(error) or type(error).__name__}"
            self._add(_entry(change, Decision.TAKEN_BACK, why, answer.step, before))
            raise
        judged = Judgement(False, missing) if after is None else judge(change, before, after)
        if not judged.kept:
            self._take_back(change)
        decision = Decision.KEPT if judged.kept else Decision.TAKEN_BACK
        return self._add(_entry(change, decision, judged.why, answer.step, before, after))

    def _count(self, change: OptionChange) -> float:
        """Return how many processes a change is about, 0 if it is about none."""
        return (change.option in COUNTED and self._run.metric(COUNTED[change.option])) or 0.0

    def _await_effect(self, change: OptionChange, had: float) -> str:
        """Wait until processes that a change adds take part; return the missing processes, if that takes too long.

        Args:
            had: the number of processes before.
        """
        wanted = had * change.new / change.old if had and change.old else 0.0
        until = time.monotonic() + COMES_WITHIN
        while (has := self._count(change)) < wanted:
            if time.monotonic() >= until:
                return f"{has:g} of {wanted:g} processes take part after {COMES_WITHIN:g} s."
            self._run.step()
            time.sleep(LOOK_EVERY)
        return ""

    def _measure_after(self, change: OptionChange, applied: int | None) -> Measurement:
        level = self._run.config().get("async_level", 0)
        begin = self._since = max(self._run.step() + 1, (applied or 0) + 1) + SETTLES + int(level)
        self._run.await_step(begin + self._steps - 1)
        return self._run.measure(begin, begin + self._steps - 1)[0]

    def _take_back(self, change: OptionChange) -> None:
        try:
            answer = self._run.undo(change)
            said = f"taken back with step {answer.step}" if answer.ok else because("not taken back", answer.reason)
            self._since = (answer.step or 0) + 1 + SETTLES + HIGHEST_LEVEL
        except LoomError as error:
            said = because("not taken back", error)
        self._say(said)

    def _add(self, entry: LedgerEntry) -> LedgerEntry:
        self.note_others()
        self._say(f"{entry.decision.value}: {entry.why}")
        return self._ledger.add(entry)

    def note_others(self) -> list[LedgerEntry]:
        """Note the changes that others have given since the last look, with the steps around them."""
        events, self._event = self._run.changes_by_others(self._event)
        made = []
        for event in events:
            step = event.data.get("step")
            for option, change in event.data["changes"].items():
                entry = LedgerEntry(
                    event.time, "given", Decision.GIVEN, f"Given by {event.data.get('by') or 'somebody'}.", option,
                    change["old"], change["new"], event.replica or ORCHESTRATOR, step=step,
                )  # fmt: skip
                made.append(self._ledger.add(self._around(entry)))
        return made

    def _around(self, entry: LedgerEntry) -> LedgerEntry:
        """Add the steps before and after an entry, as far as the log has them."""
        if entry.step is None or entry.replica != ORCHESTRATOR:
            return entry
        spans = {
            "before": (max(0, entry.step - self._steps), entry.step - 1),
            "after": (entry.step, min(self._run.step(), entry.step + self._steps - 1)),
        }
        found: dict[str, Any] = {}
        for name, (first, last) in spans.items():
            if first <= last:
                with suppress(LoomError):  # the log has them no more
                    found[name] = self._run.measure(first, last)[0]
        return replace(entry, **found)

    def replay(self, entries: Iterable[LedgerEntry]) -> list[LedgerEntry]:
        """Apply the kept and the given changes of a ledger, each when this run has come to its step.

        Raises:
            RunEnded: the run ends before.
        """
        made = []
        for old in entries:
            if old.decision not in (Decision.KEPT, Decision.GIVEN) or old.option is None:
                continue
            self._run.await_step((old.step or 0) - 1)
            now = self._run.config().get(old.option)
            answer = self._run.apply(old.option, old.new, old.replica)
            why = f"Replayed from step {old.step}." if answer.ok else str(answer.reason or answer.refused)
            decision = Decision.GIVEN if answer.ok else Decision.REFUSED
            entry = LedgerEntry(
                time.time(), "replay", decision, why, old.option, now, old.new, old.replica, step=answer.step
            )
            made.append(self._add(entry))
        return made


def _entry(
    change: OptionChange,
    decision: Decision,
    why: str,
    step: int | None = None,
    before: Measurement | None = None,
    after: Measurement | None = None,
) -> LedgerEntry:
    return LedgerEntry(
        time.time(), change.rule, decision, why, change.option, change.old, change.new, change.replica,
        change.expected, step, before, after,
    )  # fmt: skip
