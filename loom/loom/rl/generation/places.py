"""`place_of`: where an order to load weights waited."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loom.rl.generation.serving import ServingState

NOTICED_MS = 100.0
"""Waits below this are nowhere in particular."""
PASSES = 10
"""How often an order passes the server's event loop, at most."""


class Bottleneck(str, Enum):
    """Where an order waited."""

    POOL = "the client's pool"
    ACCEPT = "the server's accept queue"
    LOOP = "the server's event loop"
    ENGINE = "the engine"
    NOWHERE = "nowhere"


def place_of(queue_ms: float, rpc_ms: float, state: ServingState) -> Bottleneck:
    """Return where an order waited most.

    Args:
        queue_ms: of the order.
        rpc_ms: of the order.
        state: of the server, while the order waited.
    """
    if max(queue_ms, rpc_ms) < NOTICED_MS:
        return Bottleneck.NOWHERE
    if rpc_ms > queue_ms:
        return Bottleneck.ENGINE
    if state.late_ms * PASSES > queue_ms:
        return Bottleneck.LOOP
    return Bottleneck.ACCEPT if state.accept_queue else Bottleneck.POOL
