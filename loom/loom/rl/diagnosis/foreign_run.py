"""`ForeignRun`: another framework's run, from rows of its metrics, as the measurements that the rules judge."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from loom.rl.diagnosis.collector import METRICS, Measured, Metric, Rank
from loom.rl.diagnosis.evidence import LINE, Evidence, Problem, Problems
from loom.rl.diagnosis.frameworks import Framework, Quantity
from loom.rl.diagnosis.history import EngineReading, Reading, RunHistory, StepReadings
from loom.rl.diagnosis.metric_rows import EngineLook, MetricRow, Moment, RowReader, WaitSaid
from loom.rl.diagnosis.related_events import OrchestratorSteps, OverlappingEvents, UpdateBatchPairs, UpdatePaths
from loom.rl.diagnosis.signals import ADDED, OF_ENGINES, RunSide, Signal
from loom.rl.diagnosis.sources import Block
from loom.tracing.lines import FORMS

KEPT = 4096
"""Steps, and looks at engines, that are kept; of more, every second one is left out."""
RECENT = 512
"""The newest looks and waits, of which all are kept."""
TIMES = frozenset(
    {
        Signal.STEP,
        Signal.TRAINER_STEP,
        Signal.GENERATE,
        Signal.WAIT_BATCH,
        Signal.WAIT_POLICY,
        Signal.EVALUATE,
        *ADDED,
    }
)
_ROUNDING = 1.05
"""The parts of a step may take so many times the step, because each is measured on its own."""


class ForeignRun:
    """Reads a framework's logs.

    Args:
        framework: the framework.
        broken: where values go that cannot be.
        steps: the steps that count; all if None.
    """

    def __init__(self, framework: Framework, broken: Problems, steps: range | None = None) -> None:
        self.framework = framework
        self._counting = steps
        self._reader = RowReader(framework)
        self._broken = broken
        self._steps: dict[int, StepReadings] = {}
        self._stride = 1
        self._open: dict[str, dict[Signal, Reading]] = {}
        """Readings of each source whose rows do not say the step: those of the next step that it says."""
        self._looks: list[EngineReading] = []
        self._newest: list[EngineReading] = []
        self._waits: list[WaitSaid] = []
        self._said, self._between = 0, 0.0
        """How often the generators said since the last step that they wait, and the seconds between two times."""
        self.rows = 0

    def feed(self, file: str, block: Block) -> None:
        """Take account of the rows of a block."""
        for found in self._reader.read(file, block):
            match found:
                case MetricRow():
                    self._row(found)
                case EngineLook():
                    evidence = Evidence(file, found.line, found.text.strip()[:LINE])
                    self._look(found.moment, dict(found.values), evidence)
                case WaitSaid():
                    self._waits = [*self._waits[-RECENT:], found]
                    self._said += found.wait.seconds > 0 and found.wait.waits is RunSide.GENERATORS
                    self._between = found.wait.seconds

    def history(self) -> RunHistory:
        """Return everything that was read."""
        counting = self._counting
        steps = [self._steps[one] for one in sorted(self._steps) if counting is None or one in counting]
        return RunHistory(self.framework, steps, self._looks, self._newest, self._waits, dict(self._reader.ends))

    def measured(self) -> Measured:
        """Return the measurements; a metric that the framework does not log has no values."""
        return measure(self.history())

    def _row(self, row: MetricRow) -> None:
        readings = dict(self._translate(row))
        looked = {signal: readings.pop(signal).value for signal in list(readings) if signal in OF_ENGINES}
        if looked:
            text = ", ".join(f"{signal.value}={value:g}" for signal, value in looked.items())
            self._look(row.moment, looked, Evidence(row.file, row.line, text))
        if not readings:
            return
        self.rows += 1
        if row.step is None:
            held = self._open.setdefault(row.file, {})
            for signal, reading in readings.items():
                before = held.get(signal)
                held[signal] = reading if before is None or signal not in ADDED else _sum(before, reading)
            return
        if row.step % self._stride:
            return
        step = self._steps.setdefault(row.step, StepReadings(row.step))
        if row.moment is not None:
            step.moments[row.file] = row.moment
        if self._said:
            waited = (self._said - 1) * self._between  # at least
            reading = Reading(1000 * waited, row.file, row.line, "times said to wait", self._said)
            readings.setdefault(Signal.WAIT_POLICY, reading)
            self._said = 0
        for signal, reading in {**self._open.pop(row.file, {}), **readings}.items():
            before = step.readings.get(signal)
            if before is None or before.file == row.file:  # a step that is done again after a restart counts anew
                step.readings[signal] = reading
        if len(self._steps) > KEPT:
            self._stride *= 2
            self._steps = {number: each for number, each in self._steps.items() if number % self._stride == 0}

    def _translate(self, row: MetricRow) -> Iterator[tuple[Signal, Reading]]:
        found: dict[Signal, Reading] = {}
        names = self._plain(row.values)
        for quantity in self.framework.quantities:
            if quantity.beside is not None and quantity.beside not in names:
                continue
            if quantity.signal in found and quantity.signal not in ADDED:
                continue
            reading = self._read(quantity, row, names)
            if reading is None:
                continue
            if reading.value < 0 and quantity.signal in TIMES:
                text = f"{reading.name}={reading.said:g}"
                self._broken.add(partial(Problem, row.file, row.line, f"{reading.name} is below zero", text))
                continue
            before = found.get(quantity.signal)
            found[quantity.signal] = reading if before is None else _sum(before, reading)
        yield from found.items()

    def _plain(self, values: Iterable[str]) -> dict[str, str]:
        """Return the names of a row by their names without the framework's prefix."""
        prefix = self.framework.prefix
        return {name.removeprefix(prefix) if prefix else name: name for name in values}

    def _read(self, quantity: Quantity, row: MetricRow, names: dict[str, str]) -> Reading | None:
        for pattern in quantity.names:
            matching = [pattern] if pattern in names else _matching(pattern, names) if "*" in pattern else []
            if not matching:
                continue
            said = [row.values[names[name]] for name in matching]
            value = max(said) if quantity.signal in OF_ENGINES else sum(said) / len(said)
            whole = row.values.get(names.get(quantity.over, "")) if quantity.over else 1.0
            if not whole:
                return None
            scaled = value * quantity.scale / whole
            if quantity.behind_step:
                if row.step is None:
                    return None
                scaled = max(0.0, row.step + 1 - value)
            return Reading(scaled, row.file, row.line, matching[0], value)
        return None

    def _look(self, moment: Moment | None, values: dict[Signal, float], evidence: Evidence) -> None:
        look = EngineReading(moment, values, evidence)
        self._newest = [*self._newest[-RECENT:], look]
        self._looks.append(look)
        if len(self._looks) > KEPT:
            self._looks = self._looks[::2]


def _sum(one: Reading, other: Reading) -> Reading:
    larger = max(one, other, key=lambda each: each.value)
    return Reading(one.value + other.value, larger.file, larger.line, larger.name, larger.said)


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    form = re.compile(".+?".join(map(re.escape, pattern.split("*"))))
    return [name for name in names if form.fullmatch(name)]


def measure(history: RunHistory) -> Measured:
    """Return the measurements of a history.

    Most frameworks log only one side of the pipeline. Of the other it is known that it waits while it neither works
    nor loads weights: the side that generates, for the rest of the step; the trainers as well.
    """
    metrics = {name: Metric() for name in (*METRICS, "reload_ms", *(signal.value for signal in Signal))}
    loop, rank = OrchestratorSteps(), Rank()
    for step, wall in zip(history.steps, _walls(history.steps), strict=True):
        for signal in step.readings:
            _note(metrics[signal.value], step, signal)
        if wall:
            if step[Signal.STEP] is None:
                metrics["step_s"].series.extend([wall / 1000])
            _work(step, wall, metrics, loop, rank)
    for look in history.looks:
        for signal, value in look.values.items():
            found = metrics[signal.value]
            found.series.extend([value])
            found.largest.extend([value], partial(_of_look, look))
    ranks = {0: rank} if rank.steps.series.count else {}
    updates, batches = OverlappingEvents(3), OverlappingEvents(1)
    counts = dict.fromkeys(FORMS, 0) | {"step.complete": len(history.steps)}
    return Measured(
        metrics, counts, ranks, updates, batches, loop, UpdatePaths(), UpdateBatchPairs(), [], False, history
    )


def _of_look(look: EngineReading, index: int) -> Evidence:
    return look.evidence


def _note(metric: Metric, step: StepReadings, signal: Signal) -> None:
    metric.series.extend([step.readings[signal].value])
    metric.largest.extend([step.readings[signal].value], lambda index: step.evidence(signal))


def _work(step: StepReadings, wall: float, metrics: dict[str, Metric], loop: OrchestratorSteps, rank: Rank) -> None:
    """Add a step to the steps of both sides, in milliseconds."""
    train, sync, write = step[Signal.TRAIN], step[Signal.SYNC] or 0.0, step[Signal.WRITE] or 0.0
    evaluate = step[Signal.EVALUATE] or 0.0
    wall = max(0.0, wall - evaluate)
    generate, waits, waits_batch = step[Signal.GENERATE], step[Signal.WAIT_POLICY], step[Signal.WAIT_BATCH]
    if waits_batch is None and train is not None:
        waits_batch = max(0.0, (step[Signal.TRAINER_STEP] or 0.0) * 1000 - train - sync - write) or max(
            0.0, wall - train - sync - write
        )
    if generate is None and waits is None and waits_batch is not None and waits_batch > 0.05 * wall:
        generate = max(0.0, wall - sync)  # the trainers wait, so that the other side never does
    if waits is None:
        waits = 0.0 if generate is None else max(0.0, wall - generate - sync)
        if generate is not None:
            metrics["wait_ms"].series.extend([waits])
    if generate is None:
        generate = max(0.0, wall - waits - sync)
    generate = min(generate, max(0.0, _ROUNDING * wall - sync))
    loop.add((wall, waits, 0.0, sync, generate))
    if train is not None:
        rank.steps.series.extend([train])
        rank.steps.largest.extend([train], lambda index: step.evidence(Signal.TRAIN))
        if waits_batch is not None:
            rank.waits.extend([waits_batch])
            if Signal.WAIT_BATCH not in step.readings:
                metrics["batch_wait_ms"].series.extend([waits_batch])
    if Signal.GENERATE not in step.readings:
        metrics["dur_ms"].series.extend([generate])


def _walls(steps: Sequence[StepReadings]) -> Iterator[float]:
    """Yield the milliseconds of each step: as it says itself, from the step before, or as its parts add up."""
    before: StepReadings | None = None
    for step in steps:
        said = step[Signal.STEP] or step[Signal.TRAINER_STEP]
        wall = 1000 * said if said else _since(before, step)
        parts = (Signal.GENERATE, Signal.WAIT_BATCH, Signal.TRAIN, Signal.SYNC)
        known = [value for signal in parts if (value := step[signal]) is not None]
        yield wall or (sum(known) if len(known) > 1 else 0.0)
        before = step


def _since(before: StepReadings | None, step: StepReadings) -> float:
    if before is None or step.number <= before.number:
        return 0.0
    for file, moment in step.moments.items():
        other = before.moments.get(file)
        if other is not None and other.clock == moment.clock and moment.seconds > other.seconds:
            return 1000 * (moment.seconds - other.seconds) / (step.number - before.number)
    return 0.0


def beside(foreign: Measured, own: Measured) -> Measured:
    """Add the metrics that only log lines of `loom.tracing` have, such as those of a server with a plugin."""
    metrics = {
        name: own.metrics[name] if not metric.series.count and name in own.metrics else metric
        for name, metric in foreign.metrics.items()
    }
    return replace(
        foreign, metrics=metrics, updates=own.updates, ways=own.ways, pairs=own.pairs, timeline=own.timeline
    )
