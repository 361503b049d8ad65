"""The vocabulary of the protocol: what a message is and which kinds there are."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

TURN = 64 << 10
"""Bytes of a large buffer that are copied at once; then whoever waits gets a turn.

Python runs no other thread during a copy of its own, and a kernel that is not preemptible, as on many servers, no
other process during one of a system call. Where memory is new or virtual, a megabyte takes up to 5 ms.
"""


def turns(data: Buffer) -> Iterator[memoryview]:
    """A buffer in pieces of `TURN` bytes."""
    view = memoryview(data).cast("B")
    for start in range(0, len(view), TURN):
        yield view[start : start + TURN]


class Kind(enum.IntEnum):
    """What a message asks for or tells. Numbers are the protocol: never reuse one.

    What each says is documented at its class in `loom.wire.bodies`.
    """

    # Before the stream is numbered.
    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    OPEN = 4

    # In both directions.
    CHUNK = 8

    # Client to driver. Each names what it makes or asks by an id that the client chose.
    SPAWN_PROCS = 16
    SPAWN_ACTORS = 17
    VIEW = 18
    STOP = 19
    INITIALIZED = 20
    WITH_PYTHON = 22
    HOST_OF = 23
    STOP_HOSTS = 24
    REFRESH_HOSTS = 25
    UNDELIVERED = 26
    FORGET = 27
    COLLECT = 28
    CALL = 32
    CALL_ONE = 33
    CHOOSE = 34
    STREAM = 35
    BROADCAST = 36
    SEND = 37
    RUN = 40
    MESHES = 41
    RUNS = 42
    RUN_RESULT = 43
    RUN_OUTPUT = 44
    RUN_END = 45
    CANCEL = 46
    RECONFIGURE = 47
    END = 48
    ASK_WEAVER = 49
    PORT_OPEN = 50
    PORT_SEND = 51
    PORT_CREDIT = 52
    PORT_CLOSE = 53
    LOG_OPTIONS = 56
    FLUSH_LOGS = 57
    SYNC = 58
    SYNC_PIECES = 59
    SYNC_COMMIT = 60

    # Driver to client.
    RESULT = 64
    ERROR = 65
    EVENT = 66
    ENDED = 67
    PORT_MESSAGES = 72
    PORT_MESSAGE = 73
    LOG = 74
    RUN_STATE = 76


ADVERBS = {
    "call": Kind.CALL,
    "call_one": Kind.CALL_ONE,
    "choose": Kind.CHOOSE,
    "stream": Kind.STREAM,
    "broadcast": Kind.BROADCAST,
}
"""Monarch's messaging adverbs and the kind that carries each."""


READING = frozenset({Kind.MESHES, Kind.RUNS, Kind.RUN_OUTPUT, Kind.RUN_RESULT, Kind.FLUSH_LOGS})
"""What a client that only watches may ask."""


class Message(NamedTuple):
    """One message: a kind, the id of what it is about, a small msgpack body, and payload parts."""

    kind: int
    id: int
    body: Sequence[Any]
    parts: Sequence[Buffer] = ()

    @property
    def size(self) -> int:
        """Bytes of payload."""
        return sum(map(len, self.parts))


new_message = tuple.__new__
"""Makes a `Message` of all its fields, ``new_message(Message, fields)``: the class's own way runs Python code.

For where every message passes, which is where it counts.
"""
