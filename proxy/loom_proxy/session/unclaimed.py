"""Calls of an earlier client of the session, whose answers it has not received."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loom.shape import Shape
from loom.wire.messages import Kind
from loom_proxy.futures.future import FutureProxy
from loom_proxy.mesh.values import ValueMeshProxy

if TYPE_CHECKING:
    from loom_proxy.session.connection import Connection

__all__ = ["UndeliveredCall", "undelivered_calls"]


class UndeliveredCall:
    """A call of a program that left before it had the answer. The driver keeps that until it is collected."""

    def __init__(
        self, connection: Connection, ident: int, mesh: str, endpoint: str, adverb: str, shape: Shape, answers: int
    ) -> None:
        self._connection = connection
        self._ident = ident
        self._shape = shape
        self._answers = answers
        self._futures: list[FutureProxy[Any]] | None = None
        self.mesh = mesh
        """Name of the mesh that was called."""
        self.endpoint = endpoint
        """Name of the endpoint."""
        self.adverb = adverb
        """``call``, ``call_one``, ``choose`` or ``stream``."""

    @property
    def futures(self) -> list[FutureProxy[Any]]:
        """The answers, which are collected with the first look at this: one, or several of `stream`."""
        if self._futures is None:
            if self.adverb == "stream":
                self._futures = self._connection.ask_many(self._answers, Kind.COLLECT, (self._ident,), (), None)
            else:
                future = self._connection.ask(Kind.COLLECT, (self._ident,), key=None)
                if self.adverb == "call":
                    future._convert = lambda values: ValueMeshProxy(self._shape, values)
                self._futures = [future]
        return self._futures

    @property
    def future(self) -> FutureProxy[Any]:
        """The first of `futures`."""
        return self.futures[0]

    def __repr__(self) -> str:
        return f"<UndeliveredCall {self.mesh}.{self.endpoint}.{self.adverb}()>"


def undelivered_calls(connection: Connection) -> list[UndeliveredCall]:
    """The calls of earlier clients that have not been collected, oldest first."""
    listed = connection.ask(Kind.UNDELIVERED, (), key=None).get()
    return [
        UndeliveredCall(connection, ident, mesh, endpoint, adverb, Shape(*shape), answers)
        for ident, mesh, endpoint, adverb, shape, answers in listed
    ]
