"""Unclaimed results: calls of the session's earlier clients whose answers none of them received.

A module of its own, because futures and value meshes, which it makes, import the session's calls.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

from loom.errors import NotSupported
from loom.shape import Shape
from loom.wire.bodies import CollectAnswer, DropAnswer, ListUnclaimed
from loom_proxy.futures.future import FutureProxy
from loom_proxy.mesh.values import ValueMeshProxy
from loom_proxy.session.calls import Calls


class UndeliveredCall:
    """A call of a program that left before it had read the answer.

    The driver keeps the answer until a program has read it from `futures`, or until it is dropped with `drop`.
    """

    def __init__(
        self, caller: Calls, ident: int, mesh: str, endpoint: str, adverb: str, shape: Shape, answers: int
    ) -> None:
        self._caller = caller
        self._ident = ident
        self._shape = shape
        self._answers = answers
        self.mesh = mesh
        """Name of the mesh that was called."""
        self.endpoint = endpoint
        """Name of the endpoint."""
        self.adverb = adverb
        """``call``, ``call_one``, ``choose`` or ``stream``."""

    @cached_property
    def futures(self) -> list[FutureProxy[Any]]:
        """The futures of the answers: one, or several for `stream`. The first access collects the answers."""
        operation = CollectAnswer(self._ident)
        if self.adverb == "stream":
            return self._caller.ask_many(self._answers, operation, key=None)
        convert = partial(ValueMeshProxy, self._shape) if self.adverb == "call" else None
        return [self._caller.ask(operation, key=None, convert=convert)]

    @property
    def future(self) -> FutureProxy[Any]:
        """The first of `futures`."""
        return self.futures[0]

    def drop(self) -> None:
        """Let the driver drop the answers, also later ones. The call itself runs on.

        Raises:
            OperationFailed: the answers were collected, here or by another program, or dropped.
            NotSupported: the session's driver is of a version that drops none.
        """
        if "drops" not in self._caller.welcome.capabilities:
            raise NotSupported(
                f"this session's driver is of a version that drops no answers: read that of {self!r} instead"
            )
        self._caller.ask(DropAnswer(self._ident), key=None).get()

    def __repr__(self) -> str:
        return f"<UndeliveredCall {self.mesh}.{self.endpoint}.{self.adverb}()>"


def unclaimed_calls(caller: Calls) -> list[UndeliveredCall]:
    """Return the calls of earlier clients whose answers have not been collected, oldest first."""
    listed = caller.ask(ListUnclaimed(), key=None).get()
    return [
        UndeliveredCall(caller, ident, mesh, endpoint, adverb, Shape.of(*shape), answers)
        for ident, mesh, endpoint, adverb, shape, answers in listed
    ]
