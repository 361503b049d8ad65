"""The endpoint calls of a client, with each of Monarch's adverbs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from loom.tracing.trace_ids import checked_trace, trace
from loom.wire.bodies import EndpointCall
from loom.wire.codec import plain_payload
from loom.wire.messages import ADVERBS, CALLS, Kind, Message
from loom_gateway.driver.session.context import SessionContext
from loom_gateway.driver.session.replies import Handler

_ADVERB_OF = {int(kind): adverb for adverb, kind in ADVERBS.items()}


class CallHandlers:
    """The handlers for the calls of one session."""

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._meshes = context.meshes
        self._replies = context.replies
        self._channels = context.channels
        self.handlers: dict[int, Handler] = {
            Kind.CALL: in_its_trace(self._call),
            Kind.CALL_ONE: in_its_trace(self._call_one),
            Kind.CHOOSE: in_its_trace(self._call),
            Kind.STREAM: in_its_trace(self._stream),
            Kind.BROADCAST: in_its_trace(self._broadcast),
        }
        self.beside: dict[int, Handler] = dict.fromkeys(CALLS, in_its_trace(self._call_beside))
        """The handlers for a client next to the one that drives."""

    # The endpoint comes first in each of these: of a mesh that was stopped it says so in Monarch's words.

    def _call(self, message: Message, started: float) -> None:
        mesh, name = EndpointCall.fields(message.body)
        bound = getattr(self._meshes.endpoint(mesh, name), _ADVERB_OF[message.kind])
        entry = self._meshes.entry(mesh)
        args, kwargs = self._arguments(name, message)
        convert = _values if message.kind == Kind.CALL else None
        reply = self._replies.expect(message, started, entry, convert=convert)
        try:
            self._context.futures.soon(reply, bound(*args, **kwargs))
        except BaseException:
            self._replies.forget(reply)
            raise

    def _call_one(self, message: Message, started: float) -> None:
        mesh, name = EndpointCall.fields(message.body)
        endpoint = self._meshes.endpoint(mesh, name)
        entry = self._meshes.entry(mesh)
        channel = self._channels.to(mesh, entry)
        takes = channel is not None and channel.takes(name, endpoint)
        plain = plain_payload(message.parts) if takes else None
        if plain is None:
            resolved = self._meshes.resolved
            args, kwargs = self._arguments(name, message)
            takes = takes and self._meshes.resolved == resolved
        reply = self._replies.expect(message, started, entry)
        try:
            if channel is None or not takes:
                self._context.futures.soon(reply, endpoint.call_one(*args, **kwargs))
            elif plain is not None:
                channel.pass_on(reply, name, plain)
            else:
                channel.call(reply, name, endpoint, args, kwargs)
        except BaseException:
            self._replies.forget(reply)
            raise

    def _stream(self, message: Message, started: float) -> None:
        mesh, name = EndpointCall.fields(message.body)
        bound = self._meshes.endpoint(mesh, name).stream
        entry = self._meshes.entry(mesh)
        args, kwargs = self._arguments(name, message)
        futures = list(bound(*args, **kwargs))
        expected = [self._replies.expect(message, started, entry, index) for index in range(len(futures))]
        self._context.futures.in_order(expected, futures)

    def _broadcast(self, message: Message, started: float) -> None:
        mesh, name = EndpointCall.fields(message.body)
        bound = self._meshes.endpoint(mesh, name).broadcast
        entry = self._meshes.entry(mesh)
        args, kwargs = self._arguments(name, message)
        bound(*args, **kwargs)
        self._context.broadcasts.note(mesh)
        entry.calls_of(name, started).sent(started)

    def _call_beside(self, message: Message, started: float) -> None:
        # On the event loop: the reply channels expect their calls from the driving client's thread.
        mesh, name = EndpointCall.fields(message.body)
        bound = getattr(self._meshes.endpoint(mesh, name), _ADVERB_OF[message.kind])
        entry = self._meshes.entry(mesh)
        args, kwargs = self._arguments(name, message)
        if message.kind == Kind.BROADCAST:
            self._context.loop.call_soon_threadsafe(functools.partial(bound, *args, **kwargs))
            self._context.broadcasts.note(mesh)
            entry.calls_of(name, started).sent(started)
            return

        async def call() -> Any:
            result = await bound(*args, **kwargs).as_asyncio()
            return _values(result) if message.kind == Kind.CALL else result

        self._replies.answer_with(message, started, call(), entry)

    def _arguments(self, endpoint: str, message: Message) -> tuple[tuple[Any, ...], dict[str, object]]:
        args, kwargs = self._context.passing_decoder.loads(message.parts, f"an argument of {endpoint!r}")
        return args, kwargs


def in_its_trace(handler: Handler, place: int = 2) -> Handler:
    """Return a handler that starts an operation in its trace, whose id has this place in the message's body."""

    def start(message: Message, started: float) -> None:
        body = message.body
        id = checked_trace(body[place]) if len(body) > place else None
        if id is None:
            handler(message, started)
        else:
            with trace(id):
                handler(message, started)

    return start


def _values(value_mesh: Any) -> Sequence[Any]:
    return list(value_mesh.values())
