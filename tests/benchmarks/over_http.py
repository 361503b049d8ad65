"""What a session over plain HTTP costs, beside one over a WebSocket; there is no budget for it."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from tests.benchmarks.calls import SUBJECTS, Figures, Measured, SubjectName

__all__ = ["HTTP_SUBJECTS", "http_ratios"]

HTTP_SUBJECTS = (SUBJECTS[SubjectName.LOOM], SUBJECTS[SubjectName.LOOM_HTTP])


def http_ratios(measured: Measured) -> tuple[str, ...]:
    """A line for each figure: how many times the WebSocket's it is, the median over rounds and the extremes."""

    def line(name: str, figure: Callable[[Figures], float]) -> str:
        by_round = [
            figure(figures[SubjectName.LOOM_HTTP]) / figure(figures[SubjectName.LOOM])
            for figures in measured.rounds
        ]
        median = statistics.median(by_round)
        return f"{name}: {median:.2f} times the WebSocket's ({min(by_round):.2f} to {max(by_round):.2f})"

    return (
        line("one call, p50", lambda figures: figures.p50_ms),
        line("pipelined calls a second", lambda figures: figures.pipelined_per_s["one"]),
        line(f"{measured.plan.echo_size / 2**20:g} MiB echo", lambda figures: figures.echo_s["bytes"]),
    )
