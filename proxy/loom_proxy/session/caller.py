"""What meshes, ports, runs and syncs need of a session: a way to send operations and to get answers."""

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
    """Sends the operations of one client. `loom_proxy.session.calls.Calls` is the only one."""

    welcome: Welcome
    """What the driver said when the session was opened."""
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
        """What ended the connection, if something has."""

    def check_open(self) -> None:
        """Raise what ended the connection, if something has."""

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
        """Send something about what has the id; never wait, and do nothing when the connection is over."""

    def forget(self, mesh: int) -> None:
        """Have the driver let go of a mesh that came in a result, with the next operation."""
