"""`VllmEngine`: a vLLM server, which Loom starts or which exists, as a generator's engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loom import tracing
from loom.errors import Denied, LoomError, Unavailable, WrongArguments
from loom.rl.engines import model_folder
from loom.rl.engines.engine import PauseMode
from loom.rl.engines.vllm_client import GENERATE, RELOADED, VllmClient
from loom.rl.engines.vllm_server import AWAKE, SLEEPS, WHOLE_PROMPTS, ServerSettings, VllmServer
from loom.rl.engines.weight_transfer import backend_of
from loom.rl.generation import weight_files as files
from loom.rl.generation.completions import Completion, Sampling, TextOrTokens
from loom.rl.generation.engine import EngineState
from loom.rl.generation.weight_client import UpdateAnswer, shared_client

if TYPE_CHECKING:
    from torch import Tensor

CONNECTIONS = 4096
"""Connections to the server at a time."""
ORDERS = 2
"""Connections besides those: one for a pause that waits for completions, and one for its end."""
ENDING = 3.0
"""Seconds in which a server that answers no more should be seen to have ended."""
PROBE = "The quick brown fox, 0123456789."
"""A text that a model's own tokenizer and the server's have to turn into the same tokens."""


@dataclass(frozen=True)
class VllmOptions:
    """The options of a generator with ``engine="vllm"``."""

    url: str | None = None
    """A server that exists, as ``http://USER:KEY@HOST:PORT``; None to start one."""
    tensor_parallel: int | None = None
    """Workers that share the model; None for one for each GPU."""
    dtype: str = "auto"
    max_length: int | None = None
    """Tokens of a prompt with its completion, if fewer than the model allows."""
    pause: str | PauseMode = PauseMode.WAIT
    """``wait`` or ``keep``: what happens to completions that are under way when weights change."""
    installation: str | Path | None = None
    """The folder of the environment with vLLM."""
    arguments: Sequence[str] = ()
    """Further arguments of ``vllm serve``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of the server."""
    start_timeout: float = 900.0
    """Seconds that a server has to start."""
    colocated: bool = False
    """True if trainers use its GPUs in turns with it, and it sleeps meanwhile."""
    transfer: bool = False
    """True if weights come from a trainer's process, and none is drawn from before the first ones."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> VllmOptions:
        """Return the options; raise `WrongArguments` for names or values that are none."""
        names = [one.name for one in fields(cls)]
        if unknown := sorted(values.keys() - set(names)):
            raise WrongArguments(f"engine='vllm' has no option {unknown[0]!r}; it has {', '.join(names)}")
        made = cls(**values)
        try:
            PauseMode(made.pause)
        except ValueError:
            raise WrongArguments(f"pause is 'wait' or 'keep', not {made.pause!r:.40}") from None
        return made


class VllmEngine:
    """A vLLM server. Completions and weights go over its HTTP routes.

    Args:
        model: the folder of the model, or its name on the hub.
        options: see `VllmOptions`.
        gpus: the GPUs of the server, by uuid or number.
        concurrency: completions that are generated at the same time.
        seed: of the server.
        folder: of the run: weights are in ``step_N`` or ``weights/step_N``, the server's log is ``NAME.log``.
        name: of the log.
    """

    def __init__(
        self,
        model: str,
        options: VllmOptions,
        *,
        gpus: Sequence[str] = (),
        concurrency: int = 64,
        seed: int = 0,
        folder: Path | None = None,
        name: str = "vllm",
    ) -> None:
        self._model = model
        self._options = options
        self._folder = folder
        self._server: VllmServer | None = None
        self._client: VllmClient | None = None
        self._inflight = self._tokens = 0
        self._step = 0
        if options.url is None:
            settings = ServerSettings(
                model,
                gpus,
                options.tensor_parallel or max(1, len(gpus)),
                concurrency,
                seed,
                options.dtype,
                options.max_length,
                None if options.installation is None else Path(options.installation),
                options.arguments,
                options.environment,
                None if folder is None else folder / f"{name}.log",
                options.start_timeout,
                options.transfer,
                options.colocated,
            )
            self._server = VllmServer(settings)

    @property
    def url(self) -> str:
        """The URL of the server, with its token."""
        return self._client.server.url if self._client is not None else ""

    async def start(self) -> None:
        """Start the server, or reach the one that exists; see `InferenceEngine.start`."""
        if self._server is not None:
            if model_folder.is_folder(self._model):
                model_folder.config_of(self._model)
            await self._server.start()
        url = self._server.url if self._server is not None else self._options.url
        assert url
        self._http, self._orders = shared_client(CONNECTIONS), shared_client(ORDERS)
        client = VllmClient(
            self._http,
            url,
            model=self._model,
            mode=PauseMode(self._options.pause),
            fresh=None if self._options.transfer else 0,
            orders=self._orders,
        )
        try:
            config = await check(client, self._model if model_folder.is_folder(self._model) else None)
            if self._options.colocated:
                _check_sleeps(config, client.server.shown)
            if self._options.transfer:
                backend_of(config, client.server.shown)
        except LoomError:
            await self._close_connections()
            raise
        self._client = client

    async def _close_connections(self) -> None:
        await self._http.aclose()
        await self._orders.aclose()

    def _started(self) -> VllmClient:
        if self._client is None:
            raise Unavailable("the vLLM server is not started")
        if self._server is not None and not self._server.alive:
            raise Unavailable(f"the vLLM server has ended{self._server.last_lines()}")
        return self._client

    async def _why(self, error: Unavailable) -> Unavailable:
        """Return the error of a request, with the end of the server's log if that has ended."""
        if self._server is None or not await self._server.ended(ENDING):
            return error
        return Unavailable(f"the vLLM server has ended{self._server.last_lines()}")

    async def complete(self, prompts: Sequence[TextOrTokens], n: int, sampling: Sampling) -> list[Completion]:
        """Return ``n`` completions of each prompt; see `InferenceEngine.complete`."""
        client, count = self._started(), len(prompts) * n
        self._inflight += count
        try:
            found = await client.complete(prompts, n, sampling)
        except Unavailable as error:
            raise await self._why(error) from error
        finally:
            self._inflight -= count
        self._tokens += sum(len(one.tokens) for one in found)
        self._step = max([self._step, *(one.spans[-1].step for one in found)])
        return found

    async def pause(self) -> None:
        await self._started().pause()

    async def resume(self) -> None:
        await self._started().resume()

    async def sleep(self) -> None:
        """Free the memory of the server's GPUs until `wake`, also that of its weights.

        Raises:
            Unavailable: the server is gone, or does not sleep.
        """
        await self._turned(self._started().sleep)

    async def wake(self) -> None:
        """Take the memory back. Weights have to be loaded then, before completions.

        Raises:
            Unavailable: the server is gone, or lacks the memory.
        """
        await self._turned(self._started().wake)

    async def _turned(self, turn: Callable[[], Awaitable[None]]) -> None:
        try:
            await turn()
        except LoomError as error:
            raise await self._why(Unavailable(str(error))) from error

    async def update_weights(
        self, step: int, path: str | None = None, state: Mapping[str, Tensor] | None = None
    ) -> UpdateAnswer:
        """Let every worker load the weights of a step from their folder; see `InferenceEngine.update_weights`."""
        if state is not None:
            raise WrongArguments("a vLLM server takes weights as files: weights='messages' needs another engine")
        if type(step) is not int or step < 0:
            raise WrongArguments(f"the step of weights is a whole number from 0, not {step!r:.40}")
        client = self._started()
        place = Path(path) if path is not None else self._folder_of(step)
        tracing.event("weights.rpc.start", op=RELOADED)
        try:
            answer = await client.update_weights(step, str(place.resolve()))
        except Unavailable as error:
            raise await self._why(error) from error
        answer.pop("pool_ms", None)  # of this client: the order's own has another one, or none
        tracing.event("weights.rpc.done", op=RELOADED, rpc_ms=answer["rpc_ms"], phases=answer["phases"])
        self._step = step
        return answer

    def _folder_of(self, step: int) -> Path:
        if self._folder is None:
            raise WrongArguments("this generator has no folder: say the path of the weights")
        inner = self._folder / "weights"
        return files.path_of(inner if inner.is_dir() else self._folder, step)

    async def step(self) -> int:
        return await self._started().step()

    async def state(self) -> EngineState:
        return EngineState(self._inflight, 0, self._step, self._tokens)

    async def stop(self) -> None:
        if self._client is not None:
            await self._close_connections()
            self._client = None
        if self._server is not None:
            await self._server.stop()


async def check(client: VllmClient, model: str | None) -> Mapping[str, Any]:
    """Check that a server can be a generator's engine; return its configuration.

    Args:
        client: of the server.
        model: the folder of the model that it should have; None if that is not on this machine.

    Raises:
        Unavailable: nothing answers there.
        Denied: it wants another token.
        WrongArguments: it is no vLLM server in development mode, a proxy drops its routes, or it has another model.
    """
    await client.server.get("/v1/models")
    info = await _asked(client, "/server_info?config_format=json", "VLLM_SERVER_DEV_MODE=1 in its environment")
    await _asked(client, "/is_paused", "VLLM_SERVER_DEV_MODE=1 in its environment")
    try:
        await client.server.post("/pause?mode=none")  # vLLM knows no such mode, and pauses nothing
    except WrongArguments as error:
        if "answers /pause?mode=none with 404" in str(error) or "with 405" in str(error):
            raise WrongArguments(
                f"{client.server.shown} answers /is_paused and not POST /pause: a proxy drops that route; give the "
                "server's own URL, or let it pass /pause, /resume, /collective_rpc and /update_weight_version"
            ) from None
    config = info["vllm_config"]["model_config"]
    if (mode := config.get("logprobs_mode")) != "processed_logprobs":
        raise WrongArguments(
            f"{client.server.shown} returns {mode}, and training needs the log probabilities of the distribution "
            "that the tokens were drawn from: start it with --logprobs-mode processed_logprobs"
        )
    own: Mapping[str, Any] = info["vllm_config"]
    chunks = own.get("scheduler_config", {}).get("enable_chunked_prefill")
    if own.get("device_config", {}).get("device") == "cpu" and chunks:
        raise WrongArguments(
            f"{client.server.shown} divides prompts, and on CPUs it ends when one of these has a seed: start it "
            f"with {WHOLE_PROMPTS}"
        )
    await _check_generates(client)
    if model is not None:
        await _check_model(client, config, model)
    return own


def _check_sleeps(config: Mapping[str, Any], server: str) -> None:
    """Raise `WrongArguments` if a server cannot sleep while trainers use its GPUs."""
    if config.get("device_config", {}).get("device") == "cpu":
        raise WrongArguments(f"{server}: {AWAKE}")
    if not config["model_config"].get("enable_sleep_mode"):
        raise WrongArguments(f"{server} does not sleep while trainers use its GPUs: start it with {SLEEPS}")


async def _asked(client: VllmClient, path: str, lacks: str) -> dict[str, Any]:
    try:
        return await client.server.get(path)
    except (WrongArguments, Denied) as error:
        raise WrongArguments(
            f"{client.server.shown} is no vLLM server in development mode: start it with {lacks} ({error})"
        ) from None


async def _check_generates(client: VllmClient) -> None:
    try:
        await client.server.post(GENERATE, {"token_ids": [0], "sampling_params": {"max_tokens": 1}})
    except Denied as error:
        raise WrongArguments(
            f"{client.server.shown} does not take tokens: start it with --enable-scale-out ({error})"
        ) from None
    except WrongArguments as error:
        if "with 404" in str(error):
            raise WrongArguments(f"{client.server.shown} has no {GENERATE}: vLLM 0.32 has it ({error})") from None


async def _check_model(client: VllmClient, config: Mapping[str, Any], model: str) -> None:
    model_folder.check_same_model(model, str(config.get("model")), client.server.shown)
    if find_spec("transformers") is None:
        return
    from loom.rl.models.tokenizers import tokenizer_of

    own = await asyncio.to_thread(lambda: tokenizer_of(model).encode(PROBE))
    found = (await client.server.post("/tokenize", {"prompt": PROBE, "add_special_tokens": False}))["tokens"]
    if list(own) != found:
        raise WrongArguments(
            f"{client.server.shown} has another tokenizer than {model}: it turns {PROBE!r} into {len(found)} "
            f"tokens, and the model's own into {len(own)}"
        )
