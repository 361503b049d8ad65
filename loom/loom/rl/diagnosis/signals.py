"""The quantities that logs of other frameworks are translated to."""

from __future__ import annotations

from enum import Enum


class Signal(str, Enum):
    """A quantity of one step, or of one look at the engines. Its value is the name of its metric."""

    STEP = "step_s"
    """Seconds from one batch to the next, of the side that generates, or of the whole loop."""
    TRAINER_STEP = "train_step_s"
    """Seconds of a step of the trainers, with their waiting."""
    GENERATE = "dur_ms"
    """Milliseconds of generation."""
    WAIT_BATCH = "batch_wait_ms"
    """Milliseconds for which the trainers wait for a batch."""
    WAIT_POLICY = "wait_ms"
    """Milliseconds for which the side that generates waits for the trainers."""
    TRAIN = "train_ms"
    """Milliseconds of computing on a batch; several names add up."""
    SYNC = "rpc_ms"
    """Milliseconds of the transfer and loading of weights; several names add up."""
    WRITE = "write_ms"
    """Milliseconds of writing checkpoints."""
    EVALUATE = "evaluate_ms"
    """Milliseconds of evaluation, which is neither generation nor training."""
    TRUNCATED = "trunc_pct"
    STALENESS = "staleness"
    """Steps by which the policy of the batch is behind."""
    REWARD = "reward"
    """Mean reward of the batch, as it is trained on."""
    FAILED = "failed_pct"
    """Per cent of rollouts that failed."""
    CANCELLED = "cancelled_pct"
    """Per cent of rollouts that were cancelled."""
    MISMATCH = "mismatch"
    """Distance of the trainers' log-probabilities from those of the generators: KL, or mean absolute difference."""
    LENGTH = "length"
    """Mean length of a completion in tokens."""
    LONGEST = "longest"
    """Tokens of the longest completion."""
    KV_CACHE = "kv_cache_pct"
    """Per cent of the key-value cache that is in use, of the fullest engine."""
    RUNNING = "running_requests"
    WAITING = "waiting_requests"
    PREEMPTIONS = "preemptions"
    TOKENS = "tokens_per_s"


ADDED = frozenset({Signal.TRAIN, Signal.SYNC, Signal.WRITE, Signal.EVALUATE})
"""Signals whose names are parts, which add up; of another one the first name counts."""
OF_ENGINES = frozenset({Signal.KV_CACHE, Signal.RUNNING, Signal.WAITING, Signal.PREEMPTIONS, Signal.TOKENS})
"""Signals of the engines, which are looked at by the clock and not once a step."""


class RunSide(str, Enum):
    """The side of the pipeline that a line is about."""

    GENERATORS = "generators"
    TRAINERS = "trainers"
