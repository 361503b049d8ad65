"""Answers and notices. From driver to client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loom.wire.bodies.base import Body
from loom.wire.messages import Buffer, Kind, Message, new_message

__all__ = ["Notice", "OperationError", "OperationResult", "SessionEnded"]


@dataclass(frozen=True, slots=True)
class OperationResult(Body, kind=Kind.RESULT):
    """An operation succeeded. Payload: the result."""

    rpc_ms: float
    """Milliseconds from the operation's arrival at the driver to its answer."""
    index: int | None = None
    """The number of this answer among several, for a `StreamCall`."""

    # For the hot path: making a body for each answer would take longer than the rest of the work.

    @classmethod
    def message_of(cls, ident: int, parts: Sequence[Buffer], rpc_ms: float, index: int | None = None) -> Message:
        body = (rpc_ms,) if index is None else (rpc_ms, index)
        return new_message(Message, (cls.KIND, ident, body, parts))

    @classmethod
    def fields(cls, body: Sequence[Any]) -> tuple[float, int | None]:
        """Return ``rpc_ms`` and ``index`` of a peer's body, checked as by `from_body`."""
        if len(body) == 1 and type(body[0]) is float and body[0] >= 0:
            return body[0], None
        result = cls.from_body(body)
        return result.rpc_ms, result.index


@dataclass(frozen=True, slots=True)
class OperationError(Body, kind=Kind.ERROR):
    """An operation failed.

    Payload: `loom.wire.texts` with ``text``, ``formatted``, ``type`` and ``original``, then the pickled exception
    if there is one.
    """

    rpc_ms: float
    """Milliseconds from the operation's arrival at the driver to its failure."""
    code: str
    """Code of the error in `loom.errors`."""
    index: int | None = None
    """The number of this answer among several, for a `StreamCall`."""


@dataclass(frozen=True, slots=True)
class Notice(Body, kind=Kind.EVENT):
    """An event happened. Payload: the event's details, packed by `loom.wire.texts`."""

    name: str
    """Name of the event: ``actors_lost``, ``gateway_draining``, …"""


@dataclass(frozen=True, slots=True)
class SessionEnded(Body, kind=Kind.ENDED):
    """The session is over, and its meshes have been stopped."""

    reason: str
