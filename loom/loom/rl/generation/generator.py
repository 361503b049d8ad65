"""`Generator`: an actor that completes prompts with a model, and gets new weights while it does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loom import tracing
from loom.actor import Actor, concurrent_endpoint, current_rank, in_actor
from loom.errors import WrongArguments
from loom.extras import require
from loom.rl.generation.completions import Completion, RequestLimits, Sampling

if TYPE_CHECKING:
    from torch import Tensor, nn

    from loom.rl.generation.decoding import TextTokenizer
    from loom.rl.generation.engine import Engine, EngineState
    from loom.rl.generation.http_servers import Serving
    from loom.rl.generation.weight_client import ServingState, UpdateAnswer


class Generator(Actor):
    """An actor with a model that completes prompts. All endpoints work while others do.

    Args:
        make_model: returns the model, a ``torch.nn.Module``. ``model(tokens, cache=None)`` returns logits
            [rows, positions, size] and the cache: for each layer keys and values [rows, heads, positions, head
            size]. Tokens are padded on the left, and padding has zero keys. If the model has ``longest``, no prompt
            with its completion is longer than so many tokens.
        tokenizer: has ``encode``, ``decode``, ``eos``, ``pad`` and ``size``.
        max_tokens: tokens of a completion, if a request does not say.
        temperature: by which logits are divided, if a request does not say.
        concurrency: completions that are generated at the same time; others wait.
        seed: with the actor's rank it decides what is drawn.
        folder: where weights are, as ``step_N`` or ``weights/step_N``. Requests over HTTP load no others.
        limits: what one request may ask for; its ``concurrency`` is replaced.
        threads: threads of one operation of torch on the CPU.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        tokenizer: TextTokenizer,
        *,
        max_tokens: int = 64,
        temperature: float = 1.0,
        concurrency: int = 64,
        seed: int = 0,
        folder: str | Path | None = None,
        limits: RequestLimits | None = None,
        threads: int = 1,
    ) -> None:
        import torch

        from loom.rl.generation.engine import Engine
        from loom.rl.generation.weight_files import WeightUpdates

        torch.set_num_threads(threads)
        rank = current_rank().rank if in_actor() else 0
        limits = replace(limits or RequestLimits(), concurrency=concurrency)
        self._default = limits.checked(Sampling(max_tokens, temperature))
        self._engine: Engine = Engine(make_model(), tokenizer, limits=limits, seed=seed + rank)
        self._updates = WeightUpdates(self._engine, None if folder is None else Path(folder))
        self._serving: Serving | None = None
        self._starting = asyncio.Lock()

    @concurrent_endpoint
    async def generate(
        self,
        prompts: Sequence[str],
        n: int = 1,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> list[Completion]:
        """Return ``n`` completions of each prompt, those of the first one first.

        Raises:
            WrongArguments: the request exceeds a limit; the text says which.
            LimitReached: too many completions wait already. Nothing was begun.
        """
        return await self._engine.generate(prompts, n, self._sampling(max_tokens, temperature, seed))

    @concurrent_endpoint
    async def stream(
        self,
        port: Any,
        prompts: Sequence[str],
        n: int = 1,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> list[Completion]:
        """Send each `Piece` of the completions to a port as it is generated; return them as `generate` does."""
        async with self._engine.open(prompts, n, self._sampling(max_tokens, temperature, seed)) as stream:
            async for pieces in stream:
                for piece in pieces:
                    port.send(piece)
            return stream.completions()

    @concurrent_endpoint
    async def update_weights(
        self,
        step: int,
        path: str | None = None,
        state: Mapping[str, Tensor] | None = None,
        *,
        trace: str | None = None,
    ) -> UpdateAnswer:
        """Load weights; return ``{"status": "ok", "rpc_ms": …, "step": …}``.

        Completions that are under way go on with the new weights.

        Args:
            step: the step of the weights.
            path: their folder; without it and ``state``, that of the step in the generator's folder.
            state: the tensors themselves.
            trace: the id under which the events of this order are recorded.

        Raises:
            CheckpointBroken: the folder is not there, or not whole. The model keeps its weights.
            WrongArguments: the weights are not this model's, or path and state are given. The model keeps its own.
        """
        if path is not None and state is not None:
            raise WrongArguments("weights come by path or by state, not by both")
        with tracing.trace(trace or tracing.current_trace()):
            tracing.event("weights.server.recv", path="update_weights")
            return await asyncio.to_thread(self._updates.update, step, path, state)

    @concurrent_endpoint
    async def step(self) -> int:
        """Return the step of the weights."""
        return self._engine.step

    @concurrent_endpoint
    async def serve(self, port: int = 0, *, admin_port: int | None = None, connections: int | None = None) -> str:
        """Serve completions and administration over HTTP; return the URL, ``http://loom:TOKEN@HOST:PORT``.

        The URL is the key: whoever has it may do all of this. Most clients send its token by themselves;
        ``Authorization: Bearer TOKEN`` does the same. A second call returns the same URL.

        Args:
            port: where to listen, on this host's address; 0 picks a port.
            admin_port: the same for a listener of administration alone, whose URL `admin_url` returns.
            connections: how many connections a listener accepts at a time; more wait.

        Raises:
            PortInUse: something else listens on a port.
            MissingDependency: fastapi or uvicorn is not installed.
        """
        async with self._starting:
            if self._serving is None:
                require({"fastapi": "fastapi", "uvicorn": "uvicorn"}, "Generator.serve()", "rl")
                self._serving = await asyncio.to_thread(self._serve, port, admin_port, connections)
            return self._serving.url

    def _serve(self, port: int, admin_port: int | None, connections: int | None) -> Serving:
        from loom.rl.generation.http_app import GenerationService
        from loom.rl.generation.http_servers import CONNECTIONS, Serving, new_token

        service = GenerationService(self._engine, self._updates, self._default, new_token())
        return Serving(service, port, admin_port, connections or CONNECTIONS)

    @concurrent_endpoint
    async def admin_url(self) -> str | None:
        """Return the URL of the listener for administration, or None if there is none."""
        return None if self._serving is None else self._serving.admin_url

    @concurrent_endpoint
    async def state(self) -> tuple[EngineState, ServingState | None]:
        """Return how busy the engine is, and where requests to the HTTP server wait."""
        return self._engine.state, None if self._serving is None else self._serving.state

    def _sampling(self, max_tokens: int | None, temperature: float | None, seed: int | None) -> Sampling:
        default = self._default
        return Sampling(
            default.max_tokens if max_tokens is None else max_tokens,
            default.temperature if temperature is None else temperature,
            seed,
        )
