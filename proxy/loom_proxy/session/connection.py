"""A session seen from the laptop: operations go out, answers find their futures.

Calls made while others are on their way are gathered: they go out together when somebody waits for one of them,
when an answer comes, when there are many, or when the writer thread gets its turn, whichever is first. Answers are
taken in by a reader thread, or by a thread that waits for one: see `loom_proxy.session.read_loop`.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from loom.coordinates import for_cluster
from loom.errors import (
    ConnectionLost,
    LoomError,
    ReadOnlySession,
    SessionClosed,
    TooLarge,
)
from loom.shape import Extent, Point
from loom.wire.codec import Decoder, Encoder, Made
from loom.wire.handshake import CAPABILITIES, Hello, error_from_refusal
from loom.wire.messages import READING, Buffer, Kind, Message
from loom.wire.mux import BARRIER, OrderKey
from loom.wire.sender import COPIED, FrameSender, borrowed_bytes, with_copies
from loom.wire.stream import Stream
from loom.wire.texts import unpack_texts
from loom_proxy.display import progress
from loom_proxy.futures.future import FutureProxy
from loom_proxy.futures.results import Failure, Raise, StreamFutures, Success, error_of, text_of
from loom_proxy.logs import LogReceiver
from loom_proxy.mesh.rank_states import ON_MESHES, UNLOGGED, MeshStates
from loom_proxy.mesh.values import ValueMeshProxy
from loom_proxy.ports.ports import Ports
from loom_proxy.runs import KnownRuns
from loom_proxy.session.bulk_lane import BulkConnection
from loom_proxy.session.events import Event, EventLog
from loom_proxy.session.handshake import TRANSIENT, Dialled, client_name, delays, dial
from loom_proxy.session.interrupts import Uninterrupted
from loom_proxy.session.read_loop import Reading
from loom_proxy.transport.transports import PING_AFTER, SILENCE, Transport
from loom_proxy.transport.websocket import WebSocketTransport

__all__ = ["Address", "Connection"]

logger = logging.getLogger(__name__)

DIAL_TIMEOUT = 10.0
"""Seconds that a gateway has to answer when a lost connection is made again."""

WEBSOCKET_AGAIN = 3
"""Attempts at a WebSocket where there was one, before HTTP is tried: a network that is just coming back may break a
few."""

LINGER_MARGIN = 30.0
"""Seconds for which a session is looked for after it should have ended for want of a client."""

LEAVE_TIMEOUT = 2.0
"""Seconds that what is still to be sent has when the program leaves."""

_ANSWERS = frozenset({Kind.RESULT, Kind.ERROR})


class Address(NamedTuple):
    """Where a session's gateway is, and for how long it is looked for again."""

    url: str
    """As `loom_proxy.transport.websocket.normalise_url` gives it."""
    token: str | None
    patience: float | None = None
    """Seconds for which a lost connection is tried again; None: for as long as the session can live."""
    ca: str | None = None
    """As `loom.tls.client_context`."""
    transport: str = "auto"
    """As `loom_proxy.transport.transports.open_transport` takes it, each time: the next network may be another."""


class Connection:
    """One client's connection to one session, over one transport after the other."""

    def __init__(self, dialled: Dialled, address: Address, stream: Stream) -> None:
        url, welcome = address.url, dialled.welcome
        self.url = url
        self.welcome = welcome
        self.watching = welcome.mode == "watch"
        """Whether this client may only look on."""
        self.encoder = Encoder(
            ship_project=True,
            peer_python=welcome.python,
            session=self,
            swaps=dict.fromkeys((Extent, Point, ValueMeshProxy), for_cluster),
        )
        self.decoder = Decoder(maker=self._make)
        self.make_proxy: Callable[[Made], Any] | None = None
        """Makes the proxy of a mesh that came in a result."""
        self.wholes: WeakValueDictionary[int, Any] = WeakValueDictionary()
        """The whole meshes that have proxies, by id."""
        self._forgotten: deque[int] = deque()
        self.events = EventLog()
        self.logs = LogReceiver()
        """Shows the lines that come."""
        self.runs = KnownRuns(self)
        self.progress: bool | None = None
        """Whether long waits are shown; see `loom_proxy.display.progress.wanted`."""
        self.states = MeshStates()
        """What is known of the meshes' elements."""
        self.meshes: dict[str, Any] = {}
        """Proxies of the session's meshes by name."""
        self.ports = Ports(self)
        """The ports that messages of the cluster come to."""
        self._address = address
        self._transport = dialled.transport
        self._stream = stream
        self._ids = itertools.count(welcome.next_id)
        self._waiting: dict[int, FutureProxy[Any] | StreamFutures] = {}
        self._error: LoomError | None = None
        self.ended = threading.Event()
        """Set when the connection is over, for whatever reason."""
        self._lock = threading.Lock()
        self._sender = FrameSender(stream, "loom-writer")
        self._last_words: LoomError | None = None
        """Why the other side ended the connection, if it said so."""
        self._pinged = False
        """Whether the other side, which is silent, has been asked for a word."""
        self.away = False
        """Whether the connection is lost, and is to be made again."""
        self._leaving = threading.Event()
        self.gone: Callable[[], str | None] = lambda: None
        """Says why there is nobody to connect to again, if it knows."""
        self.unanswered: Callable[[], None] = lambda: None
        """Told of each attempt to connect again that fails."""
        self._bulk = self._second_connection()
        self._attach(dialled.transport, 0, 0)
        self.reading = Reading(self, None if self._bulk is None else self._bulk.bell)
        self._reader = threading.Thread(target=self.reading.run, name="loom-reader", daemon=True)

    @classmethod
    def open(cls, address: Address, hello: Hello, timeout: float) -> Connection:
        """Connect to a gateway and open a session, or attach to a living one.

        Raises:
            LoomError: as `loom_proxy.session.handshake.dial`.
        """
        hello = replace(hello, capabilities=_capabilities())
        dialled = dial(address.url, address.token, hello, timeout, address.ca, address.transport)
        connection = cls(dialled, address, Stream(lanes="lanes" in dialled.welcome.capabilities))
        connection._take_all(dialled.frames)
        connection._reader.start()
        if connection._bulk is not None:
            connection._bulk.start()
        return connection

    @property
    def transport_kind(self) -> str:
        """What carries the frames: ``websocket`` or ``http``."""
        return self._transport.kind

    def _second_connection(self) -> BulkConnection | None:
        """The one of the bulk lane, which is still to be made; None where there can be none."""
        if self._stream.bulk is None or self.watching or not hasattr(select, "poll"):
            return None
        return BulkConnection(self._stream, self._sender, self._dial_second, self._break)

    def _dial_second(self) -> Dialled:
        hello = replace(self._hello(), lane=1)
        return dial(self.url, self._address.token, hello, DIAL_TIMEOUT, self._address.ca, "websocket")

    def _break(self, error: LoomError) -> None:
        """End the connection because of what came."""
        self._last_words = error
        self._transport.close()

    def _make(self, made: Made) -> Any:
        return made if self.make_proxy is None else self.make_proxy(made)

    def forget(self, mesh: int) -> None:
        """Have the driver let go of a mesh that came in a result, with the next operation.

        Called when a proxy is collected, which may be in the middle of anything: so nothing is sent here.
        """
        self._forgotten.append(mesh)
        self.states.forget(mesh)

    def _send_forgotten(self) -> None:
        if self.watching:
            self._forgotten.clear()  # the meshes are the other client's
            return
        meshes = []
        while self._forgotten:
            meshes.append(self._forgotten.popleft())
        self._sender.put(Message(Kind.FORGET, self.next_id(), meshes), BARRIER, False)

    # -- operations -----------------------------------------------------------------------------------------

    def next_id(self) -> int:
        """A new id, for a mesh or an operation."""
        return next(self._ids)

    def check_open(self) -> None:
        """Raise what ended the connection, if something has."""
        if self._error is not None:
            raise self._error

    def send(
        self,
        kind: Kind,
        body: Sequence[Any],
        parts: Sequence[Buffer] = (),
        key: OrderKey = BARRIER,
        ident: int | None = None,
    ) -> int:
        """Send an operation that has no answer, unless it fails; return its id, which is new unless given."""
        if ident is None:
            ident = self.next_id()
        self._put(Message(kind, ident, body, parts), key, eager=not self._waiting)
        return ident

    def ask(
        self,
        kind: Kind,
        body: Sequence[Any],
        parts: Sequence[Buffer] = (),
        key: OrderKey = BARRIER,
        ident: int | None = None,
    ) -> FutureProxy[Any]:
        """Send an operation and return the future of its answer; its id is new unless given."""
        future: FutureProxy[Any] = FutureProxy(self)
        future._asked = (kind, body)
        if ident is None:
            ident = self.next_id()
        eager = not self._waiting
        future._ident = ident
        self._waiting[ident] = future
        self._put(Message(kind, ident, body, parts), key, eager, ident)
        if self._error is not None:  # it ended meanwhile, and may have missed this future
            future._complete(Raise(self._error))
        return future

    def withdraw(self, ident: int) -> bool:
        """Take back an operation that has not been started; if that is in time, it has no answer.

        If it has left this machine, the driver is asked, which takes a round trip.
        """
        if ident not in self._waiting:
            return False
        try:
            with Uninterrupted():
                withdrawn = self._sender.withdraw(ident)
            first_chunk = self._sender.first_chunk(ident)
            body = (ident, first_chunk) if first_chunk else (ident,)
            withdrawn = withdrawn or self.ask(Kind.CANCEL, body, key=None).get()
        except LoomError:  # the connection is over; the operation's own future says how
            return False
        if withdrawn:
            self._waiting.pop(ident, None)
        return bool(withdrawn)

    def ask_many(
        self, count: int, kind: Kind, body: Sequence[Any], parts: Sequence[Buffer], key: OrderKey
    ) -> list[FutureProxy[Any]]:
        """Send an operation that has ``count`` answers, and return a future for each."""
        futures: list[FutureProxy[Any]] = [FutureProxy(self) for _ in range(count)]
        for future in futures:
            future._asked = (kind, body)
        ident = self.next_id()
        self._waiting[ident] = StreamFutures(futures)
        self._put(Message(kind, ident, body, parts), key, True, ident)
        if self._error is not None:
            self._waiting.pop(ident, StreamFutures(futures)).fail(Raise(self._error))  # type: ignore[union-attr]
        return futures

    def tell(self, kind: Kind, ident: int, body: Sequence[Any], key: OrderKey) -> None:
        """Send something about what has the id; never waits, and does nothing when the connection is over."""
        if self._error is None:
            self._sender.put(Message(kind, ident, body), key)

    # -- sending --------------------------------------------------------------------------------------------

    def _put(self, message: Message, key: OrderKey, eager: bool, ident: int | None = None) -> None:
        if self._error is not None or (self.watching and message.kind not in READING):
            if ident is not None:
                self._waiting.pop(ident, None)
            raise self._error or ReadOnlySession(
                f"this job watches session {self.welcome.session!r}: attach with mode='drive' to change something"
            )
        if message.parts and message.size > self.welcome.max_message:
            if ident is not None:
                self._waiting.pop(ident, None)
            raise TooLarge(
                f"a message of {message.size} bytes is over the gateway's --max-message "
                f"{self.welcome.max_message}; nothing of it was sent"
            )
        on_loop = asyncio._get_running_loop() is not None  # which must not be held up
        # As with Monarch, the caller may change an array as soon as the call has been made.
        borrowed = borrowed_bytes(message) if len(message.parts) > 1 else 0
        if borrowed and (on_loop or borrowed <= COPIED):
            message, borrowed = with_copies(message), 0
        with Uninterrupted():
            if self._forgotten:
                self._send_forgotten()
            self._sender.put(message, key, eager)
        if on_loop:
            return
        if not self._sender.wait_for_room(progress.AFTER):
            progress.wait(self._sender.wait_for_room, None, self)
        if borrowed:
            taken = functools.partial(self._sender.wait_until_taken, message.id)
            if not taken(progress.AFTER):
                progress.wait(taken, None, self)

    def flush(self) -> None:
        """Send what has been gathered, as far as the socket takes it at once."""
        if self._stream.ready:
            with Uninterrupted():
                self._sender.flush()

    def moving(self) -> tuple[int, int, int]:
        """Bytes that are to be sent; bytes that are here of large results, and bytes that those have in all."""
        return self._stream.outbox.pending_bytes, *self._stream.incoming()

    # -- receiving ------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """As `loom_proxy.session.read_loop.Source.fileno`."""
        return self._transport.fileno()

    def read(self, wait: bool) -> bool:
        """Take in what has come. The read loop calls this in one thread at a time."""
        goes_on = False
        broken: LoomError | None = None
        try:
            frames = self._transport.receive(wait)
            if self._bulk is not None and self._bulk.bell.rung:
                self._bulk.bell.silence()
                self._take_arrived()
            if frames:
                self._take_all(frames)
                self.flush()
                goes_on = True
            elif frames is not None:
                goes_on = not wait or self._still_there()
            if not goes_on and self._last_words is None and not self._leaving.is_set():
                self.away = goes_on = True
        except LoomError as error:
            broken = error
        finally:
            if not goes_on:
                self._fail(self._last_words or broken or ConnectionLost(f"the connection to {self.url} broke"))
        return goes_on

    def _still_there(self) -> bool:
        """Whether to go on waiting for the other side, which has been silent for a while."""
        if self._stream.untold:
            self._acknowledge()
        silence = time.monotonic() - self._transport.heard
        if silence <= PING_AFTER:
            self._pinged = False
        elif not self._pinged:
            self._pinged = True
            self._transport.ping()
        return silence < SILENCE

    def _acknowledge(self) -> None:
        self._sender.put_raw(self._transport.encode(self._stream.acknowledgement()))

    def come_back(self) -> bool:
        """Connect again, and go on where the lost connection stopped."""
        self._sender.detach()
        self._transport.close()
        lost = time.monotonic()
        self.events.add(Event("disconnected", {"url": self.url}))
        try:
            dialled = self._dial_again(lost)
            self._attach(dialled.transport, dialled.welcome.received, dialled.welcome.received_bulk)
            self._take_all(dialled.frames)
        except LoomError as error:
            self._fail(self._last_words or error)
            return False
        self.away = False
        self.events.add(Event("resumed", {"seconds": time.monotonic() - lost}))
        return True

    def _dial_again(self, lost: float) -> Dialled:
        patience = self._address.patience
        if patience is None:
            patience = self.welcome.linger + LINGER_MARGIN if self.welcome.linger else math.inf
        for attempt, delay in enumerate(delays()):
            hello = self._hello()
            if self._leaving.wait(delay):
                raise ConnectionLost(f"this program left while the connection to {self.url} was lost")
            try:
                to = self._address
                worked = to.transport == "auto" and self._transport.kind == "websocket"
                kind = "websocket" if worked and attempt < WEBSOCKET_AGAIN else to.transport
                return dial(to.url, to.token, hello, DIAL_TIMEOUT, to.ca, kind)
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

    def _hello(self) -> Hello:
        """What to say on another connection of this stream."""
        bulk = self._stream.bulk
        return Hello(
            capabilities=_capabilities(),
            client=client_name(),
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
                transport.listen_for(self._bulk.bell)
            self._bulk.allow(isinstance(transport, WebSocketTransport))
        self._pinged = False
        transport.send_control = self._sender.put_raw  # type: ignore[method-assign]
        self._sender.attach(transport, received, received_bulk)

    def _take_arrived(self) -> None:
        """Take what the bulk lane has brought on a connection of its own."""
        for message in self._stream.arrived():
            self._take(message)

    def _take_all(self, frames: Sequence[bytes]) -> None:
        for data in frames:
            for message in self._stream.receive(data):
                if message.kind == Kind.REFUSE:
                    self._last_words = error_from_refusal(message)
                elif message.kind == Kind.ENDED:
                    text = f"session {self.welcome.session!r} has ended: {message.body[0]}"
                    self._last_words = SessionClosed(text)
                else:
                    self._take(message)

    def _take(self, message: Message) -> None:
        kind, ident, body, parts = message
        if kind not in _ANSWERS:
            self._take_news(message)
            return
        waiting = self._waiting.get(ident)
        if waiting is None:
            if kind == Kind.ERROR:
                self._take_failure(message)
            return
        if kind == Kind.ERROR:
            index = body[2] if len(body) > 2 else None
            unpack: Callable[[], Any] = Failure(self.decoder, message)
            asked = getattr(waiting, "_asked", None)
            if asked is not None:
                self.states.failed(asked, str(body[1]), text_of(message), index)
        else:
            index = body[1] if len(body) > 1 else None
            unpack = Success(self.decoder, parts)
            asked = getattr(waiting, "_asked", None)
            if asked is not None and asked[0] in ON_MESHES and asked[1][0] in self.states.unseen:
                self.states.answered(asked, index)
        if isinstance(waiting, FutureProxy):
            del self._waiting[ident]
            waiting._complete(unpack, body[0])
        elif waiting.complete(index, unpack, body[0]):
            del self._waiting[ident]

    def _take_news(self, message: Message) -> None:
        """Take what no operation asked for."""
        kind, ident, body, parts = message
        if kind == Kind.LOG:
            self.logs.take(parts[0])
        elif kind == Kind.EVENT:
            name, details = str(body[0]), unpack_texts(parts[0])
            self.states.event(name, details)
            if name not in UNLOGGED:
                self.events.add(Event(name, details))
        elif kind == Kind.RUN_STATE:
            self.runs.told(ident, body)
        elif kind in (Kind.PORT_MESSAGES, Kind.PORT_MESSAGE):
            self.ports.take(message)

    def error_of(self, code: str, parts: Sequence[Buffer]) -> LoomError:
        """The exception that a code and the payload of a `Kind.ERROR` stand for."""
        return error_of(self.decoder, Message(Kind.ERROR, 0, [0.0, code], parts))

    def _take_failure(self, message: Message) -> None:
        """An operation failed that nobody waits for: a spawn, a view or a broadcast."""
        error = error_of(self.decoder, message)
        self.states.not_made(message.id, str(error))
        self.events.add(Event("operation_failed", {"id": message.id, "error": str(error)}, error))

    # -- the end --------------------------------------------------------------------------------------------

    def _fail(self, error: LoomError) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
            error = self._error
            waiting, self._waiting = self._waiting, {}
        self.ended.set()
        self._sender.close()
        for future in waiting.values():
            if isinstance(future, FutureProxy):
                future._complete(Raise(error))
            else:
                future.fail(Raise(error))
        self.ports.end(error)
        self.events.close(Event("ended", {"reason": str(error)}, error))
        self._transport.close()
        if self._bulk is not None:
            self._bulk.close()

    def end_session(self, timeout: float) -> None:
        """Ask the driver to end the session, and wait until it has."""
        if self._error is None:
            self.send(Kind.END, [])
            self.flush()
            self.ended.wait(timeout)
        self.leave(f"session {self.welcome.session!r} was closed here")

    def leave(self, reason: str) -> None:
        """Close the connection; the session is not told to end."""
        if self._error is None and not self.away:
            self._sender.drain(LEAVE_TIMEOUT)
            self._acknowledge()
            self._sender.drain(LEAVE_TIMEOUT)
        with self._lock:
            self._error = SessionClosed(reason) if self._error is None else self._error
        self._leaving.set()
        self._transport.close()
        if self._bulk is not None:
            self._bulk.close()
        if self._reader.is_alive() and self._reader is not threading.current_thread():
            self._reader.join(5.0)
        self.logs.drain(5.0)


def _capabilities() -> Sequence[str]:
    """What this side offers; with ``LOOM_LANES=1`` everything shares one lane, and one connection."""
    two_lanes = os.environ.get("LOOM_LANES") != "1"
    return CAPABILITIES if two_lanes else [name for name in CAPABILITIES if name != "lanes"]
