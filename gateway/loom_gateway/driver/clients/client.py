"""One client of a session, independent of the connection that carries it.

Operations that were received and are not started yet. The client may still withdraw them.

The driver reads a little ahead of what it starts. Without that, it would see a withdrawal only after it had started
everything that the client sent before it.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from loom.errors import ConnectionLost, LoomError
from loom.wire.bodies import CancelOperation, OperationResult
from loom.wire.codec import dumps
from loom.wire.handshake import refusal
from loom.wire.length_prefix import behind_length
from loom.wire.messages import ADVERBS, Kind, Message
from loom.wire.mux import MAX_MESSAGE
from loom.wire.sender import HIGH_WATER, FrameSender, Wire
from loom.wire.sockets import Waker
from loom.wire.stream import Stream, unnumbered_frame
from loom_gateway.driver.session.dispatcher import OperationDispatcher
from loom_gateway.driver.session.replies import Request

MOST_MESSAGES = 16_384  # maximum number of messages to read ahead
MOST_BYTES = 8 << 20  # maximum number of bytes of frames to read ahead
PACE = 16  # number of messages to start before the connection reads ahead again


class Backlog:
    """The queue of messages between one connection's socket and the session. The connection's thread uses it.

    If that thread still starts an operation when the connection is lost, the next one's thread adds meanwhile.

    ``expects`` returns whether a large message is still incomplete, by its operation's id and the number of its
    first chunk (0 if unknown).
    """

    def __init__(
        self,
        start: Callable[[Message], None],
        expects: Callable[[int, int], bool],
        answer: Callable[[Message], object],
    ) -> None:
        self._start = start
        self._expects = expects
        self._answer = answer
        self._messages: deque[Message] = deque()
        self._withdrawn: set[int] = set()  # ids withdrawn before all of their message had arrived
        self._bytes = 0  # of the frames in `_messages`
        self._pace = PACE  # messages until the next read-ahead

    @property
    def full(self) -> bool:
        return len(self._messages) >= MOST_MESSAGES or self._bytes >= MOST_BYTES

    @property
    def empty(self) -> bool:
        return not self._messages

    def add(self, messages: Sequence[Message], size: int) -> None:
        """Add the messages of a frame of ``size`` bytes. Answer a withdrawal at once."""
        self._bytes += size
        for message in messages:
            if message.kind == Kind.CANCEL:
                self._cancel(message)
            elif self._withdrawn and message.id in self._withdrawn:
                self._withdrawn.remove(message.id)
            else:
                self._messages.append(message)

    def start_some(self) -> bool:
        """Start up to `PACE` messages. Return True when it is time to read ahead, False when the queue is empty."""
        messages = self._messages
        while messages:
            self._start(messages.popleft())
            self._pace -= 1
            if not self._pace:
                self._pace = PACE
                return True
        self._bytes = 0
        return False

    def _cancel(self, message: Message) -> None:
        cancel = CancelOperation.from_body(message.body)
        # Another connection's thread may take messages meanwhile.
        waiting = next((message for message in self._messages.copy() if message.id == cancel.operation), None)
        try:
            if waiting is None:
                raise ValueError
            self._messages.remove(waiting)
            in_time = True
        except ValueError:
            in_time = self._expects(cancel.operation, cancel.first_chunk or 0)
            if in_time:
                self._withdrawn.add(cancel.operation)
        self._answer(OperationResult(0.0).message(message.id, dumps(in_time)))


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
        operations: OperationDispatcher,
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
        """True if so many bytes wait to be sent that results belong on the disk."""
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
