"""The lost share of a step's wall time, by cause.

Trainers and orchestrator are a pipeline: while the orchestrator generates the batch of a step, the trainers
train on an older one. A step of the orchestrator is its waiting for a checkpoint, its update of weights (delay
and loading), its generation and a rest. A step of the trainers is their waiting for a batch, their computing
and the writing of weights. The slower side does not wait: a reduction of its time makes the steps shorter,
and nothing on the other side does. So the wait of one side is lost to the parts of the other side's step, in
proportion to their lengths. The orchestrator's loss on an update counts whole, for no generator generates then.

Waste (delay, loading, writing, the lead of a straggler) could go whole. Generating and computing are work:
twice as many generators or trainers would halve it, so that half of it counts as lost. And only as much as one
side has more to do than the other: with an async level of 0 both sides wait for each other, and neither is slow
for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from loom.rl.diagnosis.collector import Measured, Rank

HALF = 0.5
"""The share of the time of some work that doubling its means saves."""
SYSTEMATIC = 1.2
"""A straggler's typical step takes so many times that of the others at least, not only its mean one."""


@dataclass(frozen=True)
class Straggler:
    """The slowest rank."""

    rank: int
    mean_ms: float
    """Of its steps."""
    others_ms: float
    """The median of the other ranks' means."""

    @property
    def lead_ms(self) -> float:
        """Milliseconds for which the others wait in each step."""
        return self.mean_ms - self.others_ms


@dataclass(frozen=True)
class Loop:
    """A step of the orchestrator, in milliseconds; and what of it is lost, as shares of its wall time."""

    steps: int
    """Steps that are known."""
    wall_ms: float
    """Mean wall time of a step, or of its known parts."""
    wait_ms: float
    """For a checkpoint."""
    queue_ms: float
    """Delay of the update of weights."""
    rpc_ms: float
    """Loading of weights."""
    batch_ms: float
    """Generation."""

    @property
    def busy_ms(self) -> float:
        """All but the waiting for a checkpoint."""
        return max(0.0, self.wall_ms - self.wait_ms)

    @property
    def other_ms(self) -> float:
        """Milliseconds without a cause."""
        return max(0.0, self.wall_ms - self.wait_ms - self.queue_ms - self.rpc_ms - self.batch_ms)

    def share(self, milliseconds: float) -> float:
        """Return a part of the step as a share."""
        return min(1.0, milliseconds / self.wall_ms) if self.wall_ms else 0.0


@dataclass(frozen=True)
class TrainerStep:
    """A step of the trainers, in milliseconds."""

    steps: int
    wait_ms: float
    """For a batch: that of the rank that waits least."""
    compute_ms: float
    """Of a typical rank."""
    lead_ms: float
    """By which the slowest rank takes longer, if it does so systematically."""
    write_ms: float
    """Writing of weights."""
    straggler: Straggler | None

    @property
    def busy_ms(self) -> float:
        """All but the waiting."""
        return self.compute_ms + self.lead_ms + self.write_ms

    @property
    def wall_ms(self) -> float:
        """The whole step."""
        return self.wait_ms + self.busy_ms


@dataclass(frozen=True)
class Lost:
    """The loss to one cause in a step."""

    ms: float = 0.0
    """The milliseconds of a step that the cause takes or makes others wait."""
    share: float = 0.0
    """The share of the step's wall time that is lost."""


@dataclass(frozen=True)
class Attribution:
    """The time of a step by cause."""

    loop: Loop
    training: TrainerStep
    queue: Lost
    loading: Lost
    checkpoint: Lost
    trainer: Lost
    straggler: Lost
    generator: Lost


def attribute(measured: Measured) -> Attribution:
    """Return where the time of a step goes."""
    loop, training = _loop(measured), _training(measured)
    waited = {"checkpoint": training.write_ms, "straggler": training.lead_ms, "trainer": training.compute_ms}
    if not training.steps:  # of the trainers' step only the writing may be known
        waited["trainer"] = max(0.0, loop.wait_ms - training.write_ms) if training.write_ms else 0.0
    if not sum(waited.values()):
        waited["checkpoint"] = 1.0  # nothing is known: the seed's reading
    whole = sum(waited.values())
    if loop.wall_ms:
        lost = {cause: _lost(loop.wait_ms * part / whole, loop.wall_ms) for cause, part in waited.items()}
        if training.steps:
            more = min(loop.wait_ms, max(0.0, training.busy_ms - loop.busy_ms)) * training.compute_ms / whole
            lost["trainer"] = Lost(more, loop.share(min(more, HALF * training.compute_ms)))
    else:  # there is no log of the orchestrator
        lost = {cause: _lost(part, training.wall_ms or part) for cause, part in waited.items()}
        lost["checkpoint"] = _lost(training.write_ms, training.wall_ms or training.write_ms)
        lost["trainer"] = Lost()
    return Attribution(
        loop,
        training,
        queue=_lost(loop.queue_ms, loop.wall_ms),
        loading=_lost(loop.rpc_ms, loop.wall_ms),
        checkpoint=lost["checkpoint"],
        trainer=lost["trainer"],
        straggler=lost["straggler"],
        generator=_generator(loop, training),
    )


def _generator(loop: Loop, training: TrainerStep) -> Lost:
    """Return the loss to generation: the trainers' waiting, as far as it is for generation."""
    if training.steps:
        idle = training.wait_ms / training.wall_ms if training.wall_ms else 0.0
        if loop.busy_ms <= 0:  # there is no log of the orchestrator
            return Lost(training.wait_ms, HALF * idle)
        more = loop.share(max(0.0, loop.busy_ms - training.busy_ms))
        waited = min(idle, more) * loop.batch_ms / loop.busy_ms
        return Lost(waited * loop.wall_ms, min(waited, HALF * loop.share(loop.batch_ms)))
    if loop.share(loop.wait_ms) < 0.05:  # the trainers' log is missing; they are never waited for
        return _lost(HALF * loop.batch_ms, loop.wall_ms)
    return Lost()


def _lost(ms: float, wall_ms: float) -> Lost:
    return Lost(ms, min(1.0, ms / wall_ms)) if wall_ms else Lost(ms)


def _loop(measured: Measured) -> Loop:
    if measured.steps.count:
        steps, (wall, *parts) = measured.steps.steady()
    else:  # no line says where a step begins and ends
        series = measured.series["wait_ms"]
        _, rpc, queue = (part.steady_total for part in measured.updates.parts)
        (batch,) = (part.steady_total for part in measured.batches.parts)
        counts = (measured.batches.parts[0].count, measured.updates.parts[0].count, series.count)
        steps, wall, parts = max(counts), 0.0, [series.steady_total, queue, rpc, batch]
    if not steps:
        return Loop(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    wait, queue, rpc, batch = (part / steps for part in parts)
    return Loop(steps, max(wall / steps, wait + queue + rpc + batch), wait, queue, rpc, batch)


def _training(measured: Measured) -> TrainerStep:
    ranks = {number: rank for number, rank in measured.ranks.items() if rank.steps.series.count}
    writes = measured.series["write_ms"]
    if not ranks:
        return TrainerStep(0, 0.0, 0.0, 0.0, writes.steady_mean, None)
    steps = max(rank.steps.series.steady_count for rank in ranks.values())
    means = {number: rank.steps.series.steady_mean for number, rank in ranks.items()}
    waits = [rank.waits.steady_total / steps for rank in measured.ranks.values() if rank.waits.count]
    straggler = _straggler(ranks, means)
    compute = median(means.values()) if straggler is None else straggler.others_ms
    return TrainerStep(
        steps,
        wait_ms=min(waits, default=0.0),
        compute_ms=compute,
        lead_ms=0.0 if straggler is None else straggler.lead_ms,
        write_ms=writes.steady_total / steps,
        straggler=straggler,
    )


def _straggler(ranks: dict[int, Rank], means: dict[int, float]) -> Straggler | None:
    """Return the slowest rank, if its typical step is longer than the others', too."""
    if len(ranks) < 2:
        return None
    slowest = max(means, key=lambda number: means[number])
    others = [number for number in ranks if number != slowest]
    typical = {number: ranks[number].steps.series.percentiles(50)[0] for number in ranks}
    if typical[slowest] < SYSTEMATIC * median(typical[number] for number in others):
        return None
    return Straggler(slowest, means[slowest], median(means[number] for number in others))
