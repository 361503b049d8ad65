"""The vocabulary of the protocol: what a message is and which kinds there are."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

__all__ = ["ADVERBS", "READING", "TURN", "Buffer", "Kind", "Message", "turns"]

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
    """Body: ``[host mesh, name, {dimension: size}]``.

    Payload: ``(bootstrap, proc_bind, bootstrap_command)``, each as Monarch's argument of that name.
    """
    SPAWN_ACTORS = 17
    """Body: ``[proc mesh, name]``. Payload: ``(class, args, kwargs)``."""
    VIEW = 18
    """Give a part of a mesh an id. Body: ``[mesh, labels, offset, sizes, strides]``."""
    STOP = 19
    """Stop a proc or actor mesh. Body: ``[mesh, reason]``."""
    INITIALIZED = 20
    """Answer when a mesh has been created. Body: ``[mesh]``."""
    WITH_PYTHON = 22
    """A host mesh whose processes run another Python. Body: ``[host mesh, executable]``."""
    HOST_OF = 23
    """The host of a single process, as a host mesh. Body: ``[proc mesh]``."""
    STOP_HOSTS = 24
    """Stop every process of the session on all hosts; the hosts stay. Body: ``[]``."""
    REFRESH_HOSTS = 25
    """Use again the hosts that were gone and have come back. Body: ``[]``. Result: the list of their numbers."""
    UNDELIVERED = 26
    """List the calls of earlier clients whose answers none has received. Body: ``[]``.

    Result: a list of ``(operation, mesh's name, endpoint, adverb, (labels, offset, sizes, strides), answers)``.
    """
    COLLECT = 28
    """Answer as such a call does, when it does. Body: ``[operation]``."""
    FORGET = 27
    """Let go of meshes that came in results and of their parts; nobody names them any more. Body: ``[mesh, …]``."""
    # An endpoint is given by its name; a method that `as_endpoint` makes one as ``name()``, or ``name(port)`` if it
    # is given the port to reply to.
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
    SEND = 37
    """Send to actors; replies go to a port or nowhere. Body: ``[mesh, endpoint, selection, port or None]``."""
    RUN = 40
    """Run a function in the driver. Body: ``[name, detached]``. Payload: ``(fn, args, kwargs)``.

    The id is the run's from then on. A detached run is not answered; `RUN_STATE` tells what becomes of it.
    """
    MESHES = 41
    """List the meshes of the session. Body: ``[]``."""
    RUNS = 42
    """List the runs of the session. Body: ``[]``. Result: a list of ``(run, name, status, started, finished)``."""
    RUN_RESULT = 43
    """Answer as the run does, when it has finished. Body: ``[run]``."""
    RUN_OUTPUT = 44
    """Ask what a run printed. Body: ``[run, position, wait]``; ``wait``: answer when there is more or it has ended.

    Result: ``(position, ended, [(stream, text)])``, with the position after the text and stream 1 or 2.
    """
    RUN_END = 45
    """Be done with a run. Body: ``[run, "cancel"]``, result: whether it was going; or ``[run, "forget"]``."""
    CANCEL = 46
    """Do not start an operation. Body: ``[operation]``. Result: whether that was in time.

    Where chunks travel in a lane of their own, the number of the operation's first chunk may follow in the body.
    """
    RECONFIGURE = 47
    """Give the replicas in actors new configuration. Body: ``[mesh, config]``. Result: what each made of it."""
    END = 48
    """End the session and stop its meshes. Body: ``[]``."""
    PORT_OPEN = 50
    """Open a port, whose id is this message's. Body: ``[once, messages, bytes]``: what may be sent at first."""
    PORT_SEND = 51
    """Send to a port. Body: ``[port, whether it is an exception]``. Payload: the object."""
    PORT_CREDIT = 52
    """More may be sent of what came to the port of this id. Body: ``[messages, bytes]``."""
    PORT_CLOSE = 53
    """Nobody receives from the port of this id any more. Body: ``[]``."""

    LOG_OPTIONS = 56
    """What to send of what a proc mesh prints. Body: ``[proc mesh, send, window, level]``.

    ``window``: seconds over which identical lines are made one, or None; ``level``: of the root logger.
    Result: None.
    """
    FLUSH_LOGS = 57
    """Answer when all that was printed until now has been sent. Body: ``[]``. Result: None."""

    SYNC = 58
    """Begin to sync a folder. Body: ``[sync]``, an id. Payload: a packed `loom.manifest.Manifest`.

    Result: the digests that are lacking. A sync that had begun and was not committed is given up.
    """
    SYNC_PIECES = 59
    """Pieces of contents. Body: ``[sync, [[digest, offset, length, compressed], …]]``. Payload: a part for each."""
    SYNC_COMMIT = 60
    """Give the folder to every host, then to what is spawned. Body: ``[sync]``.

    Result: ``missing``, digests that are lacking after all, and ``warnings``.
    """

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
    LOG = 74
    """Lines that were printed. Body: ``[]``. Payload: msgpack, a list of lines.

    Each is ``[time, mesh, place, ranks, stream, text, count]``: seconds since the epoch, the mesh's name, where its
    first rank is (``hosts=0,gpus=1``), all its ranks, ``stdout`` or ``stderr``, and how often it was printed.
    """
    RUN_STATE = 76
    """A run has begun or ended. The id is the run's. Body: ``[status, started, finished]``."""

    PORT_MESSAGES = 72
    """Small messages that came to the port of this id. Body: ``[sizes, ranks]``, four bytes big endian each.

    Rank 0xffffffff is none; no ranks at all: no message has one. Payload: one part, the pickles back to back.
    """
    PORT_MESSAGE = 73
    """A message that came to the port of this id. Body: ``[rank or None, code or None]``.

    Payload: the object; with a code as for `ERROR`, and with the code ``exception`` to be raised as it is.
    """


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
        return sum(len(part) for part in self.parts)
