"""`RunHistory`: the steps of a run of another framework, its engines and its waits, in their order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from loom.rl.diagnosis.evidence import Evidence
from loom.rl.diagnosis.frameworks import Framework
from loom.rl.diagnosis.metric_rows import Moment, WaitSaid
from loom.rl.diagnosis.signals import Signal


@dataclass(frozen=True)
class Reading:
    """A value, and the line that says it."""

    value: float
    file: str
    line: int
    name: str
    said: float


@dataclass
class StepReadings:
    """The values of one step."""

    number: int
    moments: dict[str, Moment] = field(default_factory=dict)
    """The time of the newest row of each source."""
    readings: dict[Signal, Reading] = field(default_factory=dict)

    def __getitem__(self, signal: Signal) -> float | None:
        reading = self.readings.get(signal)
        return None if reading is None else reading.value

    def evidence(self, signal: Signal) -> Evidence:
        """Return the line that says a value."""
        found = self.readings[signal]
        return Evidence(found.file, found.line, f"step {self.number}: {found.name}={found.said:g}")


@dataclass(frozen=True)
class EngineReading:
    """The state of the engines at a time."""

    moment: Moment | None
    values: dict[Signal, float]
    evidence: Evidence


@dataclass
class RunHistory:
    """The steps of a run in their order, and what its engines and its waits say."""

    framework: Framework
    steps: list[StepReadings] = field(default_factory=list)
    looks: list[EngineReading] = field(default_factory=list)
    newest_looks: list[EngineReading] = field(default_factory=list)
    waits: list[WaitSaid] = field(default_factory=list)
    ends: dict[str, Moment] = field(default_factory=dict)
    """The newest time in each source."""

    def values(self, *signals: Signal) -> list[tuple[float, ...]]:
        """Return the values of the steps that have all of these signals."""
        rows = ([step[signal] for signal in signals] for step in self.steps)
        return [tuple(value for value in row if value is not None) for row in rows if None not in row]

    def largest(self, signal: Signal, count: int, steps: Iterable[StepReadings] | None = None) -> list[Evidence]:
        """Return the lines of the largest values of a signal."""
        having = [step for step in (self.steps if steps is None else steps) if signal in step.readings]
        return [step.evidence(signal) for step in sorted(having, key=lambda each: -(each[signal] or 0.0))[:count]]
