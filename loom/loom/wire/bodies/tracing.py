"""Clocks and spans; see `loom.tracing`. From client to driver, which has the capability ``traces``."""

from __future__ import annotations

from dataclasses import dataclass

from loom.wire.bodies.base import Body
from loom.wire.messages import Kind

__all__ = ["CollectSpans", "ReadClock", "SendSpans"]


@dataclass(frozen=True, slots=True)
class ReadClock(Body, kind=Kind.CLOCK):
    """Read the driver's clock, the session's time line. Result: its seconds."""


@dataclass(frozen=True, slots=True)
class CollectSpans(Body, kind=Kind.COLLECT_SPANS):
    """Collect the spans of the session's processes for a while. Result: a list of `ProcessSpans`.

    The driver asks the client that drives with the notice ``collect_spans``, if it is the same user's.
    """

    seconds: float
    kernels: bool
    """Whether to run torch's profiler in processes that have loaded torch."""


@dataclass(frozen=True, slots=True)
class SendSpans(Body, kind=Kind.SPANS):
    """Answer the notice ``collect_spans``. Not answered. Payload: `ProcessSpans` as JSON."""

    collection: int
    """The notice's ``collection``."""
