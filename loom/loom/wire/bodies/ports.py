"""Ports: messages of actors to a client, and of a client to ports of the cluster."""

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
    """Whether it takes one message only."""
    messages: int
    """How many may be sent at first; see `GrantCredit`."""
    size: int
    """Bytes that may be sent at first."""


@dataclass(frozen=True, slots=True)
class SendToPort(Body):
    """Send to a port. Payload: the object. From client to driver."""

    KIND: ClassVar[Kind] = Kind.PORT_SEND

    port: Id
    is_exception: bool
    """Whether the receiver is to raise the object."""


@dataclass(frozen=True, slots=True)
class GrantCredit(Body):
    """Allow more to be sent of what came to the port of this id. From client to driver."""

    KIND: ClassVar[Kind] = Kind.PORT_CREDIT

    messages: int
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class ClosePort(Body):
    """Nobody receives from the port of this id any more. From client to driver."""

    KIND: ClassVar[Kind] = Kind.PORT_CLOSE


@dataclass(frozen=True, slots=True)
class PortMessages(Body):
    """Small messages that came to the port of this id. From driver to client.

    Payload: one part, the pickles back to back.
    """

    KIND: ClassVar[Kind] = Kind.PORT_MESSAGES

    sizes: bytes
    """Bytes of each pickle, four bytes each, big endian."""
    ranks: bytes
    """Rank of each sender, likewise; 0xffffffff for none. Empty if no message has one."""


@dataclass(frozen=True, slots=True)
class PortMessage(Body):
    """A message that came to the port of this id. From driver to client.

    Payload: the object; with a code as of `OperationError`, and with the code ``exception`` to be raised as it is.
    """

    KIND: ClassVar[Kind] = Kind.PORT_MESSAGE

    rank: int | None
    """Of the sender, if it has one."""
    code: str | None
    """Of the error that it is; None for an ordinary object."""
