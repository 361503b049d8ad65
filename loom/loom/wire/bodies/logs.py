"""Log lines that a session's processes print."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loom.wire.bodies.base import Body, Id
from loom.wire.messages import Kind

__all__ = ["FlushLogs", "LogLines", "SetLogOptions"]


@dataclass(frozen=True, slots=True)
class SetLogOptions(Body):
    """Choose which of a proc mesh's log lines to send. Result: None. From client to driver."""

    KIND: ClassVar[Kind] = Kind.LOG_OPTIONS

    procs: Id
    stream: bool
    """Whether to send lines at all."""
    window: float | None
    """Seconds over which identical lines become one; None sends each at once."""
    level: int
    """Level of the root logger."""


@dataclass(frozen=True, slots=True)
class FlushLogs(Body):
    """Answer when all lines that were printed until now have been sent. Result: None. From client to driver."""

    KIND: ClassVar[Kind] = Kind.FLUSH_LOGS


@dataclass(frozen=True, slots=True)
class LogLines(Body):
    """Lines that processes have printed. From driver to client. Payload: msgpack, a list of lines.

    Each line is ``[time, mesh, place, ranks, stream, text, count]``: seconds since the epoch, the mesh's name, the
    place of the first rank that printed it (``hosts=0,gpus=1``), all such ranks, ``stdout`` or ``stderr``, the
    text, and the number of times that it was printed.
    """

    KIND: ClassVar[Kind] = Kind.LOG
