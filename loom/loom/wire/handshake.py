"""The handshake of a connection: `Hello` from the client, then `Welcome` from the driver or a refusal.

The protocol's version is ``major.minor``. Sides of different majors refuse each other in a sentence that names
both versions. Additions of a minor version are negotiated as capabilities: the client offers those it knows, and
the driver answers with those that both know.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from loom.errors import LoomError, ProtocolMismatch, PythonVersionMismatch, SessionLost, error_for_code
from loom.wire.bodies import Refuse
from loom.wire.body import Body, check_fields, sendable_fields
from loom.wire.messages import Kind, Message
from loom.wire.mux import MAX_MESSAGE

PROTOCOL = (1, 0)  # version of the protocol that this side speaks, as ``(major, minor)``

CAPABILITIES = (
    "chunks",
    "buffers",
    "stream",
    "run",
    "lanes",
    "draining",
    "traces",
    "cells",
    "life",
    "reads",
    "drops",
    "probes",
    "launch",
    "trainings",
    "restarts",
)
"""This side's abilities beyond the bare protocol."""

MODES = {"drive": "drive", "watch": "view", "debug": "drive", "ranks": "drive", "call": "drive"}
"""The scope in its session that a client of each mode needs."""

T = TypeVar("T", bound="_HandshakeBody")


def python_version() -> tuple[int, int]:
    """Return the major and minor version of this Python, which decide whether code can travel by value."""
    return sys.version_info[0], sys.version_info[1]


@dataclass(frozen=True, kw_only=True)
class _HandshakeBody(Body):
    """The fields of both sides. It travels as a map, and unknown fields of a newer peer are ignored."""

    protocol: Sequence[int] = PROTOCOL
    capabilities: Sequence[str] = CAPABILITIES
    python: Sequence[int] = field(default_factory=python_version)
    mode: str = "drive"
    """``drive``; or, next to the client that drives, ``watch`` to see events and change nothing, ``debug`` to talk
    to the debugger besides, ``ranks`` to run commands in the processes of ranks besides, or ``call`` to call actors
    besides."""
    stream: str = ""
    """Name of the stream, which the driver chooses; in a `Hello` of the one to resume, or empty for a new one."""
    received: int = 0
    """Number of the last frame received on an earlier connection of this stream."""
    received_bulk: int = 0
    """Number of the last frame received of the bulk lane, see `loom.wire.stream`."""

    def to_body(self) -> list[Any]:
        return [sendable_fields(self)]

    @classmethod
    def from_body(cls: type[T], body: Sequence[Any]) -> T:
        try:
            (values,) = body
            known = {each.name for each in fields(cls)}
            made = cls(**{name: value for name, value in values.items() if name in known})
        except (TypeError, ValueError, AttributeError) as error:
            raise ProtocolMismatch(f"not a handshake of Loom's protocol: {error}") from error
        check_fields(made, "a handshake")
        return made


@dataclass(frozen=True)
class Hello(_HandshakeBody, kind=Kind.HELLO):
    """A client's first message."""

    client: str = ""
    """Name and version of the client program, for people who read logs."""
    session: str | None = None
    """Name of the session to attach to, or None for a new one."""
    persist: bool = False
    """True if the session lives on without a client until it is closed."""
    take_over: bool = False
    """True to disconnect the client that drives the session, if there is one."""
    opening: str = ""
    """A name that the client has made up for the new session, by which another hello finds the session that an
    earlier one has opened without an answer. Empty from older clients."""
    lane: int = 0
    """1 for the second connection of a stream, which carries its bulk lane."""


@dataclass(frozen=True)
class Welcome(_HandshakeBody, kind=Kind.WELCOME):
    """A driver's answer when the session is open."""

    session: str
    workers: Sequence[str]
    """Address of each worker host, in the order of the dimension ``hosts``."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of loom, torchmonarch and, if it is installed, torch in the cluster."""
    next_id: int = 1
    """The first id that the client may use."""
    linger: float = 0.0
    """Seconds that the session lives on when nothing keeps it alive; 0 means for ever."""
    most: float | None = None
    """Seconds that the session can still live, whatever goes on in it; 0 means for ever. None from a driver that
    ends its session after ``linger`` seconds without a client, whatever goes on."""
    max_message: int = MAX_MESSAGE
    """Bytes of the largest message that the driver accepts."""
    meshes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The indexes of each named mesh's worker hosts; empty from a driver that knows no names."""
    joined: Sequence[str] = ()
    """Address of each worker host that has joined the session since it was opened, behind ``workers``."""
    may_end: bool = True
    """True if the client may end the session; not one with whose user it is only shared."""


def check_protocol(protocol: Sequence[int], ours: str, theirs: str) -> None:
    """Raise `ProtocolMismatch`, which names both sides and versions, for a peer of another major version."""
    valid = len(protocol) == 2 and all(type(number) is int for number in protocol)
    if not valid or protocol[0] != PROTOCOL[0]:
        spoken = ".".join(str(number) for number in protocol)
        raise ProtocolMismatch(
            f"the {theirs} speaks version {spoken} of Loom's protocol and the {ours} speaks "
            f"{PROTOCOL[0]}.{PROTOCOL[1]}: install the same major version of monarch-loom on both sides"
        )


def python_mismatch(what: str, here: Sequence[int], there: Sequence[int]) -> PythonVersionMismatch:
    """Return the error for code that would have to travel by value between different minor versions of Python."""
    return PythonVersionMismatch(
        f"{what} is defined here and would have to travel by value, but this is Python {here[0]}.{here[1]} and "
        f"the cluster runs Python {there[0]}.{there[1]}, whose bytecode differs. What still works: classes and "
        f"functions of packages that are installed on both sides, and plain data as arguments and results. "
        f"Otherwise run this program with Python {there[0]}.{there[1]}."
    )


def refusal(error: LoomError) -> Message:
    """Return the message that refuses a connection because of ``error``."""
    details: dict[str, object] = {}
    if isinstance(error, SessionLost):
        details = {"exit_code": error.exit_code, "output": error.output}
    return Refuse(error.code, str(error), details).message()


def error_from_refusal(message: Message) -> LoomError:
    """Return the exception for a refusal."""
    refused = Refuse.from_body(message.body)
    if refused.code == SessionLost.code:
        return SessionLost(refused.text, refused.details.get("exit_code"), refused.details.get("output", ""))
    return error_for_code(refused.code, refused.text)
