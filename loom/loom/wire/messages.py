"""The vocabulary of the protocol: what a message is and which kinds there are."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

__all__ = ["ADVERBS", "Buffer", "Kind", "Message"]

Buffer: TypeAlias = bytes | bytearray | memoryview


class Kind(enum.IntEnum):
    """What a message asks for or tells. Numbers are the protocol: never reuse one."""

    # Before the stream is numbered.
    HELLO = 1
    """Client: who I am and what I want. Body: see `loom.wire.handshake.Hello`."""
    WELCOME = 2
    """Driver: the session is open. Body: see `loom.wire.handshake.Welcome`."""
    REFUSE = 3
    """Gateway or driver: no, and why; the connection ends. Body: ``[code, text, details]``."""
    OPEN = 4
    """Gateway to driver only: the session that the driver is to serve. Body: ``[session, workers]``."""

    CHUNK = 8
    """A piece of a message too large for one frame. Body: ``[offset, total, head]``; see `loom.wire.mux`."""

    # Client to driver. Each names what it makes or asks by an id that the client chose.
    SPAWN_PROCS = 16
    """Body: ``[host mesh, name, {dimension: size}]``. Payload: bootstrap callable or None."""
    SPAWN_ACTORS = 17
    """Body: ``[proc mesh, name]``. Payload: ``(class, args, kwargs)``."""
    VIEW = 18
    """Give a part of a mesh an id. Body: ``[mesh, labels, offset, sizes, strides]``."""
    STOP = 19
    """Stop a proc or actor mesh. Body: ``[mesh, reason]``."""
    INITIALIZED = 20
    """Answer when a mesh has been created. Body: ``[mesh]``."""
    FORGET = 27
    """Let go of meshes that came in results and of their parts; nobody names them any more. Body: ``[mesh, …]``."""
    CALL = 32
    """Send to every actor, answer with all results in rank order. Body: ``[mesh, endpoint]``."""
    CALL_ONE = 33
    """Send to the only actor of the mesh. Body: ``[mesh, endpoint]``."""
    CHOOSE = 34
    """Send to one actor, picked at random. Body: ``[mesh, endpoint]``."""
    STREAM = 35
    """Send to every actor, answer with each result as it comes. Body: ``[mesh, endpoint]``."""
    BROADCAST = 36
    """Send to every actor, answer nothing. Body: ``[mesh, endpoint]``."""
    RUN = 40
    """Run a function in the driver. Payload: ``(fn, args, kwargs)``."""
    MESHES = 41
    """List the meshes of the session. Body: ``[]``."""
    END = 48
    """End the session and stop its meshes. Body: ``[]``."""

    # Driver to client.
    RESULT = 64
    """An operation succeeded. Body: ``[rpc_ms]``, for `STREAM` ``[rpc_ms, index]``. Payload: the result."""
    ERROR = 65
    """An operation failed. Body: ``[rpc_ms, code]``, for `STREAM` ``[rpc_ms, code, index]``.

    Payload: `loom.wire.texts` with ``text``, ``formatted``, ``type`` and ``original``, then the pickled exception
    where there is one.
    """
    EVENT = 66
    """Something happened that nobody asked about. Body: ``[name]``. Payload: its details, as `loom.wire.texts`."""
    ENDED = 67
    """The session is over: its meshes have been stopped. Body: ``[reason]``."""


ADVERBS = {
    "call": Kind.CALL,
    "call_one": Kind.CALL_ONE,
    "choose": Kind.CHOOSE,
    "stream": Kind.STREAM,
    "broadcast": Kind.BROADCAST,
}
"""Monarch's messaging adverbs and the kind that carries each."""


class Message(NamedTuple):
    """One message: a kind, the id of what it is about, a small msgpack body, and payload parts."""

    kind: int
    id: int
    body: Sequence[Any]
    parts: Sequence[Buffer] = ()

    @property
    def size(self) -> int:
        """Bytes of payload."""
        return sum(len(part) for part in self.parts)
