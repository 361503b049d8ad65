"""`SglangEngine`: an SGLang server that exists, by its own routes.

The routes are those of SGLang's ``http_server.py``: ``/generate``, ``/pause_generation``,
``/continue_generation`` and ``/get_model_info``. Tests have a stand-in for such a server; no real one has run here.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loom import tracing
from loom.errors import CheckpointBroken, LoomError, Unavailable, WrongArguments
from loom.rl.engines import model_folder
from loom.rl.engines.server_routes import ServerRoutes, ms_since
from loom.rl.generation import weight_files as files
from loom.rl.generation.completions import Completion, Sampling, TextOrTokens
from loom.rl.generation.engine import EngineState
from loom.rl.generation.weight_client import UpdateAnswer, shared_client

if TYPE_CHECKING:
    from torch import Tensor

CONNECTIONS = 4096
_FIELDS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


@dataclass(frozen=True)
class SglangOptions:
    """The options of a generator with ``engine="sglang"``."""

    url: str = ""
    """The server, as ``http://USER:KEY@HOST:PORT``."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SglangOptions:
        """Return the options; raise `WrongArguments` for names or values that are none."""
        names = [one.name for one in fields(cls)]
        if unknown := sorted(values.keys() - set(names)):
            raise WrongArguments(f"engine='sglang' has no option {unknown[0]!r}; it has {', '.join(names)}")
        made = cls(**values)
        if not made.url:
            raise WrongArguments("engine='sglang' needs a server that exists: options={'url': 'http://HOST:PORT'}")
        return made


class SglangEngine:
    """An SGLang server. SGLang's pauses cut or keep what is under way, so an update waits for completions first."""

    def __init__(self, model: str | None, options: SglangOptions, *, folder: Path | None) -> None:
        self._model = model
        self._url = options.url
        self._folder = folder
        self._server: ServerRoutes | None = None
        self._step = self._inflight = self._tokens = 0
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._updating = asyncio.Lock()

    async def start(self) -> None:
        """Reach the server; see `InferenceEngine.start`."""
        self._http = shared_client(CONNECTIONS)
        server = ServerRoutes(self._http, self._url)
        info = await server.get("/get_model_info")
        if self._model is not None:
            model_folder.check_same_model(self._model, str(info.get("model_path", "")), server.shown)
        self._server = server

    def _started(self) -> ServerRoutes:
        if self._server is None:
            raise Unavailable("the SGLang server is not reached yet")
        return self._server

    async def complete(self, prompts: Sequence[TextOrTokens], n: int, sampling: Sampling) -> list[Completion]:
        """Return ``n`` completions of each prompt; see `InferenceEngine.complete`."""
        server = self._started()
        await self._open.wait()
        self._inflight += len(prompts) * n
        self._idle.clear()
        try:
            step = self._step
            requests = [self._complete(server, prompt, n, sampling, step) for prompt in prompts]
            found = [one for group in await asyncio.gather(*requests) for one in group]
        finally:
            self._inflight -= len(prompts) * n
            if not self._inflight:
                self._idle.set()
        self._tokens += sum(len(one.tokens) for one in found)
        return found

    async def _complete(
        self, server: ServerRoutes, prompt: TextOrTokens, n: int, sampling: Sampling, step: int
    ) -> list[Completion]:
        settings = {
            **sampling.others,
            "n": n,
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            **{name: getattr(sampling, name) for name, all_ in _FIELDS.items() if getattr(sampling, name) != all_},
        }
        if sampling.stop:
            settings["stop"] = list(sampling.stop)
        if sampling.seed is not None:
            settings["sampling_seed"] = sampling.seed
        asked = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        answer = await server.post_any("/generate", {**asked, "sampling_params": settings, "return_logprob": True})
        choices = answer if isinstance(answer, list) else [answer]
        return [self._completion(server, prompt, choice, step) for choice in choices]

    def _completion(
        self, server: ServerRoutes, prompt: TextOrTokens, choice: Mapping[str, Any], step: int
    ) -> Completion:
        meta = choice["meta_info"]
        reason = (meta.get("finish_reason") or {}).get("type")
        if reason not in ("stop", "length"):
            raise Unavailable(f"{server.shown} ended a completion by {reason!r}, and not by its end")
        drawn = meta.get("output_token_logprobs")
        if not drawn:
            raise WrongArguments(f"{server.shown} returns no log probabilities of the tokens: training needs them")
        return Completion(
            prompt=prompt,
            text=str(choice["text"]),
            tokens=[int(one[1]) for one in drawn],
            prompt_tokens=[] if isinstance(prompt, str) else list(prompt),
            logprobs=[float(one[0]) for one in drawn],
            truncated=reason == "length",
            weights_step=step,
        )

    async def pause(self) -> None:
        self._open.clear()
        await self._idle.wait()
        await self._started().post("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        await self._started().post("/continue_generation", {})
        self._open.set()

    async def update_weights(
        self, step: int, path: str | None = None, state: Mapping[str, Tensor] | None = None
    ) -> UpdateAnswer:
        """Let the server load the weights of a step from their folder; see `InferenceEngine.update_weights`."""
        if state is not None or path is None:
            raise WrongArguments("an SGLang server takes weights as files: say their path")
        place = await asyncio.to_thread(os.path.realpath, path)
        if reason := await asyncio.to_thread(files.whats_wrong, path, checksum=True):
            raise CheckpointBroken(f"the weights {path} are not whole: {reason}")
        async with self._updating:
            began = at = time.monotonic()
            phases = {}
            tracing.event("weights.rpc.start", op="update_weights_from_disk")
            try:
                await self.pause()
                phases["pause_ms"], at = ms_since(at), time.monotonic()
                body = {"model_path": place, "weight_version": f"step_{step}"}
                answer = await self._started().post("/update_weights_from_disk", body)
                if not answer.get("success"):
                    raise Unavailable(str(answer.get("message")))
                phases["load_ms"], at = ms_since(at), time.monotonic()
                await self.resume()
                phases["resume_ms"] = ms_since(at)
            except LoomError as error:
                raise Unavailable(f"{self._url_shown} did not load the weights of step {step}: {error}") from error
            rpc_ms = ms_since(began)
            tracing.event("weights.rpc.done", op="update_weights_from_disk", rpc_ms=rpc_ms, phases=phases)
            self._step = step
            return {"status": "ok", "rpc_ms": rpc_ms, "step": step, "phases": phases}

    @property
    def _url_shown(self) -> str:
        return self._started().shown

    async def step(self) -> int:
        return self._step

    async def state(self) -> EngineState:
        return EngineState(self._inflight, 0, self._step, self._tokens)

    async def stop(self) -> None:
        if self._server is not None:
            await self._http.aclose()
            self._server = None
