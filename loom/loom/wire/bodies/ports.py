"""Ports: messages from actors to a client, and from a client to ports in the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loom.wire.bodies.base import Body, Id
from loom.wire.messages import Kind

__all__ = ["ClosePort", "GrantCredit", "OpenPort", "PortMessage", "PortMessages", "SendToPort"]


@dataclass(frozen=True, slots=True)
class OpenPort(Body):
    """Open a port, whose id is this message's. Answered only if it fails. From client to driver."""

    KIND: ClassVar[Kind] = Kind.PORT_OPEN

    once: bool
    """Whether the port takes one message only."""
    messages: int
    """The number of messages that the driver may send at first; see `GrantCredit`."""
    size: int
    """Bytes that the driver may send at first."""


@dataclass(frozen=True, slots=True)
class SendToPort(Body):
    """Send to a port. Payload: the object. From client to driver."""

    KIND: ClassVar[Kind] = Kind.PORT_SEND

    port: Id
    is_exception: bool
    """Whether the receiver raises the object."""


@dataclass(frozen=True, slots=True)
class GrantCredit(Body):
    """Allow the driver to send more messages of the port with this id. From client to driver."""

    KIND: ClassVar[Kind] = Kind.PORT_CREDIT

    messages: int
    """The number of further messages."""
    size: int
    """Bytes of further messages."""


@dataclass(frozen=True, slots=True)
class ClosePort(Body):
    """Close the port with this id. From client to driver."""

    KIND: ClassVar[Kind] = Kind.PORT_CLOSE


@dataclass(frozen=True, slots=True)
class PortMessages(Body):
    """Small messages to the port with this id. From driver to client.

    Payload: one part, the pickles back to back.
    """

    KIND: ClassVar[Kind] = Kind.PORT_MESSAGES

    sizes: bytes
    """Bytes of each pickle, four bytes each, big endian."""
    ranks: bytes
    """Rank of each sender, four bytes each, big endian; 0xffffffff for none. Empty if no message has a rank."""


@dataclass(frozen=True, slots=True)
class PortMessage(Body):
    """A message to the port with this id. From driver to client.

    Payload: the object; with a code, the payload of an `OperationError`. With the code ``exception`` the receiver
    raises the exception itself.
    """

    KIND: ClassVar[Kind] = Kind.PORT_MESSAGE

    rank: int | None
    """Rank of the sender, if it has one."""
    code: str | None
    """Code of the error; None for an ordinary object."""
