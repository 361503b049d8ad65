"""Calling endpoints, with each of Monarch's adverbs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from loom.wire.codec import plain_payload
from loom.wire.messages import ADVERBS, Kind, Message
from loom_gateway.driver.monarch.fast_call import MOST_LINES, Line
from loom_gateway.driver.monarch.mesh_table import Entry

if TYPE_CHECKING:
    from loom_gateway.driver.session.operations import Handler, Operations

__all__ = ["Calls"]

_ADVERB_OF = {kind: adverb for adverb, kind in ADVERBS.items()}


class Calls:
    """The calls of one session."""

    def __init__(self, session: Operations) -> None:
        self._session = session
        self._lines: dict[int, Line] = {}
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
        bound = getattr(self._session.meshes.endpoint(mesh, endpoint), adverb)
        args, kwargs = self._session.passing_decoder.loads(message.parts, f"an argument of {endpoint!r}")
        convert = _values if message.kind == Kind.CALL else None
        key = self._session.expect(message, started, self._session.meshes.entry(mesh), convert=convert)
        try:
            self._session.answers.soon(key, bound(*args, **kwargs))
        except BaseException:
            self._session.forget(key)
            raise

    def _call_one(self, message: Message, started: float) -> None:
        mesh, name = message.body
        entry = self._session.meshes.entry(mesh)
        line = self._lines.get(mesh) or self._new_line(mesh, entry)
        endpoint = self._session.meshes.endpoint(mesh, name)
        takes = line is not None and line.takes(name, endpoint)
        plain = plain_payload(message.parts) if takes else None
        resolved = self._session.meshes.resolved
        args, kwargs = (), {}
        if plain is None:
            args, kwargs = self._session.passing_decoder.loads(message.parts, f"an argument of {name!r}")
        key = self._session.expect(message, started, entry)
        try:
            if line is None or not takes or self._session.meshes.resolved > resolved:
                self._session.answers.soon(key, endpoint.call_one(*args, **kwargs))
            elif plain is not None:
                line.pass_on(key, name, plain)
            else:
                line.call(key, name, endpoint, args, kwargs)
        except BaseException:
            self._session.forget(key)
            raise

    def _new_line(self, mesh: int, entry: Entry) -> Line | None:
        if len(self._lines) >= MOST_LINES or len(entry.ranks) != 1 or entry.kind != "actors":
            return None
        line = self._lines[mesh] = Line(
            entry.mesh, self._session.loop, self._session.answer, self._session.gatherer
        )
        return line

    def break_lines(self, to: Callable[[Entry], bool]) -> None:
        """Have some actors called in Monarch's own way from now on: it tells at once what is wrong with them."""
        for mesh, line in self._lines.copy().items():
            entry = self._session.meshes.known(mesh)
            if entry is None or to(entry):
                line.broken = True

    def _stream(self, message: Message, started: float) -> None:
        mesh, endpoint = message.body
        bound = self._session.meshes.endpoint(mesh, endpoint).stream
        args, kwargs = self._session.passing_decoder.loads(message.parts, f"an argument of {endpoint!r}")
        futures = list(bound(*args, **kwargs))
        entry = self._session.meshes.entry(mesh)
        keys = [self._session.expect(message, started, entry, index) for index in range(len(futures))]
        self._session.answers.in_order(keys, futures)

    def _broadcast(self, message: Message, started: float) -> None:
        mesh, endpoint = message.body
        bound = self._session.meshes.endpoint(mesh, endpoint).broadcast
        args, kwargs = self._session.passing_decoder.loads(message.parts, f"an argument of {endpoint!r}")
        bound(*args, **kwargs)


def _values(value_mesh: Any) -> Sequence[Any]:
    return list(value_mesh.values())
