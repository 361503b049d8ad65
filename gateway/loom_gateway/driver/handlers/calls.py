"""Calling endpoints, with each of Monarch's adverbs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loom.wire.codec import plain_payload
from loom.wire.messages import ADVERBS, Kind, Message
from loom_gateway.driver.session.context import Context
from loom_gateway.driver.session.replies import Handler

__all__ = ["Calls"]

_ADVERB_OF = {kind: adverb for adverb, kind in ADVERBS.items()}


class Calls:
    """The calls of one session."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.handlers: dict[int, Handler] = {
            Kind.CALL: self._call,
            Kind.CALL_ONE: self._call_one,
            Kind.CHOOSE: self._call,
            Kind.STREAM: self._stream,
            Kind.BROADCAST: self._broadcast,
        }

    def _call(self, message: Message, started: float) -> None:
        mesh, endpoint = message.body
        adverb = _ADVERB_OF[Kind(message.kind)]
        bound = getattr(self._context.meshes.endpoint(mesh, endpoint), adverb)
        args, kwargs = self._context.passing_decoder.loads(message.parts, f"an argument of {endpoint!r}")
        convert = _values if message.kind == Kind.CALL else None
        reply = self._context.replies.expect(message, started, self._context.meshes.entry(mesh), convert=convert)
        try:
            self._context.futures.soon(reply, bound(*args, **kwargs))
        except BaseException:
            self._context.replies.forget(reply)
            raise

    def _call_one(self, message: Message, started: float) -> None:
        mesh, name = message.body
        context = self._context
        entry = context.meshes.entry(mesh)
        channel = context.channels.to(mesh, entry)
        endpoint = context.meshes.endpoint(mesh, name)
        takes = channel is not None and channel.takes(name, endpoint)
        plain = plain_payload(message.parts) if takes else None
        resolved = context.meshes.resolved
        args, kwargs = (), {}
        if plain is None:
            args, kwargs = context.passing_decoder.loads(message.parts, f"an argument of {name!r}")
        reply = context.replies.expect(message, started, entry)
        try:
            if channel is None or not takes or context.meshes.resolved > resolved:
                context.futures.soon(reply, endpoint.call_one(*args, **kwargs))
            elif plain is not None:
                channel.pass_on(reply, name, plain)
            else:
                channel.call(reply, name, endpoint, args, kwargs)
        except BaseException:
            context.replies.forget(reply)
            raise

    def _stream(self, message: Message, started: float) -> None:
        mesh, endpoint = message.body
        bound = self._context.meshes.endpoint(mesh, endpoint).stream
        args, kwargs = self._context.passing_decoder.loads(message.parts, f"an argument of {endpoint!r}")
        futures = list(bound(*args, **kwargs))
        entry = self._context.meshes.entry(mesh)
        replies = [self._context.replies.expect(message, started, entry, index) for index in range(len(futures))]
        self._context.futures.in_order(replies, futures)

    def _broadcast(self, message: Message, started: float) -> None:
        mesh, endpoint = message.body
        bound = self._context.meshes.endpoint(mesh, endpoint).broadcast
        args, kwargs = self._context.passing_decoder.loads(message.parts, f"an argument of {endpoint!r}")
        bound(*args, **kwargs)


def _values(value_mesh: Any) -> Sequence[Any]:
    return list(value_mesh.values())
