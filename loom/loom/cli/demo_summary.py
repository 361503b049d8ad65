"""The outcome of ``loom demo``: what ``--json`` prints, what a reader is told, and the exit code."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from loom.cli.demo_job import (
    LEARNING_RATES,
    Event,
    FailureSeen,
    LearningRateChanged,
    ProcessKilled,
    Progress,
    Recovered,
)

TARGET_ACCURACY = 0.95
"""Share of the test digits that have to be read correctly."""


@dataclass(frozen=True)
class FailureSummary:
    """What the lost process cost; durations are in seconds."""

    step: int
    rank: int
    pid: int
    error: str
    message: str
    noticed_seconds: float
    resumed_from_step: int
    lost_steps: int
    recovery_seconds: float


@dataclass(frozen=True)
class Summary:
    """The outcome, as ``--json`` prints it; ``samples_per_second`` and ``call_ms`` are medians."""

    hosts: int
    procs: int
    steps: int
    accuracy: float
    loss: float
    learning_rates: list[float]
    samples_per_second: float
    call_ms: float
    connected_seconds: float
    seconds: float
    failure: FailureSummary | None
    target_accuracy: float = TARGET_ACCURACY


def summarize(events: Sequence[Event], hosts: int, procs: int, connected_seconds: float, seconds: float) -> Summary:
    """Add up the events of a job that has come to its end.

    Args:
        events: all of them, in order.
        hosts: size of the dimension ``hosts``.
        procs: processes on each host.
        connected_seconds: how long it took to start the cluster and to connect to it.
        seconds: how long everything took.
    """
    progress = [event for event in events if isinstance(event, Progress)]
    changes = [event.after for event in events if isinstance(event, LearningRateChanged)]
    return Summary(
        hosts=hosts,
        procs=procs,
        steps=progress[-1].step,
        accuracy=progress[-1].accuracy,
        loss=progress[-1].loss,
        learning_rates=[LEARNING_RATES[0], *changes],
        samples_per_second=statistics.median(each.samples_per_second for each in progress),
        call_ms=statistics.median(each.call_ms for each in progress),
        connected_seconds=connected_seconds,
        seconds=seconds,
        failure=_summarize_failure(events),
    )


def _summarize_failure(events: Sequence[Event]) -> FailureSummary | None:
    story = [event for event in events if isinstance(event, ProcessKilled | FailureSeen | Recovered)]
    match story:
        case [ProcessKilled() as killed, FailureSeen() as seen, Recovered() as recovered]:
            return FailureSummary(
                step=killed.step,
                rank=killed.rank,
                pid=killed.pid,
                error=f"loom.{type(seen.error).__name__}",
                message=str(seen.error),
                noticed_seconds=seen.seconds,
                resumed_from_step=recovered.step,
                lost_steps=recovered.lost_steps,
                recovery_seconds=recovered.seconds,
            )
    return None


def exit_code(summary: Summary) -> int:
    """0 if enough of the test digits are read correctly, else 1."""
    return 0 if summary.accuracy >= summary.target_accuracy else 1


def describe(summary: Summary) -> str:
    """The summary for a reader: what was reached, how fast, and what the lost process cost."""
    rates = " → ".join(f"{rate:g}" for rate in summary.learning_rates)
    lines = [
        f"{summary.accuracy:.1%} of the test digits are read correctly after {summary.steps} steps, "
        f"{summary.seconds:.0f} s from start to end.",
        f"Hosts x processes: {summary.hosts} x {summary.procs}; {summary.samples_per_second:,.0f} samples/s, "
        f"{summary.call_ms:.1f} ms a call, learning rate {rates}.",
    ]
    lost = summary.failure
    if lost:
        lines.append(
            f"Rank {lost.rank} was killed at step {lost.step}. {lost.error} came after "
            f"{lost.noticed_seconds:.2f} s; {lost.recovery_seconds:.0f} s later training went on from "
            f"step {lost.resumed_from_step}."
        )
    if exit_code(summary):
        lines.append(f"That is less than {summary.target_accuracy:.0%}: give it more --steps.")
    return "\n".join(lines)
