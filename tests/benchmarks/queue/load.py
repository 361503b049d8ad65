"""The load and the orders, as an orchestrator in the cluster makes them: this runs in `job.run`."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from loom.rl.generation.weight_client import (
    Bottleneck,
    OrderTiming,
    bearer,
    place_of,
    shared_client,
    weights_client,
)
from tests.benchmarks.queue.plan import QueuePlan, SetUp

STEPS = (1, 2)  # weights that are loaded in turn


@dataclass(frozen=True)
class Target:
    """A generator, and how to reach it."""

    generator: Any
    url: str
    admin_url: str


@dataclass
class Window:
    """What was measured with one way, in one set-up and round."""

    queue_ms: list[float] = field(default_factory=list)
    rpc_ms: list[float] = field(default_factory=list)
    places: list[Bottleneck] = field(default_factory=list)
    """Where each order waited."""
    tokens_per_s: float = 0.0


async def measure_window(target: Target, set_up: SetUp, plan: QueuePlan, way: str) -> Window:
    """Stream completions, and order weights in one way meanwhile."""
    async with shared_client(set_up.pool) as client:
        body = {"prompt": "go", "max_tokens": set_up.tokens, "stream": True}
        streams = [asyncio.create_task(_stream(client, target.url, body)) for _ in range(set_up.streams)]
        try:
            await asyncio.sleep(plan.settle)
            return await _orders(target, plan, way, client)
        finally:
            for stream in streams:
                stream.cancel()
            ended = await asyncio.gather(*streams, return_exceptions=True)
            for error in ended:
                if not isinstance(error, asyncio.CancelledError):
                    raise RuntimeError(f"a stream ended: {error!r}")


async def _stream(client: Any, url: str, body: dict[str, Any]) -> None:
    bare, headers = bearer(url)
    while True:
        async with client.stream("POST", f"{bare}/v1/completions", json=body, headers=headers) as answer:
            answer.raise_for_status()
            async for _ in answer.aiter_raw():
                pass
        # httpx gives a connection to whoever asks at once, before those that wait, which would wait for ever.
        await asyncio.sleep(0.01)


async def _orders(target: Target, plan: QueuePlan, way: str, client: Any) -> Window:
    found = Window()
    orders = weights_client({"listener": "admin"}.get(way, way), client)
    whom = {"lane": target.generator, "listener": target.admin_url}.get(way, target.url)
    began, counting = time.monotonic(), asyncio.create_task(_tokens_per_s(target.generator, plan.seconds))
    while (sent := time.monotonic()) < began + plan.seconds:
        order = asyncio.create_task(orders.update([whom], STEPS[len(found.queue_ms) % 2]))
        # When it has waited, there is something to see: an order that does not wait is done by then.
        await asyncio.wait((order,), timeout=0.15)
        state = (await target.generator.state.call_one())[1]
        timing: OrderTiming = (await order)[0]
        found.queue_ms.append(timing.queue_ms)
        found.rpc_ms.append(timing.rpc_ms)
        found.places.append(place_of(timing.queue_ms, timing.rpc_ms, state))
        await asyncio.sleep(max(0.0, sent + plan.period - time.monotonic()))
    found.tokens_per_s = await counting
    return found


async def _tokens_per_s(generator: Any, seconds: float) -> float:
    """Count for as long in each way: an order that waits for streams is done when many of them have just ended."""
    before, began = (await generator.state.call_one())[0].tokens, time.monotonic()
    await asyncio.sleep(seconds)
    tokens: int = (await generator.state.call_one())[0].tokens - before
    return tokens / (time.monotonic() - began)
