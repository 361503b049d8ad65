"""Loom beside Loom: over plain HTTP, or as it was before a change. There is no budget for either."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.caller import MANY, MESH
from tests.benchmarks.calls import SUBJECTS, Figures, Measured, Subject, SubjectName

__all__ = ["HTTP_SUBJECTS", "before", "before_ratios", "http_ratios"]

HTTP_SUBJECTS = (SUBJECTS[SubjectName.LOOM], SUBJECTS[SubjectName.LOOM_HTTP])


def before(python: Path) -> Subject:
    """Loom as another environment has it, called by the same code; ``python`` is that environment's interpreter."""
    return Subject(SubjectName.LOOM_BEFORE, "Loom, before", "tests.benchmarks.loom_caller", python=str(python))


def http_ratios(measured: Measured) -> tuple[str, ...]:
    """A line for each figure: how many times the WebSocket's it is, the median over rounds and the extremes."""
    compare = _Comparison(measured, SubjectName.LOOM_HTTP, SubjectName.LOOM, "the WebSocket's")
    return (
        compare.line("one call, p50", lambda figures: figures.p50_ms),
        compare.line("pipelined calls a second", lambda figures: figures.pipelined_per_s["one"]),
        compare.line(_echo_name(measured), lambda figures: figures.echo_s["bytes"]),
    )


def before_ratios(measured: Measured) -> tuple[str, ...]:
    """A line for each row of the report: how many times the earlier figure today's is."""
    compare = _Comparison(measured, SubjectName.LOOM, SubjectName.LOOM_BEFORE, "the one before")
    echo = _echo_name(measured)
    return (
        compare.line("one call, p50", lambda figures: figures.p50_ms),
        compare.line("pipelined calls a second, one actor", lambda figures: figures.pipelined_per_s["one"]),
        compare.line(f"pipelined calls a second, {MANY} actors", lambda figures: figures.pipelined_per_s["many"]),
        compare.line(f"pipelined calls a second, mesh of {MESH}", lambda figures: figures.pipelined_per_s["mesh"]),
        compare.line("CPU time of a pipelined call", lambda figures: figures.pipelined_cpu_ms),
        compare.line(f"{echo}, bytes", lambda figures: figures.echo_s["bytes"]),
        compare.line(f"{echo}, array", lambda figures: figures.echo_s["array"]),
    )


def _echo_name(measured: Measured) -> str:
    return f"{measured.plan.echo_size / 2**20:g} MiB echo"


class _Comparison:
    """Lines of ratios of two subjects' figures, each taken within its round."""

    def __init__(self, measured: Measured, subject: SubjectName, other: SubjectName, others: str) -> None:
        self._measured = measured
        self._subject = subject
        self._other = other
        self._others = others

    def line(self, name: str, figure: Callable[[Figures], float]) -> str:
        by_round = [
            figure(figures[self._subject]) / figure(figures[self._other]) for figures in self._measured.rounds
        ]
        median = statistics.median(by_round)
        return f"{name}: {median:.2f} times {self._others} ({min(by_round):.2f} to {max(by_round):.2f})"
