"""The ledger of the operations that have not been answered, and the way of their answers to the client."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from loom.errors import LoomError, SupervisionError
from loom.latencies import Latencies
from loom.wire.bodies import OperationResult
from loom.wire.codec import Encoder
from loom.wire.messages import ADVERBS, Kind, Message
from loom.wire.mux import OrderKey
from loom_gateway.driver.monarch.errors import error_message
from loom_gateway.driver.monarch.mesh_table import Entry

logger = logging.getLogger(__name__)

GRACE = 0.6
"""Seconds that Monarch has to say how a process died before its calls fail without that."""

GATHERED = 0.001
"""Seconds that answers are gathered while one comes after the other."""

LINGER = 0.005
"""Seconds that an answer lingers at most for one that does not come after all."""

REMEMBERED = 1 << 14
"""Operations whose answers have been sent that are remembered, for clients that may not have received them."""

LIMITED = frozenset(ADVERBS.values()) - {Kind.BROADCAST}
"""What counts as in flight until it is answered, and may come in any number."""

Handler: TypeAlias = Callable[[Message, float], None]
"""Starts an operation, given its message and when it came (``time.perf_counter``)."""

Asked: TypeAlias = tuple[int, Sequence[Any]]
"""Kind and body of the message that asked for an operation."""

ReplyId: TypeAlias = tuple[int, int | None]
"""An operation's id and, for one result of several, its index."""


class Send(Protocol):
    """Takes a message for the client; one that is not eager may wait for the next flush."""

    def __call__(self, message: Message, eager: bool = True, key: OrderKey = None) -> None: ...


class _Pending(NamedTuple):
    """An operation that has not been answered."""

    started: float
    entry: Entry | None
    """The mesh that was called."""
    convert: Callable[[Any], Any] | None
    """Makes what travels of what Monarch's future gives."""
    asked: Asked


class Replies:
    """The unanswered operations of one session. On any thread.

    Args:
        loop: the driver's event loop, which sees to what lingers.
        encoder: pickles results.
        send: takes a message for the client.
        flush: sends the messages that were not eager.
        why_silent: says why a mesh, or one of its elements, cannot answer; None if it can as far as is known.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        encoder: Encoder,
        send: Send,
        flush: Callable[[], None],
        why_silent: Callable[[Entry], str | None],
    ) -> None:
        self.latencies = Latencies()
        """How long calls took, from their arrival to their answers."""
        self._loop = loop
        self._encoder = encoder
        self._send = send
        self._flush = flush
        self._why_silent = why_silent
        self._pending: dict[ReplyId, _Pending] = {}
        self._answered: deque[tuple[int, Asked]] = deque(maxlen=REMEMBERED)
        self._flushed = 0.0
        self._flush_planned = False

    @property
    def in_flight(self) -> int:
        """How many operations have not been answered."""
        return len(self._pending)

    def expect(
        self,
        message: Message,
        started: float,
        entry: Entry | None = None,
        index: int | None = None,
        convert: Callable[[Any], Any] | None = None,
    ) -> ReplyId:
        """Note that an operation will be answered, or fail when a process of ``entry`` is gone."""
        reply = (message.id, index)
        pending = self._pending[reply] = _Pending(started, entry, convert, (message.kind, message.body))
        if entry is not None and self._why_silent(entry) is not None:
            self._loop.call_soon_threadsafe(self._fail_after_grace, reply, pending)
        return reply

    def forget(self, reply: ReplyId) -> None:
        """Take back what `expect` noted, for an operation that could not be started."""
        self._pending.pop(reply, None)

    def pending(self) -> dict[ReplyId, Asked]:
        """Return every answer that is expected."""
        return {reply: pending.asked for reply, pending in self._pending.copy().items()}

    def note_asked(self, ident: int, asked: Asked) -> None:
        """Remember an operation whose answers are sent by others."""
        self._answered.append((ident, asked))

    def answered(self) -> dict[int, Asked]:
        """Return the operations of which some answer has been sent, as far back as they are remembered."""
        return dict(self._answered.copy())

    def answer(self, reply: ReplyId, value: Any, error: BaseException | None, eager: bool) -> None:
        """Answer an operation; an answer that is not eager waits for `gathered`."""
        pending = self._pending.pop(reply, None)
        if pending is None:  # it was failed because a process is gone
            return
        ident, index = reply
        self._answered.append((ident, pending.asked))
        if pending.asked[0] in LIMITED:
            self.latencies.add(time.perf_counter() - pending.started)
        if error is not None:
            self.fail(ident, pending.started, error, index, eager)
            return
        try:
            if pending.convert is not None:
                value = pending.convert(value)
            self.succeed(ident, pending.started, value, index, eager)
        except Exception as broken:  # of ours: somebody waits, and this thread has others to answer
            logger.exception("the answer to operation %d could not be given", ident)
            self.fail(ident, pending.started, broken, index, eager)

    def answer_when(self, message: Message, started: float, future: concurrent.futures.Future[Any]) -> None:
        """Answer an operation with what a future gives, once it is done."""
        reply = self.expect(message, started)

        def done(future: concurrent.futures.Future[Any]) -> None:
            error = future.exception()
            self.answer(reply, None if error else future.result(), error, eager=True)

        future.add_done_callback(done)

    def answer_with(self, message: Message, started: float, work: Coroutine[Any, Any, Any]) -> None:
        """Answer an operation with what a coroutine returns, which the event loop runs."""
        self.answer_when(message, started, asyncio.run_coroutine_threadsafe(work, self._loop))

    def succeed(self, ident: int, started: float, value: Any, index: int | None = None, eager: bool = True) -> None:
        """Tell the client what an operation, or one answer of several, gives."""
        rpc_ms = (time.perf_counter() - started) * 1000
        try:
            parts = self._encoder.dumps(value, "the result")
        except LoomError as error:
            self.fail(ident, started, error, index, eager)
            return
        self._send(OperationResult.message_of(ident, parts, rpc_ms, index), eager)

    def fail(
        self, ident: int, started: float, error: BaseException, index: int | None = None, eager: bool = True
    ) -> None:
        """Tell the client that an operation, or one answer of several, failed."""
        self._send(error_message(ident, error, _since(started), self._encoder, index), eager)

    def gathered(self, more: bool) -> None:
        """Note an answer that was not eager; ``more`` says whether another is expected."""
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

    def fail_calls(self, on: Callable[[Entry], bool]) -> None:
        """Fail the calls to meshes that will not answer, unless Monarch does so within `GRACE`. On the loop."""
        for reply, pending in self._pending.copy().items():
            if pending.entry is not None and on(pending.entry):
                self._fail_after_grace(reply, pending)

    def _fail_after_grace(self, reply: ReplyId, pending: _Pending) -> None:
        self._loop.call_later(GRACE, self._fail_if_pending, reply, pending)

    def _fail_if_pending(self, reply: ReplyId, pending: _Pending) -> None:
        if self._pending.get(reply) is pending and pending.entry is not None:
            error = SupervisionError(self._why_silent(pending.entry) or "it is gone")
            self.answer(reply, None, error, eager=True)


def _since(started: float) -> float:
    return (time.perf_counter() - started) * 1000
