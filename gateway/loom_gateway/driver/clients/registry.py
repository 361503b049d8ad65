"""The clients of a session: one that drives, and any number beside it.

A client is a stream of messages that outlives its connections. After a connection is lost, both sides send again on
the next one what the other has not received. A client ends when it is disconnected or when the session ends.

Each client chooses the ids of its operations. The ids of each watching client start at a number of its own, far
above those of the driving client, so the driver knows from the id which client to answer. The session alone uses
the registry. It is apart because its subject is clients that come and go.
"""

from __future__ import annotations

import logging
import secrets
import tempfile
import threading
from collections import deque

from loom.errors import LimitReached, LoomError, ProtocolMismatch, SessionInUse, SessionTakenOver, WatcherTooSlow
from loom.wire.handshake import Hello
from loom.wire.messages import ALLOWED_BESIDE, Kind, Message
from loom.wire.mux import MAX_MESSAGE, OrderKey
from loom_gateway.driver.clients.client import Carrier, Client
from loom_gateway.driver.clients.unread_results import WATCHER_IDS, StoredResults
from loom_gateway.driver.session.dispatcher import OperationDispatcher

logger = logging.getLogger(__name__)

WATCHER_ROOM = 16 << 20  # bytes that may wait for a watching client before it is disconnected
CALLER_ROOM = (
    256 << 20
)  # bytes that those in mode "call" share, whose results may be large; each has `WATCHER_ROOM`
LOG_ROOM = 16 << 20  # bytes that may wait for the driving client before printed lines are skipped; the log has them
WATCHER_MESSAGE = 64 << 10  # bytes of a message of a watching client, which only asks
MAX_WATCHERS = 32  # watching clients of the session's user, and of all others; each costs a thread, up to 20 MiB
MAX_GUESTS = 8  # watching clients of one other user, so that none keeps the others out
WATCHERS_AWAY = 8  # unconnected watching clients that may come back; beyond it, the oldest are dropped
STORED_FROM = 256 << 10  # smallest result, in bytes, that is worth the disk while its client is connected
LEAVE_GRACE = 1.0  # seconds that a new driving client waits for the previous one to leave
NOTICES = frozenset({Kind.EVENT, Kind.LOG, Kind.RUN_STATE})  # kinds of message that every client gets

ANSWERS = frozenset({Kind.RESULT, Kind.ERROR})


class Clients:
    """The clients of one session."""

    def __init__(self, max_message: int = MAX_MESSAGE, results: StoredResults | None = None) -> None:
        self._max_message = max_message
        self._results = results or StoredResults(tempfile.gettempdir())
        self.restarted: LoomError | None = None
        """The news for clients of a driver before this one; None if this is the session's first."""
        self._admitting = threading.Lock()  # held while a client is admitted, which may disconnect another
        self._driving: Client | None = None
        self._watching: dict[int, Client] = {}
        self._watchers = 0  # how many there have ever been
        # The streams of those that were disconnected, which may come back and are told why.
        self._taken_over: deque[str] = deque(maxlen=MAX_WATCHERS)
        self._too_slow: deque[tuple[str, LoomError]] = deque(maxlen=MAX_WATCHERS)

    def admit(
        self, connection: Carrier, hello: Hello, operations: OperationDispatcher, guest: str | None = None
    ) -> tuple[Client, bool]:
        """Return the client that a connection carries from now on, and whether it is new.

        Args:
            guest: the client's user, if the session is another user's.

        Raises:
            SessionInUse: another client drives.
            LimitReached: too many clients watch.
            SessionTakenOver: the client to resume has ended.
        """
        with self._admitting:
            lanes = "lanes" in hello.capabilities
            if hello.lane:
                client = self._resumed(hello)
                if client.bulk is not None:
                    client.bulk.give_up()
                client.bulk = connection
                return client, False
            if hello.stream:
                client = self._resumed(hello)
                if client.connection is not None:
                    client.connection.give_up()
            elif hello.mode in ALLOWED_BESIDE:
                self._let_watchers_go()
                self._check_room_to_watch(guest)
                self._watchers += 1
                first_id = self._watchers * WATCHER_IDS + 1
                most = WATCHER_MESSAGE if hello.mode == "watch" else self._max_message
                client = Client(self._watchers, first_id, operations, most, lanes, guest, hello.mode)
                self._watching[self._watchers] = client
            else:
                if self._driving is not None:
                    self._disconnect(self._driving, hello)
                client = self._driving = Client(0, operations.next_id, operations, self._max_message, lanes, guest)
            client.knows_traces = "traces" in hello.capabilities
            operations.unread.of_client(client.first_id, "reads" in hello.capabilities)
            client.carry_by(connection)
            self._results.begin_anew()  # what waits is taken now
            return client, not hello.stream

    def _check_room_to_watch(self, guest: str | None) -> None:
        users = [client.guest for client in self._watching.copy().values() if client.connection is not None]
        most = MAX_WATCHERS if guest is None else MAX_GUESTS
        if users.count(guest) >= most:
            raise LimitReached(f"{most} of your clients watch this session already: close one of them first")
        if guest is not None and len(users) - users.count(None) >= MAX_WATCHERS:
            raise LimitReached(f"{MAX_WATCHERS} clients of users whom this session is shared with watch it already")

    def _let_watchers_go(self) -> None:
        away = [client for client in self._watching.copy().values() if client.connection is None]
        for client in away[:-WATCHERS_AWAY]:
            self._watching.pop(client.number, None)
            client.sender.close()

    def _resumed(self, hello: Hello) -> Client:
        for client in self.all():
            if secrets.compare_digest(client.name.encode(), hello.stream.encode()):
                if client.mode != hello.mode:
                    raise ProtocolMismatch(f"a client in mode {client.mode!r} came back in mode {hello.mode!r}")
                if hello.lane and client.stream.bulk is None:
                    raise ProtocolMismatch("a client that has one lane only asked for a connection for the other")
                return client
        for name, error in self._too_slow.copy():
            if secrets.compare_digest(name.encode(), hello.stream.encode()):
                raise error
        if self.restarted is not None and hello.stream not in self._taken_over:
            raise self.restarted
        raise SessionTakenOver("another client has taken the place of this one, while it was not connected")

    def _disconnect(self, client: Client, by: Hello) -> None:
        # A client that has just detached is gone as soon as the gateway has reported it.
        if not by.take_over and not client.left.wait(LEAVE_GRACE):
            raise SessionInUse(
                f"another client drives session {by.session!r}: close or detach it there first, take its place "
                f"with take_over=True, or look on with mode='watch'"
            )
        self._taken_over.append(client.name)
        client.end(SessionTakenOver("another client has taken the place of this one"))
        client.take_turn()  # never released: no thread may receive from this client again
        if not client.wait_for_starter():
            client.turn.release()
            raise SessionInUse(
                f"an operation of the earlier client of session {by.session!r} is still being started, which runs "
                f"its code: try again later"
            )
        client.backlog.add(client.stream.arrived(), 0)
        while client.backlog.start_some():
            pass
        client.operations.client_left(client.stream.abandon(), client.unsent)

    def all(self) -> list[Client]:
        """Return every client, the driving one first."""
        watching = list(self._watching.copy().values())
        return watching if self._driving is None else [self._driving, *watching]

    def drives_for(self, operation: int) -> bool:
        """Return whether the driving client is there, knows spans, and is of the user who asks an operation.

        The records of a program are its user's: no guest of the session gets it, and no guest's program is asked.
        """
        driving = self._driving
        asks = self._watching.get(operation // WATCHER_IDS, driving)
        if driving is None or asks is None:
            return False
        return driving.knows_traces and not driving.away and driving.guest == asks.guest

    def guest_of(self, operation: int) -> str | None:
        """Return the user of the client that asks an operation; None if it is the session's own user."""
        asks = self._watching.get(operation // WATCHER_IDS, self._driving)
        return None if asks is None else asks.guest

    def say_goodbye(self, message: Message) -> None:
        for client in self.all():
            client.say_goodbye(message)

    def disconnected(self, client: Client, connection: Carrier) -> None:
        """Note that a connection of a client is gone. Another may follow."""
        client.sender.detach(connection)
        client.sender.detach_bulk(connection)
        client.carry_by(None, instead_of=connection)
        if client.bulk is connection:
            client.bulk = None

    def send_to(self, client: Client, message: Message) -> None:
        if client.number:
            self._send_watcher(client, message)
        else:
            client.sender.put(message)

    def send(self, message: Message, eager: bool = True, key: OrderKey = None) -> None:
        """Send an answer to the client that asked, or a notice to every client."""
        if self._watching:
            if message.kind in NOTICES:
                for watcher in self._watching.copy().values():
                    self._send_watcher(watcher, message)
            elif message.id >= WATCHER_IDS:
                watcher_or_none = self._watching.get(message.id // WATCHER_IDS)
                if watcher_or_none is not None:
                    self._send_watcher(watcher_or_none, message)
                if message.kind in ANSWERS and self._driving is not None and self.caller_is_gone(message.id):
                    self._driving.operations.unclaimed(message)
                return
        client = self._driving
        if client is None:
            return
        if message.kind in ANSWERS and message.id < client.first_id:
            client.operations.unclaimed(message)
            return
        if client.away or (message.parts and message.size >= STORED_FROM):
            message = self._stored(client, message)
        if not (client.sender.put(message, key) if eager else client.sender.gather(message)):
            client.operations.unclaimed(message)  # the client is being disconnected at this moment

    def caller_is_gone(self, operation: int) -> bool:
        """Return whether an operation is of a client in mode ``call`` that has no connection, or was dropped."""
        client = self._watching.get(operation // WATCHER_IDS)
        return operation >= WATCHER_IDS and (client is None or (client.away and client.mode == "call"))

    def _stored(self, client: Client, message: Message) -> Message:
        """Return a message as it waits for the driving client: on the disk if that takes too little.

        The result of a client that is away is dropped if there is no room, and the client is told which it was.
        """
        answers = client.away and message.kind in ANSWERS
        if answers:
            client.unsent.setdefault(message.id, client.operations.unread.request_of(message))
        if not client.crowded:
            return message
        kept = self._results.keep(message)
        if kept is None and answers:
            kept = client.operations.dropped(message)
        if kept is None:
            return message
        client.operations.unread.replace(kept)
        return kept

    def has_room(self) -> bool:
        """Whether printed lines may join what waits for the driving client."""
        return self._driving is None or self._driving.stream.outbox.pending_bytes < LOG_ROOM

    def _send_watcher(self, client: Client, message: Message) -> None:
        if text := self._why_too_slow(client):
            logger.warning("client %d, which does not drive, takes too little and is disconnected", client.number)
            self._watching.pop(client.number, None)
            error = WatcherTooSlow(text)
            self._too_slow.append((client.name, error))
            # The thread is separate because it waits for the client to take its last messages.
            threading.Thread(target=client.end, args=(error,), name="disconnect", daemon=True).start()
        else:
            client.sender.put(message)

    def _why_too_slow(self, client: Client) -> str:
        """Return why a client that does not drive is disconnected, or nothing."""
        own = client.stream.outbox.pending_bytes
        if own <= WATCHER_ROOM:
            return ""
        if client.mode != "call":
            return f"over {WATCHER_ROOM >> 20} MiB waited for this client, which watches"
        callers = [each for each in list(self._watching.values()) if each.mode == "call"]
        waiting = [size for each in callers if (size := each.stream.outbox.pending_bytes)]
        if sum(waiting) <= CALLER_ROOM or own * len(waiting) <= CALLER_ROOM:
            return ""
        return f"over {CALLER_ROOM >> 20} MiB waited for clients that call, and more than its share for this one"

    def flush(self) -> None:
        client = self._driving
        if client is not None:
            client.sender.flush()
