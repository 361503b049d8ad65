"""The middleware that vLLM's server imports: a token for all routes, and log lines as of `loom.tracing`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

import loom.rl.engines
from loom.tracing.lines import parse_line

FILE = Path(loom.rl.engines.__file__).with_name("vllm_plugin") / "loom_vllm.py"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LOOM_VLLM_TOKEN", "secret")
    spec = importlib.util.spec_from_file_location("loom_vllm", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def app(*middleware: Any) -> FastAPI:
    made = FastAPI()

    @made.get("/health")
    async def health() -> str:
        return "ok"

    @made.post("/collective_rpc")
    async def collective_rpc(request: Request) -> Any:
        return (await request.json())["method"]

    for one in middleware:
        made.add_middleware(one)
    return made


def client(made: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(made), base_url="http://vllm")


@pytest.mark.guarantees("rl serving", "A vLLM server that Loom starts wants its token on every route but /health")
async def test_every_route_but_health_wants_the_token(plugin: Any) -> None:
    async with client(app(plugin.TokenForAll)) as http:
        body = {"method": "reload_weights"}
        assert (await http.get("/health")).status_code == 200
        for header in ({}, {"authorization": "Bearer other"}, {"authorization": "secret"}):
            assert (await http.post("/collective_rpc", json=body, headers=header)).status_code == 401
        answer = await http.post("/collective_rpc", json=body, headers={"authorization": "Bearer secret"})
        assert (answer.status_code, answer.json()) == (200, "reload_weights")


async def test_orders_to_load_weights_are_logged_in_the_form_that_loom_analyze_reads(
    plugin: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    async with client(app(plugin.WeightTimes)) as http:
        other = await http.post("/collective_rpc", json={"method": "get_model"})
        answer = await http.post(
            "/collective_rpc", json={"method": "reload_weights"}, headers={"x-trace-id": "abc123"}
        )

    lines = [parse_line(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one.name, one.trace) for one in lines if one] == [
        ("weights.server.recv", "abc123"),
        ("weights.rpc.start", "abc123"),
        ("weights.rpc.done", "abc123"),
    ]
    assert lines[2] is not None
    assert lines[2].fields["op"] == "reload_weights"
    assert float(answer.headers["x-rpc-ms"]) == pytest.approx(float(lines[2].fields["rpc_ms"]), abs=0.1)
    assert answer.json() == "reload_weights", "the body arrives whole"
    assert "x-rpc-ms" not in other.headers


def test_the_plugin_needs_nothing_but_python() -> None:
    imported = [line for line in FILE.read_text().splitlines() if line.startswith(("import ", "from "))]
    assert imported == [
        "from __future__ import annotations",
        "import hmac",
        "import json",
        "import os",
        "import re",
        "import time",
        "from typing import Any",
    ]
