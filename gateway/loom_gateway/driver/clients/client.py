"""One client of a session, independent of the connection that carries it."""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
from collections.abc import Callable
from typing import Protocol

from loom.errors import ConnectionLost, LoomError
from loom.wire.handshake import refusal
from loom.wire.lane import behind_length
from loom.wire.messages import ADVERBS, Message
from loom.wire.mux import MAX_MESSAGE
from loom.wire.sender import HIGH_WATER, FrameSender, Wire
from loom.wire.sockets import Waker
from loom.wire.stream import Stream, unnumbered_frame
from loom_gateway.driver.clients.backlog import Backlog
from loom_gateway.driver.session.dispatcher import Dispatcher
from loom_gateway.driver.session.replies import Request

CROWD, AWAY_CROWD = 4 * HIGH_WATER, HIGH_WATER  # bytes in memory for a client, connected or not
TURN_TIMEOUT = 20.0  # seconds that a connection that was given up has to stop receiving
START_TIMEOUT = 20.0  # seconds that a client whose place is taken has to finish the operation that it is starting
GOODBYE_TIMEOUT = 5.0  # seconds that the client has to take what is still queued when the session ends

_PASSED_ON = frozenset(ADVERBS.values())


class TurnLost(Exception):
    """A later connection of the client receives."""


class Carrier(Wire, Protocol):
    """The part of a connection that its client uses."""

    def give_up(self) -> None:
        """Stop receiving, because the client has another connection or is gone."""


class Client:
    """One client of a session.

    Args:
        number: 0 for the driving client; the others count from 1.
        lanes: whether the client knows lanes; see `loom.wire.stream`.
        guest: the client's user, if the session is another user's: a guest does not end it.
    """

    def __init__(
        self,
        number: int,
        first_id: int,
        operations: Dispatcher,
        max_message: int = MAX_MESSAGE,
        lanes: bool = False,
        guest: str | None = None,
        mode: str = "drive",
    ) -> None:
        self.number = number
        self.first_id = first_id
        self.mode = mode
        self.name = secrets.token_hex(16)  # secret by which the client's next connection identifies itself
        self.operations = operations
        self.max_message = max_message
        self.stream = Stream(max_message, _PASSED_ON, lanes, keeps_whole=True)
        self.sender = FrameSender(self.stream, "client-writer")
        self.guest = guest
        self.knows_traces = False
        start: Callable[[Message], None]
        if number:
            start = functools.partial(operations.start_beside, mode)
        else:
            start = operations.start if guest is None else operations.start_for_guest
        self.backlog = Backlog(start, self.stream.expects, self.sender.put)
        self.turn = threading.Lock()
        """Held by the thread that receives from the client's connection, except while it starts operations: that
        runs user code, which may take long, and a later connection may receive meanwhile."""
        self.starter: Carrier | None = None  # the connection whose thread is starting operations
        self.handover = threading.Condition()
        """Held while a later connection's thread and the starter's agree who starts what has arrived."""
        self.left = threading.Event()  # set while the client has no connection
        self._changing = threading.Lock()  # guards `_connection` and `left`
        self._connection: Carrier | None = None
        self.away = True  # whether there is no connection
        self.unsent: dict[int, Request | None] = {}  # what was answered while the client was away, by operation
        self.bulk: Carrier | None = None  # separate connection of the client's bulk lane
        self.bulk_turn = threading.Lock()  # held by the thread that receives from the bulk connection
        self.waker = Waker() if lanes else None  # wakes the holder of `turn` for a message on the bulk connection
        self.taken = threading.Event()  # set when the holder of `turn` has taken what the bulk connection brought

    @property
    def connection(self) -> Carrier | None:
        return self._connection

    def carry_by(self, connection: Carrier | None, instead_of: Carrier | None = None) -> None:
        """Replace the current connection. With ``instead_of``, do so only if that one is the current connection."""
        with self._changing:
            if instead_of is None or instead_of is self._connection:
                self._connection = connection
                self.away = connection is None
                if self.away and not self.stream.outbox:
                    self.unsent.clear()
                (self.left.clear if connection is not None else self.left.set)()
        with self.handover:
            self.handover.notify_all()

    @property
    def crowded(self) -> bool:
        """Whether so many bytes wait to be sent that results belong on the disk."""
        if self.away:
            return self.stream.outbox.pending_bytes > AWAY_CROWD
        return self.sender.backlog > CROWD

    def take_turn(self) -> None:
        """Acquire `turn`, as soon as a connection that was given up receives no more."""
        if not self.turn.acquire(timeout=TURN_TIMEOUT):
            raise ConnectionLost("the client's earlier connection is still in use in the driver")

    def start_some(self, by: Carrier) -> bool:
        """Start some of what has arrived, with `turn` released. Return whether there may be more.

        If the thread of an earlier connection is starting operations, it goes on with these.

        Raises:
            TurnLost: a later connection receives. All that had arrived has been started, and `turn` is not held.
        """
        if self.starter is not None and self._is_left_to_starter(by):
            return False
        self.starter = by
        self.turn.release()
        try:
            return self.backlog.start_some()
        finally:
            if not self.turn.acquire(blocking=False):
                self._start_all()
                raise TurnLost
            self.starter = None

    def _is_left_to_starter(self, by: Carrier) -> bool:
        with self.handover:
            while self.starter is not None and self.backlog.full and self.connection is by:
                self.handover.wait()
            return self.starter is not None

    def _start_all(self) -> None:
        while True:
            while self.backlog.start_some():
                pass
            with self.handover:
                if self.backlog.empty:
                    self.starter = None
                    self.handover.notify_all()
                    return

    def wait_for_starter(self) -> bool:
        """Wait until nothing is being started; return False after `START_TIMEOUT` seconds. With `turn` held."""
        with self.handover:
            return self.handover.wait_for(lambda: self.starter is None, START_TIMEOUT)

    def say_goodbye(self, message: Message) -> None:
        """Send what is queued and a last message, if there is a connection, and give up the connections."""
        connection = self.connection
        if connection is not None:
            farewell = behind_length(unnumbered_frame(message))
            if self.sender.attached:
                self.sender.drain(GOODBYE_TIMEOUT)
                self.sender.put_raw(farewell)
                self.sender.drain(GOODBYE_TIMEOUT)
            else:  # the client's greeting has not been answered yet
                with contextlib.suppress(OSError):
                    connection.send_all(farewell)
            connection.give_up()
        if self.bulk is not None:
            self.bulk.give_up()

    def end(self, why: LoomError) -> None:
        """Tell the client why it is disconnected, and drop it."""
        self.say_goodbye(refusal(why))
        self.carry_by(None)
        self.sender.close()
