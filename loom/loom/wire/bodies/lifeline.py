"""Bodies of messages between a driver and the processes that it started; see `loom_gateway.driver.lifeline`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loom.wire.bodies.base import Body, Id
from loom.wire.messages import Kind

__all__ = [
    "Challenge",
    "FlushOutput",
    "LineHeld",
    "OutputFlushed",
    "OutputSkipped",
    "ProcessEnded",
    "ProcessOutput",
    "ProcessesGone",
    "TellEnd",
    "Tie",
    "Tied",
    "Untied",
    "Watch",
]


@dataclass(frozen=True, slots=True)
class Challenge(Body, kind=Kind.CHALLENGE):
    """Ask who connects for a proof. From the driver; outside the numbered stream, as the next five."""

    nonce: str
    """The driver's part of what the proofs are over; see `loom.proof.exchange`."""
    clock: float | None = None
    """The driver's clock, by which the process corrects its own; see `loom.tracing.clock`."""


@dataclass(frozen=True, slots=True)
class Tie(Body, kind=Kind.TIE):
    """Answer the driver's challenge."""

    nonce: str
    """The process's part of what the proofs are over."""
    proof: str
    """That the process's end knows the driver's key, and says the rest."""
    name: str
    """A name that the process's end has chosen at random, by which its later connections resume the line."""
    procs: Id
    """Id of the process's proc mesh."""
    rank: int
    again: bool
    """Whether the driver has answered this process before, and must know it."""
    received: int
    """Number of the last frame that this end has received."""
    master: str | None = None
    """``HOST PORT``, where the processes of the mesh may meet, from the first of them; empty from one that asks for
    it; None from one that needs none."""

    @property
    def said(self) -> tuple[str, ...]:
        """What the proof is for."""
        return self.name, *map(str, (self.procs, self.rank, self.again, self.received)), self.master or ""


@dataclass(frozen=True, slots=True)
class Tied(Body, kind=Kind.TIED):
    """Accept the process's end. From the driver."""

    proof: str
    received: int
    """Number of the last frame that the driver has received."""
    weaver: str
    """The weaver's address, perhaps empty."""
    master: str | None = None
    """What the first process of the proc mesh has said in its `Tie`; None if it is gone."""

    @property
    def said(self) -> tuple[str, ...]:
        """What the proof is for."""
        return "tied", str(self.received), self.weaver, self.master or ""


@dataclass(frozen=True, slots=True)
class Untied(Body, kind=Kind.UNTIED):
    """Refuse the process's end: the session has given up the process, which ends at once. From the driver."""

    proof: str

    @property
    def said(self) -> tuple[str, ...]:
        """What the proof is for."""
        return ("untied",)


@dataclass(frozen=True, slots=True)
class Watch(Body, kind=Kind.WATCH):
    """Ask which processes of a proc mesh are gone, now and later. The first one answers the driver's challenge."""

    nonce: str
    """The asking process's part of what the proofs are over; empty in a later one, as is the proof."""
    proof: str
    """That who asks knows the driver's key, and says the rest."""
    procs: Id
    """Id of the proc mesh."""

    @property
    def said(self) -> tuple[str, ...]:
        """What the proof is for."""
        return "watch", str(self.procs)


@dataclass(frozen=True, slots=True)
class ProcessesGone(Body, kind=Kind.PROCESSES_GONE):
    """Answer a `Watch`, perhaps with no rank, or report that more processes are gone. From the driver."""

    proof: str
    """Empty in all but the first on a connection."""
    procs: Id
    ranks: Sequence[int]

    @property
    def said(self) -> tuple[str, ...]:
        """What the proof is for."""
        return "gone", str(self.procs), *map(str, self.ranks)


@dataclass(frozen=True, slots=True)
class LineHeld(Body, kind=Kind.LINE_HELD):
    """Report that the process's agent holds the line from now on, and will report the process's end."""


@dataclass(frozen=True, slots=True)
class ProcessOutput(Body, kind=Kind.PROCESS_OUTPUT):
    """Report what a process has printed. Payload: the bytes."""

    stream: int
    """1: standard output; 2: standard error."""
    time: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class OutputSkipped(Body, kind=Kind.OUTPUT_SKIPPED):
    """Report that a process printed more than is sent."""

    stream: int
    time: float
    size: int
    """Bytes that were left out."""
    lines: int


@dataclass(frozen=True, slots=True)
class FlushOutput(Body, kind=Kind.FLUSH_OUTPUT):
    """Send all output so far, then `OutputFlushed`. From the driver."""


@dataclass(frozen=True, slots=True)
class OutputFlushed(Body, kind=Kind.OUTPUT_FLUSHED):
    """Report that all output before a `FlushOutput` has been sent."""


@dataclass(frozen=True, slots=True)
class TellEnd(Body, kind=Kind.TELL_END):
    """Tell in `ProcessEnded` how the process has ended. From the driver; older agents ignore it."""


@dataclass(frozen=True, slots=True)
class ProcessEnded(Body, kind=Kind.PROCESS_ENDED):
    """Report that the process has ended. Output of its children may follow."""

    end: Sequence[Any] | None = None
    """The fields of `loom.control.process_end.ProcessEnd`, in their order; None for a driver without `TellEnd`."""
