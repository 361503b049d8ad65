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
from loom.rl.engines.engine import EngineKind, InferenceEngine
from loom.rl.generation.completions import Completion, RequestLimits, Sampling, TextOrTokens

if TYPE_CHECKING:
    from torch import Tensor, nn

    from loom.rl.engines.own import OwnEngine
    from loom.rl.engines.vllm import VllmEngine
    from loom.rl.generation.engine import EngineState
    from loom.rl.generation.http_servers import Serving
    from loom.rl.generation.weight_client import ServingState, UpdateAnswer
    from loom.rl.task import Tokenizer


class Generator(Actor):
    """An actor with an engine that completes prompts. All endpoints work while others do.

    Args:
        make_model: returns the model of Loom's own engine, a ``torch.nn.Module``. ``model(tokens, cache=None)``
            returns logits [rows, positions, size] and the cache: for each layer keys and values [rows, heads,
            positions, head size]. Tokens are padded on the left, and padding has zero keys. If the model has
            ``longest``, no prompt with its completion is longer than so many tokens.
        tokenizer: has ``encode``, ``decode``, ``eos``, ``pad`` and ``size``; None for that of ``model``.
        engine: ``loom``, ``vllm``, ``sglang`` or ``transformers``.
        model: the folder of a Hugging Face model, or its name on the hub, instead of ``make_model``.
        gpus: GPUs of the engine, its own; 0 for those that the process sees.
        slot: number of the generator among those of its host, which decides on its GPUs.
        log: name of the engine's log in the folder, without its ending.
        max_tokens: tokens of a completion, if a request does not say.
        temperature: by which logits are divided, if a request does not say.
        sampling: other fields of requests that do not say, such as ``top_p``.
        concurrency: completions that are generated at the same time; others wait.
        seed: with the actor's rank it decides what is drawn.
        folder: where weights are, as ``step_N`` or ``weights/step_N``. Requests over HTTP load no others.
        limits: what one request may ask for; its ``concurrency`` is replaced.
        threads: threads of one operation of torch on the CPU.
        options: further options of the engine.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module] | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        engine: str = "loom",
        model: str | None = None,
        gpus: int = 0,
        slot: int = 0,
        log: str = "generator",
        max_tokens: int = 64,
        temperature: float = 1.0,
        sampling: Mapping[str, Any] | None = None,
        concurrency: int = 64,
        seed: int = 0,
        folder: str | Path | None = None,
        limits: RequestLimits | None = None,
        threads: int = 1,
        **options: Any,
    ) -> None:
        from loom.rl.engines.make import EngineSettings, make_engine

        kind = EngineKind(engine)
        if kind.in_process:
            import torch

            torch.set_num_threads(threads)
        rank = current_rank().rank if in_actor() else 0
        limits = replace(limits or RequestLimits(), concurrency=concurrency)
        self._default = limits.checked(Sampling(max_tokens, temperature).with_fields(sampling or {}))
        place = None if folder is None else Path(folder)
        settings = EngineSettings(
            kind, make_model, tokenizer, model, limits, seed + rank, place, log, gpus, slot + rank
        )
        self._engine: InferenceEngine = make_engine(settings, options)
        self._serving: Serving | None = None
        self._starting = asyncio.Lock()
        self._started = False

    @concurrent_endpoint
    async def start(self) -> None:
        """Start the engine, if it is not started. The other endpoints that need it do so, too.

        Raises:
            Unavailable: the engine ended, or is not reached.
            WrongArguments: it has another model, or lacks what a generator needs.
        """
        await self._ready()

    async def _ready(self) -> InferenceEngine:
        async with self._starting:
            if not self._started:
                await self._engine.start()
                self._started = True
        return self._engine

    @concurrent_endpoint
    async def generate(
        self,
        prompts: Sequence[TextOrTokens],
        n: int = 1,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """Return ``n`` completions of each prompt, those of the first one first.

        Args:
            prompts: texts, or their tokens.
            n: completions of each.
            max_tokens: tokens of a completion.
            temperature: by which logits are divided.
            seed: the same one gives the same completions again, from the same weights and engine.
            sampling: other fields, such as ``top_p``, by OpenAI's names.

        Raises:
            WrongArguments: the request exceeds a limit, or the engine refuses it; the text says why.
            LimitReached: too many completions wait already. Nothing was begun.
            Unavailable: the engine is gone.
        """
        engine = await self._ready()
        return await engine.complete(prompts, n, self._sampling(max_tokens, temperature, seed, sampling))

    @concurrent_endpoint
    async def stream(
        self,
        port: Any,
        prompts: Sequence[TextOrTokens],
        n: int = 1,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """Send each `Piece` of the completions to a port as it is generated; return them as `generate` does.

        Raises:
            WrongArguments: as `generate`, or this is not Loom's own engine, which alone has pieces.
        """
        drawn = self._sampling(max_tokens, temperature, seed, sampling)
        async with self._own("stream()").engine.open(prompts, n, drawn) as stream:
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
        """Load weights; return ``{"status": "ok", "rpc_ms": …, "step": …}``, and the engine's ``phases``.

        Completions that are under way go on with the new weights in Loom's own engine, and end before in others.

        Args:
            step: the step of the weights.
            path: their folder; without it and ``state``, that of the step in the generator's folder.
            state: the tensors themselves.
            trace: the id under which the events of this order are recorded.

        Raises:
            CheckpointBroken: the folder is not there, or not whole. The model keeps its weights.
            WrongArguments: the weights are not this model's, or path and state are given. The model keeps its own.
            Unavailable: the engine is gone, or has loaded them in part.
        """
        if path is not None and state is not None:
            raise WrongArguments("weights come by path or by state, not by both")
        with tracing.trace(trace or tracing.current_trace()):
            tracing.event("weights.server.recv", path="update_weights")
            return await (await self._ready()).update_weights(step, path, state)

    @concurrent_endpoint
    async def sleep(self) -> None:
        """Free the memory of the engine's GPUs until `wake`, also that of its weights.

        Raises:
            WrongArguments: the engine is no vLLM server.
            Unavailable: it is gone, or does not sleep.
        """
        await (await self._vllm()).sleep()

    @concurrent_endpoint
    async def wake(self) -> None:
        """Take the memory back. `update_weights` has to follow; raise as `sleep` does."""
        await (await self._vllm()).wake()

    async def _vllm(self) -> VllmEngine:
        from loom.rl.engines.vllm import VllmEngine

        if not isinstance(engine := await self._ready(), VllmEngine):
            raise WrongArguments("only generators with engine='vllm' sleep")
        return engine

    @concurrent_endpoint
    async def step(self) -> int:
        """Return the step of the weights."""
        return await (await self._ready()).step()

    @concurrent_endpoint
    async def serve(self, port: int = 0, *, admin_port: int | None = None, connections: int | None = None) -> str:
        """Serve completions and administration over HTTP; return the URL, ``http://loom:TOKEN@HOST:PORT``.

        The URL is the key: whoever has it may do all of this. Most clients send its token by themselves;
        ``Authorization: Bearer TOKEN`` does the same. A second call returns the same URL. With ``engine="vllm"`` it
        is that of vLLM's own server, which has started already, and the arguments make no difference.

        Args:
            port: where to listen, on this host's address; 0 picks a port.
            admin_port: the same for a listener of administration alone, whose URL `admin_url` returns.
            connections: how many connections a listener accepts at a time; more wait.

        Raises:
            PortInUse: something else listens on a port.
            MissingDependency: fastapi or uvicorn is not installed.
            WrongArguments: the engine has no HTTP server for this.
        """
        if url := getattr(await self._ready(), "url", ""):
            return str(url)
        async with self._starting:
            if self._serving is None:
                require({"fastapi": "fastapi", "uvicorn": "uvicorn"}, "Generator.serve()", "rl")
                self._serving = await asyncio.to_thread(self._serve, port, admin_port, connections)
            return self._serving.url

    def _serve(self, port: int, admin_port: int | None, connections: int | None) -> Serving:
        from loom.rl.generation.http_app import GenerationService
        from loom.rl.generation.http_servers import CONNECTIONS, Serving, new_token

        own = self._own("serve()")
        service = GenerationService(own.engine, own.updates, self._default, new_token())
        return Serving(service, port, admin_port, connections or CONNECTIONS)

    @concurrent_endpoint
    async def admin_url(self) -> str | None:
        """Return the URL of the listener for administration, or None if there is none."""
        return None if self._serving is None else self._serving.admin_url

    @concurrent_endpoint
    async def state(self) -> tuple[EngineState, ServingState | None]:
        """Return how busy the engine is, and where requests to Loom's HTTP server wait."""
        return await (await self._ready()).state(), None if self._serving is None else self._serving.state

    def _own(self, what: str) -> OwnEngine:
        from loom.rl.engines.own import OwnEngine

        if not isinstance(self._engine, OwnEngine):
            raise WrongArguments(f"{what} of a generator needs Loom's own engine; this one has another")
        return self._engine

    def _sampling(
        self,
        max_tokens: int | None,
        temperature: float | None,
        seed: int | None,
        fields: Mapping[str, Any] | None,
    ) -> Sampling:
        default = self._default
        sampling = replace(
            default,
            max_tokens=default.max_tokens if max_tokens is None else max_tokens,
            temperature=default.temperature if temperature is None else temperature,
            seed=seed,
        )
        return sampling.with_fields(fields or {})
