"""`VllmClient`: completions and weights over the HTTP routes of one vLLM server.

Completions go to ``/inference/v1/generate``, tokens in and tokens out, because its answer says which weights drew
each token. Weights go through ``/pause``, ``/collective_rpc`` with ``reload_weights`` or another way to load them,
``/update_weight_version`` and ``/resume``. vLLM's version of its weights is a label that clients set, and
``default`` after a start. A step's label is set when every worker has loaded its weights, and before a token is
drawn again.

The first request of an order asks for a connection like any other. The rest of it has one of its own: of several
API servers one has it whole, and completions that are paused, which keep their connections, keep none from it.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loom.errors import CheckpointBroken, LoomError, OperationFailed, Unavailable, WrongArguments
from loom.rl.engines import model_folder
from loom.rl.engines.engine import PauseMode
from loom.rl.engines.server_routes import ServerRoutes, ms_since
from loom.rl.generation import weight_files as files
from loom.rl.generation.completions import Completion, Sampling, TextOrTokens, WeightsSpan
from loom.rl.generation.weight_client import UpdateAnswer, own_client

if TYPE_CHECKING:
    import httpx

GENERATE = "/inference/v1/generate"
RELOADED = "reload_weights"
RESUME = "/resume"
FRESH = "default"
"""The label of a server that was given no weights since it started."""
BROKEN = "loom-broken"
"""The label while weights are loaded: completions with it are refused, also after a failure in the middle."""
ASKED_AGAIN = 3
"""Times that a completion of two policies is generated again."""
_FIELDS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}

Load = Callable[[ServerRoutes, int, bool], Awaitable[Mapping[str, float]]]
"""Lets as many workers load weights by the routes of their server; returns the milliseconds of each phase.

The last argument is whether an earlier order broke in its middle: vLLM would add new tensors to half of the old.
"""


def label_of(step: int) -> str:
    """Return the label of the weights of a step."""
    return f"step_{step}"


def step_of_label(label: str) -> int | None:
    """Return the step of a label, or None if it is not of a step's weights."""
    digits = label.removeprefix("step_")
    return int(digits) if digits != label and digits.isdecimal() else None


class VllmClient:
    """The client of one server.

    Args:
        http: the connections.
        url: of the server, with its token as user and password, if it has one.
        model: the folder of its model, or the name on the hub.
        mode: what happens to completions that are under way when weights change.
        fresh: the step of the weights of a server that was given none; None if its completions are refused.
        orders: the connections on which orders ask for one; None for those of completions.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        url: str,
        *,
        model: str | None = None,
        mode: PauseMode = PauseMode.WAIT,
        fresh: int | None = None,
        orders: httpx.AsyncClient | None = None,
    ) -> None:
        self.server = ServerRoutes(http, url)
        self._orders = self.server if orders is None else ServerRoutes(orders, url)
        self._model = model
        self._mode = mode
        self._fresh = fresh
        self._known: frozenset[str] | None = None
        """The names of the server's sampling fields, once they were asked for."""
        self._updating = asyncio.Lock()

    async def complete(self, prompts: Sequence[TextOrTokens], n: int, sampling: Sampling) -> list[Completion]:
        """Return ``n`` completions of each prompt; see `InferenceEngine.complete`."""
        if sampling.others:
            await self._check_fields(sampling.others)
        requests = [
            self._complete(prompt, n, sampling, None if sampling.seed is None else sampling.seed + 31 * number)
            for number, prompt in enumerate(prompts)
        ]
        return [one for found in await asyncio.gather(*requests) for one in found]

    async def _complete(
        self, prompt: TextOrTokens, n: int, sampling: Sampling, seed: int | None
    ) -> list[Completion]:
        tokens = await self._tokens_of(prompt)
        asked: dict[str, object] = {
            **sampling.others,
            "n": n,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "logprobs": 0,
            **{name: getattr(sampling, name) for name, all_ in _FIELDS.items() if getattr(sampling, name) != all_},
        }
        if sampling.stop:
            asked["stop"] = list(sampling.stop)
        if seed is not None:
            asked["seed"] = seed
        body = {"token_ids": tokens, "output_mode": "text", "sampling_params": asked}
        for _ in range(ASKED_AGAIN):
            answer = await self.server.post(GENERATE, body)
            choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
            found = [self._completion(prompt, tokens, choice) for choice in choices]
            if self._mode is PauseMode.KEEP or all(len(one.spans) <= 1 for one in found):
                return found
        raise OperationFailed(
            f"completions of {self.server.shown} have tokens of two policies, {ASKED_AGAIN} times in a row: "
            "another client pauses this server with mode=keep; pause='keep' takes such completions"
        )

    async def _check_fields(self, names: Mapping[str, object]) -> None:
        """Raise `WrongArguments` for a field that vLLM would pass over in silence."""
        if self._known is None:
            schemas = (await self.server.get("/openapi.json"))["components"]["schemas"]
            fields = schemas.get("GenerateRequest", {}).get("properties", {}).get("sampling_params", {})
            self._known = frozenset(fields.get("properties", {}))
        if self._known and (unknown := sorted(names.keys() - self._known)):
            raise WrongArguments(f"{self.server.shown} has no sampling field {unknown[0]!r}; vLLM would ignore it")

    async def _tokens_of(self, prompt: TextOrTokens) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        return [int(token) for token in (await self.server.post("/tokenize", {"prompt": prompt}))["tokens"]]

    def _completion(self, prompt: TextOrTokens, prompt_tokens: list[int], choice: Mapping[str, Any]) -> Completion:
        reason = choice["finish_reason"]
        if reason not in ("stop", "length"):
            raise Unavailable(f"{self.server.shown} ended a completion by {reason!r}, and not by its end")
        tokens = choice.get("token_ids") or []
        content = (choice.get("logprobs") or {}).get("content") or []
        if len(content) != len(tokens):
            raise WrongArguments(
                f"{self.server.shown} returns {len(content)} log probabilities for {len(tokens)} tokens: training "
                "needs one for each token"
            )
        spans = self._spans(choice.get("weight_versions"))
        return Completion(
            prompt=prompt,
            text=choice["text"],
            tokens=[int(token) for token in tokens],
            prompt_tokens=prompt_tokens,
            logprobs=[float(one["logprob"]) for one in content],
            truncated=reason == "length",
            weights_step=min(one.step for one in spans),
            spans=spans,
        )

    def _spans(self, versions: Sequence[Mapping[str, Any]] | None) -> tuple[WeightsSpan, ...]:
        if not versions:
            raise WrongArguments(
                f"{self.server.shown} does not say which weights drew a completion: vLLM 0.32 does"
            )
        return tuple(WeightsSpan(self._step_of(one["version"]), one["start"], one["end"]) for one in versions)

    def _step_of(self, label: str) -> int:
        step = self._fresh if label == FRESH else step_of_label(label)
        if step is None:
            why = "it has restarted, and was given no weights" if label == FRESH else "they are not of this run"
            raise Unavailable(f"{self.server.shown} has weights with the label {label!r}: {why}")
        return step

    async def step(self) -> int:
        """Return the step of the server's weights, by their label."""
        return self._step_of(str((await self.server.get("/weight_info"))["weight_version"]))

    async def pause(self) -> None:
        """Let no completion go on until `resume`; return when none does."""
        await self._orders.post(self._pause)

    async def resume(self) -> None:
        """Let completions go on."""
        await self._orders.post(RESUME)

    async def sleep(self) -> None:
        """Free the memory of the server's GPUs, also that of its weights, when no completion is under way.

        Raises:
            LoomError: the server does not sleep.
        """
        async with self._updating, own_client(keep_alive=1) as connection:
            server = ServerRoutes(connection, self.server.url)
            await server.post(self._pause)
            await _set_label(server, BROKEN)  # until weights are loaded again
            await server.post("/sleep?level=2&mode=wait")
            if not (await server.get("/is_sleeping")).get("is_sleeping"):
                raise OperationFailed(f"{server.shown} does not sleep")

    async def wake(self) -> None:
        """Take the memory back. The server draws nothing that is trusted before it has loaded weights.

        Raises:
            LoomError: the server lacks the memory, or still sleeps.
        """
        async with self._updating:
            answer = await self._orders.post("/wake_up")
            if answer.get("status") != "awake":
                raise OperationFailed(f"{self.server.shown} still sleeps: {answer!r:.200}")

    @property
    def _pause(self) -> str:
        return f"/pause?mode={self._mode.value}"

    async def update_weights(self, step: int, path: str) -> UpdateAnswer:
        """Let every worker load the weights in a folder; see `InferenceEngine.update_weights`.

        ``rpc_ms`` is by the server's own clock if that has Loom's middleware.
        """
        check = functools.partial(asyncio.to_thread, self._check_weights, path)
        return await self.update(step, check, functools.partial(_reload, path))

    async def update(self, step: int, check: Callable[[], Awaitable[None]], load: Load) -> UpdateAnswer:
        """Let every worker load the weights of a step while the server is paused.

        Args:
            step: the step of the weights.
            check: raises an error if they cannot be loaded, before the server is paused.
            load: loads them.

        Raises:
            Unavailable: they may be loaded in part. The server stays paused, and nobody trusts its label.
        """
        async with self._updating:
            began = time.monotonic()
            await check()
            phases = {"check_ms": ms_since(began)}
            try:
                answer, pool_ms = await self._orders.get_queued("/get_world_size")
                async with own_client(keep_alive=1) as connection:
                    server = ServerRoutes(connection, self.server.url)
                    phases.update(await self._load(server, int(answer["world_size"]), step, load))
            except LoomError as error:
                raise Unavailable(
                    f"{self.server.shown} did not load the weights of step {step}: {error}"
                ) from error
            self._fresh = None
            rpc_ms = round(sum(phases.values()), 3)
            return {"status": "ok", "rpc_ms": rpc_ms, "step": step, "phases": phases, "pool_ms": pool_ms}

    def _check_weights(self, path: str) -> None:
        if reason := files.whats_wrong(path, checksum=True):
            raise CheckpointBroken(f"the weights {path} are not whole: {reason}")
        if self._model is not None and model_folder.is_folder(self._model):
            shapes = model_folder.tensors_of(path)
            model_folder.check_same_tensors(self._model, shapes, f"the weights {path}")

    async def _load(self, server: ServerRoutes, workers: int, step: int, load: Load) -> Mapping[str, float]:
        """Load weights between a pause and their label; return the milliseconds of each phase."""
        _, pause_ms = await server.post_timed(self._pause)
        interrupted = (await server.get("/weight_info"))["weight_version"] == BROKEN
        broken_ms = await _set_label(server, BROKEN)
        loaded = await load(server, workers, interrupted)
        reset_ms = 0.0
        if self._mode is PauseMode.KEEP:  # no completion goes on, or begins, with keys of older weights
            reset, reset_ms = await server.post_timed("/reset_prefix_cache?reset_running_requests=true")
            if not reset.get("success"):
                raise OperationFailed("its cache still has keys and values of older weights")
        label_ms = await _set_label(server, label_of(step))
        _, resume_ms = await server.post_timed(RESUME)
        phases = {
            "pause_ms": pause_ms,
            **loaded,
            "load_ms": broken_ms + loaded["load_ms"] + reset_ms,
            "resume_ms": label_ms + resume_ms,
        }
        return {name: round(ms, 3) for name, ms in phases.items()}


async def _reload(path: str, server: ServerRoutes, workers: int, interrupted: bool) -> Mapping[str, float]:
    """Let every worker load the weights in a folder."""
    ended_ms = 0.0
    if interrupted:
        try:
            ended_ms = await _reload_in_workers(server, workers, {"weights_iterator": []})
        except LoomError as error:
            raise OperationFailed(
                f"an earlier order broke in its middle, and cannot be ended: restart it: {error}"
            ) from error
    return {"load_ms": ended_ms + await _reload_in_workers(server, workers, {"weights_path": path})}


async def _reload_in_workers(server: ServerRoutes, workers: int, weights: Mapping[str, object]) -> float:
    answer, load_ms = await server.post_timed("/collective_rpc", {"method": RELOADED, "kwargs": weights})
    results = answer.get("results") or []
    if len(results) < workers or any(one is not None for one in results):
        raise OperationFailed(f"{len(results)} of {workers} workers answered: {results!r:.200}")
    return load_ms


async def _set_label(server: ServerRoutes, label: str) -> float:
    _, took_ms = await server.post_timed("/update_weight_version", {"new_version": label})
    return took_ms
