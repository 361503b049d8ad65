"""A simulated run: generators with slots and a key-value cache, trainers, and updates of weights.

What goes wrong is a cause in the pipeline (a slow engine, a small cache, a hanging process), and the label of a run
is the name of the cause. No time of the log is written by hand: all follow from rates and from who waits for whom.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import fmean


@dataclass(frozen=True)
class Cluster:
    """The rates of a run. Times are seconds, lengths are tokens."""

    steps: int = 24
    rollouts: int = 96
    """Completions of a batch."""
    slots: int = 48
    """Completions that are generated at the same time, if the cache has room."""
    cache: int = 200_000
    """Tokens of the key-value cache."""
    per_token: float = 0.02
    """Seconds for a token of each completion."""
    length: float = 400.0
    spread: float = 0.35
    limit: int = 4096
    """The longest completion."""
    training: float = 0.00045
    """Seconds for a token of the batch."""
    transfer: float = 1.2
    """Seconds of an update of weights."""
    saving: float = 0.0
    """Seconds of a checkpoint of each step."""
    asynchronous: int = 0
    """Batches by which generation may be ahead; 0 if both sides take turns."""
    patience: float = 8.0
    """Updates of weights after which a rollout that is under way is cancelled."""
    failing: float = 0.01
    """Share of rollouts that fail."""


@dataclass(frozen=True)
class Cause:
    """What goes wrong in a run."""

    label: str
    cluster: Callable[[Cluster, random.Random], Cluster] = lambda cluster, chance: cluster
    growing: float = 0.0
    """By how much the spread of lengths grows with each step."""
    giants: float = 0.0
    """Share of the steps in which one prompt has completions of many times the length."""
    outages: bool = False
    """True if the environment fails for a while, again and again, and a failure is a reward of 0."""
    deaf: bool = False
    """True if an engine misses updates of weights from some step on."""
    hangs: str | None = None
    """The side that hangs in the last step."""


@dataclass
class Batch:
    """What is known of a step when it is over."""

    step: int
    generation: tuple[float, float]
    training: tuple[float, float]
    transfer: float
    saving: float
    waits_policy: float
    waits_batch: float
    lengths: list[int]
    truncated: float
    reward: float
    """Of the batch, with failures as 0."""
    failed: float
    cancelled: float
    staleness: float
    mismatch: float
    tokens: int = 0


@dataclass(frozen=True)
class EngineState:
    """The state of the engines at a time."""

    at: float
    running: int
    waiting: int
    used: float
    """Per cent of the cache."""
    preempted: int
    rate: float


@dataclass
class Simulated:
    """A run that was simulated."""

    cluster: Cluster
    cause: Cause
    batches: list[Batch] = field(default_factory=list)
    engines: list[EngineState] = field(default_factory=list)
    ends: float = 0.0
    """When the log ends."""
    hung: str | None = None


def _slower(name: str, low: float, high: float) -> Callable[[Cluster, random.Random], Cluster]:
    def change(cluster: Cluster, chance: random.Random) -> Cluster:
        return replace(cluster, **{name: getattr(cluster, name) * chance.uniform(low, high)})

    return change


def _less_cache(cluster: Cluster, chance: random.Random) -> Cluster:
    return replace(cluster, cache=int(chance.uniform(3500, 5500)), training=cluster.training * 0.9)


def _short_limit(cluster: Cluster, chance: random.Random) -> Cluster:
    return replace(cluster, limit=int(chance.uniform(330, 400)))


def _impatient(cluster: Cluster, chance: random.Random) -> Cluster:
    return replace(cluster, patience=chance.uniform(0.7, 0.85))


CAUSES = {
    "healthy": Cause("none"),
    "slow engines": Cause("generator", _slower("per_token", 4, 7)),
    "slow trainers": Cause("trainer", _slower("training", 5, 8)),
    "slow transfer": Cause("loading", _slower("transfer", 12, 25)),
    "slow storage": Cause("checkpoint", lambda cluster, chance: replace(cluster, saving=chance.uniform(20, 40))),
    "short limit": Cause("truncation", _short_limit),
    "small cache": Cause("kv_cache", _less_cache),
    "giant prompts": Cause("tail", lambda cluster, chance: replace(cluster, limit=16_384), giants=0.5),
    "impatience": Cause("cancelled", _impatient, growing=0.03),
    "outages": Cause("failed", outages=True),
    "deaf engine": Cause("mismatch", deaf=True),
    "engines hang": Cause("stall", hangs="generators"),
    "trainers hang": Cause("stall", hangs="trainers"),
}
"""The causes by name. Their labels are the names of rules, because both are words of the field."""


def simulate(cause: str, seed: int, **cluster: float) -> Simulated:
    """Simulate a run, in which something goes wrong or nothing.

    Without a cause both sides need the same time within a tenth, so that neither is worth more of anything.
    """
    chance = random.Random(f"{cause} {seed} {cluster}")
    ordinary = replace(Cluster(), length=chance.uniform(300, 500), **cluster)  # type: ignore[arg-type]
    lengths = _lengths(Simulated(ordinary, CAUSES["healthy"]), 0, chance)
    generation, _ = _generate(ordinary, lengths, 0.0, chance)
    balanced = replace(ordinary, training=generation / sum(lengths) * chance.uniform(0.9, 1.1))
    why = CAUSES[cause]
    return _run(Simulated(why.cluster(balanced, chance), why), chance)


def _run(run: Simulated, chance: random.Random) -> Simulated:
    cluster, cause = run.cluster, run.cause
    free, trained_until, heard = 0.0, [0.0], 0
    for step in range(cluster.steps):
        ready = trained_until[max(0, step - cluster.asynchronous)]
        begin = max(free, ready)
        policy = sum(1 for end in trained_until[1:] if end <= begin)
        heard = policy if not cause.deaf or step < cluster.steps // 3 else heard
        lengths = _lengths(run, step, chance)
        took, states = _generate(cluster, lengths, begin, chance)
        usual = fmean(batch.training[1] - batch.training[0] for batch in run.batches) if run.batches else took
        lost = sum(length * cluster.per_token > cluster.patience * max(usual, 1.0) for length in lengths)
        cancelled = lost / len(lengths) if cluster.asynchronous else 0.0
        took *= 1 + cancelled  # they are generated again, by other prompts
        end = begin + took
        starts = max(end, trained_until[-1])
        training = sum(lengths) * cluster.training * chance.gauss(1, 0.03)
        transfer = cluster.transfer * chance.gauss(1, 0.05)
        done = starts + training + cluster.saving + transfer
        failed = _failing(run, step, chance)
        truncated = sum(length >= cluster.limit for length in lengths) / len(lengths)
        staleness = float(max(0, step - heard))
        learned = 0.35 + 0.25 * step / cluster.steps
        run.batches.append(
            Batch(
                step,
                (begin, end),
                (starts, starts + training),
                transfer,
                cluster.saving,
                waits_policy=begin - free,
                waits_batch=starts - trained_until[-1],
                lengths=lengths,
                truncated=truncated,
                failed=failed,
                cancelled=cancelled,
                staleness=staleness,
                reward=learned * (1 - failed) * chance.gauss(1, 0.02),
                mismatch=0.0015 * (1 + 0.3 * staleness**2) * chance.gauss(1, 0.08),
                tokens=sum(lengths),
            )
        )
        run.engines += states
        trained_until.append(done)
        free = end if cluster.asynchronous else done
    run.ends = max(trained_until[-1], free)
    if cause.hangs is not None:
        _hang(run, cause.hangs)
    return run


def _lengths(run: Simulated, step: int, chance: random.Random) -> list[int]:
    cluster, cause = run.cluster, run.cause
    mean, spread = cluster.length, cluster.spread + cause.growing * step
    lengths = [mean * chance.lognormvariate(-(spread**2) / 2, spread) for _ in range(cluster.rollouts)]
    if cause.giants and chance.random() < cause.giants:
        lengths[chance.randrange(len(lengths))] = mean * chance.uniform(16, 24)
    return [min(cluster.limit, max(1, int(length))) for length in lengths]


def _generate(
    cluster: Cluster, lengths: list[int], begin: float, chance: random.Random
) -> tuple[float, list[EngineState]]:
    """Give completions to slots, each to the first free one; return the seconds, and the engines' states."""
    prompt = 100
    room = max(1, int(cluster.cache / (prompt + fmean(lengths) / 2)))
    slots = min(cluster.slots, room)
    crowded = room < cluster.slots
    free = [0.0] * slots
    spans = []
    for length in lengths:
        start = heapq.heappop(free)
        took = length * cluster.per_token * (1.15 if crowded else 1.0)  # what is preempted is computed again
        spans.append((start, start + took))
        heapq.heappush(free, start + took)
    whole = max(end for _, end in spans)
    states = []
    at = 5.0
    while at < whole:
        running = sum(start <= at < end for start, end in spans)
        waiting = sum(start > at for start, _ in spans) if crowded else 0
        used = min(1.0, running * (prompt + fmean(lengths) / 2) / cluster.cache)
        used = (
            min(99.9, 100 * used + chance.uniform(-1, 1)) if not (crowded and waiting) else chance.uniform(97, 100)
        )
        preempted = chance.randint(1, 6) if crowded and waiting else 0
        states.append(
            EngineState(begin + at, running, waiting, max(0.0, used), preempted, running / cluster.per_token)
        )
        at += 10.0
    return whole, states


def _failing(run: Simulated, step: int, chance: random.Random) -> float:
    if run.cause.outages and (step // 3) % 2:
        return chance.uniform(0.2, 0.5)
    return max(0.0, chance.gauss(run.cluster.failing, 0.004))


def _hang(run: Simulated, side: str) -> None:
    """Let the last step never end: the engines or the trainers stop in its middle, and the log goes on for long."""
    last = run.batches.pop()
    usual = last.training[1] / max(1, last.step)
    run.hung = side
    begin = last.generation[0] + (last.generation[1] - last.generation[0]) / 2
    if side == "trainers":
        begin = last.training[0]
        run.engines = [state for state in run.engines if state.at <= max(begin, last.generation[1])]
    else:
        run.engines = [state for state in run.engines if state.at <= begin]
    run.ends = begin + 40 * usual
    if side == "generators":
        at = begin + 10
        while at < run.ends:
            run.engines.append(EngineState(at, 12, 0, 10.0, 0, 0.0))
            at += 10
