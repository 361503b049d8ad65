"""The connections of threadlets, of which none is believed a byte before it has shown a key, and the `Intake`.

The intake shares the weaver's event loop between users, and between what they send and everything else. An event
loop handles all sockets with data before it does anything else, and libuv looks for more data up to 48 times before
that. With thousands of threadlets on a busy host, or with one session that floods the weaver with questions, this
takes seconds, in which nobody is answered, no commit begins, and no page gets anything. So the intake handles data
for `TURN` seconds at a time, a piece of one user, then a piece of the next. The rest waits for the next turn. If
much of a connection waits, nothing more is read from it until then: peers that send more than the weaver can take
wait in their own sockets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from loom.control.frame import MAX_FRAME, MAX_HELLO, pack, unpack
from loom.control.handshake import FirstFrame, Refusal, ThreadletHello
from loom.errors import AuthenticationError, LoomError, ProtocolMismatch
from loom.process.identity import identity
from loom.process.listen import Strangers
from loom.weaver.connection import FrameConnection
from loom.weaver.keys import Grant
from loom.weaver.replicas import Replica
from loom.weaver.server.local_processes import find_process, process_descriptor
from loom.weaver.server.user_weaver import ThreadletPeer, UserWeaver
from loom.weaver.server.users import Users
from loom.wire.length_prefix import FrameSplitter

_log = logging.getLogger(__name__)

TURN = 0.005
"""Seconds for which data is handled before the event loop does other work."""

MAX_UNHANDLED = 1 << 16
"""Bytes of one source that may wait before its connection is read no more: to stop and go on costs system calls."""

MAX_WAITING = 32 << 20
"""Bytes that may wait for the next turns; what comes on top of them is handled at once."""


class IntakeSource(ABC):
    """A connection that gives its data to an `Intake`."""

    user: str = ""
    """The user among whose connections this one waits; empty for the gateway, and while it is not known."""
    unhandled: bytes = b""
    """The entries that wait for a turn, and were not begun. It belongs to the intake, as the next three do."""
    begun: Iterator[object] | None = None
    """The handling of data that waits for another turn."""
    stopped: bool = False
    """True if nothing more is read from the connection."""
    at_end: Callable[[], object] | None = None
    """The function to call once everything is handled, if no more will come."""

    @property
    def waits(self) -> bool:
        """True if something of this source waits for a turn."""
        return bool(self.unhandled) or self.begun is not None

    @abstractmethod
    def handle(self, data: bytes) -> Iterator[object]:
        """Handle data in the order in which it was read, in pieces, and yield between two of them.

        The first piece may be handled before the iteration begins.
        """

    @abstractmethod
    def read(self, more: bool) -> None:
        """Read from the connection, or stop reading."""

    @abstractmethod
    def abort(self) -> None:
        """Close the connection at once."""


class Intake:
    """Handles data in turns: the users' one after the other, the oldest of each user first.

    Args:
        clock: seconds, which never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._waiting: dict[str, deque[IntakeSource]] = {}
        """The sources that wait, by user; the user whose turn is next comes first."""
        self._bytes = 0
        """The bytes that wait, and were not begun."""
        self._end: float | None = None
        """When the turn ends; None before the first data of a turn."""

    def take(self, source: IntakeSource, data: bytes) -> None:
        """Handle data now, or in later turns."""
        now = self._clock()
        if self._end is None:
            self._end = now + TURN
            asyncio.get_running_loop().call_soon(self._next_turn)
        waits = source.begun is not None or source.unhandled
        if waits or (now >= self._end and self._bytes < MAX_WAITING):
            self._put_off(source, data)
            return
        work = source.handle(data)
        for _ in work:
            if self._clock() >= self._end:
                source.begun = work
                self._wait(source)
                return

    def finish(self, source: IntakeSource, at_end: Callable[[], object]) -> None:
        """Call ``at_end`` when what waits of a source is handled. No more of it will come."""
        if source.waits:
            source.at_end = at_end
        else:
            at_end()

    def _put_off(self, source: IntakeSource, data: bytes) -> None:
        if not source.waits:
            self._wait(source)
        source.unhandled += data
        self._bytes += len(data)
        if len(source.unhandled) > MAX_UNHANDLED and not source.stopped:
            source.stopped = True
            source.read(False)

    def _wait(self, source: IntakeSource) -> None:
        self._waiting.setdefault(source.user, deque()).append(source)

    def _next_turn(self) -> None:
        self._end = self._clock() + TURN
        while self._waiting:
            user, sources = next(iter(self._waiting.items()))
            del self._waiting[user]
            source = sources.popleft()
            if sources:
                self._waiting[user] = sources  # after the other users
            self._handle_piece(source)
            if self._clock() >= self._end:
                break
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next_turn)
        else:
            self._end = None

    def _handle_piece(self, source: IntakeSource) -> None:
        """Handle a piece of what waits of a source, which then waits for the next one, or is read again."""
        try:
            if source.begun is None:
                source.begun = source.handle(self._claim(source))
            if next(source.begun, self) is self:  # it has no further piece
                source.begun = None
        except Exception:  # noqa: BLE001 - a bug of Loom, of which the other sources must not hear
            _log.exception("a peer of the weaver is disconnected: what it sent cannot be handled")
            self._claim(source)
            source.begun = None
            source.abort()
        if source.waits:
            self._waiting.setdefault(source.user, deque()).append(source)
        elif source.at_end is not None:
            source.at_end()
        elif source.stopped:
            source.stopped = False
            source.read(True)

    def _claim(self, source: IntakeSource) -> bytes:
        data, source.unhandled = source.unhandled, b""
        self._bytes -= len(data)
        return data


HELLO_WITHIN = 10.0
"""Seconds that a peer has to show its key."""

MOST_STRANGERS = 4096
"""Connections of one socket that have not shown a key: as many threadlets may come at once after a restart."""


class Peers:
    """The open connections, and the turns in which their data is handled."""

    def __init__(self) -> None:
        self.intake = Intake()
        self.links: set[FrameConnection] = set()
        self.callers: set[FrameConnection] = set()
        self.links_without_key: Strangers[FrameConnection] = Strangers(MOST_STRANGERS, FrameConnection.abort)
        self.callers_without_key: Strangers[FrameConnection] = Strangers(MOST_STRANGERS, FrameConnection.abort)

    def __bool__(self) -> bool:
        return bool(self.links or self.callers)

    def close(self) -> None:
        for connection in [*self.links, *self.callers]:
            connection.close()


_NOTHING_MORE: Iterator[None] = iter(())


class ThreadletLink(FrameConnection, ThreadletPeer, IntakeSource):
    """The connection of a threadlet. It belongs to the weaver of a user once its hello has shown a key.

    Args:
        requests: returns the connection to go on with if the hello is one of a connection for requests; None: such
            a hello is refused.
    """

    def __init__(self, users: Users, peers: Peers, requests: Callable[[], FrameConnection] | None = None) -> None:
        super().__init__(MAX_HELLO)
        self._requests = requests
        self.process: psutil.Process | None = None
        self._users = users
        self._peers = peers
        self._first: FirstFrame[Grant] | None = FirstFrame(MAX_HELLO, users.keys.read)
        """The beginning of the hello; None once its key is good."""
        self._unread = 0
        """Bytes of a refused hello that have not come. They are passed over, so that the refusal is not lost."""
        self._refused = False
        self._of: UserWeaver | None = None
        self._introduced: Replica | None = None
        """The replica of the hello, which `_introduce` handles once."""
        self._hello_timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._peers.links.add(self)
        self._peers.links_without_key.add(self)
        self._hello_timer = asyncio.get_running_loop().call_later(HELLO_WITHIN, self.close)

    @property
    def has_unheard(self) -> bool:
        return self.waits

    def data_received(self, data: bytes) -> None:
        if self._unread:
            self._pass_over(len(data))
            return
        if self._first is not None:
            try:
                first = self._first.feed(data)
            except LoomError as error:
                self._refuse(error)
                return
            if first is None:
                return
            grant, data = first
            if self._first.asks and self._requests is not None:
                return self._become(self._requests(), data)
            self.user = grant.user or ""
            self._first = None
            self._peers.links_without_key.discard(self)
        self._peers.intake.take(self, data)

    def read(self, more: bool) -> None:
        if not self._refused:
            super().read(more)

    def handle(self, data: bytes) -> Iterator[None]:
        if self._refused:
            return _NOTHING_MORE
        body = self.splitter.whole(data)
        if body is None:
            return self._handle_pieces(data)
        self._take(body)
        return _NOTHING_MORE

    def _handle_pieces(self, data: bytes) -> Iterator[None]:
        try:
            for number, body in enumerate(self.splitter.feed(data)):
                if number:
                    yield
                self._take(body)
                if self._refused:
                    return
        except ProtocolMismatch as error:
            self._refuse(error)
            if self._of is not None:
                self._of.plan_commit()

    def _take(self, body: bytes) -> None:
        try:
            if self._of is None:
                self._take_hello(unpack(body))
            else:
                self._of.weaver.receive(self, body, self._users.clock())
            if self._introduced is None and self.replica is not None:
                self._introduce(self.replica)
        except LoomError as error:
            self._refuse(error)
        if self._of is not None:
            self._of.plan_commit()

    def connection_lost(self, exc: Exception | None) -> None:
        self._hello_timer.cancel()
        self._peers.links.discard(self)
        self._peers.links_without_key.discard(self)
        self._peers.intake.finish(self, self._lost)

    def _become(self, other: FrameConnection, data: bytes) -> None:
        """Go on as a connection for requests, with all that has come."""
        self._hello_timer.cancel()
        self._peers.links.discard(self)
        self._peers.links_without_key.discard(self)
        self.transport.set_protocol(other)
        other.connection_made(self.transport)
        other.data_received(data)

    def _lost(self) -> None:
        if self._of is not None:
            self._of.lost(self)

    def _take_hello(self, frame: list[Any]) -> None:
        hello = ThreadletHello.from_body(frame)
        grant = self._users.keys.read(hello.key)
        if grant.user is None:
            raise AuthenticationError("the key is the gateway's: a threadlet shows one of a user or a session")
        self._of = self._users.of(grant.user)
        self._of.weaver.registration.register(self, hello, self._users.clock(), grant.session)

    def _pass_over(self, size: int) -> None:
        """Drop bytes of a refused hello: if they were left unread, the kernel would drop the refusal."""
        self._unread = max(self._unread - size, 0)
        if not self._unread:
            self.close()

    def _refuse(self, error: LoomError) -> None:
        if self._of is not None:
            self._of.weaver.outbox.refuse(self, error.code, str(error))
        else:
            self.write(pack(Refusal(error.code, str(error)).to_body()))
            if self._first is not None and self._first.missing:
                self._unread = self._first.missing
                return
            self.close()
        self.splitter = FrameSplitter(0)
        self.read(False)
        self._refused = True

    def _introduce(self, replica: Replica) -> None:
        self._introduced = replica
        self.splitter.limit = MAX_FRAME
        self._hello_timer.cancel()
        ours, theirs = self.transport.get_extra_info("sockname"), self.transport.get_extra_info("peername")
        if ours and theirs and ours[0] == theirs[0]:
            self.process, replica.process = find_process(replica.pid), identity(replica.pid)
            self.descriptor = process_descriptor(self.process)
