"""Answers that their program never read, kept for the next client of the session.

When a program dies, its calls run on. The next client of the session can list and collect their answers, including
those that were on their way, also if a part of them had arrived, and those that had arrived and were not read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from loom.errors import OperationFailed, ResultDropped
from loom.wire.bodies import CollectAnswer, DropAnswer, EndpointCall, OperationError, OperationResult, ReadAnswers
from loom.wire.frames import pack_texts
from loom.wire.messages import ADVERBS, Kind, Message
from loom_gateway.driver.clients.unread_results import (
    STORED_FROM,
    WATCHER_IDS,
    Answer,
    UnreadAnswers,
    answer_of,
    operation_of,
)
from loom_gateway.driver.session.context import SessionContext
from loom_gateway.driver.session.replies import Handler, Request

logger = logging.getLogger(__name__)

MOST_CALLS = 100_000  # calls to note; beyond it, the oldest is forgotten

_ADVERB_OF = {int(kind): adverb for adverb, kind in ADVERBS.items() if kind != Kind.BROADCAST}


@dataclass
class _Call:
    """A call of a client that is gone, whose answers its program has not read."""

    request: Request
    mesh: str
    shape: tuple[Any, ...]
    answers: list[Message] = field(default_factory=list)
    collector: int | None = None  # id of the operation that collects the answers
    collected: int = 0

    @property
    def endpoint(self) -> str:
        return EndpointCall.fields(self.request[1])[1]


class UnclaimedResults:
    """The unclaimed results of one session."""

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._lock = threading.Lock()  # guards `_calls` and `_kept`
        self._calls: dict[int, _Call] = {}
        self._kept: dict[int, int] = {}
        """Calls with answers that may be dropped for newer ones, the oldest first, and these answers' bytes."""
        self._dropped: dict[int, None] = {}  # calls whose answers a program did not want, the oldest first
        context.results.free_some = self._drop_oldest
        self.unread = UnreadAnswers(context.results, context.loop)
        """Answers that were sent and that no program has read."""
        context.replies.keep = self.unread.keep
        self.handlers: dict[int, Handler] = {
            Kind.UNDELIVERED: self._list,
            Kind.COLLECT: self._collect,
            Kind.DROP: self._drop,
            Kind.READ: self._read,
        }

    def _read(self, message: Message, started: float) -> None:
        of = message.id // WATCHER_IDS
        told = ReadAnswers.from_body(message.body).answers
        own = _answers(told, of)
        self.unread.read(own)
        if of:  # a client that calls and was away has come back
            with self._lock:
                for answer in own:
                    self._forget_read(answer)

    def _forget_read(self, answer: Answer) -> None:
        ident = operation_of(answer)
        call = self._calls.get(ident)
        if call is not None and call.collector is None:
            call.answers = [one for one in call.answers if answer_of(one) != answer]
            if not call.answers and not self._missing(ident):
                self._calls.pop(ident)
                self._kept.pop(ident, None)

    def _take_from_callers(self) -> None:
        """Take what the clients that call, and are gone, have not read and still wait for."""
        gone = self._context.caller_is_gone
        answered = self.unread.take(gone)
        asked = {ident: call for (ident, _), call in self._context.replies.pending().items() if gone(ident)}
        asked |= {one.operation: one.request for one in answered}
        self._adopt(asked, [one.message for one in answered if one.message is not None])

    def client_left(self, unsent: Sequence[Message], requests: Mapping[int, Request | None]) -> None:
        """Keep what a disconnected client has not received or not read, and note what it waited for.

        ``requests`` has those of operations that were answered while it was away.
        """
        answered = self.unread.take(lambda ident: ident < WATCHER_IDS)
        known = {**requests, **{one.operation: one.request for one in answered}}
        on_the_way = {answer_of(answer) for answer in unsent if answer.kind in (Kind.RESULT, Kind.ERROR)}
        unread = [one.message for one in answered if one.message is not None]
        pending = self._context.replies.pending()
        asked = {ident: request for (ident, _), request in pending.items() if ident < WATCHER_IDS}
        asked |= {answer.id: request for answer in (*unsent, *unread) if (request := known.get(answer.id))}
        arrived = [answer for answer in unread if answer_of(answer) not in on_the_way]
        with self._lock:
            for call in self._calls.values():
                call.collector = None
        self._adopt(asked, [*arrived, *unsent])

    def _adopt(self, asked: Mapping[int, Request], answers: Sequence[Message]) -> None:
        """Note operations of a client that is gone, the oldest first, and take their answers."""
        with self._lock:
            for ident, request in sorted(asked.items()):
                self._note(ident, request)
        for answer in answers:
            self.take(answer)

    def _note(self, ident: int, request: Request) -> None:
        kind, body = request
        if ident in self._calls or ident in self._dropped or kind not in _ADVERB_OF:
            return
        entry = self._context.meshes.known(EndpointCall.fields(body)[0])
        if entry is not None and entry.shape is not None:
            self._calls[ident] = _Call(request, entry.name, entry.shape)
        if len(self._calls) > MOST_CALLS:
            oldest = next(iter(self._calls))
            call = self._calls.pop(oldest)
            self._kept.pop(oldest, None)
            logger.warning("the answer of %s.%s() was never collected and is forgotten", call.mesh, call.endpoint)

    def take(self, message: Message, request: Request | None = None) -> None:
        """Keep an answer to a client that is gone, or pass it on to the client that collects it.

        ``request`` is that of the answered call, if it is known.
        """
        with self._lock:
            if request is not None:
                self._note(message.id, request)
            call = self._calls.get(message.id)
        if call is None:
            return
        kept = self._context.results.keep(message) if call.collector is None else message
        with self._lock:
            known = {answer_of(one) for one in call.answers}
            if self._calls.get(message.id) is not call or answer_of(message) in known:
                return
            if kept is not None:
                self._kept[message.id] = self._kept.get(message.id, 0) + message.size
            call.answers.append(kept or self.dropped(message, call.request))
            ready = self._ready(message.id, call)
        self._send(ready, call)

    def _send(self, answers: Sequence[Message], call: _Call) -> None:
        for answer in answers:
            self._context.replies.keep(answer, call.request)
            self._context.send(answer)

    def dropped(self, message: Message, request: Request | None) -> Message:
        """Return the answer that says that the result of a call, which has run, was not kept."""
        body = (OperationResult if message.kind == Kind.RESULT else OperationError).from_body(message.body)
        what = "an operation"
        if request is not None and request[0] in _ADVERB_OF:
            mesh, endpoint = EndpointCall.fields(request[1])[:2]
            entry = self._context.meshes.known(mesh)
            what = f"{entry.name if entry is not None else mesh}.{endpoint}.{_ADVERB_OF[request[0]]}()"
        logger.warning("the result of %s, %d bytes, is dropped", what, message.size)
        text = (
            f"the result of {what}, {message.size:,} bytes, was not kept while no program took it: "
            f"{self._context.results.why_full}. It has run; run it again if you need it"
        )
        dropped = OperationError(body.rpc_ms, ResultDropped.code, body.index)
        return dropped.message(message.id, [pack_texts({"text": text})])

    def _drop_oldest(self) -> bool:
        """Drop what is needed least: an answer that was delivered, else those of the call that has waited longest.

        Calls with small answers come last, which leave hardly any room. Return False if none is kept.
        """
        if self.unread.drop_oldest_stored():
            return True
        with self._lock:
            if not self._kept:
                return False
            large = (ident for ident, size in self._kept.items() if size >= STORED_FROM)
            ident = next(large, None) or next(iter(self._kept))
            del self._kept[ident]
            call = self._calls[ident]
            call.answers = [self.dropped(answer, call.request) for answer in call.answers]
            return True

    def _ready(self, ident: int, call: _Call) -> list[Message]:
        """Return the answers that a call's collector gets now. The caller holds the lock."""
        if call.collector is None:
            return []
        answers, call.answers = call.answers, []
        self._kept.pop(ident, None)
        ready = []
        for answer in answers:
            body = (OperationResult if answer.kind == Kind.RESULT else OperationError).from_body(answer.body)
            if body.index is not None:
                body = replace(body, index=call.collected)
            ready.append(body.message(call.collector, answer.parts))
            call.collected += 1
        if not self._missing(ident):
            self._calls.pop(ident, None)
        return ready

    def _missing(self, ident: int) -> int:
        return sum(1 for pending, _ in self._context.replies.pending() if pending == ident)

    def _list(self, message: Message, started: float) -> None:
        self._take_from_callers()
        with self._lock:
            listed = [
                (ident, call.mesh, call.endpoint, _ADVERB_OF[call.request[0]], call.shape, expected)
                for ident, call in self._calls.items()
                if (expected := len(call.answers) + self._missing(ident)) and call.collector is None
            ]
        self._context.replies.succeed(message.id, started, listed)

    def _collect(self, message: Message, started: float) -> None:
        ident = CollectAnswer.from_body(message.body).operation
        with self._lock:
            call = self._uncollected(ident)
            call.collector = message.id
            ready = self._ready(ident, call)
        self._send(ready, call)

    def _uncollected(self, ident: int) -> _Call:
        call = self._calls.get(ident)
        if call is None or call.collector is not None:
            raise OperationFailed(
                f"no undelivered call has the id {ident}: it may have been collected or dropped already"
            )
        return call

    def _drop(self, message: Message, started: float) -> None:
        ident = DropAnswer.from_body(message.body).operation
        with self._lock:
            self._uncollected(ident)
            del self._calls[ident]
            self._kept.pop(ident, None)
            self._dropped[ident] = None  # an answer may be under way
            if len(self._dropped) > MOST_CALLS:
                del self._dropped[next(iter(self._dropped))]
        self._context.replies.succeed(message.id, started, None)


def _answers(told: Sequence[Any], client: int) -> Sequence[Answer]:
    """Return the answers that a client tells of, without those that are none of its own."""
    if set(map(type, told)) == {int} and min(told) // WATCHER_IDS == max(told) // WATCHER_IDS == client:
        return told  # nearly always
    answers = [tuple(one) if isinstance(one, (list, tuple)) else (one,) for one in told]
    counts = [one for one in answers if len(one) in (1, 2) and set(map(type, one)) == {int}]
    return [one[0] if len(one) == 1 else one for one in counts if one[0] // WATCHER_IDS == client]
