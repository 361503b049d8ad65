"""Orders to load weights on the real vLLM: completions that are kept, and the ways to connect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import loom
from loom.rl.arithmetic import SMALL_SERVER
from loom.rl.arithmetic_model import LONGEST
from loom.rl.engines import vllm_server
from loom.rl.engines.engine import PauseMode
from loom.rl.engines.vllm import VllmEngine, VllmOptions
from loom.rl.engines.vllm_client import VllmClient
from loom.rl.generation import weight_files as weights
from loom.rl.generation.completions import Completion, Sampling
from loom.rl.generation.weight_client import UpdateAnswer, shared_client, weights_client
from tests.benchmarks.queue.servers import SLOWNESS
from tests.support.real_vllm import needs_vllm
from tests.support.seed_lines import RPC_DONE, RPC_START, SERVER_RECV, matches
from tests.system.rl.drawn import logprobs_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), needs_vllm]

STEP_S = 0.1
PROMPT = [one % 200 for one in range(40)]
"""Longer than a block of the server's cache."""
TOKENS = 60
SLOW = Sampling(TOKENS, 1.0, seed=3).with_fields({"ignore_eos": True, "extra_args": {"step_s": STEP_S}})


@asynccontextmanager
async def engine_of(folder: Path, pause: str, *arguments: str) -> AsyncIterator[VllmEngine]:
    """A server whose steps take as long as requests say."""
    environment = {**SMALL_SERVER["environment"], "PYTHONPATH": f"{vllm_server.PLUGIN}:{SLOWNESS}"}
    options = {
        **SMALL_SERVER,
        "pause": pause,
        "max_length": LONGEST,
        "arguments": ("--enforce-eager", "--logits-processors", "slow_vllm:SlowSteps", *arguments),
        "environment": environment,
    }
    engine = VllmEngine(str(folder / "model"), VllmOptions.of(options), folder=folder, name=pause)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def running(engine: VllmEngine) -> int:
    """Return how many completions the server draws tokens of."""
    assert engine._client is not None
    metrics = await engine._client.server._request("GET", "/metrics", None, 60.0)
    (line,) = (one for one in metrics.text.splitlines() if one.startswith("vllm:num_requests_running{"))
    return int(float(line.split()[-1]))


async def begin(engine: VllmEngine, count: int = 1) -> asyncio.Future[list[Completion]]:
    """Begin completions; return them to come when all are under way."""
    found = asyncio.ensure_future(engine.complete([PROMPT], count, SLOW))
    while await running(engine) < count:
        assert not found.done(), found
        await asyncio.sleep(0.01)
    return found


async def test_kept_completions_have_the_step_of_each_token_and_go_on_with_the_new_weights(folder: Path) -> None:
    async with engine_of(folder, "keep", "--block-size", "32") as engine:
        await engine.update_weights(1)
        under_way = await begin(engine, 2)
        answer = await engine.update_weights(2)
        (new,) = await engine.complete([PROMPT], 1, Sampling(8, 1.0, seed=5))
        kept = await under_way

    assert answer["step"] == 2
    assert [(span.step, span.start, span.end) for span in new.spans] == [(2, 0, len(new.tokens))]
    assert new.logprobs == pytest.approx(logprobs_of(folder / "model_2", new, 1.0), abs=1e-4)
    for one in kept:
        old, after = one.spans
        assert (old.step, old.start, old.end) == (1, 0, after.start)
        assert (after.step, after.end) == (2, TOKENS)
        assert one.weights_step == 1
        by_step = {step: logprobs_of(folder / f"model_{step}", one, 1.0) for step in (1, 2)}
        assert one.logprobs[: old.end] == pytest.approx(by_step[1][: old.end], abs=1e-4)
        assert one.logprobs[old.end :] == pytest.approx(by_step[2][old.end :], abs=1e-4)
        assert one.logprobs[old.end :] != pytest.approx(by_step[1][old.end :], abs=1e-2)


def order_of(folder: Path, mode: PauseMode) -> Callable[..., Any]:
    async def order(client: Any, url: str, step: int, path: str | None, trace: str) -> UpdateAnswer:
        with loom.tracing.trace(trace):
            return await VllmClient(client, url, model=str(folder / "model"), mode=mode).update_weights(
                step, str(path)
            )

    return order


@pytest.mark.parametrize("pause", ["wait", "keep"])
async def test_orders_over_a_pool_that_completions_fill_and_over_a_client_of_their_own(
    folder: Path, pause: str
) -> None:
    mode, timings = PauseMode(pause), []
    async with engine_of(folder, pause) as engine, shared_client(connections=2) as http:
        client = VllmClient(http, engine.url, mode=mode, fresh=0)

        async def complete() -> None:
            while True:
                await client.complete([PROMPT], 1, Sampling(4, 1.0).with_fields({"extra_args": {"step_s": 0.02}}))
                await asyncio.sleep(0.01)  # or the order never has a connection

        busy = [asyncio.ensure_future(complete()) for _ in range(6)]
        while not await running(engine):  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.01)
        for step, via in ((1, "shared"), (2, "admin")):
            path = str(weights.path_of(folder / "weights", step))
            orders = weights_client(via, http, order_of(folder, mode))
            (timing,) = await asyncio.wait_for(orders.update([engine.url], step, path), 120)

            assert await engine.step() == step
            assert timing.wall_ms == pytest.approx(timing.rpc_ms + timing.queue_ms, abs=0.01)
            timings.append(timing)
        for one in busy:
            assert not one.done(), one
            one.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        (after,) = await engine.complete([PROMPT], 1, Sampling(8, 1.0, seed=5))

    assert after.weights_step == 2
    assert after.logprobs == pytest.approx(logprobs_of(folder / "model_2", after, 1.0), abs=1e-4)
    log = (folder / f"{pause}.log").read_text()
    for timing in timings:
        lines = "\n".join(line for line in log.splitlines() if timing.trace in line)
        (recv,), (start,), (done,) = (matches(one, lines) for one in (SERVER_RECV, RPC_START, RPC_DONE))
        assert float(recv["t"]) <= float(start["t"]) <= float(done["t"])
        in_engine = sum(took for name, took in timing.phases.items() if name != "check_ms")
        assert float(done["rpc_ms"]) == pytest.approx(in_engine, abs=0.2)
