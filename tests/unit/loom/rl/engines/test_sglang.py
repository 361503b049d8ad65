"""A generator's engine on an SGLang server, by SGLang's routes. The server is a stand-in: no real one has run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI, Request

import loom
from loom.errors import Unavailable
from loom.rl.engines import sglang
from loom.rl.engines.sglang import SglangEngine, SglangOptions
from loom.rl.generation import weight_files as weights
from loom.rl.generation.completions import Sampling


class StandIn:
    """The routes, and what was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.loads = True
        self.hold = asyncio.Event()
        self.hold.set()

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/get_model_info")
        async def info() -> Any:
            return {"model_path": "/nowhere"}

        @app.post("/generate")
        async def generate(request: Request) -> Any:
            body = await request.json()
            self.calls.append(("/generate", body))
            await self.hold.wait()
            meta = {
                "output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]],
                "finish_reason": {"type": "length"},
            }
            one = {"text": "ab", "meta_info": meta}
            return [one] * body["sampling_params"]["n"] if body["sampling_params"]["n"] > 1 else one

        @app.post("/{path}")
        async def order(path: str, request: Request) -> Any:
            self.calls.append((f"/{path}", await request.json()))
            return {"success": self.loads, "message": "shapes differ"}

        return app


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    transport = httpx.ASGITransport(made.app())
    monkeypatch.setattr(sglang, "shared_client", lambda connections: httpx.AsyncClient(transport=transport))
    return made


async def started(folder: Path) -> SglangEngine:
    engine = SglangEngine(None, SglangOptions.of({"url": "http://sglang"}), folder=folder)
    await engine.start()
    return engine


async def test_completions_have_the_tokens_of_the_server(server: StandIn, tmp_path: Path) -> None:
    engine = await started(tmp_path)
    found = await engine.complete([[1, 2], "x"], 2, Sampling(5, 0.5, seed=3, top_p=0.9, stop=("y",)))

    assert [one.tokens for one in found] == [[7, 8]] * 4
    assert found[0].logprobs == [-0.5, -0.25]
    asked = next(body for path, body in server.calls if body.get("input_ids") == [1, 2])
    assert asked["sampling_params"] == {
        "n": 2,
        "max_new_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["y"],
        "sampling_seed": 3,
    }
    await engine.stop()


async def test_an_update_waits_for_completions_and_holds_later_ones(server: StandIn, tmp_path: Path) -> None:
    path = weights.save({"layer": torch.zeros(2)}, {}, tmp_path, 4)
    engine = await started(tmp_path)
    server.hold.clear()
    before = asyncio.ensure_future(engine.complete([[1]], 1, Sampling(5)))
    while not server.calls:  # noqa: ASYNC110
        await asyncio.sleep(0)
    update = asyncio.ensure_future(engine.update_weights(4, str(path)))
    await asyncio.sleep(0)
    server.hold.set()

    assert (await update)["step"] == 4
    after = await engine.complete([[1]], 1, Sampling(5))
    assert [(await before)[0].weights_step, after[0].weights_step] == [0, 4]
    assert [called for called, _ in server.calls] == [
        "/generate",
        "/pause_generation",
        "/update_weights_from_disk",
        "/continue_generation",
        "/generate",
    ]
    await engine.stop()


async def test_a_server_that_does_not_load_them_is_used_no_more(server: StandIn, tmp_path: Path) -> None:
    path = weights.save({"layer": torch.zeros(2)}, {}, tmp_path, 4)
    server.loads = False
    engine = await started(tmp_path)
    with pytest.raises(Unavailable, match="did not load the weights of step 4: shapes differ"):
        await engine.update_weights(4, str(path))
    await engine.stop()


def test_a_server_has_to_be_named() -> None:
    with pytest.raises(loom.WrongArguments, match="needs a server that exists"):
        SglangOptions.of({})
