"""Exceptions about training and its checkpoints."""

from __future__ import annotations

from loom.errors.base import LoomError


class CheckpointError(LoomError, code="checkpoint"):
    """Something about a checkpoint."""


class CheckpointNotWritten(CheckpointError, OSError, code="checkpoint_not_written"):
    """A checkpoint could not be written: the disk is full, or refuses. Those before it are as they were."""


class CheckpointBroken(CheckpointError, code="checkpoint_broken"):
    """A checkpoint is not whole: a file of it is missing, or has another size or hash than when it was written."""


class UnstorableState(CheckpointError, TypeError, code="unstorable_state"):
    """A state holds something that a checkpoint cannot: neither a whole tensor nor plain data."""


class TrainingFailed(LoomError, code="training_failed"):
    """A training has ended before its last step: no replica group is left, and none may be tried again."""
