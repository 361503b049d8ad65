"""Bodies of messages about the processes of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from loom.wire.bodies.base import Body, Id
from loom.wire.messages import Kind

__all__ = ["AskRank"]


@dataclass(frozen=True, slots=True)
class AskRank(Body, kind=Kind.RANK):
    """Ask for an operation in the process of a rank, such as running a command. Result: the operation's.

    Payload: the operation's arguments, a tuple.
    """

    operation: str
    """An operation of `loom_gateway.driver.handlers.ranks.RankOperations`."""
    mesh: Id
    """A proc mesh, or an actor mesh, whose processes are meant."""
    rank: int
    """The rank of the process in its proc mesh."""
