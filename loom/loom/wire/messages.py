"""The vocabulary of the protocol: messages and their kinds."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

TURN = 64 << 10
"""Bytes of a large buffer that are copied at once; then other threads and processes get a turn.

Python runs no other thread during a copy of its own. A kernel that is not preemptible, as on many servers, runs no
other process during the copy of a system call. In new or virtual memory a megabyte takes up to 5 ms.
"""


def turns(data: Buffer) -> Iterator[memoryview]:
    """Yield a buffer in pieces of `TURN` bytes."""
    view = memoryview(data).cast("B")
    for start in range(0, len(view), TURN):
        yield view[start : start + TURN]


class Kind(enum.IntEnum):
    """The kind of a message. The numbers are part of the protocol: never reuse one.

    The class of each kind in `loom.wire.bodies` documents its meaning.
    """

    # Before the stream is numbered.
    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    OPEN = 4
    DESCRIBE = 5
    DESCRIPTION = 6
    RESTORE = 7

    # In both directions.
    CHUNK = 8
    PROBE = 9
    PROBED = 10

    # Client to driver. The client chooses the id of what each makes or asks for.
    SPAWN_PROCS = 16
    SPAWN_ACTORS = 17
    VIEW = 18
    STOP = 19
    INITIALIZED = 20
    ALL_HOSTS = 21
    WITH_PYTHON = 22
    HOST_OF = 23
    STOP_HOSTS = 24
    REFRESH_HOSTS = 25
    UNDELIVERED = 26
    FORGET = 27
    COLLECT = 28
    LIFE = 29
    READ = 30
    DROP = 31
    CALL = 32
    CALL_ONE = 33
    CHOOSE = 34
    STREAM = 35
    BROADCAST = 36
    SEND = 37
    LIVING_HOSTS = 38
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
    SPANS = 54
    RANK = 55
    LOG_OPTIONS = 56
    FLUSH_LOGS = 57
    SYNC = 58
    SYNC_PIECES = 59
    SYNC_COMMIT = 60
    DEBUG = 61
    CLOCK = 62
    COLLECT_SPANS = 63

    # Driver to client.
    RESULT = 64
    ERROR = 65
    EVENT = 66
    ENDED = 67
    PORT_MESSAGES = 72
    PORT_MESSAGE = 73
    LOG = 74
    RUN_STATE = 76

    # Between the driver and the processes that it started.
    TIE = 96
    TIED = 97
    UNTIED = 98
    PROCESS_OUTPUT = 99
    OUTPUT_SKIPPED = 100
    FLUSH_OUTPUT = 101
    OUTPUT_FLUSHED = 102
    PROCESS_ENDED = 103
    LINE_HELD = 104
    CHALLENGE = 105
    WATCH = 106
    PROCESSES_GONE = 107
    TELL_END = 108
    HOST_LEAVING = 109


ADVERBS = {
    "call": Kind.CALL,
    "call_one": Kind.CALL_ONE,
    "choose": Kind.CHOOSE,
    "stream": Kind.STREAM,
    "broadcast": Kind.BROADCAST,
}


READING = frozenset(
    {
        Kind.MESHES,
        Kind.RUNS,
        Kind.RUN_OUTPUT,
        Kind.RUN_RESULT,
        Kind.FLUSH_LOGS,
        Kind.CLOCK,
        Kind.COLLECT_SPANS,
        Kind.LIFE,
    }
)
"""The kinds of message that a client which only watches may send."""

CALLS = frozenset({Kind.CALL, Kind.CALL_ONE, Kind.CHOOSE, Kind.BROADCAST})
"""The kinds of message that call actors and have one answer at most."""

ALLOWED_BESIDE = {
    "watch": READING,
    "debug": READING | {Kind.DEBUG},
    "ranks": READING | {Kind.RANK},
    "call": READING | CALLS | {Kind.READ},
}
"""The kinds of message that a client may send next to the one that drives, by its mode."""


class Message(NamedTuple):
    """One message: a kind, the id of its operation or object, a small msgpack body, and payload parts.

    A body that is a tuple can be sent as it is; one that is a list is checked first (`loom.wire.frames.sealed`).
    """

    kind: int
    id: int
    body: Sequence[Any]
    parts: Sequence[Buffer] = ()

    @property
    def size(self) -> int:
        """Bytes of payload."""
        return sum(map(len, self.parts))


new_message = tuple.__new__
"""Makes a `Message`, as ``new_message(Message, fields)``, without the Python code of the class's constructor."""
