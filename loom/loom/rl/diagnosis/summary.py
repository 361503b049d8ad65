"""``SUMMARY.md``: the analysis for people. It has exactly one line ``PRIMARY: RULE``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from loom.rl.diagnosis.diagnosis import Finding
from loom.rl.diagnosis.evidence import NAMED, Problems
from loom.rl.diagnosis.result import Analysis
from loom.rl.diagnosis.rules import ASSUMED_LEVEL, RANGES, Range, Rating, RuleName, staleness_range

LABELS = {
    "queue_ms": "Queue Delay",
    "rpc_ms": "RPC Time",
    "reload_ms": "RPC Time of reloads",
    "wall_ms": "Update of weights",
    "wait_ms": "Checkpoint Wait",
    "write_ms": "Checkpoint Write",
    "dur_ms": "Generation of a batch",
    "completions": "Completions of a batch",
    "inflight": "Requests in flight",
    "idle_ms": "Generator waits",
    "trunc_pct": "Truncation",
    "staleness": "Staleness",
    "step_s": "Step",
    "train_ms": "Training step of a rank",
    "batch_wait_ms": "Trainer waits for a batch",
    "train_step_s": "Step of the trainers",
    "evaluate_ms": "Evaluation",
    "reward": "Reward",
    "failed_pct": "Failed rollouts",
    "cancelled_pct": "Cancelled rollouts",
    "mismatch": "Mismatch of log-probabilities",
    "length": "Tokens of a completion",
    "longest": "Tokens of the longest completion",
    "kv_cache_pct": "Key-value cache in use",
    "running_requests": "Requests of the engines",
    "waiting_requests": "Requests that wait in the engines",
    "preemptions": "Preemptions",
    "tokens_per_s": "Tokens a second",
}
"""The titles of the metrics, in the order of the table."""


def summary(analysis: Analysis, pictures: Sequence[str] = ()) -> str:
    """Return the summary as Markdown.

    Args:
        analysis: what it is about.
        pictures: the files of plots beside it.
    """
    lines = [
        "# Where the time goes",
        "",
        f"{analysis.made:%Y-%m-%d %H:%M:%S}, from {analysis.lines:,} lines with {analysis.events:,} events:",
        "",
        *(f"- {_quoted(name)}" for name in analysis.sources),
        *([] if analysis.framework is None else ["", f"They are logs of {analysis.framework}."]),
        "",
        "## Diagnosis",
        "",
        f"PRIMARY: {analysis.primary}",
        "",
        *_diagnosis(analysis.findings),
        "## Where a step's time goes",
        "",
        *_step(analysis),
        "",
        "## Metrics",
        "",
        *_metrics(analysis),
        "",
        *_ranks(analysis),
        *_problems("Broken lines", "They are left out.", analysis.broken),
        *_problems("Lines that contradict themselves", "They count all the same.", analysis.contradictions),
        *(f"![{name}]({name})\n" for name in pictures),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _diagnosis(findings: Sequence[Finding]) -> Iterator[str]:
    if not any(finding.over_bound for finding in findings):
        yield "No finding is above its threshold.\n"
    for finding in findings:
        yield from _finding(finding)


def _finding(finding: Finding) -> Iterator[str]:
    rule = finding.rule
    mark = "" if finding.over_bound else ", below the threshold of a diagnosis"
    yield f"### {rule.name.value}: {finding.level.value}{mark}"
    yield ""
    share = "" if rule.quality else f"; {finding.share:.1%} of the step's wall time is lost to it"
    yield f"{rule.says} {rule.value}: {finding.value:,.1f} {rule.unit}{share}."
    yield ""
    if finding.details:
        yield "\n".join(finding.details)
        yield ""
    yield f"Suggestion: {rule.suggests}"
    yield ""
    traces = list(dict.fromkeys(line.trace for line in finding.evidence if line.trace))
    if finding.evidence:
        yield "Evidence" + (f" (trace ids {', '.join(traces)})" if traces else "") + ":"
        yield ""
        yield from (f"- {_quoted(str(line))}" for line in finding.evidence)
        yield ""


def _step(analysis: Analysis) -> Iterator[str]:
    loop, training = analysis.attribution.loop, analysis.attribution.training
    if loop.wall_ms:
        rows = {
            "waiting for a checkpoint": loop.wait_ms,
            "delay of the update of weights (queue_ms)": loop.queue_ms,
            "loading of weights (rpc_ms)": loop.rpc_ms,
            "generation": loop.batch_ms,
            "not accounted for": loop.other_ms,
        }
        yield from _parts(f"A step of the orchestrator, mean of {loop.steps}", rows, loop.wall_ms)
    if training.steps:
        rows = {
            "waiting for a batch": training.wait_ms,
            "computing, typical rank": training.compute_ms,
            "computing, lead of the slowest rank": training.lead_ms,
            "writing of weights": training.write_ms,
        }
        yield ""
        yield from _parts(f"A step of the trainers, mean of {training.steps}", rows, training.wall_ms)
    yield ""
    yield "A slow start is left out here: early steps that took twice as long as later ones, and such first values."


def _parts(title: str, rows: dict[str, float], whole: float) -> Iterator[str]:
    shown = [[name, f"{value:,.1f}", f"{value / whole if whole else 0:.1%}"] for name, value in rows.items()]
    yield from _table([title, "ms", "share"], [*shown, ["all", f"{whole:,.1f}", "100.0%"]])


def _metrics(analysis: Analysis) -> Iterator[str]:
    ranges = {one.metric: one for one in RANGES}
    level = ASSUMED_LEVEL if analysis.async_level is None else analysis.async_level
    ranges["staleness"] = staleness_range(level)
    rows = []
    for name, label in LABELS.items():
        if (stats := analysis.metrics.get(name)) is None:
            continue
        numbers = [f"{value:,.1f}" for field, value in stats.as_dict().items() if field != "count"]
        known = ranges.get(name)
        rows.append(
            [f"{label} ({name})", f"{stats.count:,}", *numbers, "" if known is None else _judged(known, stats.mean)]
        )
    columns = ["metric", "Count", "Mean", "StdDev", "Min", "Max", "p50", "p90", "p95", "p99", "the mean is"]
    yield from _table(columns, rows)
    rounded = [
        name for name, metric in analysis.measured.metrics.items() if not metric.series.exact and name in LABELS
    ]
    if rounded:
        yield ""
        yield f"Percentiles are right to half a per cent for {', '.join(rounded)}; everything else is exact."
    if analysis.async_level is None:
        yield ""
        yield f"No line says async_level; it is taken for {level}."


def _judged(known: Range, mean: float) -> str:
    level = known.level(mean)
    if known.metric == "staleness" and level is Rating.GOOD and mean == known.good:
        return "good: at async_level, the barrier works"
    return f"{level.value} (good ≤ {known.good:g}, critical > {known.critical:g})"


def _ranks(analysis: Analysis) -> Iterator[str]:
    ranks = sorted(analysis.measured.ranks.items())
    if len(ranks) < 2:
        return
    rows = []
    for number, rank in ranks:
        median, high = rank.steps.series.percentiles(50, 95)
        waits = f"{rank.waits.mean:,.1f}" if rank.waits.count else ""
        series = rank.steps.series
        rows.append(
            [str(number), f"{series.count:,}", f"{series.mean:,.1f}", f"{median:,.1f}", f"{high:,.1f}", waits]
        )
    yield "## Ranks of the trainers"
    yield ""
    yield from _table(["rank", "steps", "mean dur_ms", "p50", "p95", "mean wait for a batch, ms"], rows)
    yield ""


def _problems(title: str, then: str, problems: Problems) -> Iterator[str]:
    if not problems.count:
        return
    more = f" The first {NAMED}:" if problems.count > NAMED else ""
    yield f"## {title}: {problems.count:,}"
    yield ""
    yield then + more
    yield ""
    yield from (f"- {_quoted(str(each))}" for each in problems.first)
    yield ""


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"| --- |{' ---: |' * (len(columns) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _quoted(text: str) -> str:
    return "`" + text.replace("`", "'") + "`"


def headline(analysis: Analysis) -> str:
    """Return the diagnosis in a sentence or two."""
    if analysis.primary == RuleName.NONE.value:
        return "No time is lost above a threshold."
    first = analysis.findings[0]
    lost = "" if first.rule.quality else f" {first.share:.0%} of the step's wall time is lost to it."
    return f"{first.rule.says}{lost} {first.rule.suggests}"
