"""The diagnosis: the rules' verdicts on the measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from loom.rl.diagnosis.attribution import Attribution, Lost
from loom.rl.diagnosis.case import Case, typical
from loom.rl.diagnosis.collector import Measured
from loom.rl.diagnosis.evidence import Evidence
from loom.rl.diagnosis.rules import (
    ASSUMED_LEVEL,
    EARLY,
    FOREIGN_RULES,
    GENERATION_ALONE,
    RANGES,
    RULES,
    Bound,
    Rating,
    Rule,
    RuleName,
    staleness_range,
)
from loom.rl.diagnosis.statistics import Series
from loom.rl.diagnosis.symptoms import symptoms

FEW = 8
"""Pairs of an update and a batch from which on peaks are looked for."""
PEAK_OF_QUEUE, PEAK_OF_BATCH = 5.0, 1.5
"""A peak is this many times the median."""
SHOWN = 5
"""Lines under a finding."""


@dataclass(frozen=True)
class Finding:
    """The verdict of one rule on a run."""

    rule: Rule
    level: Rating
    value: float
    """Of ``rule.value``, in ``rule.unit``."""
    share: float
    """The share of the step's wall time that is lost; 0 for quality."""
    over_bound: bool
    """True if it may be the primary finding."""
    details: list[str] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)

    @property
    def name(self) -> RuleName:
        """The name of the rule."""
        return self.rule.name


def diagnose(measured: Measured, found: Attribution, async_level: int | None) -> list[Finding]:
    """Return the findings of a run, the most important first. Only one with ``over_bound`` may be primary.

    Args:
        measured: the metrics.
        found: where the time goes.
        async_level: None if it is unknown.
    """
    cases = _cases(measured, found, async_level)
    findings = [
        finding
        for rule in (*RULES, *FOREIGN_RULES)
        if rule.name in cases
        if (finding := _judge(rule, cases[rule.name], measured))
    ]
    over = {finding.name for finding in findings if finding.over_bound}
    findings = [_yielding(finding, over) for finding in findings]
    return sorted(
        findings, key=lambda each: (each.over_bound, not each.rule.quality, each.share, each.value), reverse=True
    )


def _judge(rule: Rule, case: Case, measured: Measured) -> Finding | None:
    bounds = case.bounds or rule.bounds
    passed = [
        index for index, bound in enumerate(bounds) if case.value > bound.over and case.lost.share >= bound.share
    ]
    if passed:
        level = Rating.CRITICAL if passed[0] == 0 else Rating.WARNING
    else:
        level = _level_of(case, rule, measured)
        if level is Rating.GOOD:
            return None
    evidence = case.evidence
    if evidence is None:
        evidence = [line for name in case.metrics for line in measured.metrics[name].largest.lines()[:SHOWN]]
    return Finding(rule, level, case.value, case.lost.share, bool(passed), case.details, evidence[: 2 * SHOWN])


def _level_of(case: Case, rule: Rule, measured: Measured) -> Rating:
    """Return a warning for a finding below its bounds, if it has a bad metric and loses time; else good."""
    if not rule.quality and case.lost.share < EARLY:
        return Rating.GOOD
    levels = [one.level(typical(measured.series[one.metric])) for one in RANGES if one.metric in case.metrics]
    return Rating.GOOD if all(level is Rating.GOOD for level in levels) else Rating.WARNING


def _yielding(finding: Finding, over: set[RuleName]) -> Finding:
    first = [name.value for name in finding.rule.yields_to if name in over]
    if not finding.over_bound or not first:
        return finding
    why = f"It comes after `{first[0]}`, which makes generation slower, too: cure that first, and measure again."
    return replace(finding, over_bound=False, details=[*finding.details, why])


def _cases(measured: Measured, found: Attribution, async_level: int | None) -> Mapping[RuleName, Case]:
    series = measured.series
    loop, training = found.loop, found.training
    cases: dict[RuleName, Case] = {}
    if series["queue_ms"].count:
        cases[RuleName.QUEUE] = Case(typical(series["queue_ms"]), found.queue, ("queue_ms",), _ways(measured))
    if series["rpc_ms"].count:
        cases[RuleName.LOADING] = Case(typical(series["rpc_ms"]), found.loading, ("rpc_ms",))
    if (contention := _contention(measured)) is not None:
        cases[RuleName.CONTENTION] = contention
    wait = typical(series["wait_ms"])
    if series["wait_ms"].count and loop.wait_ms:
        cycle = f"A step of the trainers computes {_ms(training.compute_ms)} and writes {_ms(training.write_ms)}."
        told = (
            [cycle]
            if training.steps
            else ["The log of the trainers is not here; it would tell computing from writing."]
        )
        for name, lost, metrics in (
            (RuleName.CHECKPOINT, found.checkpoint, ("write_ms", "wait_ms")),
            (RuleName.TRAINER, found.trainer, ("wait_ms", "train_ms")),
        ):
            cases[name] = Case(wait * lost.ms / loop.wait_ms, lost, metrics, told)
    elif series["write_ms"].count:
        cases[RuleName.CHECKPOINT] = Case(typical(series["write_ms"]), found.checkpoint, ("write_ms",))
    if (one := training.straggler) is not None:
        more = one.mean_ms / one.others_ms - 1 if one.others_ms else 0.0
        told = [
            f"Rank {one.rank} takes {_ms(one.mean_ms)} a step, the others {_ms(one.others_ms)}: {more:.0%} longer."
        ]
        lines = measured.ranks[one.rank].steps.largest.lines()
        cases[RuleName.STRAGGLER] = Case(one.lead_ms, found.straggler, (), told, evidence=lines)
    cases.update(_generation(measured, found))
    if series["trunc_pct"].count:
        cases[RuleName.TRUNCATION] = Case(_lasting(series["trunc_pct"]), Lost(), ("trunc_pct",))
    if series["staleness"].count and (measured.history is None or async_level is not None):
        cases[RuleName.STALENESS] = _staleness(series["staleness"], async_level)
    if measured.history is not None:
        cases.update(symptoms(measured.history, found))
    return cases


def _generation(measured: Measured, found: Attribution) -> dict[RuleName, Case]:
    dur, waits = measured.series["dur_ms"], measured.series["batch_wait_ms"]
    idle = measured.series["idle_ms"]
    told = [f"Generators wait {_ms(idle.steady_mean)} for requests at a time."] if idle.count else []
    if waits.count:
        wait = found.training.wait_ms
        told.append(f"A step of the trainers waits {_ms(wait)} for its batch; the batch takes {_ms(typical(dur))}.")
        wall = found.training.wall_ms
        part = found.generator.ms / found.loop.wall_ms if found.loop.wall_ms else wait / wall if wall else 0.0
        return {RuleName.GENERATOR: Case(part * wall, found.generator, ("batch_wait_ms", "dur_ms"), told)}
    if dur.count and not found.training.steps:
        told.append(
            "The log of the trainers is not here. They seem to wait, as the orchestrator does not wait for them."
        )
        return {RuleName.GENERATOR: Case(typical(dur), found.generator, ("dur_ms",), told, GENERATION_ALONE)}
    return {}


def _contention(measured: Measured) -> Case | None:
    """Return the peaks of generation beside peaks of delay, if most of either are beside each other."""
    queue, batch = measured.pairs.queue.values, measured.pairs.batch.values
    if len(queue) < FEW:
        return None
    usual_queue, usual_batch = median(queue), median(batch)
    if usual_queue > 100:  # it is not about peaks
        return None
    high = [delay > max(100.0, PEAK_OF_QUEUE * usual_queue) for delay in queue]
    long = [took > PEAK_OF_BATCH * usual_batch for took in batch]
    peaks = [index for index, is_high in enumerate(high) if is_high]
    beside = [index for index in peaks if long[index]]
    calm = len(queue) - len(peaks)
    if len(beside) < 2 or len(beside) < 0.6 * len(peaks) or sum(long) - len(beside) > 0.2 * calm:
        return None
    more = sum(queue[index] - usual_queue + batch[index] - usual_batch for index in beside)
    whole = _whole(measured) * len(queue) / max(1, measured.updates.parts[0].count)
    told = [
        f"In {len(beside)} of {len(queue)} steps both have a peak: dur_ms {_ms(fmean(batch[i] for i in beside))} "
        f"beside a usual {_ms(usual_batch)}, queue_ms {_ms(fmean(queue[i] for i in beside))} beside a usual "
        f"{_ms(usual_queue)}."
    ]
    lost = Lost(more / len(queue), min(1.0, more / whole) if whole else 0.0)
    return Case(fmean(queue[i] for i in beside), lost, ("queue_ms", "dur_ms"), told)


def _whole(measured: Measured) -> float:
    """Return the milliseconds of all steps."""
    known = sum(
        part.total for part in (*measured.updates.parts[1:], *measured.batches.parts, measured.series["wait_ms"])
    )
    return max(1000 * measured.series["step_s"].total, known)


def _lasting(series: Series) -> float:
    """Return the mean, or the later half's if it has become lower: a past problem needs no cure."""
    later = series.points.values[len(series.points.values) // 2 :]
    return min(series.mean, fmean(later))


def _staleness(series: Series, async_level: int | None) -> Case:
    known = async_level is not None
    level = ASSUMED_LEVEL if async_level is None else async_level
    limits = staleness_range(level)
    told = [f"async_level is {level}." if known else f"No line says async_level; it is taken for {level}."]
    bounds = None if known else (Bound(limits.critical - level),)
    return Case(_lasting(series) - level, Lost(), ("staleness",), told, bounds)


def _ways(measured: Measured) -> list[str]:
    ways = measured.ways
    if not ways.accept.count:
        return []
    before = {"before the server (the client's pool, the network, the accept queue)": ways.accept.mean}
    if ways.pool.count == ways.accept.count:
        before = {
            "in the client's pool, for a connection": ways.pool.mean,
            "between the pool and the server's first line (the network, the accept queue, a busy event loop)": max(
                0.0, ways.accept.mean - ways.pool.mean
            ),
        }
    parts = {
        **before,
        "in the server before the engine (its event loop)": ways.handle.mean,
        "on the way back (the server's event loop, the network)": ways.back.mean,
    }
    place = max(parts, key=lambda name: parts[name])
    told = ", ".join(f"{_ms(mean)} {name}" for name, mean in parts.items())
    return [f"Most of it is {place}: {told}; means of {ways.accept.count} updates."]


def _ms(value: float) -> str:
    return f"{value:,.1f} ms" if value < 100 else f"{value:,.0f} ms"
