"""Bodies of messages around the numbered stream. `Hello` and `Welcome` are in `loom.wire.handshake`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loom.wire.bodies.base import Body
from loom.wire.messages import Kind, Message

__all__ = ["Chunk", "Describe", "Description", "OpenSession", "Probe", "Probed", "Refuse"]


@dataclass(frozen=True, slots=True)
class Refuse(Body, kind=Kind.REFUSE):
    """Refuse the client and end the connection. From gateway or driver to client."""

    code: str
    """Code of the error in `loom.errors`."""
    text: str
    details: Mapping[str, Any]
    """``exit_code`` and ``output`` of a driver that has ended; otherwise empty."""


@dataclass(frozen=True, slots=True)
class OpenSession(Body, kind=Kind.OPEN):
    """Name the session that the connection is for. From gateway to driver, before the client's first frame."""

    session: str
    user: str
    """The user that the session belongs to."""
    weaver_key: str
    """The session's key to the weaver. It comes this way because a program can read its environment."""
    guest: str | None = None
    """The user of the client, if the session is another user's who shares it: a guest cannot end it."""

    def message_for_older(self) -> Message:
        """Return the message for a driver of before users, which knows of no field but the session."""
        return Message(self.KIND, 0, [self.session])


@dataclass(frozen=True, slots=True)
class Describe(Body, kind=Kind.DESCRIBE):
    """Ask for a description of the session. From gateway to driver, on a connection that carries no client.

    The answer is a `Description` or a `Refuse`, after which the gateway may ask again.
    """

    subject: str
    """``meshes``, ``runs``, ``tensors`` or ``life``."""


@dataclass(frozen=True, slots=True)
class Description(Body, kind=Kind.DESCRIPTION):
    """Describe the session. From driver to gateway.

    Payload: JSON, of `loom_gateway.sessions.descriptions`.
    """


@dataclass(frozen=True, slots=True)
class Probe(Body, kind=Kind.PROBE):
    """Ask what the driver has received, outside the numbered stream; see `loom.wire.watch`. From client to driver.

    Only to a driver with the capability ``probes``.
    """

    number: int


@dataclass(frozen=True, slots=True)
class Probed(Body, kind=Kind.PROBED):
    """Answer a `Probe`, or tell of a gap, outside the numbered stream. From driver to client.

    Only to a client with the capability ``probes``. A number of a lane that the connection does not carry is 0.
    """

    number: int
    """That of the `Probe`; 0 if a frame has come behind a gap, and the driver gives up the connection."""
    received: int
    """Number of the last frame received."""
    received_bulk: int
    """Number of the last frame received of the bulk lane."""
    sent: int
    """Number of the last frame that was sent on this connection before the answer."""
    sent_bulk: int
    """The same of the bulk lane."""


@dataclass(frozen=True, slots=True)
class Chunk(Body, kind=Kind.CHUNK):
    """A piece of a message too large for one frame; see `loom.wire.mux`. In both directions.

    The message's id is the number of the transfer. Payload: bytes of the large message's payload.
    """

    offset: int
    """Bytes of the payload before this piece."""
    total: int
    """Bytes of the whole payload."""
    head: Sequence[Any] | None
    """The head of the message, see `loom.wire.mux`, in its first chunk; otherwise None."""
