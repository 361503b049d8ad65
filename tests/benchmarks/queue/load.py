"""The load and the orders, as an orchestrator in the cluster makes them: this runs in `job.run`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loom import tracing
from loom.rl.engines.engine import PauseMode
from loom.rl.engines.vllm_client import VllmClient
from loom.rl.generation import weight_files as weights
from loom.rl.generation.openai import MODEL
from loom.rl.generation.weight_client import (
    Bottleneck,
    OrderTiming,
    SharedWeights,
    UpdateAnswer,
    WeightsClient,
    bearer,
    own_client,
    place_of,
    shared_client,
    update_over_http,
    weights_client,
)
from tests.benchmarks.queue.plan import QueuePlan, SetUp

STEPS = (1, 2)  # weights that are loaded in turn


@dataclass(frozen=True)
class Target:
    """A generator, and how to reach it."""

    generator: Any
    url: str
    admin_url: str | None
    weights: Path
    """The folder of the steps' weights."""
    vllm: bool = False
    """Whether the URL is that of a vLLM server."""

    def order(self) -> Any:
        """Return what orders the server over HTTP."""
        return _update_vllm if self.vllm else update_over_http


async def _update_vllm(client: Any, url: str, step: int, path: str | None, trace: str) -> UpdateAnswer:
    with tracing.trace(trace):
        # Completions go on with the new weights, as those of Loom's own engine do.
        return await VllmClient(client, url, mode=PauseMode.KEEP).update_weights(step, str(path))


@dataclass
class Window:
    """What was measured with one way, in one set-up and round."""

    queue_ms: list[float] = field(default_factory=list)
    rpc_ms: list[float] = field(default_factory=list)
    places: list[Bottleneck] = field(default_factory=list)
    """Where each order waited."""
    tokens_per_s: float = 0.0


async def measure_window(
    target: Target, set_up: SetUp, plan: QueuePlan, way: str, events: Path | None = None
) -> Window:
    """Stream completions, and order weights in one way meanwhile; the events of orders go to a folder."""
    tracing.configure(folder=events)
    async with shared_client(set_up.pool) as client:
        request = _request(target, set_up)
        streams = [asyncio.create_task(_stream(client, *request)) for _ in range(set_up.streams)]
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


def _request(target: Target, set_up: SetUp) -> tuple[str, dict[str, str], Mapping[str, Any]]:
    """Return a request's URL, headers and body. A model that waits, or a plugin of vLLM, makes it slow."""
    bare, headers = bearer(target.url)
    body = {"prompt": "go", "max_tokens": set_up.tokens, "stream": True}
    if target.vllm:
        headers = {**headers, "x-decode-s": str(set_up.decode_s)}
        body |= {"model": MODEL, "ignore_eos": True, "vllm_xargs": {"step_s": set_up.step_s}}
    return f"{bare}/v1/completions", headers, body


async def _stream(client: Any, url: str, headers: dict[str, str], body: Mapping[str, Any]) -> None:
    while True:
        async with client.stream("POST", url, json=body, headers=headers) as answer:
            answer.raise_for_status()
            async for _ in answer.aiter_raw():
                pass
        # httpx gives a connection to whoever asks at once, before those that wait, which would wait for ever.
        await asyncio.sleep(0.01)


async def _orders(target: Target, plan: QueuePlan, way: str, client: Any) -> Window:
    found = Window()
    whom = {"lane": target.generator, "listener": target.admin_url}.get(way, target.url)
    async with AsyncExitStack() as connections:
        orders: WeightsClient
        if way == "kept":
            kept = await connections.enter_async_context(own_client(keep_alive=1))
            orders = SharedWeights(kept, target.order())
        else:
            orders = weights_client({"listener": "admin"}.get(way, way), client, target.order())
        began, counting = time.monotonic(), asyncio.create_task(_tokens_per_s(target.generator, plan.seconds))
        while (sent := time.monotonic()) < began + plan.seconds:
            step = STEPS[len(found.queue_ms) % 2]
            path = str(weights.path_of(target.weights, step))
            order = asyncio.create_task(orders.update([whom], step, path))
            # When it has waited, there is something to see: an order that does not wait is done by then.
            await asyncio.wait((order,), timeout=0.15)
            state = (await target.generator.state.call_one())[1]
            timing: OrderTiming = (await order)[0]
            found.queue_ms.append(timing.queue_ms)
            found.rpc_ms.append(timing.rpc_ms)
            if state is not None:
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
