"""What a session's processes print."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loom.wire.bodies.base import Body, Id
from loom.wire.messages import Kind

__all__ = ["FlushLogs", "LogLines", "SetLogOptions"]


@dataclass(frozen=True, slots=True)
class SetLogOptions(Body):
    """Say what to send of what a proc mesh prints. Result: None. From client to driver."""

    KIND: ClassVar[Kind] = Kind.LOG_OPTIONS

    procs: Id
    stream: bool
    """Whether to send it at all."""
    window: float | None
    """Seconds over which identical lines are made one; None for as they come."""
    level: int
    """Of the root logger."""


@dataclass(frozen=True, slots=True)
class FlushLogs(Body):
    """Answer when all that was printed until now has been sent. Result: None. From client to driver."""

    KIND: ClassVar[Kind] = Kind.FLUSH_LOGS


@dataclass(frozen=True, slots=True)
class LogLines(Body):
    """Lines that were printed. From driver to client. Payload: msgpack, a list of lines.

    Each is ``[time, mesh, place, ranks, stream, text, count]``: seconds since the epoch, the mesh's name, where its
    first rank is (``hosts=0,gpus=1``), all its ranks, ``stdout`` or ``stderr``, and how often it was printed.
    """

    KIND: ClassVar[Kind] = Kind.LOG
