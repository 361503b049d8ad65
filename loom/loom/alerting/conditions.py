"""The conditions of rules: what holds of a run, a device or a disk now.

They look at summaries, leads and time accounts, which the weaver has anyway; none looks at a status report.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from loom.alerting.rules import WatchedRule
from loom.weaver.alert_views import AlertKind
from loom.weaver.goodput.goodput import Goodput
from loom.weaver.replicas import Replica
from loom.weaver.runs.run import RUNNING, Run
from loom.weaver.states import ReplicaEnding, ReplicaState

FAILED = (ReplicaEnding.CRASHED.value, ReplicaEnding.LOST.value, ReplicaEnding.EVICTED.value)
"""The states of a run that has crashed, as a rule has it."""

SAMPLES = 3
"""Values far above the best one, of different steps, that make a loss a diverged one."""

GOODPUT_EVERY = 5.0
"""Seconds between two looks at a job's goodput, at least."""

MAX_SAMPLES = 200
"""Looks at a job's goodput in a window."""

_STEPPING = (ReplicaState.REGISTERING, ReplicaState.RUNNING, ReplicaState.STALLED)


class AlertCause(NamedTuple):
    """A condition that holds."""

    message: str
    value: float | None = None
    step: int | None = None
    replica: str | None = None
    metric: str | None = None


@dataclass
class Observations:
    """What a rule has seen of a run while the weaver lives."""

    high_since: float | None = None
    """Since when each value of the loss was far above the best one."""
    high_steps: set[int | None] = field(default_factory=set)
    accounts: deque[tuple[float, float, float]] = field(default_factory=deque)
    """(time, seconds of steps that count, seconds in all) of the job."""


class Looked(NamedTuple):
    """What the conditions look at."""

    run: Run
    odd: Mapping[str, tuple[float, int | None]]
    """Values of metrics that are not finite, and came since the last look."""
    goodput: Goodput
    seen: Observations
    started: float
    """When the weaver started."""
    now: float


def leads(run: Run) -> Iterator[Replica]:
    """Yield the lowest rank of each group that is there."""
    return (run.there[id] for _, id in run.leads.values() if id in run.there)


def _not_a_number(rule: WatchedRule, at: Looked) -> AlertCause | None:
    found = {name: (one[0], one[3]) for name, one in at.run.summary.items() if not math.isfinite(one[0])}
    for name, (value, step) in {**found, **at.odd}.items():
        if rule.measures(name):
            teller = at.run.summary[name][4] if name in at.run.summary else None
            return AlertCause(f"{name} is {value}", value, step, teller, name)
    return None


def _diverged(rule: WatchedRule, at: Looked) -> AlertCause | None:
    factor, seen = rule.view.factor or 1.0, at.seen
    for name, (last, best, _, step, teller) in at.run.summary.items():
        if not rule.measures(name) or not (math.isfinite(last) and math.isfinite(best)):
            continue
        if last - best <= (factor - 1.0) * abs(best) or last <= best:
            continue
        if seen.high_since is None:
            seen.high_since = at.now
        seen.high_steps.add(step)
        if len(seen.high_steps) >= SAMPLES and at.now >= seen.high_since + (rule.view.window or 0.0):
            seen.high_steps = set([*seen.high_steps][-SAMPLES:])
            return AlertCause(
                f"{name} is {last:.6g}, its best value was {best:.6g} ({factor:g} times it is the bound)",
                last, step, teller, name,
            )  # fmt: skip
        return None
    seen.high_since = None
    seen.high_steps.clear()
    return None


def _no_progress(rule: WatchedRule, at: Looked) -> AlertCause | None:
    for lead in leads(at.run):
        if lead.state not in _STEPPING or lead.made_all_steps:
            continue
        bound, usual = rule.view.seconds or 0.0, lead.baseline_step_time()
        if rule.view.steps is not None:
            if usual is None and not bound:
                continue
            bound = max(bound, rule.view.steps * (usual or 0.0))
        still = at.now - max(lead.progress, lead.registered, at.started)
        if bound and still >= bound:
            last = "its first step" if lead.step is None else f"step {lead.step + 1:,}"
            return AlertCause(f"no progress for {still:.0f} s: {last} does not come", still, lead.step, lead.id)
    return None


def _crashed(rule: WatchedRule, at: Looked) -> AlertCause | None:
    return _ended(at.run) if at.run.state in FAILED else None


def _finished(rule: WatchedRule, at: Looked) -> AlertCause | None:
    return _ended(at.run) if at.run.state not in (*FAILED, RUNNING) else None


def _ended(run: Run) -> AlertCause:
    cause = " ".join(filter(None, [run.by and f"by {run.by}", run.reason and f"({run.reason})"]))
    of = "" if run.max_step is None else f" of {run.max_step:,}"
    where = "" if run.step is None else f" at step {run.step:,}{of}"
    return AlertCause(" ".join(filter(None, [f"{run.state}{where}", cause])), None, run.step, run.first)


def _goodput(rule: WatchedRule, at: Looked) -> AlertCause | None:
    lead, seen, window = next(leads(at.run), None), at.seen.accounts, rule.view.window or 0.0
    if lead is None or lead.job not in at.goodput.jobs():
        return None
    every = max(GOODPUT_EVERY, window / MAX_SAMPLES)
    if not seen or at.now >= seen[-1][0] + min(every, window):
        seconds = at.goodput.record(lead.job, at.now, course=False, faults=0).seconds
        seen.append((at.now, seconds["compute"], sum(seconds.values())))
    while len(seen) > 1 and seen[1][0] <= at.now - window:
        seen.popleft()
    (first, counted, whole), (_, counted_now, whole_now) = seen[0], seen[-1]
    if first > at.now - window or whole_now <= whole:
        return None
    share, bound = max(0.0, (counted_now - counted) / (whole_now - whole)), rule.view.below or 0.0
    if share >= bound:
        return None
    return AlertCause(f"goodput {share:.0%} in {window:.0f} s, below {bound:.0%}", share, lead.step, lead.id)


OF_RUNS: Mapping[AlertKind, Callable[[WatchedRule, Looked], AlertCause | None]] = {
    AlertKind.NOT_A_NUMBER: _not_a_number,
    AlertKind.DIVERGED: _diverged,
    AlertKind.NO_PROGRESS: _no_progress,
    AlertKind.CRASHED: _crashed,
    AlertKind.FINISHED: _finished,
    AlertKind.GOODPUT: _goodput,
}
"""The conditions that are about runs."""
