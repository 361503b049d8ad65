"""The operations of one client: sending them, and completing their futures with the answers.

Calls made while others are on their way are gathered. They leave together when a thread waits for one of them, when
an answer comes, when there are many, or when the writer thread gets its turn, whichever is first.

`NamedMeshes`: the proxies of a session's meshes, by unique names.

A name need not be unique: a proc mesh and the actors on it often share one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from loom.bootstrap import BootstrapCommand, command_for_cluster
from loom.errors import LimitReached, LoomError, NoSuchMesh, ReadOnlySession, TooLarge
from loom.session_alive import SessionLife
from loom.shape import Extent, NDSlice, Point, Shape, for_cluster
from loom.wire.bodies import (
    AskLife,
    Call,
    CallOne,
    CancelOperation,
    Choose,
    CollectAnswer,
    ForgetMeshes,
    OperationError,
    OperationResult,
    ReadAnswers,
    StreamCall,
)
from loom.wire.body import Body
from loom.wire.codec import Decoder, Encoder, Made
from loom.wire.frames import unpack_texts
from loom.wire.handshake import Welcome
from loom.wire.messages import ALLOWED_BESIDE, READING, Buffer, Kind, Message
from loom.wire.mux import BARRIER, OrderKey
from loom.wire.sender import COPIED, FrameSender, borrowed_bytes, with_copies
from loom.wire.stream import Stream
from loom_proxy import progress
from loom_proxy.futures.future import FutureProxy, LargeAnswer
from loom_proxy.futures.results import StreamFutures, Unread, error_of, raise_error, raise_failure
from loom_proxy.mesh.values import ValueMeshProxy
from loom_proxy.session.events import Event, SessionEvents
from loom_proxy.session.read_loop import Uninterrupted
from loom_proxy.session.waits import Reads, Waits

KEPT_STOPPED = 64
"""Meshes that were stopped here which still have a name."""


class NamedMeshes:
    """The meshes that one client knows, the oldest first. Any thread may call."""

    def __init__(self) -> None:
        self._all: dict[int, Any] = {}  # by the mesh's id; ids grow in the order in which meshes are made
        self._stopped: dict[int, None] = {}
        """The ids of meshes stopped here, in that order."""

    def __contains__(self, ident: int) -> bool:
        return ident in self._all

    def add(self, mesh: Any) -> None:
        self._all[mesh._whole.ident] = mesh

    def remove(self, mesh: Any) -> None:
        self._all.pop(mesh._whole.ident, None)
        self._stopped.pop(mesh._whole.ident, None)

    def by_name(self) -> Mapping[str, Any]:
        """Return each mesh under its name. Of several with one name, the newest that was not stopped has it.

        The others are there, too, with their id behind the name: ``trainers#3``. If all were stopped, the newest
        has the name.
        """
        found: dict[str, Any] = {}
        for _, mesh in sorted(self._all.copy().items()):
            name, other = mesh._whole.name, None
            if name in found:
                other = found[name]
                if mesh._whole.ident in self._stopped and other._whole.ident not in self._stopped:
                    mesh, other = other, mesh
            found[name] = mesh
            if other is not None:
                found[f"{name}#{other._whole.ident}"] = other
        return found

    def note_stopped(self, ident: int | None) -> None:
        """Note that a whole mesh was stopped, with the actors on it; without an id, that all were.

        Beyond `KEPT_STOPPED`, the meshes that were stopped first are dropped.
        """
        for known, mesh in self._all.copy().items():
            if ident is None or ident in (known, mesh._whole.procs):
                self._stopped.setdefault(known)
        while len(self._stopped) > KEPT_STOPPED:
            oldest = next(iter(self._stopped))
            del self._stopped[oldest]
            self._all.pop(oldest, None)


if TYPE_CHECKING:
    from loom.launch.environment import EnvironmentEntry

logger = logging.getLogger(__name__)

KEPT_UNTIL_READ = frozenset({Call, CallOne, Choose, StreamCall, CollectAnswer})
"""The operations whose answers the driver keeps until the program has read them."""

LARGE = 16 << 10
"""Bytes from which an answer's size counts when its reading is reported to the driver."""


class Calls(Waits):
    """The sender of one client's operations, which completes their futures."""

    def __init__(self, welcome: Welcome, stream: Stream, sender: FrameSender, events: SessionEvents) -> None:
        super().__init__(stream, sender)
        self.welcome = welcome
        self.reads = Reads(self._send_read)
        self.watching = welcome.mode != "drive"
        self.knows_traces = "traces" in welcome.capabilities
        self.knows_restarts = "restarts" in welcome.capabilities
        """True if the driver takes the trace ids of calls."""
        self.knows_cells = "cells" in welcome.capabilities
        """True if the driver runs the cells of notebooks."""
        self.knows_launches = "launch" in welcome.capabilities
        """True if the cluster has `loom.launch`."""
        self.knows_trainings = "trainings" in welcome.capabilities
        """True if the driver names the trainings of functions."""
        self.environment: EnvironmentEntry | None = None
        """The environment that processes enter when they are spawned, from `Job.env`."""
        self._kept: Collection[type] = KEPT_UNTIL_READ if "reads" in welcome.capabilities else ()
        self._allowed = ALLOWED_BESIDE.get(welcome.mode, READING)  # to a client that does not drive
        self.encoder = Encoder(
            ship_project=True,
            peer_python=welcome.python,
            session=self,
            swaps={
                BootstrapCommand: command_for_cluster,
                **dict.fromkeys((Extent, NDSlice, Point, Shape, ValueMeshProxy), for_cluster),
            },
        )
        self.decoder = Decoder(maker=self._make, at_home=True)
        self.make_proxy: Callable[[Made], Any] | None = None
        """Makes the proxy of a mesh that came in a result."""
        self.wholes: WeakValueDictionary[int, Any] = WeakValueDictionary()
        """The whole meshes that have proxies, by id."""
        self.meshes = NamedMeshes()
        """Proxies of the session's meshes."""
        self.ended = threading.Event()
        self._events = events
        self._ids = itertools.count(welcome.next_id)
        self._waiting: dict[int, FutureProxy[Any] | StreamFutures] = {}
        """The futures of operations without an answer yet, by the operation's id."""
        self._refused = itertools.count(1)  # calls over a limit whose error nobody read
        self._forgotten: deque[int] = deque()  # ids of released meshes that the driver does not know of yet
        self._error: LoomError | None = None
        self._lock = threading.Lock()  # held while `_error` or `_waiting` is replaced

    def _make(self, made: Made) -> Any:
        return made if self.make_proxy is None else self.make_proxy(made)

    @property
    def error(self) -> LoomError | None:
        """The error that ended the connection, if it is over."""
        return self._error

    @property
    def unanswered(self) -> int:
        """The number of operations without an answer yet."""
        return len(self._waiting)

    def check_open(self) -> None:
        """Raise the error that ended the connection, if it is over."""
        if self._error is not None:
            raise self._error

    def check_passed(self, thing: object, session: object) -> None:
        """Raise an error if a mesh or port of this session is passed to another one, or after the end."""
        if session is not self:
            raise NoSuchMesh(
                f"{thing!r} belongs to session {self.welcome.session!r} and can be passed inside that one only"
            )
        self.check_open()

    def next_id(self) -> int:
        return next(self._ids)

    def send(
        self, operation: Body, parts: Sequence[Buffer] = (), key: OrderKey = BARRIER, ident: int | None = None
    ) -> int:
        """Send an operation that has no answer, unless it fails; return its id, which is new unless given."""
        if ident is None:
            ident = self.next_id()
        self._put(operation.message(ident, parts), key, eager=not self._waiting)
        return ident

    def ask(
        self,
        operation: Body,
        parts: Sequence[Buffer] = (),
        key: OrderKey = BARRIER,
        ident: int | None = None,
        convert: Callable[[Any], Any] | None = None,
    ) -> FutureProxy[Any]:
        """Send an operation and return the future of its answer, which ``convert`` turns into the result.

        Its id is new unless given. ``key`` is the id of the mesh among whose messages it keeps its place.
        """
        if ident is None:
            ident = next(self._ids)
        future: FutureProxy[Any] = FutureProxy(self, operation, ident, convert)
        if type(operation) in self._kept:
            future._answer = ident
        eager = not self._waiting
        self._waiting[ident] = future
        self._put(operation.message(ident, parts), key, eager, ident)
        if self._error is not None:  # the connection ended meanwhile, and `fail` may have missed this future
            future._complete(partial(raise_error, self._error))
        return future

    def ask_many(
        self, count: int, operation: Body, parts: Sequence[Buffer] = (), key: OrderKey = BARRIER
    ) -> list[FutureProxy[Any]]:
        """Send an operation that has ``count`` answers, and return a future for each."""
        futures: list[FutureProxy[Any]] = [FutureProxy(self, operation) for _ in range(count)]
        ident = self.next_id()
        if type(operation) in self._kept:
            for number, future in enumerate(futures):
                future._answer = (ident, number)
        waiting = self._waiting[ident] = StreamFutures(operation, futures)
        self._put(operation.message(ident, parts), key, True, ident)
        if self._error is not None:
            self._waiting.pop(ident, None)
            waiting.complete(partial(raise_error, self._error))
        return futures

    def tell(self, operation: Body, ident: int, key: OrderKey) -> None:
        """Send a message about the mesh, port or run with an id; never wait, and do nothing after the end."""
        if self._error is None:
            self._sender.put(operation.message(ident), key)

    def ask_life(self, timeout: float) -> SessionLife:
        """Return until when the session lives once this client has left; nothing after so many seconds."""
        if "life" in self.welcome.capabilities:
            with contextlib.suppress(LoomError):  # the driver is busy, or the connection is lost
                return SessionLife.of(self.ask(AskLife()).get(timeout))
        return SessionLife()

    def _send_read(self, answers: Sequence[Any], at_once: bool) -> None:
        with Uninterrupted():
            message = ReadAnswers(answers).message(self.welcome.next_id)
            self._sender.put(message) if at_once else self._sender.gather(message)

    def withdraw(self, ident: int) -> bool:
        if ident not in self._waiting:
            return False
        try:
            with Uninterrupted():
                withdrawn = self._sender.withdraw(ident)
            if not withdrawn:
                operation = CancelOperation(ident, self._sender.first_chunk(ident) or None)
                withdrawn = self.ask(operation, key=None).get()
        except LoomError:  # the connection is over: the operation's own future gets the error
            return False
        if withdrawn:
            self._waiting.pop(ident, None)
        return bool(withdrawn)

    def note_stopped(self, ident: int | None = None) -> None:
        """Note that a whole mesh was stopped, with the actors on it; without an id, that all were."""
        self.meshes.note_stopped(ident)

    def forget(self, mesh: int) -> None:
        """Release a mesh that came in a result; the driver learns of it with the next operation.

        Nothing is sent here, since the garbage collector may call this in the middle of any other code.
        """
        self._forgotten.append(mesh)

    def _send_forgotten(self) -> None:
        if self.watching:
            self._forgotten.clear()  # the meshes are the other client's
            return
        meshes = []
        while self._forgotten:
            meshes.append(self._forgotten.popleft())
        self._sender.put(ForgetMeshes(meshes).message(self.next_id()), BARRIER, False)

    def _put(self, message: Message, key: OrderKey, eager: bool, ident: int | None = None) -> None:
        parts = message.parts
        if self._error is not None or self.watching or (parts and message.size > self.welcome.max_message):
            refusal = self._why_not(message)
            if refusal is not None:
                if ident is not None:
                    self._waiting.pop(ident, None)
                raise refusal
        on_loop = asyncio._get_running_loop() is not None  # then nothing below may wait
        # The caller may change an array right after the call, as Monarch's callers may.
        borrowed = borrowed_bytes(message) if len(parts) > 1 else 0
        if borrowed and (on_loop or borrowed <= COPIED):
            message, borrowed = with_copies(message), 0
        try:
            with Uninterrupted():
                if self._forgotten:
                    self._send_forgotten()
                if self.reads.due:
                    self.reads.tell(at_once=False)
                self._sender.put(message, key, eager)
        except LoomError:  # a value that cannot be sent
            if ident is not None:
                self._waiting.pop(ident, None)
            raise
        if on_loop:
            return
        if not self._sender.has_room and not self._sender.wait_for_room(progress.AFTER):
            with progress.shown(self):
                self._sender.wait_for_room(None)
        if borrowed and not self._sender.wait_until_taken(message.id, progress.AFTER):
            with progress.shown(self):
                self._sender.wait_until_taken(message.id, None)

    def _why_not(self, message: Message) -> LoomError | None:
        """Return the error to raise instead of sending a message, if any."""
        if self._error is not None:
            return self._error
        if self.watching and message.kind not in self._allowed:
            does = {
                "watch": "watches",
                "debug": "debugs",
                "ranks": "reaches ranks of",
                "call": "calls actors of",
            }.get(self.welcome.mode, "looks on at")
            return ReadOnlySession(
                f"this job {does} session {self.welcome.session!r}: attach with mode='drive' to change something"
            )
        if message.size > self.welcome.max_message:
            return TooLarge(
                f"a message of {message.size} bytes is over the gateway's --max-message "
                f"{self.welcome.max_message}; nothing of it was sent"
            )
        return None

    def take_result(self, message: Message) -> None:
        waiting = self._waiting.get(message.id)
        if waiting is None:
            return
        rpc_ms, index = OperationResult.fields(message.body)
        if self.states.unseen:
            self.states.answered(waiting.operation, index)
        parts = message.parts
        large = len(parts[0]) >= LARGE or (len(parts) > 1 and message.size >= LARGE)
        unpack = (LargeAnswer if large else partial)(self.decoder.loads, parts, "the result")
        self._complete(message, waiting, unpack, rpc_ms, index)

    def take_error(self, message: Message) -> None:
        """Complete the future of an operation that failed; without a future, report the failure as an event."""
        waiting = self._waiting.get(message.id)
        if waiting is None:  # a spawn, a view or a broadcast
            error = error_of(self.decoder, message)
            self.states.not_made(message.id, str(error))
            self._events.add(Event("operation_failed", {"id": message.id, "error": str(error)}, error))
            return
        failed = OperationError.from_body(message.body)
        text = str(unpack_texts(message.parts[0]).get("text", ""))
        self.states.failed(waiting.operation, failed.code, text, failed.index)
        unpack: Callable[[], Any] = partial(raise_failure, self.decoder, message)
        if failed.code == LimitReached.code:
            unpack = Unread(unpack, partial(self._note_unread, message, text))
        self._complete(message, waiting, unpack, failed.rpc_ms, failed.index)

    def _note_unread(self, message: Message, text: str) -> None:
        """Report a refused call whose future nobody has read: the first one, and each that doubles their number."""
        count = next(self._refused)
        if count.bit_count() > 1 or self._error is not None:
            return
        calls = "A call was" if count == 1 else f"{count} calls were"
        logger.warning("%s not begun, and nobody has read the error of its future: %s", calls, text)
        details = {"id": message.id, "error": text, "refused": count}
        self._events.add(Event("operation_failed", details, error_of(self.decoder, message)))

    def _complete(
        self,
        message: Message,
        waiting: FutureProxy[Any] | StreamFutures,
        unpack: Callable[[], Any],
        rpc_ms: float,
        index: int | None,
    ) -> None:
        if not isinstance(waiting, StreamFutures):
            del self._waiting[message.id]
            waiting._complete(unpack, rpc_ms)
        elif waiting.complete(unpack, rpc_ms, index):
            del self._waiting[message.id]

    def error_of(self, code: str, parts: Sequence[Buffer]) -> LoomError:
        """Return the exception for the code and the payload of an `OperationError`."""
        return error_of(self.decoder, Message(Kind.ERROR, 0, [0.0, code], parts))

    def let_go(self, error: LoomError) -> None:
        """Fail everything with an error, in a forked child of the process to which the session belongs.

        No lock of the parent's is taken: a thread that is not here may hold it.
        """
        self._lock = threading.Lock()
        self._error = error
        self._stream, self.away = Stream(), False
        waiting, self._waiting = list(self._waiting.values()), {}
        for one in waiting:
            for future in one.futures() if isinstance(one, StreamFutures) else [one]:
                future._fail_in_child(partial(raise_error, error))
        self.read_loop.let_go()

    def over(self, error: LoomError) -> LoomError:
        """Refuse all further operations; return the error that they raise, which is the first one given."""
        with self._lock:
            self._error = self._error or error
            return self._error

    def fail(self, error: LoomError) -> LoomError:
        """Fail every future that has no answer, since the connection is over; return the error that they get."""
        error = self.over(error)
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        self.ended.set()
        self.reads.close()
        self._sender.close()
        for future in waiting.values():
            if isinstance(future, StreamFutures):
                future.complete(partial(raise_error, error))
            else:
                future._complete(partial(raise_error, error))
        return error
