"""The dispatcher, which runs a session's operations in the order in which the client made them.

Monarch's own calls return at once and deliver in order. So the thread that receives an operation *starts* it in
order, and its answer follows when its future resolves; see `loom_gateway.driver.session.replies`.

Large calls have a thread of their own. To start a call, Monarch pickles its arguments, which takes a second for a
gigabyte. On the client's own thread, small calls to other actors would wait that long.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from loom.errors import LimitReached, ProtocolMismatch, ReadOnlySession, ScopeError, because
from loom.process.threads import keep_going
from loom.session_alive import AliveBecause, SessionLife
from loom.wings import Part
from loom.wire.bodies import EndpointCall
from loom.wire.messages import ADVERBS, ALLOWED_BESIDE, READING, Kind, Message
from loom_gateway.driver.clients.unread_results import UnreadAnswers
from loom_gateway.driver.handlers.calls import CallHandlers
from loom_gateway.driver.handlers.hosts import HostWatcher
from loom_gateway.driver.handlers.meshes import MeshOperations
from loom_gateway.driver.handlers.ports import SessionPorts
from loom_gateway.driver.handlers.processes import Processes
from loom_gateway.driver.handlers.remote_exec import RankOperations
from loom_gateway.driver.handlers.runs import Runs
from loom_gateway.driver.handlers.spans import SpanCollector
from loom_gateway.driver.handlers.sync import Syncs
from loom_gateway.driver.handlers.unclaimed import UnclaimedResults
from loom_gateway.driver.handlers.weaver import Debugging, WeaverOperations
from loom_gateway.driver.lifetime import Lifetime
from loom_gateway.driver.output.collector import LogCollector
from loom_gateway.driver.output.spool import LogSpool
from loom_gateway.driver.runs.restart_file import RestartFile
from loom_gateway.driver.session.context import SessionContext
from loom_gateway.driver.session.local_api import LocalSession
from loom_gateway.driver.session.mesh_view import MeshView
from loom_gateway.driver.session.replies import LIMITED, Handler, Request
from loom_gateway.driver.weaver_link import UserLimits
from loom_gateway.sessions.descriptions import SessionMeshes, SessionRuns, SessionTensors

LARGE = 1 << 20  # smallest arguments, in bytes, with which a call is started on the separate thread
MOST = 2  # number of large calls that may be queued or starting before the client's thread waits too

QUIET = 30.0
"""Seconds without a large call after which freed memory goes back to the system. If it went back sooner, the next
large call would have to allocate it again, which takes longer than to copy into it."""

_WAITS_FOR_NOTHING = frozenset({Kind.END, Kind.READ})
_CALLS = frozenset(ADVERBS.values())

_LOOKS = READING | {Kind.ASK_WEAVER, Kind.READ, Kind.DROP, Kind.COLLECT, Kind.FORGET, Kind.SPANS}
"""Kinds of message that clients also send by themselves, such as a live cell of a notebook."""


class LargeCalls:
    """Decides which operations start on the separate thread, and which have to wait for those.

    Operations on the same actors start in the order in which they arrived. So does every operation that is not a
    call, because it may create or stop the target of a call. ``root`` returns the id of the whole mesh that
    contains a mesh.
    """

    def __init__(self, start: Callable[[Message], None], root: Callable[[int], int]) -> None:
        self._start = start
        self._root = root
        self._queue: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self.under_way: Counter[int] = Counter()  # large calls queued or starting, by the root of their mesh
        self._done = threading.Condition()  # notified after each start; guards `under_way`
        self._thread: threading.Thread | None = None

    def take(self, message: Message) -> bool:
        """Queue an operation if it is a large call. Else wait until it may start, and return False.

        Only the client's thread calls this. The caller may skip it for an operation below `LARGE` while none is
        `under_way`.
        """
        if message.kind not in _CALLS:
            if message.kind not in _WAITS_FOR_NOTHING:
                self._wait(lambda: not self.under_way)
            return False
        root = self._root(EndpointCall.fields(message.body)[0])
        if message.size < LARGE:
            self._wait(lambda: root not in self.under_way)
            return False
        self._wait(lambda: sum(self.under_way.values()) < MOST)
        with self._done:
            self.under_way[root] += 1
        if self._thread is None:
            self._thread = threading.Thread(
                target=keep_going, args=("start large calls", self._run), name="large calls", daemon=True
            )
            self._thread.start()
        self._queue.put((root, message))
        return True

    def _wait(self, ready: Callable[[], bool]) -> None:
        with self._done:
            self._done.wait_for(ready)

    def _run(self) -> None:
        while True:
            root, message = self._next()
            try:
                self._start(message)
            finally:
                del message  # else its arguments would stay in memory until the next large call
                with self._done:
                    self.under_way -= Counter({root: 1})
                    self._done.notify_all()

    def _next(self) -> tuple[int, Message]:
        try:
            return self._queue.get(timeout=QUIET)
        except queue.Empty:
            give_back_memory()
            return self._queue.get()


def give_back_memory() -> None:
    """Return freed memory to the system. glibc would keep up to twice the size of a large call's arguments."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


WEAVER_TIMEOUT = 1.0  # seconds to report stopped processes to the weaver when the session ends


class OperationDispatcher:
    """Starts the operations of one session, and ends its lifetime if the client asks for that."""

    def __init__(
        self,
        context: SessionContext,
        lifetime: Lifetime,
        log_spool: LogSpool,
        max_in_flight: int,
        restart_file: RestartFile,
    ) -> None:
        self._context = context
        self._lifetime = lifetime
        self._replies = context.replies
        self._max_in_flight = max_in_flight
        self.limits = UserLimits(max_in_flight, context.results, lambda: context.replies.in_flight)
        self._highest_id = 0  # the highest id that any client has used
        self.begun = 0
        """Operations that clients have begun, but for looks."""
        self._closed = False
        self._large_calls = LargeCalls(self._start, context.meshes.root)
        self.logs = LogCollector(context, log_spool)
        self._ports = SessionPorts(context)
        self._restart_file = restart_file
        self._runs = Runs(context, self.logs, restart_file)
        self._ranks = RankOperations(context)
        self._unclaimed = UnclaimedResults(context)
        self._syncs = Syncs(context, restart_file)
        self._meshes = MeshOperations(context, self._syncs)
        self.processes = Processes(context)
        self.hosts = HostWatcher(context, self._syncs)
        self._runs.clean_start.take_hosts_back = self.hosts.take_lost_back
        self.local_session = LocalSession(context, self._syncs)
        context.failures.on_process_gone += [self.processes.gone, self.local_session.gone]
        self._descriptions: dict[str, Callable[[], SessionMeshes | SessionRuns | SessionTensors | SessionLife]] = {
            "life": lifetime.life,
            "meshes": MeshView(context, self.processes).describe,
            "runs": self._runs.describe,
            "tensors": Part.WATCHED_TENSORS.load()(context).describe,
        }
        calls = CallHandlers(context)
        self._beside = calls.beside  # handlers that differ for a client which does not drive
        self._handlers: dict[int, Handler] = {
            Kind.END: self._end_session,
            Kind.LIFE: self._tell_life,
            **calls.handlers,
            **self._meshes.handlers,
            **self._ports.handlers,
            **self._runs.handlers,
            **self._unclaimed.handlers,
            **self._syncs.handlers,
            **self.hosts.handlers,
            **self.logs.handlers,
            **WeaverOperations(context).handlers,
            **Debugging(context).handlers,
            **self._ranks.handlers,
            **SpanCollector(context).handlers,
        }

    def restore(self) -> None:
        """Take up what the session's driver before this one has left. Safe on any thread but the event loop's."""
        left = self._restart_file.take_over()
        self._highest_id = max((message.id for message in left), default=0)
        for restore, kind in ((self._syncs.restore, Kind.SYNC), (self._runs.restore, Kind.RUN)):
            restoring = restore([message for message in left if message.kind == kind])
            asyncio.run_coroutine_threadsafe(restoring, self._context.loop).result()

    def describe(self, subject: str) -> bytes:
        """Return a description of the session as JSON. Safe on any thread."""
        describe = self._descriptions.get(subject)
        if describe is None:
            raise ProtocolMismatch(f"this driver describes {' and '.join(self._descriptions)}, not {subject!r:.40}")
        return json.dumps(asdict(describe()), ensure_ascii=False).encode(errors="replace")

    @property
    def next_id(self) -> int:
        return self._highest_id + 1

    def start(self, message: Message) -> None:
        """Start an operation, or queue it as a large call. Operations that it depends on are started first."""
        if message.id > self._highest_id:
            self._highest_id = message.id
        large_calls = self._large_calls
        if (large_calls.under_way or message.size >= LARGE) and large_calls.take(message):
            return
        self._start(message)

    def start_for_guest(self, message: Message) -> None:
        """Start an operation of a client whose user's session it is not, unless it ends the session.

        The session's key to the weaver reaches all replicas of the session's user, so a guest asks the gateway.
        """
        if message.kind == Kind.ASK_WEAVER:
            text = "a guest of a session asks the gateway for its replicas: job.weaver of this version does"
            self._replies.fail(message.id, time.perf_counter(), ScopeError(text))
        elif message.kind != Kind.END:
            self.start(message)

    def start_beside(self, mode: str, message: Message) -> None:
        """Start an operation of a client of a mode, next to the one that drives. Safe on any thread."""
        if message.kind in ALLOWED_BESIDE[mode]:
            self._start(message, self._beside.get(message.kind))
        else:
            text = "this client does not drive the session: attach with mode='drive' to change something"
            self._replies.fail(message.id, time.perf_counter(), ReadOnlySession(text))

    def _start(self, message: Message, handler: Handler | None = None) -> None:
        started = time.perf_counter()
        if self._closed:
            return
        self.begun += message.kind not in _LOOKS
        try:
            handler = handler or self._handlers.get(message.kind)
            if handler is None:
                raise ProtocolMismatch(f"this driver knows no operation {message.kind}")
            if self._max_in_flight and message.kind in LIMITED:
                self._check_in_flight()
            handler(message, started)
        except Exception as error:  # noqa: BLE001 - a user's __reduce__ or Monarch may raise anything
            call = (message.kind, message.body) if message.kind in LIMITED else None
            self._replies.fail(message.id, started, error, call=call)

    def _check_in_flight(self) -> None:
        in_flight, left = self._replies.in_flight, self.limits.in_flight_left
        if in_flight >= left:
            others = self._max_in_flight - left
            raise LimitReached(
                f"{in_flight} operations of this session have not been answered"
                + (f", and {others} of the user's other sessions" if others else "")
                + f": the gateway's --max-in-flight allows {self._max_in_flight} to a user, so wait for some. "
                "This one was not begun"
            )

    def _end_session(self, message: Message, started: float) -> None:
        self._context.loop.call_soon_threadsafe(self._lifetime.end, "the client closed it")

    def under_way(self) -> list[AliveBecause]:
        """Return what goes on in the session that was asked of it. Safe on any thread."""
        found = [AliveBecause.RUN] if self._runs.going_on else []
        if self._large_calls.under_way or self._replies.awaits_calls or self._context.broadcasts.go_on:
            found.append(AliveBecause.CALL)
        return found

    def _tell_life(self, message: Message, started: float) -> None:
        # On the event loop, behind the beginning of the runs that were asked for before.
        async def life() -> dict[str, object]:
            await self._context.broadcasts.settle()
            return asdict(self._lifetime.life(leaving=1))

        self._replies.answer_with(message, started, life())

    def client_left(self, unsent: Sequence[Message], requests: Mapping[int, Request | None]) -> None:
        """Note that the driving client was disconnected, and which messages it had not received.

        ``requests`` has those of operations that were answered while it was away.
        """
        self._runs.new_client()
        self._ports.client_gone()
        self._unclaimed.client_left(unsent, requests)

    def unclaimed(self, message: Message) -> None:
        """Take an answer that was not sent, because its client is gone or is being disconnected."""
        self._unclaimed.take(message, self._unclaimed.unread.pop(message))

    @property
    def unread(self) -> UnreadAnswers:
        return self._unclaimed.unread

    def dropped(self, message: Message) -> Message:
        """Return the answer that takes the place of one for which there is no room."""
        return self._unclaimed.dropped(message, self.unread.request_of(message))

    async def close(self, reason: str) -> None:
        """Stop accepting operations, stop the session's meshes, and collect the last of their output."""
        self._closed = True
        await asyncio.gather(self._meshes.stop_all(because("its session has ended", reason)), self._runs.close())
        await self.logs.end()
        await self._context.weaver.flush(WEAVER_TIMEOUT)
