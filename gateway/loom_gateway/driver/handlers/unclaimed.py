"""Answers that their client never received, kept for the next client of the session.

When a program dies, its calls run on. The next client of the session can list and collect their answers, including
those that were on their way. A large answer is lost if the dead client had received a part of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from loom.errors import OperationFailed
from loom.wire.bodies import CollectAnswer, EndpointCall, OperationError, OperationResult
from loom.wire.messages import ADVERBS, Kind, Message
from loom_gateway.driver.session.context import Context
from loom_gateway.driver.session.replies import Handler, Request

logger = logging.getLogger(__name__)

MOST_CALLS = 10_000
MOST_BYTES = 256 << 20
"""The number of calls and bytes of answers to keep. Beyond either, the oldest call goes."""

_ADVERB_OF = {int(kind): adverb for adverb, kind in ADVERBS.items() if kind != Kind.BROADCAST}


@dataclass
class _Call:
    """A call whose answers no client has received."""

    request: Request
    mesh: str
    shape: tuple[Any, ...]
    answers: list[Message] = field(default_factory=list)
    collector: int | None = None  # id of the operation that collects the answers
    collected: int = 0

    @property
    def endpoint(self) -> str:
        return EndpointCall.fields(self.request[1])[1]

    @property
    def size(self) -> int:
        return sum(answer.size for answer in self.answers)


class UnclaimedResults:
    """The unclaimed results of one session."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = threading.Lock()  # guards `_calls`
        self._calls: dict[int, _Call] = {}
        self.handlers: dict[int, Handler] = {Kind.UNDELIVERED: self._list, Kind.COLLECT: self._collect}

    def client_left(self, unsent: Sequence[Message]) -> None:
        """Keep what was on its way to a disconnected client, and note what it waited for."""
        with self._lock:
            for call in self._calls.values():
                call.collector = None
            for (ident, _), request in self._context.replies.pending().items():
                self._note(ident, request)
        for message in unsent:
            self.take(message)

    def _note(self, ident: int, request: Request) -> None:
        kind, body = request
        if ident in self._calls or kind not in _ADVERB_OF:
            return
        entry = self._context.meshes.known(EndpointCall.fields(body)[0])
        if entry is not None and entry.mesh is not None:
            self._calls[ident] = _Call(request, entry.name, self._context.meshes.shape(entry))

    def take(self, message: Message) -> None:
        with self._lock:
            if message.id not in self._calls:
                request = self._context.replies.answered().get(message.id)
                if request is not None:
                    self._note(message.id, request)
            call = self._calls.get(message.id)
            if call is None:
                return
            call.answers.append(message)
            self._make_room()
            ready = self._ready(message.id, call)
        for answer in ready:
            self._context.send(answer)

    def _make_room(self) -> None:
        while len(self._calls) > MOST_CALLS or sum(call.size for call in self._calls.values()) > MOST_BYTES:
            ident, call = next(iter(self._calls.items()))
            logger.warning("the answer of %s.%s() was never collected and is dropped", call.mesh, call.endpoint)
            del self._calls[ident]

    def _ready(self, ident: int, call: _Call) -> list[Message]:
        """Return the answers that a call's collector gets now. The caller holds the lock."""
        if call.collector is None:
            return []
        answers, call.answers = call.answers, []
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
            call = self._calls.get(ident)
            if call is None or call.collector is not None:
                raise OperationFailed(f"no undelivered call has the id {ident}: it may have been collected already")
            call.collector = message.id
            self._context.replies.note_request(message.id, call.request)
            ready = self._ready(ident, call)
        for answer in ready:
            self._context.send(answer)
