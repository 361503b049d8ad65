"""Functions that run in the driver, printed lines, and the session's end.

From client to driver, except `RunChanged` and `LogLines`.
"""

from __future__ import annotations

from dataclasses import dataclass

from loom.wire.bodies.base import Body, Id
from loom.wire.messages import Kind

__all__ = [
    "AwaitRun",
    "EndRun",
    "EndSession",
    "FlushLogs",
    "ListRuns",
    "LogLines",
    "ReadRunOutput",
    "RunChanged",
    "SetLogOptions",
    "StartRun",
]


STDOUT, STDERR, RECORD = 1, 2, 3
"""The streams of a run's output: its two texts, and the records of `loom.cells.records` between them."""


@dataclass(frozen=True, slots=True)
class StartRun(Body, kind=Kind.RUN):
    """Run a function in the driver. Result: the function's result.

    Payload: ``(fn, args, kwargs)``. The message's id becomes the run's.
    """

    name: str
    """Name of the run, for lists and for lines of its output."""
    detached: bool
    """Whether the run is detached: it is not answered, and only `RunChanged` reports its end."""
    trace: str | None = None
    """The trace id that the function begins with, for a driver with the capability ``traces``."""


@dataclass(frozen=True, slots=True)
class ListRuns(Body, kind=Kind.RUNS):
    """List the runs of the session. Result: a list of ``(run, name, status, started, finished)``."""


@dataclass(frozen=True, slots=True)
class AwaitRun(Body, kind=Kind.RUN_RESULT):
    """Wait for a run. The answer is the run's, when it has finished."""

    run: Id


@dataclass(frozen=True, slots=True)
class ReadRunOutput(Body, kind=Kind.RUN_OUTPUT):
    """Read the output of a run. Result: ``(position, ended, [(stream, text)])``.

    The position is the one after the text; the stream is `STDOUT`, `STDERR`, or `RECORD` for a whole record.
    """

    run: Id
    position: int
    """Position to read from."""
    wait: bool
    """Whether to answer only when there is more output, or the run has ended."""


@dataclass(frozen=True, slots=True)
class EndRun(Body, kind=Kind.RUN_END):
    """Cancel or forget a run."""

    run: Id
    how: str
    """``cancel``, with the result whether the run was going; or ``forget``, which is not answered."""


@dataclass(frozen=True, slots=True)
class EndSession(Body, kind=Kind.END):
    """End the session and stop its meshes. The driver sends `SessionEnded`."""


@dataclass(frozen=True, slots=True)
class RunChanged(Body, kind=Kind.RUN_STATE):
    """A run has begun or ended. From driver to client; the id is the run's."""

    status: str
    started: float
    """Seconds since the epoch."""
    finished: float | None
    """Seconds since the epoch; None while the run goes on."""


@dataclass(frozen=True, slots=True)
class SetLogOptions(Body, kind=Kind.LOG_OPTIONS):
    """Choose which of a proc mesh's log lines to send. Result: None. From client to driver."""

    procs: Id
    stream: bool
    """Whether to send lines at all."""
    window: float | None
    """Seconds over which identical lines become one; None sends each at once."""
    level: int
    """Level of the root logger."""


@dataclass(frozen=True, slots=True)
class FlushLogs(Body, kind=Kind.FLUSH_LOGS):
    """Answer when all lines that were printed until now have been sent. Result: None. From client to driver."""


@dataclass(frozen=True, slots=True)
class LogLines(Body, kind=Kind.LOG):
    """Lines that processes have printed. From driver to client. Payload: msgpack, a list of lines.

    Each line is ``[time, mesh, place, ranks, stream, text, count]``: seconds since the epoch, the mesh's name, the
    place of the first rank that printed it (``hosts=0,gpus=1``), all such ranks, ``stdout`` or ``stderr``, the
    text, and the number of times that it was printed.
    """
