"""`GeneratorRequests`: HTTP requests to generators, and orders in all ways, on a thread's own event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loom import tracing
from loom.errors import LoomError, Unavailable
from loom.rl.engines.engine import EngineKind, PauseMode
from loom.rl.engines.vllm_client import VllmClient
from loom.rl.generation.completions import Completion, Sampling
from loom.rl.generation.weight_client import (
    POOL,
    OrderTiming,
    UpdateAnswer,
    WeightsClient,
    WeightsVia,
    shared_client,
    update_over_http,
    weights_client,
    without_token,
)

if TYPE_CHECKING:
    import httpx

_DATA = "data: "


class GeneratorRequests:
    """Requests to generators. Completions by HTTP are streams, one for each prompt, of one pool of connections.

    Args:
        engine: of the generators.
        model: of the generators, if they have one by name.
        pause: what happens to completions that are under way when a server of another engine loads weights.
        connections: of that pool; orders by `WeightsVia.SHARED` use it, too.
    """

    def __init__(
        self,
        engine: EngineKind = EngineKind.LOOM,
        model: str | None = None,
        pause: PauseMode = PauseMode.WAIT,
        connections: int = POOL,
    ) -> None:
        self._engine = engine
        self._model = model
        self._pause = pause
        self._connections = connections
        self._loop = asyncio.new_event_loop()
        self._client: httpx.AsyncClient | None = None
        self._ways: dict[WeightsVia, WeightsClient] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, name="rl requests", daemon=True)
        self._thread.start()

    def order(self, via: WeightsVia, generator: Any, step: int, path: str) -> Future[OrderTiming]:
        """Order a generator, by its URL or, with `WeightsVia.LANE`, its actor, to load weights."""
        return asyncio.run_coroutine_threadsafe(self._order(via, generator, step, path), self._loop)

    def complete(
        self, url: str, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling
    ) -> Future[list[Completion]]:
        """Request ``n`` completions of each prompt, whose tokens are given, from a generator's server."""
        requests = self._complete_all(url, prompts, n, sampling)
        return asyncio.run_coroutine_threadsafe(requests, self._loop)

    async def _order(self, via: WeightsVia, generator: Any, step: int, path: str) -> OrderTiming:
        if via not in self._ways:
            shared = self._shared() if via is WeightsVia.SHARED else None
            order = self._update_vllm if self._engine is EngineKind.VLLM else update_over_http
            self._ways[via] = weights_client(via, shared, order)
        (timing,) = await self._ways[via].update([generator], step, path)
        return timing

    async def _update_vllm(
        self, client: httpx.AsyncClient, url: str, step: int, path: str | None, trace: str
    ) -> UpdateAnswer:
        assert path is not None
        with tracing.trace(trace):
            return await VllmClient(client, url, model=self._model, mode=self._pause).update_weights(step, path)

    async def _complete_all(
        self, url: str, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling
    ) -> list[Completion]:
        if self._engine is EngineKind.VLLM:
            return await VllmClient(self._shared(), url, mode=self._pause).complete(prompts, n, sampling)
        seed = sampling.seed or 0
        streams = [
            self._complete(url, prompt, n, replace(sampling, seed=seed + 31 * number))
            for number, prompt in enumerate(prompts)
        ]
        return [one for found in await asyncio.gather(*streams) for one in found]

    async def _complete(self, url: str, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
        body = {
            "prompt": list(prompt),
            "n": n,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            **({"stop": list(sampling.stop)} if sampling.stop else {}),
            "seed": sampling.seed,
            "stream": True,
            "logprobs": 1,
            "return_token_ids": True,
        }
        texts, tokens, logprobs = [""] * n, [list[int]() for _ in range(n)], [list[float]() for _ in range(n)]
        ends: dict[int, Mapping[str, Any]] = {}
        async for choice in self._choices(url, body):
            place = choice["index"]
            texts[place] += choice["text"]
            tokens[place] += choice["token_ids"]
            logprobs[place] += choice["logprobs"]["token_logprobs"]
            if choice["finish_reason"] is not None:
                ends[place] = choice
        if len(ends) < n:
            raise Unavailable(f"{without_token(url)} ended its answer in the middle")
        return [
            Completion(
                prompt=prompt,
                text=texts[place],
                tokens=tokens[place],
                prompt_tokens=list(prompt),
                logprobs=logprobs[place],
                truncated=ends[place]["finish_reason"] == "length",
                weights_step=ends[place]["weights_step"],
            )
            for place in range(n)
        ]

    async def _choices(self, url: str, body: Mapping[str, object]) -> AsyncIterator[Mapping[str, Any]]:
        """Request completions, and yield the pieces of the answer's stream."""
        import httpx

        try:
            async with self._shared().stream("POST", f"{url}/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")
                    raise LoomError(f"{without_token(url)} answers {answer.status_code}: {text:.500}")
                async for line in answer.aiter_lines():
                    if line.startswith(_DATA) and (data := line.removeprefix(_DATA)) != "[DONE]":
                        event = json.loads(data)
                        if "error" in event:
                            raise LoomError(f"{without_token(url)} says: {event['error']['message']:.500}")
                        for choice in event["choices"]:
                            yield choice
        except httpx.HTTPError as error:
            raise Unavailable(f"{without_token(url)} does not answer: {error!r}") from error

    def _shared(self) -> httpx.AsyncClient:
        if self._client is None:
            self._client = shared_client(self._connections)
        return self._client

    def close(self) -> None:
        async def close() -> None:
            if self._client is not None:
                await self._client.aclose()
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(close(), self._loop)
        self._thread.join(5.0)
