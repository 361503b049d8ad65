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
from tests.support.seed_lines import RPC_DONE, RPC_START, SERVER_RECV, matches

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

    @made.post("/pause")
    @made.post("/resume")
    @made.post("/update_weight_version")
    async def other() -> str:
        return "ok"

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


def said(capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str | None, object]]:
    lines = [parse_line(line) for line in capsys.readouterr().out.splitlines()]
    return [(one.name.removeprefix("weights."), one.trace, one.fields.get("op")) for one in lines if one]


async def test_an_order_of_several_requests_has_its_lines_once(
    plugin: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    async with client(app(plugin.WeightTimes)) as http:
        rpc_ms = []
        for path in ("/pause?mode=wait", "/update_weight_version", "/collective_rpc", "/resume"):
            body = {"method": "reload_weights"} if path == "/collective_rpc" else {}
            answer = await http.post(path, json=body, headers={"x-trace-id": "abc123"})
            rpc_ms.append(float(answer.headers["x-rpc-ms"]))
    out = capsys.readouterr().out
    done = parse_line(out.splitlines()[-1])

    assert [line.split(" t=")[0] for line in out.splitlines()] == [
        "[weights][abc123] server.recv path=/pause",
        "[weights][abc123] rpc.start op=pause",
        "[weights][abc123] rpc.done op=reload_weights",
    ]
    assert done is not None
    assert float(done.fields["rpc_ms"]) == pytest.approx(sum(rpc_ms), abs=0.1)
    (recv,), (start,), (end,) = (matches(pattern, out) for pattern in (SERVER_RECV, RPC_START, RPC_DONE))
    assert {recv["trace"], start["trace"], end["trace"]} == {"abc123"}
    assert float(recv["t"]) <= float(start["t"]) <= float(end["t"])
    assert float(end["rpc_ms"]) == float(done.fields["rpc_ms"])


async def test_an_order_beside_another_one_has_lines_of_its_own(
    plugin: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    async with client(app(plugin.WeightTimes)) as http:
        for path, trace in (
            ("/pause", "one"),
            ("/collective_rpc", "other"),
            ("/collective_rpc", "one"),
            ("/resume", "one"),
            ("/pause", ""),
            ("/resume", ""),
        ):
            answer = await http.post(path, json={"method": "load_weights"}, headers={"x-trace-id": trace})
            assert float(answer.headers["x-rpc-ms"]) >= 0

    assert said(capsys) == [
        ("server.recv", "one", None),
        ("rpc.start", "one", "pause"),
        ("server.recv", "other", None),
        ("rpc.start", "other", "load_weights"),
        ("rpc.done", "other", "load_weights"),
        ("rpc.done", "one", "load_weights"),
    ]


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
