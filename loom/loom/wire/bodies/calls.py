"""Calling endpoints. From client to driver.

The name of an endpoint identifies it. A method that `as_endpoint` makes an endpoint has the name ``name()``, or
``name(port)`` if it gets the port to reply to. Payload: ``(args, kwargs)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loom.wire.bodies.base import Body, Id
from loom.wire.messages import Buffer, Kind, Message, new_message

__all__ = [
    "AskLife",
    "AskWeaver",
    "Broadcast",
    "Call",
    "CallOne",
    "CancelOperation",
    "Choose",
    "CollectAnswer",
    "Debug",
    "DropAnswer",
    "EndpointCall",
    "ListUnclaimed",
    "ReadAnswers",
    "ReconfigureActors",
    "SendToActors",
    "StreamCall",
]


@dataclass(frozen=True, slots=True)
class EndpointCall(Body):
    """A call of an endpoint with one of Monarch's adverbs."""

    mesh: Id
    """The actor mesh, or a part of one."""
    endpoint: str
    trace: str | None = None
    """The trace id of the call, for a driver with the capability ``traces``."""

    def message(self, ident: int = 0, parts: Sequence[Buffer] = ()) -> Message:
        # Written out for the hot path: every call is made here. A short ASCII name needs no check.
        name = self.endpoint
        if self.trace is None:
            body: Sequence[Any] = (self.mesh, name) if len(name) < 256 and name.isascii() else [self.mesh, name]
        else:
            body = [self.mesh, name, self.trace]
        return new_message(Message, (self.KIND, ident, body, parts))

    @staticmethod
    def fields(body: Sequence[Any]) -> tuple[int, str]:
        """Return ``mesh`` and ``endpoint`` of a peer's body, checked as by `from_body`.

        This is for the hot path: making a body for each call would take longer than the rest of the work.
        """
        if len(body) == 2:
            mesh, endpoint = body
            if type(mesh) is int and type(endpoint) is str:
                return mesh, endpoint
        call = Call.from_body(body)
        return call.mesh, call.endpoint


@dataclass(frozen=True, slots=True)
class Call(EndpointCall, kind=Kind.CALL):
    """Send to every actor. Result: all results, in the order of ranks."""


@dataclass(frozen=True, slots=True)
class CallOne(EndpointCall, kind=Kind.CALL_ONE):
    """Send to the only actor of the mesh. Result: its result."""


@dataclass(frozen=True, slots=True)
class Choose(EndpointCall, kind=Kind.CHOOSE):
    """Send to one actor, picked at random. Result: its result."""


@dataclass(frozen=True, slots=True)
class StreamCall(EndpointCall, kind=Kind.STREAM):
    """Send to every actor. Results: one for each actor, as they come, numbered in that order."""


@dataclass(frozen=True, slots=True)
class Broadcast(EndpointCall, kind=Kind.BROADCAST):
    """Send to every actor. Answered only if it fails."""


@dataclass(frozen=True, slots=True)
class SendToActors(Body, kind=Kind.SEND):
    """Send to actors; replies go to a port, or nowhere. Answered only if it fails."""

    mesh: Id
    endpoint: str
    selection: str
    """``all`` or ``choose``."""
    port: Any
    """A reference to the port for replies; None for none."""
    trace: str | None = None
    """As in `EndpointCall`."""


@dataclass(frozen=True, slots=True)
class CancelOperation(Body, kind=Kind.CANCEL):
    """Withdraw an operation that has not been started. Result: whether that was in time."""

    operation: Id
    first_chunk: int | None = None
    """Number of the operation's first chunk, when chunks travel in a lane of their own."""


@dataclass(frozen=True, slots=True)
class ReconfigureActors(Body, kind=Kind.RECONFIGURE):
    """Give the replicas in actors new configuration. Result: each replica's acknowledgement."""

    mesh: Id
    config: Mapping[str, Any]
    """New values by key."""


@dataclass(frozen=True, slots=True)
class AskWeaver(Body, kind=Kind.ASK_WEAVER):
    """Ask the weaver for an operation. Result: the weaver's answer."""

    operation: str
    """Name of an operation of `loom.weaver`, such as ``command``."""
    arguments: Mapping[str, Any]
    timeout: float
    """Seconds that the weaver has to answer."""


@dataclass(frozen=True, slots=True)
class Debug(Body, kind=Kind.DEBUG):
    """Ask the debugger of the session's actors for an operation. Result: the operation's."""

    operation: str
    """A method of `loom_gateway.driver.monarch.debugger.SessionDebugger`, of those in its ``OPERATIONS``."""
    arguments: Sequence[Any]


@dataclass(frozen=True, slots=True)
class ListUnclaimed(Body, kind=Kind.UNDELIVERED):
    """List the unclaimed results: calls of earlier clients whose answers none of them received.

    Result: a list of ``(operation, mesh's name, endpoint, adverb, (labels, offset, sizes, strides), answers)``.
    """


@dataclass(frozen=True, slots=True)
class AskLife(Body, kind=Kind.LIFE):
    """Ask until when the session lives once this client has left, of a driver with the capability ``life``.

    Result: the fields of `loom.session_life.SessionLife`, with ``because`` as texts.
    """


@dataclass(frozen=True, slots=True)
class ReadAnswers(Body, kind=Kind.READ):
    """Tell which answers of calls the program has read, to a driver with the capability ``reads``.

    The driver keeps an answer until then: a program that dies without having read it leaves it to the next one. The
    message's id is one of the client's, which reads its own answers only.
    """

    answers: Sequence[Any]
    """The id of each operation; of a `StreamCall`, the id and the number of the answer."""


@dataclass(frozen=True, slots=True)
class CollectAnswer(Body, kind=Kind.COLLECT):
    """Claim the results of an earlier client's call. The answers are those of the call, when they come."""

    operation: Id


@dataclass(frozen=True, slots=True)
class DropAnswer(Body, kind=Kind.DROP):
    """Drop the results of an earlier client's call, of a driver with the capability ``drops``. Result: None.

    The call itself runs on; what it still answers is dropped when it comes.
    """

    operation: Id
