"""A pod's keeper lets in only who proves to know the job's key, and proves it itself. A real server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from loom.errors import LoomError, PodUnreachable
from loom.mutual_auth import Exchange, Purpose, Side, new_nonce
from loom.mutual_auth.over_http import CHALLENGE_HEADER, NONCE_HEADER, PROOF_HEADER
from loom.process.listen import listen
from loom_gateway.pod import app as keeper_app
from loom_gateway.pod.app import MAX_BODY, KeeperProtocol, create_app
from loom_gateway.pod.settings_and_peers import CONFIGURE, MeshPods, PodSettings, ask_pod, make_pod_key, pod_key

BASE = PodSettings("workers", (MeshPods("workers", "w", 2),), "the job's key")


class Keeper:
    """In the place of a `PodSupervisor`: it notes what it is told."""

    address = "127.0.0.1"

    def __init__(self, settings: PodSettings) -> None:
        self.settings = settings
        self.told: list[str] = []
        self.worker = SimpleNamespace(restart=self._restart)

    async def _restart(self) -> None:
        self.told.append("restart")

    async def configure(self, settings: PodSettings) -> None:
        self.told.append("configure")
        self.settings = settings

    async def states(self) -> list[dict[str, Any]]:
        return [self.state()]

    def state(self) -> dict[str, Any]:
        return {"name": "pod-0", "gateway": False}


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    listener = listen("127.0.0.1", 0)
    keeper = Keeper(replace(BASE, keeper_port=listener.getsockname()[1]))
    app = create_app(keeper, lambda: keeper.told.append("end"), make_pod_key(tmp_path))  # type: ignore[arg-type]
    config = uvicorn.Config(app, lifespan="off", proxy_headers=False, log_level="error", http=KeeperProtocol)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    yield keeper
    server.should_exit = True
    thread.join(20)


def send(keeper: Keeper, method: str, path: str, body: bytes = b"", **headers: str) -> int:
    return answer_to(keeper, method, path, body, headers)[0]


def answer_to(
    keeper: Keeper, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = {}
) -> tuple[int, str]:
    """The status, and the challenge."""
    connection = http.client.HTTPConnection("127.0.0.1", keeper.settings.keeper_port, timeout=20)
    try:
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.headers.get(CHALLENGE_HEADER, "")
    finally:
        connection.close()


def proven(keeper: Keeper, key: str, method: str, path: str, host: str = "") -> dict[str, str]:
    """What a request has whose sender knows a key, after a challenge."""
    exchange = Exchange(Purpose.POD, key, new_nonce(), answer_to(keeper, method, path)[1])
    host = host or f"127.0.0.1:{keeper.settings.keeper_port}"
    return {
        CHALLENGE_HEADER: exchange.answering,
        NONCE_HEADER: exchange.asking,
        PROOF_HEADER: exchange.proof(Side.ASKS, method, host, path),
    }


def test_a_keeper_of_the_job_is_answered(keeper: Keeper) -> None:
    settings = keeper.settings

    assert ask_pod(settings, "127.0.0.1", "GET", "/pod") == {"name": "pod-0", "gateway": False}
    assert ask_pod(settings, "127.0.0.1", "GET", "/pods") == {"pods": [{"name": "pod-0", "gateway": False}]}
    ask_pod(settings, "127.0.0.1", "POST", "/restart_worker")
    ask_pod(settings, "127.0.0.1", "POST", "/shutdown")
    assert keeper.told == ["restart", "end"]


@pytest.mark.guarantees(
    "ports", "A pod's keeper asks for a proof of the job's key before it reads a body, and gives one"
)
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/pod"), ("GET", "/pods"), ("POST", "/restart_worker"), ("POST", "/shutdown"), ("POST", CONFIGURE)]
    + [("GET", "/nothing"), ("GET", "/openapi.json")],
)
def test_who_does_not_know_the_key_is_refused_whatever_it_asks(keeper: Keeper, method: str, path: str) -> None:
    wrong = proven(keeper, "another", method, path)
    other_path = proven(keeper, keeper.settings.token_sha256, method, path + "x")

    # The header of older keepers, which is the key itself, is none either.
    for headers in ({}, wrong, other_path, {"x-loom-job": keeper.settings.token_sha256}):
        assert send(keeper, method, path, json.dumps(asdict(BASE)).encode(), **headers) == 403
    assert keeper.told == []


def test_a_request_for_another_pod_is_worth_nothing_here(keeper: Keeper) -> None:
    stolen = proven(keeper, keeper.settings.token_sha256, "POST", "/shutdown", host="10.0.0.7:26599")

    assert send(keeper, "POST", "/shutdown", Host="10.0.0.7:26599", **stolen) == 403
    assert keeper.told == []


@pytest.mark.guarantees(
    "ports", "A request between pods or training groups that was overheard is refused when it is sent again"
)
def test_a_request_that_is_sent_again_is_refused(keeper: Keeper) -> None:
    overheard = proven(keeper, keeper.settings.token_sha256, "POST", "/restart_worker")

    assert send(keeper, "POST", "/restart_worker", **overheard) == 200
    assert send(keeper, "POST", "/restart_worker", **overheard) == 403
    with_a_new_challenge = {**overheard, CHALLENGE_HEADER: answer_to(keeper, "POST", "/restart_worker")[1]}
    assert send(keeper, "POST", "/restart_worker", **with_a_new_challenge) == 403
    assert keeper.told == ["restart"]


@pytest.mark.guarantees(
    "ports", "New settings for a pod need the pod's own key, so that no other process can take its gateway"
)
def test_new_settings_need_the_pods_own_key(keeper: Keeper, tmp_path: Path) -> None:
    settings = keeper.settings
    with pytest.raises(PodUnreachable, match="another job's"):
        ask_pod(settings, "127.0.0.1", "POST", CONFIGURE, asdict(settings))  # with the job's
    assert keeper.told == []

    new = replace(settings, token_sha256="a new key")
    ask_pod(new, "127.0.0.1", "POST", CONFIGURE, asdict(new), key=pod_key(tmp_path))

    assert keeper.settings == new
    with pytest.raises(PodUnreachable, match="another job's, or has another token"):
        ask_pod(settings, "127.0.0.1", "GET", "/pod")
    assert ask_pod(new, "127.0.0.1", "GET", "/pod")["name"] == "pod-0"


def test_only_its_user_can_read_the_pods_key(tmp_path: Path) -> None:
    key = make_pod_key(tmp_path)

    assert pod_key(tmp_path) == key
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert pod_key(tmp_path / "nowhere") == ""


def test_settings_that_make_no_sense_are_an_error(keeper: Keeper, tmp_path: Path) -> None:
    with pytest.raises(LoomError, match="no settings of a pod"):
        ask_pod(keeper.settings, "127.0.0.1", "POST", CONFIGURE, {"mesh": "x"}, key=pod_key(tmp_path))


def test_a_large_body_is_not_read(keeper: Keeper, tmp_path: Path) -> None:
    def with_key() -> dict[str, str]:
        return proven(keeper, pod_key(tmp_path), "POST", CONFIGURE)

    assert announces(keeper, with_key(), f"content-length: {MAX_BODY + 1}") == 413
    assert announces(keeper, with_key(), "transfer-encoding: chunked") == 411
    assert announces(keeper, {}, "content-length: 99999999999") == 403


def announces(keeper: Keeper, headers: dict[str, str], length: str) -> int:
    """The status of a request of which the body never comes: it is refused without."""
    port = keeper.settings.keeper_port
    lines = [f"POST {CONFIGURE} HTTP/1.1", f"host: 127.0.0.1:{port}", length]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with socket.create_connection(("127.0.0.1", port), 20) as sock:
        sock.settimeout(20)
        sock.sendall("\r\n".join([*lines, "", ""]).encode())
        return int(sock.recv(4096).split()[1])


@pytest.mark.guarantees("ports", "Silent connections keep no keeper out")
def test_a_crowd_of_silent_connections_keeps_nobody_out(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_app, "CONNECTIONS", 8)
    with contextlib.ExitStack() as held:
        crowd = [
            held.enter_context(socket.create_connection(("127.0.0.1", keeper.settings.keeper_port), 20))
            for _ in range(40)
        ]
        assert ask_pod(keeper.settings, "127.0.0.1", "GET", "/pod")["name"] == "pod-0"
        assert crowd[0].recv(1) == b""  # the oldest was closed


def test_a_connection_without_a_request_is_closed(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_app, "REQUEST_TIMEOUT", 0.2)
    with socket.create_connection(("127.0.0.1", keeper.settings.keeper_port), 20) as sock:
        sock.sendall(b"GET /pod HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""


@pytest.mark.guarantees("ports", "What is no keeper of the job is not believed")
@pytest.mark.parametrize(
    "answer",
    [
        lambda _: ({CHALLENGE_HEADER: new_nonce()}, b'{"gateway": true}'),
        lambda asked: (
            {CHALLENGE_HEADER: asked.get(NONCE_HEADER) or new_nonce(), PROOF_HEADER: asked.get(PROOF_HEADER, "")},
            b'{"gateway": true}',
        ),
        lambda _: ({CHALLENGE_HEADER: new_nonce()}, b"{" * 100_000),
    ],
)
def test_what_is_no_keeper_is_not_believed(answer: Callable[[Any], tuple[dict[str, str], bytes]]) -> None:
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(str(self.headers))
            headers, body = answer(self.headers)
            self.send_response(200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        with pytest.raises(PodUnreachable, match="it answers as no keeper of this job does"):
            ask_pod(replace(BASE, keeper_port=server.server_port), "127.0.0.1", "GET", "/pod")
    finally:
        server.shutdown()
        server.server_close()
    assert len(seen) == 2
    assert BASE.token_sha256 not in "".join(seen)


@pytest.mark.parametrize(
    ("challenge", "why"),
    [("", "it is no Loom, or another version"), (f"2-{'0' * 64}", "by version 2 of the proof"), ("1-0", "no Loom")],
)
def test_a_keeper_without_a_challenge_of_this_version_gets_no_proof(challenge: str, why: str) -> None:
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(str(self.headers).lower())
            self.send_response(403)
            self.send_header(CHALLENGE_HEADER, challenge)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        with pytest.raises(PodUnreachable, match=why):
            ask_pod(replace(BASE, keeper_port=server.server_port), "127.0.0.1", "GET", "/pod")
    finally:
        server.shutdown()
        server.server_close()
    assert PROOF_HEADER not in "".join(seen)
