"""The server of a generator, over real sockets: completions, weights, errors in OpenAI's form, and who gets in."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

import loom
from loom.rl.generation import http_servers
from loom.rl.generation import weight_files as weights
from loom.rl.generation.completions import RequestLimits, Sampling
from loom.rl.generation.engine import Engine
from loom.rl.generation.http_app import MAX_BODY, GenerationService
from loom.rl.generation.http_servers import Serving, new_token
from loom.rl.generation.weight_client import Bottleneck, ServingState, place_of, without_token
from loom.rl.generation.weight_files import WeightUpdates
from tests.support.small_models import Letters, SmallModel

BOUND = 60.0


class Paced(SmallModel):
    """A model that waits in each step until it is let, while ``held``."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()

    def forward(self, tokens: Any, cache: Any = None) -> Any:
        assert self.open.wait(BOUND)
        return super().forward(tokens, cache)


class Server:
    """A served engine, and a client with its token."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.model = Paced()
        limits = RequestLimits(concurrency=4, queue=8, max_prompt=40, max_tokens=50, max_n=6)
        self.engine = Engine(self.model, Letters(), limits=limits)
        service = GenerationService(self.engine, WeightUpdates(self.engine, folder), Sampling(12, 0.0), new_token())
        self.serving = Serving(service, **options)
        self.url = self.serving.url
        self.client = httpx.Client(base_url=self.url, timeout=BOUND)

    def post(self, path: str, /, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def close(self) -> None:
        self.model.open.set()
        self.client.close()
        self.serving.close()
        self.engine.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def begun(server: Server) -> int:
    return server.engine.state.inflight + server.engine.state.waiting


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.guarantees("rl serving", "Completions have OpenAI's form, also as a stream")
def test_a_completion_has_openais_form(server: Server) -> None:
    answer = server.post(
        "/v1/completions", prompt="abc", max_tokens=5, seed=3, temperature=1.0, logprobs=0, return_token_ids=True
    )

    found = answer.json()
    expected = asyncio.run(server.engine.generate(["abc"], 1, Sampling(5, 1.0, seed=3)))[0]
    assert answer.status_code == 200
    assert found["object"] == "text_completion"
    assert found["choices"] == [
        {
            "index": 0,
            "text": expected.text,
            "logprobs": {
                "tokens": [*expected.text],
                "token_logprobs": expected.logprobs,
                "top_logprobs": [{one: p} for one, p in zip(expected.text, expected.logprobs, strict=True)],
                "text_offset": [0, 1, 2, 3, 4],
            },
            "finish_reason": "length" if expected.truncated else "stop",
            "weights_step": 0,
            "token_ids": expected.tokens,
            "prompt_token_ids": [2, 3, 4],
        }
    ]
    count = len(expected.tokens)
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}


def test_several_prompts_with_n_are_answered_in_their_order(server: Server) -> None:
    found = server.post("/v1/completions", prompt=["abc", "p"], n=2).json()
    texts = [choice["text"] for choice in found["choices"]]
    one, other = (server.post("/v1/completions", prompt=prompt).json() for prompt in ("abc", "p"))
    assert texts == [one["choices"][0]["text"]] * 2 + [other["choices"][0]["text"]] * 2
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert found["usage"]["prompt_tokens"] == 4


@pytest.mark.guarantees("rl serving", "Completions have OpenAI's form, also as a stream")
def test_a_stream_has_the_pieces_of_the_completion(server: Server) -> None:
    body = {"prompt": ["abc", "bcdefgh"], "max_tokens": 20, "stream_options": {"include_usage": True}}
    whole = server.post("/v1/completions", prompt=body["prompt"], max_tokens=20).json()
    with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = events(response)

    texts = ["", ""]
    reasons = {}
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert reasons == {choice["index"]: choice["finish_reason"] for choice in whole["choices"]}
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])


def test_the_model_has_a_name(server: Server) -> None:
    (model,) = server.client.get("/v1/models").json()["data"]
    assert (model["id"], model["weights_step"]) == ("policy", 0)


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({}, 400, "prompt", "required"),
        ({"prompt": 5}, 400, "prompt", "valid string"),
        ({"prompt": "a" * 41}, 400, None, "from 1 to 40 tokens, and this one 41"),
        ({"prompt": ""}, 400, None, "from 1 to 40 tokens, and this one 0"),
        ({"prompt": "a", "n": 7}, 400, None, "n is a whole number from 1 to 6, not 7"),
        ({"prompt": "a", "n": 0}, 400, None, "not 0"),
        ({"prompt": "a", "max_tokens": 51}, 400, None, "max_tokens is a whole number from 1 to 50, not 51"),
        ({"prompt": "a", "max_tokens": "9"}, 400, "max_tokens", "valid integer"),
        ({"prompt": "a", "temperature": -1}, 400, None, "temperature is a number from 0"),
        ({"prompt": "a", "top_p": 0}, 400, None, "top_p is a number above 0 to 1, not 0"),
        ({"prompt": "a", "stop": 5}, 400, "stop", "valid string"),
        ({"prompt": "a", "frequency_penalty": 0.5}, 400, "frequency_penalty", "not supported"),
        ({"prompt": "AB"}, 400, None, "the tokenizer refuses the prompt 'AB'"),
        ({"prompt": [3, 99]}, 400, None, "a token of a prompt is a whole number from 0 to 17, not 99"),
        ({"prompt": "a", "no_such": 1}, 400, "no_such", "not permitted"),
        ({"prompt": "a", "logprobs": 5}, 400, "logprobs", "0 or 1"),
    ],
)
def test_what_is_wrong_with_a_request_is_said_in_openais_form(
    body: dict[str, Any], status: int, param: str | None, message: str, server: Server
) -> None:
    for stream in (False, True):
        answer = server.post("/v1/completions", **body, stream=stream)
        error = answer.json()["error"]
        assert answer.status_code == status
        assert message in error["message"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_other_wrong_requests(server: Server) -> None:
    assert (
        server.client.post("/v1/completions", content=b"{").json()["error"]["message"].startswith("the body is no")
    )
    assert server.client.post("/v1/completions", content=b"[1]").status_code == 400
    assert server.client.post("/v1/completions", content=b"[" * 100_000).status_code == 400
    assert server.client.post("/v1/completions", content=b" " * (MAX_BODY + 1)).status_code == 413
    assert server.client.get("/v1/completions").status_code == 405
    missing = server.client.get("/nothing")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "invalid_request_error")


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "gpt", "top_p": 1, "stop": None, "user": "me", "best_of": 1},
        {
            "top_k": -1,
            "min_p": 0.0,
            "cache_salt": "3",
            "ignore_eos": False,
            "stop_token_ids": None,
            "logit_bias": {},
        },
        {"repetition_penalty": 1.0, "skip_special_tokens": True, "min_tokens": 0, "bad_words": []},
    ],
)
def test_fields_of_openai_and_vllm_that_change_nothing_are_taken(server: Server, fields: dict[str, Any]) -> None:
    plain = server.post("/v1/completions", prompt="a").json()["choices"]
    answer = server.post("/v1/completions", prompt="a", **fields)
    assert answer.status_code == 200
    assert answer.json()["choices"] == plain


def test_tokens_are_a_prompt_and_a_stop_ends_a_completion(server: Server) -> None:
    whole = server.post("/v1/completions", prompt="abc").json()["choices"][0]["text"]
    cut = server.post("/v1/completions", prompt=[2, 3, 4], stop=whole[3]).json()["choices"][0]

    assert cut["text"] == whole[: whole.index(whole[3])]
    assert cut["finish_reason"] == "stop"
    refused = server.post("/v1/completions", prompt="abc", stop="a", stream=True).json()["error"]
    assert refused["message"] == "stop is not supported in streams"


def test_without_max_tokens_a_completion_is_as_long_as_the_model_reads(server: Server) -> None:
    server.model.longest = 20
    answer = server.post("/v1/completions", prompt="abcabcabcabc", temperature=1.0, return_token_ids=True)
    assert answer.status_code == 200
    assert len(answer.json()["choices"][0]["token_ids"]) <= 8
    assert server.post("/v1/completions", prompt="abcabcabcabc", max_tokens=12).status_code == 400


def test_an_admin_pauses_and_resumes(server: Server) -> None:
    for _ in range(2):
        assert server.post("/pause").json() == {"status": "paused"}
    with server.client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as answer:
        until(lambda: begun(server))
        assert server.engine.state.tokens == 0
        assert server.client.post("/resume").json() == {"status": "resumed"}
        assert events(answer)


def test_weights_in_several_files_are_loaded_by_their_index(server: Server) -> None:
    state = SmallModel(seed=3).state_dict()
    names = sorted(state)
    parts = {"one.safetensors": names[:3], "two.safetensors": names[3:]}
    folder = server.folder / "step_4"
    for file, held in parts.items():
        aside = weights.save({name: state[name] for name in held}, {}, server.folder / file.partition(".")[0], 0)
        folder.mkdir(exist_ok=True)
        (aside / "model.safetensors").rename(folder / file)
    (folder / "config.json").write_text("{}")
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (folder / weights.INDEX).write_text(json.dumps(index))

    assert server.post("/update_weights", weight_dir="step_4").json()["step"] == 4
    (folder / "two.safetensors").unlink()
    broken = server.post("/update_weights", weight_dir="step_4")
    assert (broken.status_code, "two.safetensors is missing" in broken.text) == (409, True)


def test_too_many_waiting_completions_are_refused_for_now(server: Server) -> None:
    server.model.open.clear()
    with server.client.stream("POST", "/v1/completions", json={"prompt": "a", "n": 4, "stream": True}):
        until(lambda: server.engine.state.inflight == 4)
        with server.client.stream("POST", "/v1/completions", json={"prompt": "a", "n": 6, "stream": True}):
            answer = server.post("/v1/completions", prompt="a", n=3)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert answer.json()["error"]["code"] == "limit_reached"
            server.model.open.set()


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_a_client_that_leaves_are_cancelled(stream: bool, server: Server) -> None:
    server.model.open.clear()
    parts = urlsplit(server.url)
    body = json.dumps({"prompt": "abc", "n": 6, "max_tokens": 50, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {parts.password}\r\n"
    with socket.create_connection((parts.hostname or "", parts.port or 0)) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: begun(server) == 6)
    server.model.open.set()
    until(lambda: begun(server) == 0)
    assert server.post("/v1/completions", prompt="a").status_code == 200


# Weights.


def test_weights_are_loaded_by_their_path(server: Server) -> None:
    before = server.post("/v1/completions", prompt="abc").json()["choices"][0]
    path = weights.save(SmallModel(seed=1).state_dict(), {}, server.folder / "weights", 3)

    answer = server.client.post("/update_weights", json={"path": str(path)}, headers={"x-trace-id": "abc123"})

    assert answer.json()["status"] == "ok"
    assert answer.json()["rpc_ms"] > 0
    assert answer.json()["step"] == 3
    assert answer.headers["x-trace-id"] == "abc123"
    after = server.post("/v1/completions", prompt="abc").json()["choices"][0]
    assert after["weights_step"] == 3
    assert after["text"] != before["text"]


def test_weights_are_found_by_their_step_and_reloaded_by_the_newest_one(server: Server) -> None:
    for step in (3, 7):
        weights.save(SmallModel(seed=step).state_dict(), {}, server.folder / "weights", step)
    assert server.post("/update_weights", step=3).json()["step"] == 3
    assert server.post("/update_weights", path="step_3").json()["step"] == 3
    assert server.post("/reload_weights").json()["step"] == 7
    assert server.engine.step == 7


def test_the_trace_of_an_order_is_recorded(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    weights.save(SmallModel(seed=1).state_dict(), {}, server.folder, 3)
    loom.tracing.configure(lines=True)
    try:
        server.client.post("/update_weights", json={"step": 3}, headers={"x-trace-id": "abc123"})
    finally:
        loom.tracing.configure(lines=False)
    lines = [line.split(" t=")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "[weights][abc123] server.recv path=/update_weights",
        "[weights][abc123] rpc.start op=update_weights",
        "[weights][abc123] rpc.done op=update_weights",
    ]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "say the path of the weights, or their step"),
        ({"path": "somewhere"}, 400, "say the step"),
        ({"path": "/etc"}, 403, "not in the folder"),
        ({"path": "../../x/step_3"}, 403, "not in the folder"),
        ({"path": "leads_out/step_3"}, 403, "not in the folder"),
        ({"path": "a\0b"}, 403, "not in the folder"),
        ({"path": "x" * 5000, "step": 3}, 409, "cannot be read"),
        ({"path": "."}, 403, "not in the folder"),
        ({"step": 4}, 409, "no such folder"),
        ({"step": -1}, 400, "from 0, not -1"),
        ({"path": "step_5"}, 409, "model.safetensors is missing"),
        ({"path": "step_6"}, 400, "not this model's"),
        ({"path": 5}, 400, "valid string"),
        ({"other": 5}, 400, "not permitted"),
    ],
)
def test_orders_that_cannot_be_followed_change_nothing(
    body: dict[str, Any], status: int, message: str, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    weights.save(SmallModel(seed=1).state_dict(), {}, outside, 3)
    (server.folder / "leads_out").symlink_to(outside)
    (weights.save({}, {}, server.folder, 5) / "model.safetensors").unlink()
    weights.save({"other": SmallModel().head.bias}, {}, server.folder, 6)

    answer = server.post("/update_weights", **body)

    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert server.engine.step == 0


def test_without_whole_weights_nothing_is_reloaded(server: Server) -> None:
    assert server.post("/reload_weights").status_code == 409


# Who gets in.


@pytest.mark.guarantees("rl serving", "Without the token nothing is answered but health, and garbage does no harm")
@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", "Basic !!", "Basic bG9vbTp3cm9uZw==", "Digest x"])
def test_without_the_token_nothing_is_answered_but_health(header: str, server: Server) -> None:
    headers = {"authorization": header} if header else {}
    bare = without_token(server.url)
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/update_weights")):
        answer = httpx.request(method, bare + path, headers=headers, timeout=BOUND)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
    assert httpx.get(f"{bare}/health", timeout=BOUND).json() == {"status": "ok"}


def test_the_token_is_taken_as_a_bearer_token_too(server: Server) -> None:
    headers = {"authorization": f"Bearer {urlsplit(server.url).password}"}
    assert httpx.get(f"{without_token(server.url)}/v1/models", headers=headers, timeout=BOUND).status_code == 200


@pytest.mark.guarantees("rl serving", "Without the token nothing is answered but health, and garbage does no harm")
def test_garbage_on_the_port_does_no_harm(server: Server) -> None:
    parts = urlsplit(server.url)
    address = (parts.hostname or "", parts.port or 0)
    for garbage in (b"", b"\x16\x03\x01\x02\x00", b"\xff" * 100_000, b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 1000):
        with socket.create_connection(address) as client:
            client.settimeout(BOUND)
            try:
                client.sendall(garbage)
                client.shutdown(socket.SHUT_WR)
                while client.recv(1 << 16):
                    pass
            except ConnectionError:
                pass
    assert server.post("/v1/completions", prompt="a").status_code == 200
    until(lambda: server.serving.state.connections <= 1)


def test_a_connection_that_shows_no_token_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_servers, "REQUEST_TIMEOUT", 0.2)
    server = Server(tmp_path)
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname or "", parts.port or 0)) as silent:
        silent.settimeout(BOUND)
        silent.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        assert silent.recv(100) == b""
    server.close()


def test_connections_without_a_token_make_room_and_others_wait_in_the_accept_queue(tmp_path: Path) -> None:
    server = Server(tmp_path, connections=2)
    parts = urlsplit(server.url)
    address = (parts.hostname or "", parts.port or 0)
    strangers = [socket.create_connection(address) for _ in range(5)]
    assert server.post("/v1/completions", prompt="a").status_code == 200
    for stranger in strangers:
        stranger.close()
    server.client.close()
    until(lambda: server.serving.state.connections == 0)

    server.model.open.clear()
    streams = [httpx.Client(base_url=server.url, timeout=BOUND) for _ in range(3)]
    body = {"prompt": "a", "max_tokens": 2}
    answers: list[httpx.Response] = []

    def ask(client: httpx.Client) -> None:
        answers.append(client.post("/v1/completions", json=body))

    waiting = [threading.Thread(target=ask, args=[client]) for client in streams]
    for thread in waiting:
        thread.start()
    until(lambda: begun(server) == 2 and server.serving.state.accept_queue == 1)
    server.model.open.set()
    for thread in waiting:
        thread.join(BOUND)
    assert [answer.status_code for answer in answers] == [200] * 3
    for each in streams:
        each.close()
    server.close()


def test_the_admin_listener_answers_while_the_other_one_takes_no_connection(tmp_path: Path) -> None:
    server = Server(tmp_path, connections=1, admin_port=0)
    weights.save(SmallModel(seed=1).state_dict(), {}, tmp_path, 2)
    admin = server.serving.admin_url
    assert admin is not None
    server.model.open.clear()
    with server.client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}):
        parts = urlsplit(server.url)
        with socket.create_connection((parts.hostname or "", parts.port or 0)):
            until(lambda: server.serving.state.accept_queue == 1)
            assert httpx.get(f"{admin}/v1/models", timeout=BOUND).status_code == 200
        server.model.open.set()
        assert httpx.post(f"{admin}/update_weights", json={"step": 2}, timeout=BOUND).json()["step"] == 2
        assert httpx.post(f"{admin}/v1/completions", json={"prompt": "a"}, timeout=BOUND).status_code == 404
    server.close()


def test_a_late_event_loop_is_noticed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Letters.encode

    def slowly(self: Letters, text: str) -> list[int]:
        time.sleep(0.4)
        return encode(self, text)

    monkeypatch.setattr(Letters, "encode", slowly)
    server.post("/v1/completions", prompt="a")
    until(lambda: server.serving.state.late_ms > 200)


@pytest.mark.parametrize(
    ("queue_ms", "rpc_ms", "accept_queue", "late_ms", "place"),
    [
        (3.0, 900.0, 0, 2.0, Bottleneck.ENGINE),
        (2000.0, 5.0, 0, 20.0, Bottleneck.POOL),
        (2000.0, 5.0, 7, 20.0, Bottleneck.ACCEPT),
        (900.0, 5.0, 1, 150.0, Bottleneck.LOOP),
        (5.0, 2.0, 0, 1.0, Bottleneck.NOWHERE),
    ],
)
def test_the_place_where_an_order_waited_is_named(
    queue_ms: float, rpc_ms: float, accept_queue: int, late_ms: float, place: Bottleneck
) -> None:
    assert place_of(queue_ms, rpc_ms, ServingState(9, accept_queue, late_ms)) is place


def test_a_port_in_use_is_named(server: Server, tmp_path: Path) -> None:
    port = urlsplit(server.url).port
    with pytest.raises(loom.PortInUse, match=f"port {port} of"):
        Server(tmp_path, port=port)
    with pytest.raises(loom.PortInUse, match=f"port {port} of"):
        Server(tmp_path, admin_port=port)
