"""A session's connection, which reconnects when its transport is lost.

A reader thread, or a thread that waits for an answer, reads from it; see `loom_proxy.session.read_loop`.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import math
import os
import secrets
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

from loom.errors import (
    ConnectionLost,
    DriverUnavailable,
    InForkedChild,
    LoomError,
    SessionClosed,
    SessionInUse,
    SessionRestarted,
    TokenRevoked,
    UnknownSession,
    because,
    describe_error,
)
from loom.rest_client import normalise_url
from loom.wire.bodies import EndSession, Notice, Probed, SessionEnded
from loom.wire.frames import unpack_texts
from loom.wire.handshake import CAPABILITIES, Hello, error_from_refusal
from loom.wire.lost_frames import ConnectionWatch
from loom.wire.messages import Kind, Message
from loom.wire.sender import FrameSender
from loom.wire.stream import OutOfStep, Stream
from loom_proxy.mesh.rank_states import UNLOGGED
from loom_proxy.session.bulk_lane import BulkConnection
from loom_proxy.session.calls import Calls
from loom_proxy.session.events import Event, SessionEvents
from loom_proxy.session.read_loop import ReadLoop
from loom_proxy.session.spans import send_spans
from loom_proxy.session.transport_and_handshake import CLIENT, RECONNECT, TRANSIENT, Address, Handshake, connect
from loom_proxy.transport.base import Transport
from loom_proxy.transport.websocket import WebSocketTransport

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 10.0  # seconds that a gateway has to answer an attempt to reconnect

WEBSOCKET_AGAIN = 3
"""Attempts by WebSocket, if it worked before, until HTTP is tried: a network that comes back may break a few."""

LINGER_MARGIN = 30.0
"""Seconds of attempts to reconnect beyond the time at which the session should have ended."""

LEAVE_TIMEOUT = 2.0  # seconds to send the rest of the messages when the program leaves

MOVES_WITHIN = 5.0
"""Seconds in which some of a large message has to leave or arrive, for the program that leaves to wait for it."""


class Connection:
    """One client's connection to one session.

    The owner first subscribes to messages with `on`, then calls `start`.
    """

    def __init__(self, handshake: Handshake, address: Address, stream: Stream) -> None:
        self.url = address.url
        self.address = address
        self.events = SessionEvents()
        self._first_frames: Sequence[bytes] = handshake.frames  # frames that came with the handshake, until `start`
        self._transport = handshake.transport
        self._stream = stream
        self._sender = FrameSender(stream, "loom-writer")
        self.calls = Calls(handshake.welcome, stream, self._sender, self.events)
        self.welcome = handshake.welcome
        self._opened = time.monotonic()
        self.ended = self.calls.ended
        """Set when the connection is over, for whatever reason."""
        self._handlers: dict[int, Callable[[Message], None]] = {}
        """The function that takes the messages of each kind."""
        self.on(Kind.RESULT, self.calls.take_result)
        self.on(Kind.ERROR, self.calls.take_error)
        self.on(Kind.EVENT, self._take_notice)
        self.on(Kind.REFUSE, self._take_refusal)
        self.on(Kind.ENDED, self._take_end)
        self.on(Kind.PROBED, self._take_answer)
        self._end_callbacks: list[Callable[[LoomError], None]] = []
        self._fork_callbacks: list[Callable[[LoomError], None]] = []
        self.forked = False
        """True if this process is a forked child of the one to which the connection belongs."""
        self._end_reason: LoomError | None = None
        """The reason that the other side gave for ending the connection, if any."""
        self._ending = False  # whether the session's end was asked for
        self._leaving = threading.Event()  # set when the program leaves, which ends attempts to reconnect
        self.gone: Callable[[], str | None] = lambda: None
        """Returns why there is no gateway to reconnect to any more; None if there may be one."""
        self.unanswered: Callable[[], None] = lambda: None
        """Called after each attempt to reconnect that fails."""
        knows_probes = "probes" in handshake.welcome.capabilities
        self._watch = ConnectionWatch(stream) if knows_probes else None
        """The watch over lost frames; None if the driver is too old for it."""
        self._moved = (0, 0)  # frames received and acknowledged when the last connection was lost
        self._futile = 0  # lost connections in a row that had moved nothing; each waits longer
        self._bulk = self._second_connection()
        self._attach(handshake.transport, 0, 0)
        self._read_loop = self.calls.read_loop = ReadLoop(self, None if self._bulk is None else self._bulk.waker)
        self._reader = threading.Thread(target=self._read_loop.run, name="loom-reader", daemon=True)

    @classmethod
    def open(cls, address: Address, hello: Hello, timeout: float) -> Connection:
        """Connect to a gateway and open a session, or attach to a living one.

        Try again, for ``timeout`` seconds, if a connection is cut in the handshake. A new session has a made-up
        name, so that the gateway opens it once, however often it is asked.
        """
        until = time.monotonic() + timeout
        hello = replace(hello, capabilities=_capabilities())
        if hello.session is None:
            hello = replace(hello, opening=secrets.token_hex(16))
        cut: ConnectionLost | None = None
        for delay in RECONNECT:
            time.sleep(delay)
            try:
                handshake = connect(address, hello, timeout)
                return cls(handshake, address, Stream(lanes="lanes" in handshake.welcome.capabilities))
            except ConnectionLost as error:
                cut = error
            except SessionInUse:
                if cut is None:  # else perhaps by the connection that was cut, as the gateway has not noticed
                    raise
            if time.monotonic() >= until:
                raise cut
            if hello.session is None:
                hello = replace(hello, take_over=True)  # from the connection that was cut
        raise AssertionError("unreachable")

    def anew(self, timeout: float) -> Connection:
        """Attach to the session's next driver, after this one's connection has ended with `SessionRestarted`."""
        hello = Hello(client=CLIENT, session=self.welcome.session, mode=self.welcome.mode)
        until = time.monotonic() + timeout
        for delay in RECONNECT:
            time.sleep(delay)
            try:
                made = Connection.open(self.address, hello, timeout)
                break
            except (*TRANSIENT, DriverUnavailable):
                if self.gone() is not None or time.monotonic() > until:
                    raise
                self.unanswered()
        made.gone, made.unanswered = self.gone, self.unanswered
        made.calls.progress, made.calls.environment = self.calls.progress, self.calls.environment
        return made

    def move_to(self, url: str) -> None:
        """Reconnect to another URL of the gateway from now on."""
        self.url = normalise_url(url)
        self.address = self.address._replace(url=self.url)

    def let_go(self, owner: int) -> None:
        """Leave the session to the process ``owner``, of which this one is a forked child.

        Nothing that the two share is touched from here on: neither the sockets nor the threads' locks.
        """
        self.forked = True
        self._transport.let_go()
        if self._bulk is not None:
            self._bulk.let_go()
        error = InForkedChild(
            f"session {self.welcome.session!r} belongs to process {owner}, of which this is a forked child: open a "
            f"session here with loom.connect(), or call the actors of that one with "
            f"loom.connect(session={self.welcome.session!r}, mode='call')"
        )
        self.calls.let_go(error)
        self.ended = self.calls.ended = threading.Event()
        self.ended.set()
        self.events.let_go(Event("ended", {"reason": str(error)}, error))
        for callback in self._fork_callbacks:
            callback(error)

    def start(self) -> None:
        """Start to take messages, after all subscriptions with `on`."""
        _connections.add(self)
        frames, self._first_frames = self._first_frames, ()
        self._take_all(frames)
        self._reader.start()
        if self._bulk is not None:
            self._bulk.start()

    def on(self, kind: Kind, take: Callable[[Message], None]) -> None:
        """Call a function with each message of a kind, in the thread that reads from the connection."""
        self._handlers[int(kind)] = take

    def on_fork(self, callback: Callable[[LoomError], None]) -> None:
        """Call a function with an error in each forked child of this process."""
        self._fork_callbacks.append(callback)

    def on_end(self, callback: Callable[[LoomError], None]) -> None:
        self._end_callbacks.append(callback)

    @property
    def away(self) -> bool:
        return self.calls.away

    @property
    def transport_kind(self) -> str:
        return self._transport.kind

    def _second_connection(self) -> BulkConnection | None:
        """Return the bulk lane's connection, not yet started; None if there can be none."""
        if self._stream.bulk is None or self.calls.watching or not hasattr(select, "poll"):
            return None
        return BulkConnection(self._stream, self._sender, self._connect_bulk, self._break, self._watch is not None)

    def _connect_bulk(self) -> Handshake:
        return connect(self.address, replace(self._hello(), lane=1), CONNECT_TIMEOUT, "websocket")

    def _break(self, error: LoomError) -> None:
        """End the connection because of a frame that makes no sense."""
        self._end_reason = error
        self._transport.close()

    def fileno(self) -> int:
        return self._transport.fileno()

    def read(self, wait: bool) -> bool:
        """Take in received frames; return whether to read on. The read loop calls this in one thread at a time."""
        goes_on = False
        broken: LoomError | None = None
        try:
            frames = self._transport.receive(wait)
            if self._bulk is not None and self._bulk.waker.woken:
                self._bulk.waker.clear()
                self._take(self._stream.arrived())  # from the bulk lane's connection
            if frames:
                self._take_all(frames)
                self.calls.flush()
                goes_on = True
            elif frames is not None:
                goes_on = not wait or self._is_alive()
            if self._watch is not None and goes_on:
                self._look_after(self._watch)
            if not goes_on and self._end_reason is None and not self._leaving.is_set():
                self.calls.away = goes_on = True
        except OutOfStep as error:
            logger.warning("the connection to %s is made anew: %s", self.url, error)
            self.calls.away = goes_on = True
        except LoomError as error:
            if self._renews(error):
                self.calls.away = goes_on = True
            else:
                broken = error
        except BaseException as error:
            broken = self._broken(error)
            raise
        finally:
            if not goes_on:
                self._fail(self._end_reason or broken or ConnectionLost(f"the connection to {self.url} broke"))
        return goes_on

    def _look_after(self, watch: ConnectionWatch) -> None:
        now = time.monotonic()
        # A tunnel has no time at which it was heard of: its requests fail by themselves.
        watch.check(now, getattr(self._transport, "heard", now))
        if watch.due(now):
            self._sender.put_behind(lambda: watch.question(now))

    def _take_answer(self, message: Message) -> None:
        if self._watch is not None:
            self._watch.answered(Probed.from_body(message.body))

    def _is_alive(self) -> bool:
        if self._stream.untold:
            self._acknowledge()
        return self._transport.is_alive()

    def _acknowledge(self) -> None:
        self._sender.put_raw(self._transport.encode(self._stream.acknowledgement()))

    def reconnect(self) -> bool:
        self._sender.detach()
        self._transport.close()
        lost = time.monotonic()
        self.events.add(Event("disconnected", {"url": self.url}))
        try:
            handshake = self._connect_again(lost)
            self._attach(handshake.transport, handshake.welcome.received, handshake.welcome.received_bulk)
            self._take_all(handshake.frames)
        except OutOfStep as error:
            logger.debug("the next connection to %s has lost frames, too: %s", self.url, error)
            return True  # and so `reconnect` is called again
        except LoomError as error:
            self._fail(self._end_reason or error)
            return False
        except BaseException as error:
            self._fail(self._broken(error))
            raise
        self.calls.away = False
        self.events.add(Event("resumed", {"seconds": time.monotonic() - lost}))
        return True

    def _broken(self, error: BaseException) -> ConnectionLost:
        """Return what to tell of an error of this program's own, which ends the thread that reads."""
        return ConnectionLost(f"the connection to {self.url} broke of itself: {describe_error(error)}")

    def _connect_again(self, lost: float) -> Handshake:
        patience = self._patience()
        moved = self._stream.received, self._stream.acknowledged
        self._futile = self._futile + 1 if moved == self._moved else 0
        self._moved = moved
        for attempt, delay in enumerate(itertools.islice(RECONNECT, self._futile, None)):
            hello = self._hello()
            if self._leaving.wait(delay):
                raise ConnectionLost(f"this program left while the connection to {self.url} was lost")
            try:
                worked = self.address.transport == "auto" and self._transport.kind == "websocket"
                kind = "websocket" if worked and attempt < WEBSOCKET_AGAIN else None
                return connect(self.address, hello, CONNECT_TIMEOUT, kind)
            except TRANSIENT as error:
                gone = self.gone()
                if gone is not None:
                    raise ConnectionLost(f"the connection to {self.url} broke: {gone}") from error
                if time.monotonic() - lost > patience:
                    raise ConnectionLost(
                        f"the connection to {self.url} broke and was not made again within {patience:g} s: {error}"
                    ) from error
                self.unanswered()
                logger.debug("connecting to %s again: %s", self.url, error)
        raise AssertionError("unreachable")

    def _patience(self) -> float:
        """Return the seconds for which to try to reconnect: as long as the session can live, unless told."""
        if self.address.patience is not None:
            return self.address.patience
        welcome, passed = self.welcome, time.monotonic() - self._opened
        most, passed = (welcome.linger, 0.0) if welcome.most is None else (welcome.most, passed)
        return max(most - passed, 0.0) + LINGER_MARGIN if most else math.inf

    def _hello(self) -> Hello:
        bulk = self._stream.bulk
        return Hello(
            capabilities=_capabilities(),
            client=CLIENT,
            session=self.welcome.session,
            mode=self.welcome.mode,
            stream=self.welcome.stream,
            received=self._stream.received,
            received_bulk=0 if bulk is None else bulk.received,
        )

    def _attach(self, transport: Transport, received: int, received_bulk: int) -> None:
        self._transport = transport
        if self._bulk is not None:
            if isinstance(transport, WebSocketTransport):
                transport.listen_for(self._bulk.waker)
            self._bulk.allow(isinstance(transport, WebSocketTransport))
        # Control frames take their turn among the sender's frames instead of going out in the middle of one.
        transport.send_control = self._sender.put_raw  # type: ignore[method-assign]
        if self._watch is not None:
            self._watch.connected(time.monotonic(), received, received_bulk)
        self._sender.attach(transport, received, received_bulk)

    def _take_all(self, frames: Sequence[bytes]) -> None:
        for data in frames:
            self._take(self._stream.receive(data))

    def _take(self, messages: Sequence[Message]) -> None:
        handlers = self._handlers
        for message in messages:
            take = handlers.get(message.kind)
            if take is not None:  # else a kind that this version does not know
                take(message)

    def _take_refusal(self, message: Message) -> None:
        error = error_from_refusal(message)
        if not self._renews(error):  # otherwise the connection is over, and the next one shows the next token
            self._end_reason = error

    def _renews(self, error: LoomError) -> bool:
        """Return whether an error is the end of a token that has a successor."""
        return isinstance(error, TokenRevoked) and callable(self.address.token)

    def _take_end(self, message: Message) -> None:
        reason = SessionEnded.from_body(message.body).reason
        self._end_reason = SessionClosed(because(f"session {self.welcome.session!r} has ended", reason))

    def _take_notice(self, message: Message) -> None:
        name, details = Notice.from_body(message.body).name, unpack_texts(message.parts[0])
        if name == "collect_spans":
            send_spans(self.calls, details)
            return
        self.calls.states.event(name, details)
        if name not in UNLOGGED:
            self.events.add(Event(name, details))

    def _fail(self, error: LoomError) -> None:
        if self._ending and isinstance(error, UnknownSession):  # it has ended as asked, and the answer was lost
            error = SessionClosed(self._closed_here)
        if isinstance(error, SessionRestarted):
            error.meshes, error.unanswered = tuple(self.calls.meshes.by_name()), self.calls.unanswered
        error = self.calls.fail(error)
        for callback in self._end_callbacks:
            callback(error)
        self.events.close(Event("ended", {"reason": str(error)}, error))
        self._transport.close()
        if self._bulk is not None:
            self._bulk.close()

    @property
    def _closed_here(self) -> str:
        return f"session {self.welcome.session!r} was closed here"

    def end_session(self, timeout: float) -> None:
        if self.calls.error is None:
            self._ending = True
            self.calls.send(EndSession())
            self.calls.flush()
            self.ended.wait(timeout)
        self.leave(self._closed_here)

    @property
    def has_rest(self) -> bool:
        """True if the connection goes on and something has not been sent."""
        return self.calls.error is None and self._sender.has_rest

    def send_rest(self) -> bool:
        """Send what the program has asked for before it leaves, as long as some of it moves.

        Return whether nothing is left. A line that has stopped is warned of.
        """
        if self.calls.error is not None:
            return False
        if not self.away:
            self.calls.reads.tell(at_once=True)
        if not self.has_rest or (not self.away and self._sender.drain_while_it_moves(MOVES_WITHIN)):
            return True
        logger.warning(
            "this program leaves session %r while its connection is lost or stands still: "
            "the session does not begin the last operations, as far as it has not got them",
            self.welcome.session,
        )
        return False

    def leave(self, reason: str) -> None:
        """Close the connection without ending the session."""
        if self.calls.error is None and not self.away:
            self.calls.reads.tell(at_once=True)
            self._sender.drain(LEAVE_TIMEOUT)
            self._acknowledge()
            self._sender.drain(LEAVE_TIMEOUT)
        self.calls.over(SessionClosed(reason))
        self._leaving.set()
        self._transport.close()
        if self._bulk is not None:
            self._bulk.close()
        if self._reader.is_alive() and self._reader is not threading.current_thread():
            self._reader.join(5.0)


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
_owner = os.getpid()


def _let_go_in_child() -> None:
    global _owner
    for connection in list(_connections):
        if not connection.forked:
            connection.let_go(_owner)
    _owner = os.getpid()


def _send_rest_of_all() -> None:
    """Send what the program has asked for, such as a detached run with large arguments, before it ends."""
    for connection in list(_connections):
        if not connection.forked:
            is_rest = connection.has_rest
            if connection.send_rest() and is_rest:
                connection.calls.ask_life(LEAVE_TIMEOUT)  # an answer shows that all has arrived


os.register_at_fork(after_in_child=_let_go_in_child)
atexit.register(_send_rest_of_all)


def _capabilities() -> Sequence[str]:
    """Return this side's capabilities. ``LOOM_LANES=1`` leaves out the bulk lane and its connection."""
    two_lanes = os.environ.get("LOOM_LANES") != "1"
    return CAPABILITIES if two_lanes else [name for name in CAPABILITIES if name != "lanes"]
