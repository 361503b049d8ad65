"""Functions that run in the driver, and the session's end. From client to driver, except `RunChanged`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loom.wire.bodies.base import Body, Id
from loom.wire.messages import Kind

__all__ = ["AwaitRun", "EndRun", "EndSession", "ListRuns", "ReadRunOutput", "RunChanged", "StartRun"]


@dataclass(frozen=True, slots=True)
class StartRun(Body):
    """Run a function in the driver. Result: the function's result.

    Payload: ``(fn, args, kwargs)``. The message's id becomes the run's.
    """

    KIND: ClassVar[Kind] = Kind.RUN

    name: str
    """Name of the run, for lists and for lines of its output."""
    detached: bool
    """Whether the run is detached: it is not answered, and only `RunChanged` reports its end."""


@dataclass(frozen=True, slots=True)
class ListRuns(Body):
    """List the runs of the session. Result: a list of ``(run, name, status, started, finished)``."""

    KIND: ClassVar[Kind] = Kind.RUNS


@dataclass(frozen=True, slots=True)
class AwaitRun(Body):
    """Wait for a run. The answer is the run's, when it has finished."""

    KIND: ClassVar[Kind] = Kind.RUN_RESULT

    run: Id


@dataclass(frozen=True, slots=True)
class ReadRunOutput(Body):
    """Read the output of a run. Result: ``(position, ended, [(stream, text)])``.

    The position is the one after the text; stream is 1 for the standard output and 2 for the standard error.
    """

    KIND: ClassVar[Kind] = Kind.RUN_OUTPUT

    run: Id
    position: int
    """Position to read from."""
    wait: bool
    """Whether to answer only when there is more output, or the run has ended."""


@dataclass(frozen=True, slots=True)
class EndRun(Body):
    """Cancel or forget a run."""

    KIND: ClassVar[Kind] = Kind.RUN_END

    run: Id
    how: str
    """``cancel``, with the result whether the run was going; or ``forget``, which is not answered."""


@dataclass(frozen=True, slots=True)
class EndSession(Body):
    """End the session and stop its meshes. The driver sends `SessionEnded`."""

    KIND: ClassVar[Kind] = Kind.END


@dataclass(frozen=True, slots=True)
class RunChanged(Body):
    """A run has begun or ended. From driver to client; the id is the run's."""

    KIND: ClassVar[Kind] = Kind.RUN_STATE

    status: str
    started: float
    """Seconds since the epoch."""
    finished: float | None
    """Seconds since the epoch; None while the run goes on."""
