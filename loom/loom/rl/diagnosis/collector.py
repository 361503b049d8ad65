"""Collects the events of log lines or of JSON lines: values of every metric, and the lines of the largest ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, islice
from operator import not_

from loom.rl.diagnosis.evidence import Evidence, Largest, Problems
from loom.rl.diagnosis.history import RunHistory
from loom.rl.diagnosis.related_events import OrchestratorSteps, OverlappingEvents, UpdateBatchPairs, UpdatePaths
from loom.rl.diagnosis.scanner import KEPT, EventBlock, Scanner, as_text, problem
from loom.rl.diagnosis.statistics import Series, Sums
from loom.tracing.lines import FORMS

SLOWEST = 10
"""Updates of ``slowest_updates.txt``, and lines under a finding at most."""
OF_A_RANK = 3
"""Lines of each rank that are kept."""
RANKS = 1024
"""Ranks that are told apart."""
LAST = 50
"""Events of ``timeline.txt``."""
ROUNDING_MS = 1.0
"""Milliseconds by which the fields of a line may disagree, because each is rounded."""

TIMELINE = ("gen.batch.start", "gen.batch.done", "weights.client.send", "weights.client.done")


@dataclass
class Metric:
    """The values of a metric, and the lines with the largest."""

    series: Series = field(default_factory=Series)
    largest: Largest = field(default_factory=lambda: Largest(SLOWEST))


@dataclass
class Rank:
    """The work of one rank of the trainers."""

    steps: Metric = field(default_factory=lambda: Metric(Series(2000), Largest(OF_A_RANK)))
    """Milliseconds of each step."""
    waits: Sums = field(default_factory=Sums)
    """Milliseconds that it waited for each batch."""


METRICS = {
    "wall_ms": ("weights.client.done", "wall_ms"),
    "rpc_ms": ("weights.client.done", "rpc_ms"),
    "queue_ms": ("weights.client.done", "queue_ms"),
    "server_rpc_ms": ("weights.rpc.done", "rpc_ms"),
    "write_ms": ("ckpt.write.done", "write_ms"),
    "wait_ms": ("ckpt.wait.done", "wait_ms"),
    "inflight": ("gen.batch.start", "inflight"),
    "dur_ms": ("gen.batch.done", "dur_ms"),
    "completions": ("gen.batch.done", "completions"),
    "idle_ms": ("gen.idle", "wait_ms"),
    "trunc_pct": ("rollout", "trunc_pct"),
    "staleness": ("rollout", "staleness"),
    "step_s": ("step.complete", "wall"),
    "train_ms": ("train.step.done", "dur_ms"),
    "batch_wait_ms": ("train.batch.wait", "wait_ms"),
}
"""The event and the field of each metric."""

_PLACES = {name: {each.name: place for place, each in enumerate(kept, 2)} for name, kept in KEPT.items()}
"""The place of each field of an event in its columns."""
_BY_EVENT = {
    name: [(metric, _PLACES[name][of]) for metric, (event, of) in METRICS.items() if event == name]
    for name in FORMS
}
_NUMBERS = {
    name: [place for place, each in enumerate(kept, 2) if each.required and each.digits is not None]
    for name, kept in KEPT.items()
}
"""The places of the used numbers that an event always has."""
_NO_NEGATIVES = {
    name: [
        _PLACES[name][of]
        for of in ("wall_ms", "rpc_ms", "wait_ms", "write_ms", "dur_ms", "trunc_pct", "wall")
        if of in _PLACES[name]
    ]
    for name in FORMS
}
_DUR = _PLACES["gen.batch.done"]["dur_ms"]
_WAIT, _WALL = _PLACES["ckpt.wait.done"]["wait_ms"], _PLACES["step.complete"]["wall"]
_OP, _RPC = _PLACES["weights.rpc.done"]["op"], _PLACES["weights.rpc.done"]["rpc_ms"]
_POOL = _PLACES["weights.client.done"]["pool_ms"]
_RELOAD = ("reload_weights", b"reload_weights")
_FOLLOWED = {
    "weights.client.send",
    "weights.client.done",
    "gen.batch.start",
    "gen.batch.done",
    "ckpt.wait.done",
    "step.complete",
}
"""Events whose order matters."""
_TIMES = {
    "weights.client.send": "send",
    "weights.server.recv": "recv",
    "weights.rpc.start": "start",
    "weights.rpc.done": "done",
}
"""The part of an update that an event with a time is."""


class Collector:
    """Everything that the analysis keeps of the events; its size does not grow with the logs.

    Args:
        scanner: names rows that turn out to be broken.
        contradictions: where lines go that contradict themselves.
        ways: of updates, whose lines may be here and elsewhere.
    """

    def __init__(self, scanner: Scanner, contradictions: Problems, ways: UpdatePaths) -> None:
        self.counts: dict[str, int] = dict.fromkeys(FORMS, 0)
        self.metrics = {name: Metric() for name in METRICS}
        self.reload_ms = Metric()
        """Of ``rpc.done`` with ``op=reload_weights``."""
        self.ranks: dict[int, Rank] = {}
        self.updates = OverlappingEvents(3)
        """wall_ms, rpc_ms and queue_ms of updates; those at the same time count once."""
        self.batches = OverlappingEvents(1)
        self.steps = OrchestratorSteps()
        self.ways = ways
        self.pairs = UpdateBatchPairs()
        self.timeline: deque[tuple[float | None, Evidence]] = deque(maxlen=LAST)
        self.async_level: int | None = None
        """The level that the last barrier says."""
        self._waited = 0.0  # for a checkpoint, in this step
        self._scanner = scanner
        self._contradictions = contradictions

    def feed(self, batch: EventBlock) -> None:
        """Take account of the events of a block."""
        columns = {}
        for name in batch.columns:
            columns[name] = numbers = self._numbers(batch, name)
            self.counts[name] += len(batch.columns[name][0])  # without broken ones
            for metric, place in _BY_EVENT[name]:
                found = self.metrics[metric]
                found.series.extend(numbers[place])
                found.largest.extend(numbers[place], partial(batch.evidence, name))
        self._check(batch, columns)
        self._by_rank(batch, columns)
        self._follow(batch, columns)
        self._timeline(batch)

    def finish(self) -> None:
        """Take account of what has not ended. Nothing is taken after that."""
        self.updates.finish()
        self.batches.finish()
        self.ways.finish()

    def _numbers(self, batch: EventBlock, name: str) -> dict[int, list[float]]:
        """Return the columns of numbers of an event. Events with an impossible one are named, and taken out."""
        columns = batch.columns[name]
        found = {place: list(map(float, columns[place])) for place in _NUMBERS[name]}
        for place in _NO_NEGATIVES[name]:
            if min(found[place], default=0.0) < 0:
                good = [value >= 0 for value in found[place]]
                for position in compress(columns[0], map(not_, good)):
                    self._scanner.broken(batch, position, f"{name} with {_name_at(name, place)} below zero")
                batch.keep(name, good)
                return self._numbers(batch, name) if any(good) else {at: [] for at in found}
        return found

    def _check(self, batch: EventBlock, columns: dict[str, dict[int, list[float]]]) -> None:
        """Name lines that contradict themselves. They count all the same."""
        if numbers := columns.get("weights.client.done"):
            wall, rpc, queue = numbers.values()
            off = [abs(w - r - q) > ROUNDING_MS for w, r, q in zip(wall, rpc, queue, strict=True)]
            self._contradict(batch, "weights.client.done", off, "queue_ms is not wall_ms - rpc_ms")
        if numbers := columns.get("rollout"):
            _, step, ckpt, stale = numbers.values()
            off = [s - c != by for s, c, by in zip(step, ckpt, stale, strict=True)]
            self._contradict(batch, "rollout", off, "staleness is not current_step - ckpt_step")
        if numbers := columns.get("barrier"):
            step, ckpt, level = numbers.values()
            off = [s - c <= most for s, c, most in zip(step, ckpt, level, strict=True)]
            self._contradict(
                batch, "barrier", off, "the barrier is not hit: the difference is not above async_level"
            )
            if level:
                self.async_level = int(level[-1])

    def _contradict(self, batch: EventBlock, name: str, off: Sequence[bool], why: str) -> None:
        if any(off):
            for position in compress(batch.columns[name][0], off):
                self._contradictions.add(partial(problem, batch, position, why))

    def _by_rank(self, batch: EventBlock, columns: dict[str, dict[int, list[float]]]) -> None:
        for name in ("train.step.done", "train.batch.wait"):
            if not (numbers := columns.get(name)):
                continue
            ranks, took = numbers.values()
            for number in set(ranks):
                rank = self.ranks.get(int(number))
                if rank is None:
                    if len(self.ranks) >= RANKS:
                        continue
                    rank = self.ranks[int(number)] = Rank()
                mine = [index for index, value in enumerate(ranks) if value == number]
                values = [took[index] for index in mine]
                if name == "train.batch.wait":
                    rank.waits.extend(values)
                    continue
                rank.steps.series.extend(values)
                rank.steps.largest.extend(values, partial(_evidence_of, batch, name, mine))

    def _follow(self, batch: EventBlock, columns: dict[str, dict[int, list[float]]]) -> None:
        """Take account of what depends on the order of events, or on several of them."""
        done = iter(zip(*columns.get("weights.client.done", {0: (), 1: (), 2: ()}).values(), strict=True))
        gen = iter(columns.get("gen.batch.done", {_DUR: ()})[_DUR])
        waits = iter(columns.get("ckpt.wait.done", {_WAIT: ()})[_WAIT])
        walls = iter(columns.get("step.complete", {_WALL: ()})[_WALL])
        for name in filter(_FOLLOWED.__contains__, batch.order):
            if name == "weights.client.send":
                self.updates.begin()
            elif name == "weights.client.done":
                numbers = next(done)
                self.updates.end(numbers)
                self.pairs.update(numbers[2])
            elif name == "gen.batch.start":
                self.batches.begin()
            elif name == "gen.batch.done":
                dur = next(gen)
                self.batches.end((dur,))
                self.pairs.ended(dur)
            elif name == "ckpt.wait.done":
                self._waited += next(waits)
            elif name == "step.complete":
                _, rpc, queue = self.updates.end_step()
                (dur,) = self.batches.end_step()
                self.steps.add((1000 * next(walls), self._waited, queue, rpc, dur))
                self._waited = 0.0
        self.updates.flush()
        self.batches.flush()
        self.pairs.flush()
        self._note_ways(batch, columns)
        if found := batch.columns.get("weights.rpc.done"):
            reloads = [index for index, op in enumerate(found[_OP]) if op in _RELOAD]
            values = [columns["weights.rpc.done"][_RPC][index] for index in reloads]
            self.reload_ms.series.extend(values)
            self.reload_ms.largest.extend(values, partial(_evidence_of, batch, "weights.rpc.done", reloads))

    def _note_ways(self, batch: EventBlock, columns: dict[str, dict[int, list[float]]]) -> None:
        for name, what in _TIMES.items():
            if found := batch.columns.get(name):
                times = [None if time is None else float(time) for time in found[_PLACES[name]["t"]]]
                self.ways.note(what, list(map(as_text, found[1])), times)
        if found := batch.columns.get("weights.client.done"):
            wall, *_ = columns["weights.client.done"].values()
            traces = list(map(as_text, found[1]))
            pools = [None if pool is None else float(pool) for pool in found[_POOL]]
            self.ways.note("pool_ms", traces, pools)
            self.ways.note("wall_ms", traces, wall)

    def _timeline(self, batch: EventBlock) -> None:
        shown = [
            (position, name, index)
            for name in TIMELINE
            if (found := batch.columns.get(name))
            for index, position in islice(enumerate(found[0]), max(0, len(found[0]) - LAST), None)
        ]
        for position, name, index in sorted(shown)[-LAST:]:
            self.timeline.append((batch.times.get(position), batch.evidence(name, index)))


def _name_at(name: str, place: int) -> str:
    """Return the name of the field at a place in the columns of an event."""
    return KEPT[name][place - 2].name


def _evidence_of(batch: EventBlock, name: str, indices: Sequence[int], index: int) -> Evidence:
    return batch.evidence(name, indices[index])


@dataclass(frozen=True)
class Measured:
    """The metrics of a run.

    Each event comes from log lines or from JSON lines, whichever have more of it, so that none counts twice.
    """

    metrics: Mapping[str, Metric]
    counts: Mapping[str, int]
    """Number of events of each name."""
    ranks: Mapping[int, Rank]
    updates: OverlappingEvents
    batches: OverlappingEvents
    steps: OrchestratorSteps
    ways: UpdatePaths
    pairs: UpdateBatchPairs
    timeline: list[Evidence]
    both: bool
    """True if log lines and JSON lines have the same events."""
    history: RunHistory | None = None
    """The steps of a run of another framework."""

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
