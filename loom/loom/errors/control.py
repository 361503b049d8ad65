"""Exceptions about training: the weaver, replicas and devices, checkpoints, and faults that are injected."""

from __future__ import annotations

from loom.errors.base import Denied, Invalid, LoomError, NotFound, Unavailable


class WeaverUnavailable(Unavailable, code="weaver_unavailable", http_status=503, exit_status=5):
    """The gateway's weaver is away. It is started again by itself; replicas go on meanwhile."""


class NatsUnreachable(Unavailable, code="nats_unreachable", exit_status=5):
    """No server of NATS answers where `loom bridge` was told."""


class UnknownReplica(NotFound, code="unknown_replica"):
    """The weaver knows no replica with that id."""


class UnknownDevice(NotFound, code="unknown_device"):
    """No replica has ever registered a device with that uuid."""


class UnknownCommand(NotFound, code="unknown_command"):
    """The weaver has given no command with that id, or has forgotten it: it was done long ago."""


class UnknownInjection(NotFound, code="unknown_injection"):
    """No fault with that id is there: there never was, or it has been removed."""


class NotInjectable(Denied, code="not_injectable"):
    """A fault was to strike what was not marked as injectable."""


class FaultRefused(LoomError, RuntimeError, code="fault_refused", http_status=409):
    """A fault that this machine or process cannot have; the text says why, and what to do."""


class BadPlan(Invalid, code="bad_plan", exit_status=2):
    """A plan of faults makes no sense; the text says where, by line and column, and what would."""


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
