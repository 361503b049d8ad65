"""The rules of the diagnosis, and the ranges of the metrics, as data.

Ranges and most thresholds are those of the prime-rl investigation: mean delay above 1,000 ms, loading above
5,000 ms, waiting for a checkpoint above 2,000 ms, writing above 5,000 ms, truncation above 20 % (critical above
30 %), staleness above the async level.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Rating(str, Enum):
    """The grade of a metric's mean."""

    GOOD = "good"
    WARNING = "warning"
    CRITICAL = "critical"


class RuleName(str, Enum):
    """A bottleneck of a run."""

    QUEUE = "queue"
    LOADING = "loading"
    CHECKPOINT = "checkpoint"
    CONTENTION = "contention"
    TRUNCATION = "truncation"
    STALENESS = "staleness"
    GENERATOR = "generator"
    TRAINER = "trainer"
    STRAGGLER = "straggler"
    STALL = "stall"
    KV_CACHE = "kv_cache"
    TAIL = "tail"
    CANCELLED = "cancelled"
    FAILED = "failed"
    MISMATCH = "mismatch"
    NONE = "none"


@dataclass(frozen=True)
class Range:
    """The range of a metric's mean: good up to ``good``, critical above ``critical``, a warning between."""

    metric: str
    unit: str
    good: float
    critical: float
    what: str

    def level(self, mean: float) -> Rating:
        """Return how good a mean is."""
        return Rating.GOOD if mean <= self.good else Rating.CRITICAL if mean > self.critical else Rating.WARNING


RANGES = (
    Range("queue_ms", "ms", 100, 1000, "delay of an update of weights"),
    Range("rpc_ms", "ms", 2000, 5000, "loading of weights"),
    Range("reload_ms", "ms", 500, 2000, "reloading of weights"),
    Range("write_ms", "ms", 1000, 5000, "writing of weights"),
    Range("wait_ms", "ms", 500, 2000, "the orchestrator waits for a checkpoint"),
    Range("dur_ms", "ms", 5000, 10_000, "generation of a batch"),
    Range("batch_wait_ms", "ms", 500, 2000, "a trainer waits for a batch"),
    Range("trunc_pct", "%", 10, 30, "truncated completions"),
)
"""The range of each metric that has one; `staleness_range` has that of staleness."""


def staleness_range(async_level: int) -> Range:
    """Return the range of staleness."""
    return Range("staleness", "steps", async_level, async_level + 2, "steps by which the policy is behind")


@dataclass(frozen=True)
class Bound:
    """A finding may be primary if its value is above ``over`` and at least this share of the step is lost to it."""

    over: float
    share: float = 0.0


@dataclass(frozen=True)
class Rule:
    """A rule of the diagnosis.

    A value above the first bound is critical, one above another a warning. Rules about time compete by the share
    of the step's wall time that is lost; one about quality counts only if no time is lost.
    """

    name: RuleName
    value: str
    """The quantity that is compared with the bounds."""
    unit: str
    bounds: tuple[Bound, ...]
    says: str
    suggests: str
    option: str | None = None
    """The option of a running orchestrator that the suggestion changes."""
    quality: bool = False
    yields_to: tuple[RuleName, ...] = ()
    """Rules that explain this one's finding, so that they come first."""


RULES = (
    Rule(
        RuleName.QUEUE,
        "mean queue_ms",
        "ms",
        (Bound(1000), Bound(100, 0.10)),
        "The front end is saturated: orders to load weights wait behind streaming requests.",
        "Send them another way: a client of their own without keep-alive (weights_via=admin), or the control lane "
        "(weights_via=lane). If both clients share one accept queue or event loop, a listener of its own helps, or "
        "the lane.",
        option="weights_via",
    ),
    Rule(
        RuleName.LOADING,
        "mean rpc_ms",
        "ms",
        (Bound(5000, 0.05), Bound(2000, 0.15), Bound(500, 0.36)),
        "Loading weights is slow: generators stand still while they load.",
        "Read from faster storage, send weights by messages in place of files (weights=messages), load fewer "
        "bytes, or load while completions are under way.",
    ),
    Rule(
        RuleName.CHECKPOINT,
        "wait_ms, as far as it is for write_ms",
        "ms",
        (Bound(2000, 0.05), Bound(500, 0.15), Bound(250, 0.40)),
        "Writing checkpoints is slow: the orchestrator waits for weights that are being written.",
        "Write to faster storage or in the background, or send weights by messages; a higher async_level hides "
        "some of it. If write_ms is small, look whether the right path is polled.",
        option="async_level",
    ),
    Rule(
        RuleName.CONTENTION,
        "mean queue_ms at peaks of dur_ms",
        "ms",
        (Bound(1000, 0.02), Bound(100, 0.10)),
        "Generation and updates of weights get in each other's way: dur_ms has its peaks beside those of queue_ms.",
        "Look for what they share (CPU, disk, network) and give one of them its own; bound the requests in flight.",
        option="weights_via",
    ),
    Rule(
        RuleName.STRAGGLER,
        "lead of the slowest rank",
        "ms",
        (Bound(1000, 0.05), Bound(250, 0.10), Bound(100, 0.20)),
        "One rank of the trainers is slower than the others, which wait for it in every step.",
        "Move the rank to another device (deactivate its own; keep spares), or give it less of the batch.",
        option="spares",
    ),
    Rule(
        RuleName.GENERATOR,
        "batch_wait_ms, as far as it is for dur_ms",
        "ms",
        (Bound(2000, 0.20), Bound(500, 0.25)),
        "Generation is the bottleneck: trainers wait for batches.",
        "Add generators, generate less (max_tokens, batch), or let trainers run further behind (async_level).",
        option="generators",
        yields_to=(RuleName.QUEUE, RuleName.CONTENTION, RuleName.KV_CACHE, RuleName.TAIL, RuleName.CANCELLED),
    ),
    Rule(
        RuleName.TRAINER,
        "wait_ms, as far as it is for computing",
        "ms",
        (Bound(2000, 0.20), Bound(500, 0.25)),
        "Training is the bottleneck: the orchestrator waits for checkpoints while the trainers compute.",
        "Add trainers or split the batch over more of them, train on less (batch), or raise async_level.",
        option="batch",
    ),
    Rule(
        RuleName.TRUNCATION,
        "mean trunc_pct (of the later half, if that is lower)",
        "%",
        (Bound(30), Bound(20)),
        "Many completions are cut off before their end, so that their rewards say little.",
        "Raise max_tokens, or the model's longest sequence.",
        option="max_tokens",
        quality=True,
    ),
    Rule(
        RuleName.STALENESS,
        "mean staleness above async_level",
        "steps",
        (Bound(2), Bound(0)),
        "Rollouts come from a policy that is further behind than async_level allows.",
        "Look why updates of weights do not arrive; lower async_level, or drop rollouts that are too old "
        "(max_staleness).",
        option="async_level",
        quality=True,
    ),
)

FOREIGN_RULES = (
    Rule(
        RuleName.STALL,
        "seconds without a step",
        "s",
        (Bound(60, 0.02),),
        "It stands still: no step for many times a usual one.",
        "Look at the side that is named: at its last lines, and at its processes with py-spy or `loom where`.",
    ),
    Rule(
        RuleName.KV_CACHE,
        "looks at the engines with a full key-value cache",
        "%",
        (Bound(30),),
        "The key-value cache is full: requests wait for room in it, or are preempted and begin again.",
        "Give the cache more memory, shard the model over more devices, bound the requests in flight or their "
        "length, or add engines.",
        option="generators",
    ),
    Rule(
        RuleName.TAIL,
        "longest completion, beside a mean one",
        "times",
        (Bound(8, 0.10), Bound(6, 0.15)),
        "A long tail: the whole batch waits for the completion of one prompt.",
        "Bound its length (max_tokens), leave the prompt out, or let a batch begin without it (partial rollouts, a "
        "higher async level).",
        option="max_tokens",
    ),
    Rule(
        RuleName.CANCELLED,
        "cancelled rollouts, of the last third of the steps",
        "%",
        (Bound(5, 0.02),),
        "More and more rollouts are cancelled before they end, so that their generation is lost.",
        "Raise the number of steps that a rollout may be behind, shorten rollouts, or add generators.",
    ),
    Rule(
        RuleName.FAILED,
        "failed rollouts",
        "%",
        (Bound(5),),
        "Failed rollouts count as reward 0: the policy is trained away from prompts whose environment failed.",
        "Leave failed rollouts out of the batch, or try them again; look for their cause in the environment's log.",
        quality=True,
    ),
    Rule(
        RuleName.MISMATCH,
        "mismatch of the last third of the steps, beside the first third",
        "times",
        (Bound(2),),
        "The policy that generates and the one that is trained drift apart with staleness.",
        "Lower the number of steps that a rollout may be behind, correct with truncated importance sampling, or "
        "look whether all engines get each update of weights.",
        quality=True,
    ),
)
"""The rules about what only logs of other frameworks have. Each is silent without its evidence."""

STANDS_STILL = 10.0
"""A run stands still without a step for so many times the median one."""
FULL_CACHE, ALMOST_FULL = 99.0, 95.0
"""Per cent of the key-value cache above which it is full; above the lower one if requests wait or are preempted."""
TAIL_FROM = 6.0
"""A completion is a tail from so many times the mean length on, if the batch's generation took longer with it."""
USUAL_TAIL = 5.0
"""The longest of many completions of a usual spread is so many times the mean one."""
FEW_STEPS = 9
"""Steps from which on a trend or a relation of two values is looked for."""
RELATED = 0.5
"""Rank correlation from which on two values count as related."""
LEAST_MISMATCH = 1e-3
"""A mismatch below this is the rounding of two implementations."""

GENERATION_ALONE = (Bound(10_000, 0.30), Bound(5000, 0.375))
"""Bounds of `RuleName.GENERATOR` on the mean dur_ms, if there is no log of the trainers."""
ASSUMED_LEVEL = 2
"""The async level if no line says it. Then staleness is a finding only if it is critical."""
EARLY = 0.05
"""Share of the step above which a loss is worth a finding, if it is not the primary one."""
