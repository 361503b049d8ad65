"""Ports: messages from actors to a client, and from a client to ports in the cluster."""

from __future__ import annotations

from dataclasses import dataclass

from loom.wire.bodies.base import Body, Id
from loom.wire.messages import Kind

__all__ = ["ClosePort", "GrantCredit", "OpenPort", "PortMessage", "PortMessages", "SendToPort"]


@dataclass(frozen=True, slots=True)
class OpenPort(Body, kind=Kind.PORT_OPEN):
    """Open a port, whose id is this message's. Answered only if it fails. From client to driver."""

    once: bool
    """Whether the port takes one message only."""
    messages: int
    """The number of messages that the driver may send at first; see `GrantCredit`."""
    size: int
    """Bytes that the driver may send at first."""


@dataclass(frozen=True, slots=True)
class SendToPort(Body, kind=Kind.PORT_SEND):
    """Send to a port. Payload: the object. From client to driver."""

    port: Id
    is_exception: bool
    """Whether the receiver raises the object."""


@dataclass(frozen=True, slots=True)
class GrantCredit(Body, kind=Kind.PORT_CREDIT):
    """Allow the driver to send more messages of the port with this id. From client to driver."""

    messages: int
    """The number of further messages."""
    size: int
    """Bytes of further messages."""


@dataclass(frozen=True, slots=True)
class ClosePort(Body, kind=Kind.PORT_CLOSE):
    """Close the port with this id. From client to driver."""


@dataclass(frozen=True, slots=True)
class PortMessages(Body, kind=Kind.PORT_MESSAGES):
    """Small messages to the port with this id. From driver to client.

    Payload: one part, the pickles back to back.
    """

    sizes: bytes
    """Bytes of each pickle, four bytes each, big endian."""
    ranks: bytes
    """Rank of each sender, four bytes each, big endian; 0xffffffff for none. Empty if no message has a rank."""


@dataclass(frozen=True, slots=True)
class PortMessage(Body, kind=Kind.PORT_MESSAGE):
    """A message to the port with this id. From driver to client.

    Payload: the object; with a code, the payload of an `OperationError`. With the code ``exception`` the receiver
    raises the exception itself.
    """

    rank: int | None
    """Rank of the sender, if it has one."""
    code: str | None
    """Code of the error; None for an ordinary object."""
