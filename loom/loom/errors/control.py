"""Exceptions about the weaver, its replicas and devices, and faults that are injected."""

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
