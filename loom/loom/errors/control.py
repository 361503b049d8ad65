"""Exceptions about training: the weaver, replicas and devices, checkpoints, and injected faults."""

from __future__ import annotations

from loom.errors.base import Denied, Invalid, LoomError, NotFound, Unavailable


class WeaverUnavailable(Unavailable, code="weaver_unavailable", http_status=503, exit_status=5):
    """The gateway's weaver is away. The gateway restarts it; replicas go on meanwhile."""


class NatsUnreachable(Unavailable, code="nats_unreachable", exit_status=5):
    """No NATS server answers at the address that `loom bridge` got."""


class UnknownReplica(NotFound, code="unknown_replica"):
    """The weaver knows no replica with that id."""


class UnknownDevice(NotFound, code="unknown_device"):
    """No replica has ever registered a device with that uuid."""


class UnknownCommand(NotFound, code="unknown_command"):
    """The weaver has given no command with that id, or has forgotten it because it was done long ago."""


class UnknownInjection(NotFound, code="unknown_injection"):
    """There is no fault with that id: it never existed, or was removed."""


class NotInjectable(Denied, code="not_injectable"):
    """The target of a fault is not marked as injectable."""


class FaultRefused(LoomError, RuntimeError, code="fault_refused", http_status=409):
    """A fault is impossible on this machine or in this process; the text says why, and what to do."""


class BadPlan(Invalid, code="bad_plan", exit_status=2):
    """A plan of faults makes no sense; the text says where, by line and column, and how to correct it."""


class CheckpointError(LoomError, code="checkpoint"):
    """A problem with a checkpoint."""


class CheckpointNotWritten(CheckpointError, OSError, code="checkpoint_not_written"):
    """A checkpoint could not be written: the disk is full, or refuses. Earlier checkpoints are unchanged."""


class CheckpointBroken(CheckpointError, code="checkpoint_broken"):
    """A checkpoint is not whole: one of its files is missing, or differs in size or hash from what was written."""


class UnstorableState(CheckpointError, TypeError, code="unstorable_state"):
    """A state holds something that a checkpoint cannot: neither a whole tensor nor plain data."""


class TrainingFailed(LoomError, code="training_failed"):
    """A training ended before its last step: no replica group is left, and none has another attempt."""
