"""Answers and news. From driver to client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from loom.wire.bodies.base import Body
from loom.wire.messages import Kind

__all__ = ["Notice", "OperationError", "OperationResult", "SessionEnded"]


@dataclass(frozen=True, slots=True)
class OperationResult(Body):
    """An operation succeeded. Payload: the result."""

    KIND: ClassVar[Kind] = Kind.RESULT

    rpc_ms: float
    """Milliseconds from the operation's arrival at the driver to its answer."""
    index: int | None = None
    """Which of several answers this is, for a `StreamCall`."""

    # Written out, as in `EndpointCall`.

    def to_body(self) -> list[Any]:
        """Return the fields as they travel."""
        return [self.rpc_ms] if self.index is None else [self.rpc_ms, self.index]

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> OperationResult:
        """Make a body of what a peer sent; see `Body.from_body`."""
        if len(body) == 1 and type(body[0]) is float:
            return cls(body[0])
        return super(OperationResult, cls).from_body(body)


@dataclass(frozen=True, slots=True)
class OperationError(Body):
    """An operation failed.

    Payload: `loom.wire.texts` with ``text``, ``formatted``, ``type`` and ``original``, then the pickled exception
    if there is one.
    """

    KIND: ClassVar[Kind] = Kind.ERROR

    rpc_ms: float
    """Milliseconds from the operation's arrival at the driver to its failure."""
    code: str
    """Which error of `loom.errors` it is."""
    index: int | None = None
    """Which of several answers this is, for a `StreamCall`."""

    def to_body(self) -> list[Any]:
        """Return the fields as they travel."""
        return [self.rpc_ms, self.code] if self.index is None else [self.rpc_ms, self.code, self.index]


@dataclass(frozen=True, slots=True)
class Notice(Body):
    """Something happened that nobody asked about. Payload: its details, as `loom.wire.texts`."""

    KIND: ClassVar[Kind] = Kind.EVENT

    name: str
    """Of the event: ``actors_lost``, ``gateway_draining``, …"""


@dataclass(frozen=True, slots=True)
class SessionEnded(Body):
    """The session is over: its meshes have been stopped."""

    KIND: ClassVar[Kind] = Kind.ENDED

    reason: str
