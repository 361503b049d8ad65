"""The verdicts on a plan's expectations."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from loom.chaos.durations import spoken
from loom.chaos.plans import Expectation, ExpectationKind
from loom.chaos.runs.observer import Life
from loom.chaos.runs.run import PlanExecution
from loom.chaos.runs.tracker import Struck

LEAST_POINTS = 4  # values of a metric that are needed to tell whether it falls or rises
HASH = "params_hash"  # the metric with the hash of a replica's parameters
PARTICIPANTS = "participants"  # the metric with how many groups have made a replica's step together


@dataclass(frozen=True)
class Verdict:
    """The verdict on an expectation."""

    expected: str
    held: bool
    found: str
    fault: int | None = None
    """The number of the fault that the expectation is about; None: the whole run."""


def judge(run: PlanExecution) -> list[Verdict]:
    """Return the verdict on each expectation, faults' expectations first."""
    verdicts = []
    for number, struck in enumerate(run.struck):
        of_all = [one for one in run.plan.expect if one.of_faults]
        verdicts += [judge_fault(expected, struck, number) for expected in (*struck.planned.expect, *of_all)]
    if run.cut_short is not None:
        verdicts.append(Verdict("the plan is carried out", False, run.cut_short))
    for number, struck in enumerate(run.struck):
        if struck.failed is not None:
            verdicts.append(Verdict("it is injected", False, struck.failed, number))
    return verdicts + [judge_run(run, expected) for expected in run.plan.expect if not expected.of_faults]


def judge_run(run: PlanExecution, expected: Expectation) -> Verdict:
    """Return the verdict on an expectation of the whole run, as far as the run has come."""
    held, found = _OF_RUNS[expected.kind](run, expected)
    return Verdict(expected.text, held, found)


def judge_fault(expected: Expectation, struck: Struck, number: int) -> Verdict:
    """Return the verdict on an expectation of the fault with a number, as far as the fault's outcome is known."""
    held, found = _of_fault(expected, struck)
    return Verdict(expected.text, held, found, number)


def _of_fault(expected: Expectation, struck: Struck) -> tuple[bool, str]:
    if expected.kind is ExpectationKind.STEPS_LOST:
        lost = struck.steps_lost or 0
        return lost <= expected.value and struck.recovered is not None, f"{lost} steps"
    took = struck.recovered if expected.kind is ExpectationKind.RECOVERS else struck.detected
    if took is None:
        return False, "never"
    return took <= expected.value, spoken(took)


def lost_twice(lives: dict[str, list[Life]]) -> dict[str, int]:
    """Return for each replica the first step that it made more than twice; replicas without one are left out."""
    found: dict[str, int] = {}
    for replica, processes in lives.items():
        again: list[tuple[int, int]] = []
        for before, after in itertools.pairwise(processes):
            if before.last is None or after.first is None or after.first > before.last:
                continue
            for first, last in again:
                if after.first <= last and first <= before.last:
                    found.setdefault(replica, max(first, after.first))
            again.append((after.first, before.last))
    return found


def _lost_once(run: PlanExecution, expected: Expectation) -> tuple[bool, str]:
    watched = {one.id for one in run.watched()}
    twice = lost_twice({id: lives for id, lives in run.observer.lives.items() if id in watched})
    text = ", ".join(f"step {step} of {replica}" for replica, step in twice.items())
    return not twice, text or "none was"


def _points(run: PlanExecution, metric: str) -> list[tuple[float, float]]:
    """Return time and value of a metric of all watched replicas during the run, sorted."""
    points = (run.observer.history(replica.id, metric, run.began) for replica in run.watched())
    return sorted((point.time, point.value) for of_one in points for point in of_one if math.isfinite(point.value))


def _trend(run: PlanExecution, expected: Expectation) -> tuple[bool, str]:
    values = [value for _, value in _points(run, expected.metric)]
    if len(values) < LEAST_POINTS:
        return False, f"{len(values)} values of {expected.metric}"
    few = max(1, len(values) // 10)
    first, last = statistics.median(values[:few]), statistics.median(values[-few:])
    held = last < first if expected.kind is ExpectationKind.FALLS else last > first
    return held, f"from {first:.4g} to {last:.4g}"


def _last_values(run: PlanExecution, expected: Expectation) -> tuple[bool, str]:
    """Check the last value of every replica that has not failed."""
    holds = {
        ExpectationKind.AT_LEAST: lambda value: value >= expected.value,
        ExpectationKind.AT_MOST: lambda value: value <= expected.value,
        ExpectationKind.FINITE: math.isfinite,
    }[expected.kind]
    replicas = [one for one in run.watched() if one.state != "failed" and expected.metric in one.metrics]
    values = {one.id: one.metrics[expected.metric] for one in replicas}
    text = ", ".join(f"{replica} {value:.4g}" for replica, value in values.items())
    return bool(values) and all(map(holds, values.values())), text or "nobody reports it"


def _agree(run: PlanExecution, expected: Expectation) -> tuple[bool, str]:
    """Check that replicas have the same parameters at each step of a lineage.

    When a replica goes back to an earlier step, the steps after that are made anew from a checkpoint, perhaps by
    fewer groups, and may come out differently than before: a new lineage begins.

    A group that is cut off, or whose peer dies in the middle of a step, makes a step alone which another group may
    have made, too. One of the two takes over the other's state, or is dead: they agree again afterwards.
    """
    made: dict[int, list[_Made]] = {}
    back: list[tuple[float, int]] = []  # when a replica went back, and to which step
    for replica in run.watched():
        last: tuple[int, float] | None = None
        counts = run.observer.history(replica.id, PARTICIPANTS, run.began)
        alone = {(point.time, point.step) for point in counts if point.value == 1}
        for point in sorted(run.observer.history(replica.id, HASH, run.began), key=lambda point: point.time):
            if point.step is None:
                continue
            if last is not None and (point.step < last[0] or (point.step == last[0] and point.value != last[1])):
                back.append((point.time, point.step))
            last = point.step, point.value
            one = _Made(point.time, replica.id, point.value, (point.time, point.step) in alone)
            made.setdefault(point.step, []).append(one)
    lineages = [(step, found) for step, points in made.items() for found in _lineages(step, sorted(points), back)]
    several = sorted((max(one.time for one in found), step, found) for step, found in lineages if len(found) > 1)
    apart: list[int] = []
    alone_at: list[int] = []
    unsettled: list[int] = []
    for _, step, found in several:
        if len({one.value for one in found}) == 1:
            alone_at += unsettled
            unsettled = []
        elif len({one.value for one in found if not one.alone}) > 1:
            apart.append(step)
        else:
            unsettled.append(step)
    apart += unsettled
    if not several:
        return False, f"no two replicas report {HASH} of one step"
    if apart:
        return False, f"at {len(apart)} of {len(several)} steps they do not: first at {min(apart)}"
    if alone_at:
        return True, f"at all of {len(several)} steps but {len(alone_at)}, which one made alone and gave up"
    return True, f"at all of {len(several)} steps"


class _Made(NamedTuple):
    """A step that a replica has made."""

    time: float
    replica: str
    value: float
    alone: bool
    """True if no other group took part."""


def _lineages(step: int, points: list[_Made], back: list[tuple[float, int]]) -> Iterator[list[_Made]]:
    """Yield what each replica made of a step, for each lineage that has the step."""
    found: dict[str, _Made] = {}
    before = -math.inf
    for one in points:
        if found and any(before < when <= one.time and first <= step for when, first in back):
            yield [*found.values()]
            found = {}
        found[one.replica], before = one, one.time
    yield [*found.values()]


def goodput(spent: Mapping[str, float]) -> float | None:
    """Return the share of seconds by reason that went into steps that count, from 0 to 1; None without any."""
    whole = sum(spent.values())
    return spent.get("compute", 0.0) / whole if whole > 0 else None


def _goodput(run: PlanExecution, expected: Expectation) -> tuple[bool, str]:
    found = goodput(run.goodput)
    return found is not None and found >= expected.value, "not known" if found is None else f"{found:.1%}"


_OF_RUNS: dict[ExpectationKind, Callable[[PlanExecution, Expectation], tuple[bool, str]]] = {
    ExpectationKind.LOST_ONCE: _lost_once,
    ExpectationKind.FALLS: _trend,
    ExpectationKind.RISES: _trend,
    ExpectationKind.AT_LEAST: _last_values,
    ExpectationKind.AT_MOST: _last_values,
    ExpectationKind.FINITE: _last_values,
    ExpectationKind.AGREE: _agree,
    ExpectationKind.GOODPUT: _goodput,
}
