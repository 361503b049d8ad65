"""A stand-in for a vLLM server: its routes for completions and weights, without a model.

What it draws is a function of the prompt and the step of its weights, and each log probability is ``-step``: so a
test sees which weights drew a token. As a program it takes the place of ``bin/vllm`` of an environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

EOS = 256


@dataclass
class StandInServer:
    """The state of the server, which tests look at and change."""

    model: str = ""
    development: bool = True
    scale_out: bool = True
    logprobs_mode: str = "processed_logprobs"
    divides_prompts: bool = False
    drops: tuple[str, ...] = ()
    """Paths that a proxy before it does not know."""
    workers: int = 1
    silent_workers: int = 0
    """Workers that do not answer an order."""
    rpc_ms: float | None = None
    """The milliseconds that each answer says by the header of Loom's middleware."""
    keeps_keys: bool = False
    """Whether its cache of keys and values cannot be emptied."""
    key: str = ""
    label: str = "default"
    weights: int = 0
    """The step of the weights that its workers have."""
    paused: bool = False
    logprobs: bool = True
    breaks: str = ""
    """The path whose next request is answered with an error of the server."""
    calls: list[str] = field(default_factory=list)
    log: Path | None = None
    """The file for the time and the path of each call."""
    ports: list[int] = field(default_factory=list)
    """The client's port of each call."""
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    """Completions go on while it is set."""
    begun: threading.Event = field(default_factory=threading.Event)
    """Set when a completion has begun."""
    seconds: float = 0.0
    """Seconds that a completion and a load of weights take."""
    tokens: int = 26
    """Number of tokens that it draws from, from `first` on."""
    first: int = 65
    running: int = 0
    version_per_token: list[str] | None = None
    backend: str | None = None
    """The backend by which its workers take tensors."""
    device: str = "cpu"
    receivers: list[Any] = field(default_factory=list)
    """Workers that take tensors, each a `GlooWorker`."""
    sleeps: bool = False
    """Whether it was started so that it can sleep."""
    asleep: bool = False
    drowsy: bool = False
    """Whether it says that it sleeps, or is awake, when it is not."""
    updating: bool = False
    stuck: bool = False
    """Whether the engine waits for its workers, and answers nothing."""
    half_loaded: bool = False
    """Whether layers wait for the rest of their tensors, as `reload_weights` leaves them when it fails."""
    leaves: bool = False
    """Whether a worker leaves the trainer's group instead of receiving."""

    def app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        self.hold.set()

        @app.middleware("http")
        async def guard(request: Request, call_next: Any) -> Response:
            path = request.url.path
            self.calls.append(path)
            if self.log is not None:
                with self.log.open("a") as file:
                    file.write(f"{time.time()} {path}\n")
            self.ports.append(request.client.port if request.client else 0)
            if path in self.drops:
                return JSONResponse({"detail": "Not Found"}, 404)
            if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
                return JSONResponse({"error": "Unauthorized"}, 401)
            if path == self.breaks:
                self.breaks = ""
                self.half_loaded = path == "/collective_rpc"
                return JSONResponse({"error": {"message": "EngineDeadError"}}, 500)
            answer: Response = await call_next(request)
            if self.rpc_ms is not None:
                answer.headers["x-rpc-ms"] = str(self.rpc_ms)
            return answer

        @app.get("/v1/models")
        async def models() -> Any:
            return {"object": "list", "data": [{"id": "policy"}]}

        @app.get("/openapi.json")
        async def openapi() -> Any:
            sampling = {"properties": {name: {} for name in ("n", "top_k", "frequency_penalty")}}
            return {"components": {"schemas": {"GenerateRequest": {"properties": {"sampling_params": sampling}}}}}

        @app.post("/tokenize")
        async def tokenize(request: Request) -> Any:
            prompt = (await request.json())["prompt"]
            file = Path(self.model) / "tokenizer.json"
            known = json.loads(file.read_text())["model"]["vocab"] if file.exists() else None
            tokens = list(prompt.encode()) if known is None else [known[one] for one in prompt if one in known]
            return {"tokens": tokens}

        @app.post("/inference/v1/generate")
        async def generate(request: Request) -> Any:
            if not self.scale_out:
                return JSONResponse({"error": {"message": "Scale-out endpoints are disabled."}}, 403)
            return await self._generate(await request.json())

        if self.development:
            self._add_development(app)
        return app

    async def _generate(self, asked: Mapping[str, Any]) -> Any:
        while self.paused:  # noqa: ASYNC110 - tests change it from their thread
            await asyncio.sleep(0.005)
        assert not self.asleep, "it draws tokens in its sleep"
        self.running += 1
        self.begun.set()
        await self.hold.wait()
        await asyncio.sleep(self.seconds)
        sampling = asked["sampling_params"]
        count = min(int(sampling.get("max_tokens", 16)), 4)
        tokens = [self.first + (sum(asked["token_ids"]) + self.weights) % self.tokens] * count
        label = self.label
        spans = [{"version": label, "start": 0, "end": count}]
        if self.version_per_token:
            spans = [{"version": one, "start": at, "end": at + 1} for at, one in enumerate(self.version_per_token)]
        content = [{"token": "?", "logprob": -float(self.weights)} for _ in tokens] if self.logprobs else []
        choice = {
            "finish_reason": "length",
            "text": bytes(tokens).decode(),
            "token_ids": tokens,
            "logprobs": {"content": content},
            "weight_versions": spans,
        }
        self.running -= 1
        return {"choices": [{"index": index, **choice} for index in range(int(sampling.get("n", 1)))]}

    def _add_development(self, app: FastAPI) -> None:
        @app.get("/server_info")
        async def server_info() -> Any:
            config = {
                "model": self.model,
                "logprobs_mode": self.logprobs_mode,
                "enable_sleep_mode": self.sleeps,
            }
            places = {
                "device_config": {"device": self.device},
                "weight_transfer_config": self.backend and {"backend": self.backend},
                "scheduler_config": {"enable_chunked_prefill": self.divides_prompts},
            }
            return {"vllm_config": {"model_config": config, **places}}

        @app.get("/is_paused")
        async def is_paused() -> Any:
            return {"is_paused": self.paused}

        @app.post("/pause")
        async def pause(mode: str = "abort") -> Any:
            if mode not in ("abort", "wait", "keep"):
                return JSONResponse({"error": {"message": f"no mode {mode}"}}, 400)
            self.paused = True
            while mode == "wait" and self.running:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            return {"status": "paused"}

        @app.post("/resume")
        async def resume() -> Any:
            self.paused = False
            return {"status": "resumed"}

        @app.post("/collective_rpc")
        async def collective_rpc(request: Request) -> Any:
            weights = (await request.json())["kwargs"]
            assert self.paused, "weights change while tokens are drawn"
            if weights == {"weights_iterator": []}:
                self.half_loaded = False
                return {"results": [None] * self.workers}
            assert not self.half_loaded, "new tensors are added to those of an order that broke"
            path = Path(weights["weights_path"])
            assert not self.asleep, "weights change in memory that is not there"
            self.weights = -1000
            await asyncio.sleep(self.seconds)
            self.weights = json.loads((path / "config.json").read_text())["_loom"]["step"]
            return {"results": [None] * (self.workers - self.silent_workers)}

        self._add_transfer(app)
        self._add_sleep(app)

        @app.post("/update_weight_version")
        async def update_weight_version(request: Request) -> Any:
            self.label = (await request.json())["new_version"]
            return {"success": True}

        @app.get("/weight_info")
        async def weight_info() -> Any:
            while self.stuck:  # noqa: ASYNC110 - tests change it from their thread
                await asyncio.sleep(0.005)
            return {"weight_version": self.label}

        @app.post("/reset_prefix_cache")
        async def reset_prefix_cache() -> Any:
            return {"success": not self.keeps_keys}

        @app.get("/get_world_size")
        async def get_world_size() -> Any:
            return {"world_size": self.workers}

    def _add_sleep(self, app: FastAPI) -> None:
        @app.post("/sleep")
        async def sleep(level: int = 1) -> Any:
            assert self.paused, "it sleeps while tokens are drawn"
            assert level == 2
            self.asleep, self.weights = True, -1000
            return {"status": "sleeping"}

        @app.get("/is_sleeping")
        async def is_sleeping() -> Any:
            return {"is_sleeping": self.asleep and not self.drowsy}

        @app.post("/wake_up")
        async def wake_up() -> Any:
            self.asleep = self.paused = False
            return {"status": "sleeping" if self.drowsy else "awake"}

    def _add_transfer(self, app: FastAPI) -> None:
        """Add the routes by which workers take tensors. An update that fails leaves layers half loaded."""
        failed = JSONResponse({"error": {"message": "EngineCore encountered an issue."}}, 500)

        @app.post("/shutdown_weight_transfer_engine")
        async def shutdown() -> Any:
            if self.updating:
                return failed
            for one in self.receivers:
                one.leave()
            return {}

        @app.post("/init_weight_transfer_engine")
        async def init(request: Request) -> Any:
            from tests.support.gloo_workers import GlooWorker

            info = (await request.json())["init_info"]
            self.receivers = [GlooWorker(number) for number in range(self.workers)]
            await asyncio.gather(*(asyncio.to_thread(one.join, info) for one in self.receivers))
            return {}

        @app.post("/start_weight_update")
        async def start() -> Any:
            if self.updating:
                return failed
            assert self.paused, "weights change while tokens are drawn"
            self.updating = True
            return {}

        @app.post("/update_weights")
        async def update(request: Request) -> Any:
            if not self.updating:
                return failed
            info = (await request.json())["update_info"]
            self.weights = -1000
            try:
                if self.leaves:
                    self.receivers[-1].leave()
                await asyncio.gather(*(asyncio.to_thread(one.receive, info) for one in self.receivers))
            except RuntimeError as error:  # the trainer is gone
                self.updating = False
                return JSONResponse({"error": {"message": f"the worker failed: {error!r}"}}, 500)
            self.weights = int(next(iter(self.receivers[-1].tensors.values())).reshape(-1)[0])
            return {}

        @app.post("/finish_weight_update")
        async def finish() -> Any:
            if not self.updating:
                return failed
            self.updating = False
            return {}


@contextmanager
def served(server: StandInServer) -> Iterator[str]:
    """Serve in a thread; give the URL, with the key."""
    config = uvicorn.Config(server.app(), host="127.0.0.1", port=0, log_level="error", lifespan="off")
    running = uvicorn.Server(config)
    ready = threading.Event()

    async def main() -> None:
        serving = asyncio.ensure_future(running.serve())
        while not running.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
        ready.set()
        await serving

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(30)
    port = running.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://{f'loom:{server.key}@' if server.key else ''}127.0.0.1:{port}"
    finally:
        running.should_exit = True
        thread.join(10)


def environment(folder: Path) -> Path:
    """Make a folder whose ``bin/python`` runs this file in the place of vLLM; return it."""
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "python"
    program.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} {__file__} "$@"\n')
    program.chmod(0o755)
    (folder / "bin" / "vllm").write_text("")
    return folder


class _Server(uvicorn.Server):
    """Says that it is ready, and then listens, ``STAND_IN_LISTENS`` seconds later."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        await asyncio.sleep(float(os.environ.get("STAND_IN_LISTENS", 0)))
        self.lifespan.startup = _nothing  # type: ignore[method-assign]
        await super().startup(sockets)


async def _nothing() -> None:
    pass


def _main() -> None:
    arguments = sys.argv[sys.argv.index("serve") + 1 :]
    options = dict(pairwise(arguments[1:]))
    if os.environ.get("STAND_IN_FAILS"):
        print("ValueError: the model does not fit", flush=True)
        sys.exit(1)
    server = StandInServer(
        model=arguments[0],
        key=os.environ["LOOM_VLLM_TOKEN"],
        workers=int(options.get("--tensor-parallel-size", 1)),
        logprobs_mode=options["--logprobs-mode"],
        scale_out="--enable-scale-out" in arguments,
        development=os.environ.get("VLLM_SERVER_DEV_MODE") == "1",
        device=os.environ.get("STAND_IN_DEVICE", "cpu"),
        sleeps="--enable-sleep-mode" in arguments,
        log=Path(os.environ["STAND_IN_CALLS"]) if "STAND_IN_CALLS" in os.environ else None,
        seconds=float(os.environ.get("STAND_IN_SECONDS", 0)),
        tokens=int(os.environ.get("STAND_IN_TOKENS", 26)),
        first=0 if "STAND_IN_TOKENS" in os.environ else 65,
    )
    segment = os.environ.get("STAND_IN_SHARED")
    shared = SharedMemory(segment, create=True, size=1) if segment else None  # as the queues of vLLM's workers
    if os.fork() == 0:  # as the engine's process
        os.execvp("sleep", ["sleep", "1000"])
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((options["--host"], int(options["--port"])))  # as vLLM does; uvicorn listens last
    _Server(uvicorn.Config(server.app(), log_level="info")).run(sockets=[listener])
    if shared is not None:
        shared.unlink()


if __name__ == "__main__":
    _main()
