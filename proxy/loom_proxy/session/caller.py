"""The side of a session that meshes, ports, runs and syncs need: sending operations and getting answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

from loom.wire.bodies import Body
from loom.wire.codec import Decoder, Encoder
from loom.wire.handshake import Welcome
from loom.wire.messages import Buffer
from loom.wire.mux import BARRIER, OrderKey
from loom_proxy.futures.future import FutureProxy
from loom_proxy.session.waits import Waits


class Caller(Waits, Protocol):
    """The sender of one client's operations. `loom_proxy.session.calls.Calls` implements it."""

    welcome: Welcome
    """The driver's answer when the session was opened."""
    encoder: Encoder
    decoder: Decoder
    meshes: dict[str, Any]
    """Proxies of the session's meshes by name."""
    wholes: WeakValueDictionary[int, Any]
    """The whole meshes that have proxies, by id."""
    ended: threading.Event
    """Set when the connection is over, for whatever reason."""

    @property
    def error(self) -> Exception | None:
        """The error that ended the connection, if it is over."""

    def check_open(self) -> None:
        """Raise the error that ended the connection, if it is over."""

    def next_id(self) -> int:
        """Return a new id, for a mesh or an operation."""

    def send(
        self, operation: Body, parts: Sequence[Buffer] = (), key: OrderKey = BARRIER, ident: int | None = None
    ) -> int:
        """Send an operation that has no answer, unless it fails; return its id, which is new unless given."""

    def ask(
        self,
        operation: Body,
        parts: Sequence[Buffer] = (),
        key: OrderKey = BARRIER,
        ident: int | None = None,
        convert: Callable[[Any], Any] | None = None,
    ) -> FutureProxy[Any]:
        """Send an operation and return the future of its answer; its id is new unless given."""

    def ask_many(
        self, count: int, operation: Body, parts: Sequence[Buffer] = (), key: OrderKey = BARRIER
    ) -> list[FutureProxy[Any]]:
        """Send an operation that has ``count`` answers, and return a future for each."""

    def tell(self, operation: Body, ident: int, key: OrderKey) -> None:
        """Send a message about the mesh, port or run with an id; never wait, and do nothing after the end."""

    def forget(self, mesh: int) -> None:
        """Release a mesh that came in a result; the driver learns of it with the next operation."""
