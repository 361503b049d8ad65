"""What the histories of other frameworks' runs show: runs that stand still, full caches, tails, failures, drift."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from loom.rl.diagnosis.attribution import Attribution, Lost
from loom.rl.diagnosis.case import Case
from loom.rl.diagnosis.evidence import Evidence
from loom.rl.diagnosis.history import EngineReading, RunHistory, StepReadings
from loom.rl.diagnosis.rules import (
    ALMOST_FULL,
    FEW_STEPS,
    FULL_CACHE,
    LEAST_MISMATCH,
    RELATED,
    STANDS_STILL,
    TAIL_FROM,
    USUAL_TAIL,
    RuleName,
)
from loom.rl.diagnosis.signals import RunSide, Signal

SHOWN = 5
"""Lines under a finding."""
STARTS = 4
"""Steps at the beginning that may take long, because things are compiled and caches are filled."""
FEW_LOOKS = 5
"""Looks at the engines from which on they are judged."""

WAITS = {
    RunSide.TRAINERS: "The trainers wait for the generators.",
    RunSide.GENERATORS: "The generators wait for the trainers.",
    None: "The logs do not say which side waits for the other.",
}
"""The first line under `RuleName.STALL`."""


def symptoms(history: RunHistory, found: Attribution) -> dict[RuleName, Case]:
    """Return the cases of the rules for which a history has evidence."""
    cases = {
        RuleName.STALL: _stall(history),
        RuleName.KV_CACHE: _full_cache(history, found),
        RuleName.TAIL: _tail(history),
        RuleName.CANCELLED: _cancelled(history, found),
        RuleName.FAILED: _failed(history),
        RuleName.MISMATCH: _mismatch(history),
    }
    return {name: case for name, case in cases.items() if case is not None}


@dataclass(frozen=True)
class _Gap:
    """A time without a step."""

    clock: str
    begin: float
    end: float
    median: float
    span: float
    """Seconds of the whole log."""
    before: StepReadings
    after: StepReadings | None
    """The step that ends it; None if the log ends with it."""

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def _stall(history: RunHistory) -> Case | None:
    gap = max(_gaps(history), key=lambda each: each.seconds, default=None)
    if gap is None:
        return None
    side, why, lines = _waiting(history, gap)
    told = [
        WAITS[side],
        *why,
        f"Nothing for {gap.seconds:,.0f} s after step {gap.before.number}; a usual step takes {gap.median:,.1f} s.",
    ]
    last = [gap.before.evidence(signal) for signal in list(gap.before.readings)[:1]]
    lost = Lost(1000 * gap.seconds, min(1.0, gap.seconds / gap.span) if gap.span else 0.0)
    return Case(gap.seconds, lost, (), told, evidence=[*last, *lines])


def _gaps(history: RunHistory) -> Iterator[_Gap]:
    """Yield the longest time without a step of each file that has steps, if it is long."""
    for file in {file for step in history.steps for file in step.moments}:
        steps = [step for step in history.steps if file in step.moments]
        clock = steps[-1].moments[file].clock
        times = [(step.moments[file].seconds, step) for step in steps if step.moments[file].clock == clock]
        if len(times) < STARTS + FEW_STEPS - 3:
            continue
        each = [(later - time) for (time, _), (later, _) in pairwise(times)]
        usual = median(each)
        if usual <= 0:
            continue
        newest = [moment.seconds for moment in history.ends.values() if moment.clock == clock]
        end = max([*newest, times[-1][0]])
        gaps = [
            _Gap(clock, time, later - _aside(after), usual, end - times[0][0], before, after)
            for (time, before), (later, after) in pairwise(times[STARTS:])
        ]
        gaps.append(_Gap(clock, times[-1][0], end, usual, end - times[0][0], times[-1][1], None))
        longest = max(gaps, key=lambda gap: gap.seconds)
        if longest.seconds > STANDS_STILL * usual:
            yield longest


def _aside(step: StepReadings) -> float:
    """Return the seconds of a step that are known to be something else."""
    return ((step[Signal.EVALUATE] or 0.0) + (step[Signal.WRITE] or 0.0)) / 1000


_TAKES = {
    Signal.WAIT_BATCH: RunSide.TRAINERS,
    Signal.GENERATE: RunSide.TRAINERS,
    Signal.WAIT_POLICY: RunSide.GENERATORS,
    Signal.TRAIN: RunSide.GENERATORS,
    Signal.SYNC: RunSide.GENERATORS,
}
"""The side that waits while a part of a step takes long."""


def _waiting(history: RunHistory, gap: _Gap) -> tuple[RunSide | None, list[str], list[Evidence]]:
    """Return the side that waits in a gap, how that is known, and the lines that say it."""
    if gap.after is not None:
        for signal, side in _TAKES.items():
            if (gap.after[signal] or 0.0) >= 500 * gap.seconds:
                return side, [], [gap.after.evidence(signal)]
    looks = [look for look in history.newest_looks or history.looks if _within(look, gap)]
    if looks:
        side, why = _engines(looks)
        return side, [why], [look.evidence for look in looks[-SHOWN:]]
    said = [
        wait
        for wait in history.waits
        if wait.moment is None or (wait.moment.clock == gap.clock and wait.moment.seconds >= gap.begin - gap.median)
    ]
    if said:
        return said[-1].wait.waits, [], [Evidence(one.file, one.line, one.text) for one in said[-SHOWN:]]
    trained = [step.number for step in history.steps if step[Signal.TRAINER_STEP] is not None]
    made = [step.number for step in history.steps if step[Signal.STEP] is not None]
    if trained and made and gap.after is None:
        side = RunSide.GENERATORS if made[-1] > trained[-1] else RunSide.TRAINERS
        return side, [f"The last batch is that of step {made[-1]}, the last trained step is {trained[-1]}."], []
    before = [look for look in history.looks if look.moment and look.moment.clock == gap.clock]
    if len(before) >= 2 * FEW_LOOKS and median(_steps_between(before)) < gap.seconds / STANDS_STILL:
        why = "The engines say nothing in that time, as they do without requests."
        return RunSide.GENERATORS, [why], [look.evidence for look in before[-1:]]
    return None, [], []


def _steps_between(looks: Sequence[EngineReading]) -> list[float]:
    times = [look.moment.seconds for look in looks if look.moment is not None]
    return [later - time for time, later in pairwise(times)]


def _within(look: EngineReading, gap: _Gap) -> bool:
    """Return whether a look is in a gap, after what was still under way at its beginning."""
    if look.moment is None or look.moment.clock != gap.clock:
        return False
    return gap.begin + 0.2 * gap.seconds <= look.moment.seconds <= gap.end


def _engines(looks: Sequence[EngineReading]) -> tuple[RunSide, str]:
    running = median(look.values.get(Signal.RUNNING, 0.0) for look in looks)
    tokens = median(look.values.get(Signal.TOKENS, 0.0) for look in looks)
    if running < 1:
        return RunSide.GENERATORS, "The engines have no requests."
    if tokens < 1:
        return RunSide.TRAINERS, f"The engines have {running:.0f} requests and generate nothing."
    return RunSide.TRAINERS, f"The engines generate {tokens:,.0f} tokens/s, but no batch becomes complete."


def _full_cache(history: RunHistory, found: Attribution) -> Case | None:
    busy = [
        look for look in history.looks if Signal.KV_CACHE in look.values and look.values.get(Signal.RUNNING, 1) > 0
    ]
    if len(busy) < FEW_LOOKS:
        return None
    full = [look for look in busy if _is_full(look)]
    if not full:
        return None
    waiting = [look.values[Signal.WAITING] for look in full if Signal.WAITING in look.values]
    told = [f"{fmean(waiting):,.1f} requests wait at a time while it is full."] if waiting else []
    lines = [look.evidence for look in sorted(full, key=lambda look: -look.values[Signal.KV_CACHE])[:SHOWN]]
    return Case(100 * len(full) / len(busy), found.generator, (), told, evidence=lines)


def _is_full(look: EngineReading) -> bool:
    used = look.values[Signal.KV_CACHE]
    held_up = look.values.get(Signal.WAITING, 0.0) > 0 or look.values.get(Signal.PREEMPTIONS, 0.0) > 0
    return used >= FULL_CACHE or (used >= ALMOST_FULL and held_up)


def _tail(history: RunHistory) -> Case | None:
    having = [step for step in history.steps if step[Signal.LENGTH] and step[Signal.LONGEST] and _generation(step)]
    tails = [step for step in having if _ratio(step) >= TAIL_FROM]
    if len(having) < FEW_STEPS or len(tails) < 3:
        return None
    took = [_generation(step) for step in having]
    if correlation(took, [step[Signal.LONGEST] or 0.0 for step in having]) < RELATED:
        return None
    others = [_generation(step) for step in having if _ratio(step) < TAIL_FROM]
    usual = median(others) if len(others) >= 3 else None
    lost = sum(
        max(0.0, _generation(step) - usual)
        if usual is not None
        else _generation(step) * (1 - USUAL_TAIL / _ratio(step))
        for step in tails
    )
    whole = sum(1000 * (step[Signal.STEP] or 0.0) or _generation(step) for step in having)
    told = [
        f"In {len(tails)} of {len(having)} steps one completion is at least {TAIL_FROM:g} times the mean length; "
        f"generation takes {median(map(_generation, tails)) / 1000:,.1f} s then"
        + ("." if usual is None else f", and {usual / 1000:,.1f} s without.")
    ]
    value = fmean(map(_ratio, tails))
    lines = history.largest(Signal.LONGEST, SHOWN, tails)
    return Case(value, Lost(lost / len(having), min(1.0, lost / whole)), (), told, evidence=lines)


def _generation(step: StepReadings) -> float:
    """Return the milliseconds of a step's generation, or of the step if nothing else may go on at the same time."""
    if step[Signal.WAIT_POLICY] is not None or step[Signal.WAIT_BATCH] is not None:
        return step[Signal.GENERATE] or 0.0
    return step[Signal.GENERATE] or 1000 * (step[Signal.STEP] or 0.0)


def _ratio(step: StepReadings) -> float:
    return (step[Signal.LONGEST] or 0.0) / (step[Signal.LENGTH] or 1.0)


def _cancelled(history: RunHistory, found: Attribution) -> Case | None:
    values = [value for (value,) in history.values(Signal.CANCELLED)]
    if len(values) < FEW_STEPS or correlation(range(len(values)), values) < RELATED:
        return None
    early, late = _thirds(values)
    if late < 2 * early:
        return None
    told = [
        f"{early:.1f} % of the rollouts of the first third of the steps are cancelled, {late:.1f} % of the last."
    ]
    loop = found.loop
    lost = Lost(late / 100 * loop.batch_ms, late / 100 * loop.share(loop.batch_ms))
    return Case(late, lost, (), told, evidence=history.largest(Signal.CANCELLED, SHOWN))


def _failed(history: RunHistory) -> Case | None:
    values = history.values(Signal.FAILED, Signal.REWARD)
    if len(values) < FEW_STEPS:
        return None
    failed, rewards = zip(*values, strict=True)
    changes = [_changes(failed), _changes(rewards)]
    if min(correlation(failed, rewards), correlation(*changes)) > -RELATED:
        return None
    slope = _slope(failed, rewards)
    whole = fmean(rewards) - slope * fmean(failed)  # the reward that is expected without failures
    if slope >= 0 or whole <= 0 or not 0.4 <= -100 * slope / whole <= 2.5:
        return None
    told = [
        f"The reward falls with the share of failures as it does if they count as 0: {whole:.3f} without failures, "
        f"{fmean(rewards):.3f} with {fmean(failed):.1f} %."
    ]
    return Case(fmean(failed), Lost(), (), told, evidence=history.largest(Signal.FAILED, SHOWN))


def _mismatch(history: RunHistory) -> Case | None:
    values = history.values(Signal.MISMATCH, Signal.STALENESS)
    if len(values) < FEW_STEPS:
        return None
    mismatch, staleness = zip(*values, strict=True)
    (early, late), (fresh, stale) = _thirds(mismatch), _thirds(staleness)
    if late < LEAST_MISMATCH or stale <= fresh or correlation(mismatch, staleness) < RELATED:
        return None
    told = [
        f"With a staleness of {fresh:.1f} steps it is {early:.4g}, with {stale:.1f} steps {late:.4g}; rank "
        f"correlation {correlation(mismatch, staleness):.2f}."
    ]
    return Case(
        late / max(early, LEAST_MISMATCH / 10), Lost(), (), told, evidence=history.largest(Signal.MISMATCH, SHOWN)
    )


def _thirds(values: Sequence[float]) -> tuple[float, float]:
    """Return the means of the first and the last third."""
    third = max(1, len(values) // 3)
    return fmean(values[:third]), fmean(values[-third:])


def _changes(values: Sequence[float]) -> list[float]:
    return [later - value for value, later in pairwise(values)]


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    x, y = fmean(xs), fmean(ys)
    spread = sum((one - x) ** 2 for one in xs)
    return sum((one - x) * (other - y) for one, other in zip(xs, ys, strict=True)) / spread if spread else 0.0


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return Spearman's rank correlation, 0.0 if one side does not change."""
    first, second = _ranks(xs), _ranks(ys)
    mean = (len(first) - 1) / 2
    spread = [sum((rank - mean) ** 2 for rank in ranks) for ranks in (first, second)]
    if not all(spread):
        return 0.0
    both = sum((one - mean) * (other - mean) for one, other in zip(first, second, strict=True))
    return float(both / (spread[0] * spread[1]) ** 0.5)


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value from 0 on; equal values have their mean rank."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    place = 0
    while place < len(order):
        same = place
        while same + 1 < len(order) and values[order[same + 1]] == values[order[place]]:
            same += 1
        for index in order[place : same + 1]:
            ranks[index] = (place + same) / 2
        place = same + 1
    return ranks
