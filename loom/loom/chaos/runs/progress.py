"""The progress of a run while it goes on: what became of each fault so far, and which expectations hold."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from loom.chaos.plans import Expectation, ExpectationKind
from loom.chaos.runs.run import PlanExecution
from loom.chaos.runs.tracker import Struck
from loom.chaos.runs.verdicts import judge, judge_fault, judge_run

JUDGE_EVERY = 2.0
"""Seconds between two judgements of the whole run, for which the metrics' history is read."""

JUDGED = 100
"""Watched replicas up to which the whole run is judged before its end: the history of each is read for that."""

SHOWN = 200
"""Injected faults whose progress is told, the newest ones."""


class FaultState(str, Enum):
    """The fate of a planned fault."""

    WAITING = "waiting"
    """Its moment has not come."""
    PRESENT = "present"
    OVER = "over"
    """It is over, and the training has not recovered yet."""
    RECOVERED = "recovered"
    GIVEN_UP = "given_up"
    """The training did not recover in the time that the plan gives it."""
    NOT_INJECTED = "not_injected"


@dataclass(frozen=True)
class FaultProgress:
    """A fault of a plan. Times are in seconds."""

    fault: str
    when: str
    target: str
    state: FaultState
    times: int = 1
    """Number of strikes that are left, while it waits."""
    at: float | None = None
    """The time of its injection, from the beginning of the run."""
    struck: tuple[str, ...] = ()
    """The replicas, session or component that it has struck."""
    injection: str = ""
    detected: float | None = None
    recovered: float | None = None
    steps_lost: int | None = None
    why: str | None = None
    """Why it was not injected."""


@dataclass(frozen=True)
class ExpectationProgress:
    """An expectation of a plan."""

    expected: str
    held: bool | None
    """True if it holds; None while that is open."""
    final: bool
    """True if nothing can change that any more."""
    found: str
    fault: int | None = None
    """The number of the injected fault that it is about, from 0; None: the whole run."""


@dataclass(frozen=True)
class RunProgress:
    """A run of a plan."""

    seconds: float
    """Duration so far."""
    faults: tuple[FaultProgress, ...]
    """The newest `SHOWN` injected faults, and then the waiting ones."""
    expectations: tuple[ExpectationProgress, ...]
    injected: int
    """The number of faults that were injected, or should have been."""


class PlanProgress:
    """Follows a run, on the run's own thread: pass ``look`` to it as ``looked``."""

    def __init__(self) -> None:
        self.now = RunProgress(0.0, (), (), 0)
        """The newest progress. Any thread may read it."""
        self._judged = 0.0
        self._of_run: tuple[ExpectationProgress, ...] = ()

    def begin(self, run: PlanExecution) -> None:
        """Note that all faults of a run wait."""
        self._note(run, run.began, ())

    def look(self, run: PlanExecution) -> None:
        """Note the progress of a run that goes on."""
        if time.monotonic() >= self._judged + JUDGE_EVERY:
            self._of_run = tuple(_so_far(run))
            self._judged = time.monotonic()
        first = max(0, len(run.struck) - SHOWN)
        of_faults = [
            _of_fault(run, number, expected)
            for number in range(first, len(run.struck))
            for expected in _expected_of(run, run.struck[number])
        ]
        self._note(run, run.observer.now(), (*of_faults, *self._of_run))

    def end(self, run: PlanExecution) -> bool:
        """Note the verdicts on a run that has ended; return whether all expectations held."""
        verdicts = judge(run)
        first = len(run.struck) - SHOWN
        shown = [one for one in verdicts if one.fault is None or one.fault >= first]
        self._note(
            run,
            run.ended,
            tuple(ExpectationProgress(one.expected, one.held, True, one.found, one.fault) for one in shown),
        )
        return all(one.held for one in verdicts)

    def _note(self, run: PlanExecution, now: float, expectations: tuple[ExpectationProgress, ...]) -> None:
        injected = [_fault(run, one) for one in run.struck[-SHOWN:]]
        waiting = [
            FaultProgress(one.fault, str(one.when), str(one.target), FaultState.WAITING, times)
            for one, times in run.pending()
        ]
        self.now = RunProgress(now - run.began, (*injected, *waiting), expectations, len(run.struck))


def _so_far(run: PlanExecution) -> Iterator[ExpectationProgress]:
    """Yield what the expectations of the whole run come to so far."""
    run.account()
    few = len(run.watched()) <= JUDGED
    for expected in run.plan.expect:
        if expected.of_faults:
            continue
        if few:
            verdict = judge_run(run, expected)
            yield ExpectationProgress(expected.text, verdict.held, False, verdict.found)
        else:
            yield ExpectationProgress(expected.text, None, False, "judged at the end")


def _expected_of(run: PlanExecution, struck: Struck) -> tuple[Expectation, ...]:
    return (*struck.planned.expect, *(one for one in run.plan.expect if one.of_faults))


def _of_fault(run: PlanExecution, number: int, expected: Expectation) -> ExpectationProgress:
    struck = run.struck[number]
    verdict = judge_fault(expected, struck, number)
    if struck.done or (verdict.held and expected.kind is ExpectationKind.DETECTED):
        return ExpectationProgress(expected.text, verdict.held, True, verdict.found, number)
    since = struck.over if expected.kind is ExpectationKind.RECOVERS else struck.at
    late = (
        expected.kind is not ExpectationKind.STEPS_LOST
        and since is not None
        and run.observer.now() > since + expected.value
    )
    return ExpectationProgress(expected.text, False if late else None, late, "not yet", number)


def _fault(run: PlanExecution, struck: Struck) -> FaultProgress:
    planned = struck.planned
    return FaultProgress(
        planned.fault,
        str(planned.when),
        str(planned.target),
        _state(struck),
        0,
        struck.at - run.began,
        tuple(struck.targets[:100]),
        struck.id,
        struck.detected,
        struck.recovered,
        struck.steps_lost,
        struck.failed,
    )


def _state(struck: Struck) -> FaultState:
    if struck.failed is not None:
        return FaultState.NOT_INJECTED
    if struck.recovered is not None:
        return FaultState.RECOVERED
    if struck.given_up:
        return FaultState.GIVEN_UP
    return FaultState.PRESENT if struck.over is None else FaultState.OVER
