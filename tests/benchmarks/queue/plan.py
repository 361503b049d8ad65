"""The set-ups, the ways, and how much is measured."""

from __future__ import annotations

from dataclasses import dataclass

from loom.rl.generation.weight_client import POOL, Bottleneck

WAYS = ("shared", "admin", "listener", "lane")
"""The three ways, and the admin client at a listener of its own."""
SERVER_WAYS = ("shared", "kept", "admin", "lane")
"""The three ways, and an admin client that keeps its connection."""


@dataclass(frozen=True)
class SetUp:
    """A load of streams, and what makes orders wait. All slowness is waiting, and no work for the processor."""

    name: str
    place: Bottleneck
    """Where orders over the shared pool wait."""
    streams: int
    tokens: int
    """Of a stream."""
    step_s: float
    """Seconds that the model waits in each step."""
    pool: int = POOL
    """Connections of the shared client."""
    accepted: int = 4096
    """Connections that the server accepts at a time."""
    decode_s: float = 0.0
    """Seconds that decoding a piece of text keeps the server's event loop."""
    budget: str = ""
    """The name of the budget for the best way."""


SET_UPS = (
    SetUp("client's pool", Bottleneck.POOL, 36, 40, 0.025, pool=12, budget="order beside a full pool"),
    SetUp("accept queue", Bottleneck.ACCEPT, 36, 40, 0.025, accepted=12, budget="order beside a full accept queue"),
    SetUp("event loop", Bottleneck.LOOP, 24, 40, 0.025, decode_s=0.004, budget="order beside a busy event loop"),
    # No divisor of the plan's period: all orders would come at the same moment of a step.
    SetUp("engine's lock", Bottleneck.ENGINE, 12, 4, 0.53),
)


@dataclass(frozen=True)
class QueuePlan:
    """How much is measured."""

    rounds: int = 6
    """By chance, spreads of equal ways are apart in a tenth of comparisons of three rounds; of six, in 1 of 462."""
    seconds: float = 6.0
    """For each way in each set-up and round."""
    period: float = 2.0
    """Seconds from an order to the next one: long, so that each way makes about as many."""
    settle: float = 2.0
    """Seconds of load before the first order."""


SERVER_SET_UPS = (
    SetUp("client's pool", Bottleneck.POOL, 36, 40, 0.025, pool=12),
    SetUp("event loop", Bottleneck.LOOP, 24, 40, 0.025, decode_s=0.008),
    SetUp("engine", Bottleneck.ENGINE, 12, 4, 1.3),
)
"""The set-ups of Loom's server beside vLLM's, which accepts all connections."""
SERVERS = {"Loom": 0, "vLLM": 1, "vLLM, 2 API servers": 2}
"""The servers, and the API servers of vLLM."""


@dataclass(frozen=True)
class ServersPlan(QueuePlan):
    """How much is measured of each server."""

    rounds: int = 1
    seconds: float = 5.0
    period: float = 0.5
    settle: float = 1.0
    servers: tuple[str, ...] = tuple(SERVERS)
