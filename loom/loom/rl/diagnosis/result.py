"""`Analysis`: the result of reading a run's logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from loom.rl.diagnosis.attribution import Attribution
from loom.rl.diagnosis.collector import Measured
from loom.rl.diagnosis.diagnosis import Finding
from loom.rl.diagnosis.evidence import Evidence, Problems
from loom.rl.diagnosis.statistics import Stats


@dataclass(frozen=True)
class Analysis:
    """The result of reading a run's logs."""

    made: datetime
    sources: list[str]
    lines: int
    """Lines that were read."""
    events: int
    """Events that were found."""
    primary: str
    """The rule of the primary finding: ``queue``, ``loading``, …, or ``none``."""
    findings: list[Finding]
    """All findings, the most important one first."""
    metrics: dict[str, Stats]
    """The statistics of every metric that has values, by name: ``queue_ms``, ``rpc_ms``, …"""
    attribution: Attribution
    """The time of a step by cause."""
    async_level: int | None
    broken: Problems
    """Lines that look like an event's and are none; they are left out."""
    contradictions: Problems
    """Lines that contradict themselves, such as a barrier that is not hit."""
    measured: Measured
    extracts: dict[str, list[Evidence]]
    """The first lines of each tag."""
    folder: Path | None = None
    """The folder of the written analysis."""
    framework: str | None = None
    """The framework that wrote the logs; None if they are those of Loom's own pipeline."""

    @property
    def slowest(self) -> list[Evidence]:
        """The slowest updates of weights by wall_ms, the slowest first."""
        return self.measured.metrics["wall_ms"].largest.lines()

    def as_dict(self) -> Mapping[str, object]:
        """Return the analysis as JSON has it, without the extracts."""
        return {
            "made": self.made.isoformat(),
            "sources": self.sources,
            "lines": self.lines,
            "events": self.events,
            "framework": self.framework,
            "primary": self.primary,
            "findings": [_finding(each) for each in self.findings],
            "metrics": {name: stats.as_dict() for name, stats in self.metrics.items()},
            "step": asdict(self.attribution),
            "async_level": self.async_level,
            "broken": _problems(self.broken),
            "contradictions": _problems(self.contradictions),
            "folder": None if self.folder is None else str(self.folder),
        }


def _problems(problems: Problems) -> Mapping[str, object]:
    return {"count": problems.count, "first": [asdict(each) for each in problems.first]}


def _finding(finding: Finding) -> Mapping[str, object]:
    rule = finding.rule
    return {
        "rule": rule.name.value,
        "level": finding.level.value,
        "primary": finding.over_bound,
        "value": finding.value,
        "unit": rule.unit,
        "share": finding.share,
        "says": rule.says,
        "suggests": rule.suggests,
        "option": rule.option,
        "details": finding.details,
        "evidence": [asdict(line) for line in finding.evidence],
    }
