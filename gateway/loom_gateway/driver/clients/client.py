"""One client of a session, whichever connection carries it."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from typing import Protocol

from loom.errors import LoomError, ProtocolMismatch
from loom.wire.handshake import refusal
from loom.wire.messages import ADVERBS, Message
from loom.wire.mux import MAX_MESSAGE
from loom.wire.sender import HIGH_WATER, FrameSender, Wire
from loom.wire.stream import Stream
from loom.wire.waker import Bell
from loom_gateway.driver.clients.backlog import Backlog

CROWD, AWAY_CROWD = 4 * HIGH_WATER, HIGH_WATER
"""Bytes that may wait in memory for a client that is connected, and for one that is away."""

TURN_TIMEOUT = 20.0
"""Seconds that a lost connection has to finish the operation that it is just starting."""

_PASSED_ON = frozenset(ADVERBS.values())


class Carrier(Wire, Protocol):
    """A connection, as the client that it carries knows it."""

    def give_up(self) -> None:
        """Receive no more: the client has another connection, or none any more."""

    def say_goodbye(self, message: Message) -> None:
        """Send what is queued, then a last message, and close."""


class Operations(Protocol):
    """The operations of the session that a client belongs to."""

    @property
    def next_id(self) -> int:
        """The first id that the next client that drives may use."""

    def start(self, message: Message) -> None:
        """Start an operation of the client that drives. By one thread at a time."""

    def read(self, message: Message) -> None:
        """Start an operation of a client that watches. On any thread."""

    def client_left(self, unsent: Sequence[Message]) -> None:
        """Note that a client that drove has been let go of, and what it has not received."""

    def unclaimed(self, message: Message) -> None:
        """Keep an answer to a client that was let go of. On any thread."""


class Client:
    """One client.

    Args:
        number: 0 drives, the others watch.
        first_id: the first id that it may use.
        operations: of the session.
        max_message: bytes of the largest message that is taken from it.
        lanes: whether it knows lanes, see `loom.wire.stream`.
    """

    def __init__(
        self,
        number: int,
        first_id: int,
        operations: Operations,
        max_message: int = MAX_MESSAGE,
        lanes: bool = False,
    ) -> None:
        self.number = number
        self.first_id = first_id
        self.mode = "watch" if number else "drive"
        self.name = secrets.token_hex(16)
        """By which its next connection knows it: nobody else can guess it."""
        self.operations = operations
        self.stream = Stream(max_message, _PASSED_ON, lanes)
        self.sender = FrameSender(self.stream, "client-writer")
        start = operations.read if number else operations.start
        self.backlog = Backlog(start, self.stream.expects, self.sender.put)
        self.turn = threading.Lock()
        """Held by the thread that receives from the client's connection."""
        self.left = threading.Event()
        """Set while the client has no connection."""
        self._changing = threading.Lock()
        self._connection: Carrier | None = None
        self.bulk: Carrier | None = None
        """The connection that its bulk lane has of its own."""
        self.bulk_turn = threading.Lock()
        """Held by the thread that receives from that."""
        self.bell = Bell() if lanes else None
        """Rung when a large message has come on that, for the thread that has the `turn`."""
        self.taken = threading.Event()
        """Set by that thread when it has taken all such messages."""

    @property
    def connection(self) -> Carrier | None:
        """What carries it, if anything does."""
        return self._connection

    def carry_by(self, connection: Carrier | None, instead_of: Carrier | None = None) -> None:
        """Have another connection carry it, or none; with ``instead_of`` only if that one does now."""
        with self._changing:
            if instead_of is None or instead_of is self._connection:
                self._connection = connection
                (self.left.clear if connection is not None else self.left.set)()

    @property
    def crowded(self) -> bool:
        """Whether so much waits to be sent that large answers are better off on the disk."""
        return self.sender.backlog > (CROWD if self.connection is not None else AWAY_CROWD)

    def take_turn(self) -> None:
        """Acquire `turn`, once a connection that was given up has finished what it is at."""
        if not self.turn.acquire(timeout=TURN_TIMEOUT):
            raise ProtocolMismatch(
                "an operation that was being started when the connection was lost takes too long"
            )

    def end(self, why: LoomError) -> None:
        """Tell the client why it is disconnected, and let go of it."""
        connection = self.connection
        if connection is not None:
            connection.say_goodbye(refusal(why))
            connection.give_up()
        self.carry_by(None)
        if self.bulk is not None:
            self.bulk.give_up()
        self.sender.close()
