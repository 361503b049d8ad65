"""The unanswered operations, and the path of their answers to the client.

`Futures` waits for Monarch's futures, to answer operations with their results. There are two ways to wait. A thread
that blocks in ``Future.get`` gets the result soonest, but waits for one future at a time. The event loop waits for
any number, and gets each result two thread switches later. The thread waits for calls. If one keeps it longer than
`PATIENCE`, those behind it move to the event loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from loom.control.latencies import Latencies
from loom.errors import LoomError, SupervisionError
from loom.process.threads import keep_going
from loom.tracing.spans import record_call, recorder
from loom.tracing.trace_ids import checked_trace
from loom.wire.bodies import Notice, OperationResult
from loom.wire.codec import Encoder
from loom.wire.frames import pack_texts
from loom.wire.messages import ADVERBS, Kind, Message
from loom.wire.mux import OrderKey
from loom_gateway.driver.monarch.errors import MonarchSupervisionError, error_message, is_of_a_dead_process
from loom_gateway.driver.monarch.mesh_table import MeshEntry
from loom_gateway.driver.monarch.native_calls import GRACE

logger = logging.getLogger(__name__)

GATHERED = 0.001  # seconds for which consecutive answers are gathered into one write
LINGER = 0.005  # seconds after which gathered answers are sent even though the expected next one has not come

EXPLAINED_WITHIN = 2.0
"""Seconds for which the agent of a dead process has to say how it ended: the agent of a new one may be starting."""

EXPLAIN_EVERY = 0.05  # seconds between two looks for what it says

LIMITED = frozenset(ADVERBS.values()) - {Kind.BROADCAST}
"""The kinds of operation that count as in flight until they are answered, and that a limit applies to."""

Handler: TypeAlias = Callable[[Message, float], None]
"""Starts an operation, given its message and its arrival time (``time.perf_counter``)."""

Request: TypeAlias = tuple[int, Sequence[Any]]  # kind and body of the message that started an operation
ReplyId: TypeAlias = tuple[int, int | None]  # an operation's id and, for one of several results, its index


def notice(name: str, details: Mapping[str, Any]) -> Message:
    """Return the message that reports an event to every client and answers no operation."""
    return Notice(name).message(parts=[pack_texts(details)])


class Send(Protocol):
    """A function that sends a message to the client. A message that is not eager may wait for the next flush."""

    def __call__(self, message: Message, eager: bool = True, key: OrderKey = None) -> None: ...


class _Pending(NamedTuple):
    """An operation without an answer."""

    started: float
    entry: MeshEntry | None  # called mesh
    convert: Callable[[Any], Any] | None  # converts the result of Monarch's future to the value that is sent
    request: Request


class Replies:
    """The unanswered operations of one session. Safe on any thread.

    ``why_silent`` returns why a mesh, or one of its elements, cannot answer; None if no reason is known.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        encoder: Encoder,
        send: Send,
        flush: Callable[[], None],
        why_silent: Callable[[MeshEntry], str | None],
    ) -> None:
        self.latencies = Latencies()  # durations of calls from arrival to answer
        self._loop = loop
        self._encoder = encoder
        self._send = send
        self._flush = flush
        self._why_silent = why_silent
        self.how_died: Callable[[MeshEntry], str] = lambda entry: ""
        """Returns how the process of an element has ended; "" if none has, or nothing is known of its end."""
        self._pending: dict[ReplyId, _Pending] = {}  # iterated as a copy, because other threads change it
        self.keep: Callable[[Message, Request], None] = lambda answer, call: None
        """Called with each answer of a call before it is sent, to keep it until the client has read it."""
        self._flushed = 0.0  # time of the last flush
        self._flush_planned = False  # whether the loop will flush soon

    @property
    def in_flight(self) -> int:
        return len(self._pending)

    def expect(
        self,
        message: Message,
        started: float,
        entry: MeshEntry | None = None,
        index: int | None = None,
        convert: Callable[[Any], Any] | None = None,
    ) -> ReplyId:
        """Register an operation that waits for an answer. It fails if a process of ``entry`` is gone."""
        reply = (message.id, index)
        pending = self._pending[reply] = _Pending(started, entry, convert, (message.kind, message.body))
        if entry is not None and self._why_silent(entry) is not None:
            self._loop.call_soon_threadsafe(self._fail_after_grace, reply, pending)
        return reply

    def forget(self, reply: ReplyId) -> None:
        """Remove an operation that could not be started."""
        self._pending.pop(reply, None)

    def pending(self) -> dict[ReplyId, Request]:
        return {reply: pending.request for reply, pending in self._pending.copy().items()}

    @property
    def awaits_calls(self) -> bool:
        """True if a call has not been answered."""
        return any(pending.request[0] in LIMITED for pending in self._pending.copy().values())

    def calls_in_flight(self) -> Counter[tuple[int, str]]:
        """Count the unanswered calls, by the id of the whole mesh and the endpoint."""
        return Counter(
            (pending.entry.root, pending.request[1][1])
            for pending in self._pending.copy().values()
            if pending.entry is not None and pending.request[0] in LIMITED
        )

    def answer(self, reply: ReplyId, value: Any, error: BaseException | None, eager: bool) -> None:
        """Answer an operation. After an answer that is not eager, the caller calls `gathered`."""
        pending = self._pending.pop(reply, None)
        if pending is None:  # it failed before, because a process is gone
            return
        ident, index = reply
        call: Request | None = None
        if pending.request[0] in LIMITED:
            call = pending.request
            now = time.perf_counter()
            seconds = now - pending.started
            self.latencies.add(seconds)
            if recorder.sinks:
                _, endpoint, *trace = pending.request[1]
                record_call(
                    "driver", pending.started, now, checked_trace(trace[0]) if trace else None, endpoint=endpoint
                )
            if pending.entry is not None:
                name = pending.request[1][1]
                calls = pending.entry.calls.get(name) or pending.entry.calls_of(name, now)
                calls.answered(now, seconds, error is not None)
        if error is not None:
            if isinstance(error, MonarchSupervisionError) and is_of_a_dead_process(str(error)):
                until = time.monotonic() + EXPLAINED_WITHIN
                self._loop.call_soon_threadsafe(self._fail_explained, reply, pending, error, until, call)
            else:
                self.fail(ident, pending.started, error, index, eager, call)
            return
        try:
            if pending.convert is not None:
                value = pending.convert(value)
            self.succeed(ident, pending.started, value, index, eager, call)
        # a bug of Loom's: still answer the client, and go on with this thread's other answers
        except Exception as broken:
            logger.exception("the answer to operation %d could not be given", ident)
            self.fail(ident, pending.started, broken, index, eager, call)

    def _fail_explained(
        self, reply: ReplyId, pending: _Pending, error: BaseException, until: float, call: Request | None
    ) -> None:
        """Send Monarch's report of a death, with what the process's agent has seen of it, which may come later."""
        ident, index = reply
        seen = ""
        if pending.entry is not None:
            try:
                seen = self.how_died(pending.entry)
            except Exception:  # the report is due, with or without it
                logger.exception("nothing is known of how a process died")
        if pending.entry is None or seen or time.monotonic() >= until:
            explained = SupervisionError(f"{error}\n{seen}") if seen else error
            self.fail(ident, pending.started, explained, index, call=call)
        else:
            self._loop.call_later(EXPLAIN_EVERY, self._fail_explained, reply, pending, error, until, call)

    def answer_when(
        self,
        message: Message,
        started: float,
        future: concurrent.futures.Future[Any],
        entry: MeshEntry | None = None,
    ) -> None:
        reply = self.expect(message, started, entry)

        def done(future: concurrent.futures.Future[Any]) -> None:
            error = future.exception()
            self.answer(reply, None if error else future.result(), error, eager=True)

        future.add_done_callback(done)

    def answer_with(
        self, message: Message, started: float, work: Coroutine[Any, Any, Any], entry: MeshEntry | None = None
    ) -> None:
        """Answer an operation with the result of a coroutine that runs on the event loop.

        It fails if a process of ``entry`` is gone.
        """
        self.answer_when(message, started, asyncio.run_coroutine_threadsafe(work, self._loop), entry)

    def succeed(
        self,
        ident: int,
        started: float,
        value: Any,
        index: int | None = None,
        eager: bool = True,
        call: Request | None = None,
    ) -> None:
        """Send the client the result of an operation, or one of several results. ``call``: if it was a call."""
        rpc_ms = (time.perf_counter() - started) * 1000
        try:
            parts = self._encoder.dumps(value, "the result")
        except LoomError as error:
            self.fail(ident, started, error, index, eager, call)
            return
        message = OperationResult.message_of(ident, parts, rpc_ms, index)
        if call is not None:
            self.keep(message, call)
        self._send(message, eager)

    def fail(
        self,
        ident: int,
        started: float,
        error: BaseException,
        index: int | None = None,
        eager: bool = True,
        call: Request | None = None,
    ) -> None:
        """Send the client the error of an operation, or of one of several results. ``call``: if it was a call."""
        message = error_message(ident, error, _since(started), self._encoder, index)
        if call is not None:
            self.keep(message, call)
        self._send(message, eager)

    def gathered(self, more: bool) -> None:
        """Count an answer that was not eager, and flush if it is time. ``more``: whether another is expected."""
        now = time.perf_counter()
        if not more or now - self._flushed > GATHERED:
            self._flush()
            self._flushed = now
        elif not self._flush_planned:
            self._flush_planned = True
            self._loop.call_soon_threadsafe(self._loop.call_later, LINGER, self._flush_late)

    def _flush_late(self) -> None:
        self._flush_planned = False
        self._flush()

    def fail_calls(self, on: Callable[[MeshEntry], bool]) -> None:
        """Fail the calls to dead meshes unless Monarch fails them within `GRACE` seconds. On the event loop."""
        for reply, pending in self._pending.copy().items():
            if pending.entry is not None and on(pending.entry):
                self._fail_after_grace(reply, pending)

    def _fail_after_grace(self, reply: ReplyId, pending: _Pending) -> None:
        self._loop.call_later(GRACE, self._fail_if_pending, reply, pending)

    def _fail_if_pending(self, reply: ReplyId, pending: _Pending) -> None:
        if self._pending.get(reply) is pending and pending.entry is not None:
            why = self._why_silent(pending.entry) or f"mesh {pending.entry.name!r} was stopped"
            error = SupervisionError(why)
            self.answer(reply, None, error, eager=True)


def _since(started: float) -> float:
    return (time.perf_counter() - started) * 1000


PATIENCE = 0.02  # seconds that the thread waits for one future before those behind it move to the event loop


class Futures:
    """Waits for futures, and answers their operations on the waiting thread or the event loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, replies: Replies) -> None:
        self._loop = loop
        self._replies = replies
        self._queueing = threading.Lock()  # held by the client's thread or that of large calls
        self._queued = 0  # futures that `soon` has queued
        # Each counter has one writer: the waiting thread, and the event loop.
        self._answered = 0  # queued futures that the thread has answered
        self._moved = 0  # queued futures that moved to the event loop
        self._since = 0.0  # when the thread's current wait began; 0: it does not wait
        self._slow = False  # set while the thread is held up, so that all go to the event loop
        self._checking = False  # whether a check of the thread is planned
        self._futures: queue.SimpleQueue[tuple[ReplyId, Any]] = queue.SimpleQueue()
        threading.Thread(target=keep_going, args=("answer", self._wait), name="futures", daemon=True).start()

    def soon(self, reply: ReplyId, future: Any) -> None:
        """Wait for a future that is likely to be done at once."""
        if self._slow:
            self.whenever(reply, future)
            return
        with self._queueing:
            self._queued += 1
        self._futures.put((reply, future))
        if self._queued - self._answered - self._moved > 1 and not self._checking:
            self._checking = True
            self._loop.call_soon_threadsafe(self._check_later)

    def whenever(self, reply: ReplyId, future: Any) -> None:
        """Wait for a future that may take long."""
        self._loop.call_soon_threadsafe(self._observe, reply, future)

    def in_order(self, replies: Sequence[ReplyId], futures: Sequence[Any]) -> None:
        """Wait for futures that finish in any order. The first result answers the first reply.

        Monarch's futures of one stream share one port, and each takes whatever message comes next.
        """
        self._loop.call_soon_threadsafe(self._observe_in_order, iter(replies), futures)

    def _observe_in_order(self, replies: Iterator[ReplyId], futures: Sequence[Any]) -> None:
        for future in futures:
            future.as_asyncio().add_done_callback(lambda done: self._done(next(replies), done))

    def _observe(self, reply: ReplyId, future: Any) -> None:
        try:
            future.as_asyncio().add_done_callback(lambda done: self._done(reply, done))
        except Exception as error:  # noqa: BLE001 - passed on to the laptop
            self._replies.answer(reply, None, error, True)

    def _done(self, reply: ReplyId, done: asyncio.Future[Any]) -> None:
        error = done.exception()
        self._replies.answer(reply, None if error else done.result(), error, True)

    def _check_later(self) -> None:
        self._loop.call_later(PATIENCE, self._check)

    def _check(self) -> None:
        """Move the queued futures to the event loop if the thread has been waiting for one future all the time."""
        self._checking = False
        since = self._since
        if since and time.perf_counter() - since > PATIENCE:
            self._slow = True
            with contextlib.suppress(queue.Empty):
                while True:
                    self._observe(*self._futures.get_nowait())
                    self._moved += 1
        elif not self._futures.empty():
            self._checking = True
            self._check_later()

    def _wait(self) -> None:
        while True:
            reply, future = self._futures.get()
            self._since = time.perf_counter()
            try:
                value, error = future.get(), None
            except BaseException as raised:  # noqa: BLE001 - passed on to the laptop
                value, error = None, raised
            self._since = 0.0
            self._slow = False
            self._answered += 1
            self._replies.answer(reply, value, error, False)
            self._replies.gathered(more=not self._futures.empty())
