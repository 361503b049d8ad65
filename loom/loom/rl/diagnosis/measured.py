"""Measurements, put together from log lines and JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loom.rl.diagnosis.collector import METRICS, Collector, Metric, Rank
from loom.rl.diagnosis.evidence import Evidence
from loom.rl.diagnosis.statistics import Series
from loom.rl.diagnosis.trackers import OrchestratorSteps, Pairs, Together, Ways
from loom.tracing.lines import FORMS


@dataclass(frozen=True)
class Measured:
    """The metrics of a run.

    Each event comes from log lines or from JSON lines, whichever have more of it, so that none counts twice.
    """

    metrics: Mapping[str, Metric]
    counts: Mapping[str, int]
    """Number of events of each name."""
    ranks: Mapping[int, Rank]
    updates: Together
    batches: Together
    steps: OrchestratorSteps
    ways: Ways
    pairs: Pairs
    timeline: list[Evidence]
    both: bool
    """Whether log lines and JSON lines have the same events."""

    @property
    def series(self) -> dict[str, Series]:
        """The values of each metric."""
        return {name: metric.series for name, metric in self.metrics.items()}


def put_together(lines: Collector, records: Collector) -> Measured:
    """Return what log lines and JSON lines have measured."""

    def better(event: str) -> Collector:
        return records if records.counts[event] > lines.counts[event] else lines

    metrics = {name: better(event).metrics[name] for name, (event, _) in METRICS.items()}
    if not metrics["rpc_ms"].series.count:  # a log of the server alone
        metrics["rpc_ms"] = metrics["server_rpc_ms"]
    metrics["reload_ms"] = better("weights.rpc.done").reload_ms
    updates = better("weights.client.done")
    timeline = [entry for one in (lines, records) if better("gen.batch.done") is one for entry in one.timeline]
    if updates is not better("gen.batch.done"):
        timeline += updates.timeline
    if all(time is not None for time, _ in timeline):
        timeline.sort(key=lambda entry: entry[0] or 0.0)
    return Measured(
        metrics,
        {name: better(name).counts[name] for name in FORMS},
        ranks=better("train.step.done").ranks,
        updates=updates.updates,
        batches=better("gen.batch.done").batches,
        steps=better("step.complete").steps,
        ways=updates.ways,
        pairs=updates.pairs,
        timeline=[evidence for _, evidence in timeline],
        both=any(lines.counts[name] and records.counts[name] for name in FORMS),
    )
