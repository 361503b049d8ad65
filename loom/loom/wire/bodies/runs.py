"""Functions that run in the driver, and the session's end. From client to driver, but for `RunChanged`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loom.wire.bodies.base import Body, Id
from loom.wire.messages import Kind

__all__ = ["AwaitRun", "EndRun", "EndSession", "ListRuns", "ReadRunOutput", "RunChanged", "StartRun"]


@dataclass(frozen=True, slots=True)
class StartRun(Body):
    """Run a function in the driver. Result: what it returns.

    Payload: ``(fn, args, kwargs)``. The message's id is the run's from then on.
    """

    KIND: ClassVar[Kind] = Kind.RUN

    name: str
    """For lists and for the output's lines."""
    detached: bool
    """A detached run is not answered; `RunChanged` tells what becomes of it."""


@dataclass(frozen=True, slots=True)
class ListRuns(Body):
    """List the runs of the session. Result: a list of ``(run, name, status, started, finished)``."""

    KIND: ClassVar[Kind] = Kind.RUNS


@dataclass(frozen=True, slots=True)
class AwaitRun(Body):
    """Answer as the run does, when it has finished."""

    KIND: ClassVar[Kind] = Kind.RUN_RESULT

    run: Id


@dataclass(frozen=True, slots=True)
class ReadRunOutput(Body):
    """Ask what a run printed. Result: ``(position, ended, [(stream, text)])``.

    The position is the one after the text; stream is 1 for the standard output and 2 for the standard error.
    """

    KIND: ClassVar[Kind] = Kind.RUN_OUTPUT

    run: Id
    position: int
    """Where to read from."""
    wait: bool
    """Whether to answer only when there is more, or the run has ended."""


@dataclass(frozen=True, slots=True)
class EndRun(Body):
    """Be done with a run."""

    KIND: ClassVar[Kind] = Kind.RUN_END

    run: Id
    how: str
    """``cancel``, result: whether it was going; or ``forget``, not answered."""


@dataclass(frozen=True, slots=True)
class EndSession(Body):
    """End the session and stop its meshes. The driver says `SessionEnded`."""

    KIND: ClassVar[Kind] = Kind.END


@dataclass(frozen=True, slots=True)
class RunChanged(Body):
    """A run has begun or ended. From driver to client; the id is the run's."""

    KIND: ClassVar[Kind] = Kind.RUN_STATE

    status: str
    started: float
    """Seconds since the epoch."""
    finished: float | None
    """The same; None while it goes on."""
