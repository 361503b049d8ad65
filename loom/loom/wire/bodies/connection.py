"""What is said around the numbered stream. The handshake's own two are in `loom.wire.handshake`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from loom.wire.bodies.base import Body
from loom.wire.messages import Kind

__all__ = ["Chunk", "OpenSession", "Refuse"]


@dataclass(frozen=True, slots=True)
class Refuse(Body):
    """No, and why; the connection ends. From gateway or driver to client."""

    KIND: ClassVar[Kind] = Kind.REFUSE

    code: str
    """Which error of `loom.errors` it is."""
    text: str
    details: Mapping[str, Any]
    """``exit_code`` and ``output`` of a driver that has ended; otherwise empty."""


@dataclass(frozen=True, slots=True)
class OpenSession(Body):
    """Say which session the connection is for. From gateway to driver, before the client's first frame."""

    KIND: ClassVar[Kind] = Kind.OPEN

    session: str
    """Its name."""


@dataclass(frozen=True, slots=True)
class Chunk(Body):
    """A piece of a message too large for one frame; see `loom.wire.mux`. In both directions.

    The message's id is the number of the transfer. Payload: bytes of the large message's payload.
    """

    KIND: ClassVar[Kind] = Kind.CHUNK

    offset: int
    """Bytes of the payload before this piece."""
    total: int
    """Bytes of the whole payload."""
    head: Sequence[Any] | None
    """Kind, id, body and sizes of parts of the message, in its first chunk; otherwise None."""
