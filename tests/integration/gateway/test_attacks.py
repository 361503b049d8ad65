"""Attacks on a real gateway: pickle bombs, floods of bad handshakes, and requests that nobody makes by hand."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import pickle
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgpack
import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from rich.console import Console
from websockets.exceptions import ConnectionClosed

import loom
from loom import Actor, endpoint
from loom.rest_client import Gateway
from loom.token_file import TokenFile
from loom.wire.handshake import Hello
from loom.wire.messages import Kind, Message
from loom.wire.stream import unnumbered_frame
from loom_proxy.local import LocalCluster
from tests.benchmarks import handshakes as handshake_benchmark
from tests.benchmarks.attack import TRIES, attack
from tests.benchmarks.hostile import KINDS, Hostile
from tests.support.raw_client import BOUND, answer, exchange, say_hello, status_of, websocket

SPY = """
import os, sys

def spy(event, arguments):
    if event == "pickle.find_class":
        with open({file!r}, "a") as file:
            file.write(f"{{os.getpid()}}\\n")

sys.addaudithook(spy)
"""
"""A ``sitecustomize`` that writes down which processes unpickle."""


class Echo(Actor):
    @endpoint
    def echo(self, value: object) -> object:
        return value


class Target:
    """A gateway, a bomb, and what tells whether it went off."""

    def __init__(self, cluster: LocalCluster, view: str, folder: Path) -> None:
        self.url = cluster.url
        self.http = cluster.url.replace("ws:", "http:")
        self.token = cluster.token
        self.view = view
        self.crater = folder / "crater"
        self.gateway = psutil.Process(cluster.pids[0])
        self._unpickled = folder / "unpickled"

    @property
    def bomb(self) -> bytes:
        """A pickle that makes a file when it is loaded. Without line ends, so that it fits into a header."""
        text = str(self.crater).encode()
        return b"\x8c\x08builtins\x8c\x04open\x93\x8c" + bytes([len(text)]) + text + b"\x8c\x01w\x86R."

    def unpickled(self) -> list[int]:
        """For each time that anything but plain data was unpickled, the id of the process that did."""
        return [int(line) for line in self._unpickled.read_text().split()] if self._unpickled.exists() else []

    def unpickled_by(self) -> set[int]:
        """Ids of the processes that have unpickled anything but plain data."""
        return set(self.unpickled())

    def unpickled_for(self, job: loom.Job) -> int:
        """How often a session's driver unpickled anything but plain data. Spare drivers do, as they start."""
        sessions = json.loads(self.rest("GET", "/api/v1/sessions", self.token)[1])["sessions"]
        (driver,) = [session["pid"] for session in sessions if session["name"] == job.session]
        return self.unpickled().count(driver)

    def rest(self, method: str, path: str, token: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of the answer to a request."""
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/octet-stream"}
        request = urllib.request.Request(self.http + path, data=body, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=BOUND) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def assert_unharmed(self) -> None:
        """The gateway answers, and has unpickled nothing."""
        with urllib.request.urlopen(f"{self.http}/healthz", timeout=BOUND) as health:
            assert health.status == 200
        assert not self.crater.exists()
        assert self.gateway.pid not in self.unpickled_by()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("t")
    (folder / "sitecustomize.py").write_text(SPY.format(file=str(folder / "unpickled")))
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    file = TokenFile(folder / "tokens.json")
    options = ["--tokens", str(file.path), "--login-failures", "0", "--connection-rate", "0"]
    with LocalCluster(1, env={"PYTHONPATH": path}, gateway_options=options) as cluster:
        yield Target(cluster, file.create("a viewer", "view", user="admin")[1], folder)


@pytest.fixture(scope="module")
def job(target: Target) -> Iterator[loom.Job]:
    with loom.connect(target.url, target.token) as connected:
        yield connected


# -- pickle bombs -------------------------------------------------------------------------------------------


def test_the_bomb_is_one(tmp_path: Path, target: Target) -> None:
    try:
        pickle.loads(target.bomb).close()
        assert target.crater.exists()
    finally:
        target.crater.unlink(missing_ok=True)


def test_the_spy_sees_drivers_unpickle_and_the_gateway_not(target: Target) -> None:
    with loom.connect(target.url, target.token) as job:
        echo = job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("echo", Echo)
        assert echo.echo.call_one({1, 2}).get(BOUND) == {1, 2}
        assert target.unpickled_by()
    target.assert_unharmed()


HEADERS = [
    "Authorization",
    "Cookie",
    "Host",
    "Origin",
    "User-Agent",
    "Sec-WebSocket-Extensions",
    "Sec-WebSocket-Key",
    "Sec-WebSocket-Protocol",
    "Sec-WebSocket-Version",
    "X-Forwarded-For",
    "Content-Type",
    "Accept",
    "X-Loom",
]


@pytest.mark.parametrize("header", HEADERS)
def test_a_bomb_in_a_header_is_never_unpickled(target: Target, header: str) -> None:
    bombs = [target.bomb, base64.b64encode(target.bomb), quote(target.bomb).encode()]
    tokens = [None, target.view, target.token]
    for bomb, token in itertools.product(bombs, tokens):
        headers = {
            "Host": b"localhost",
            "Connection": b"Upgrade",
            "Upgrade": b"websocket",
            "Sec-WebSocket-Version": b"13",
            "Sec-WebSocket-Key": b"dGhlIHNhbXBsZSBub25jZQ==",
            **({} if token is None else {"Authorization": b"Bearer " + token.encode()}),
        }
        headers[header] = b"Bearer " + bomb if header == "Authorization" else bomb
        lines = [name.encode() + b": " + value for name, value in headers.items()]
        request = b"\r\n".join([b"GET /ws/v1 HTTP/1.1", *lines, b"", b""])
        assert status_of(exchange(target.url, request)) in (101, 400, 401, 403, 426)
    target.assert_unharmed()


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
def test_a_bomb_in_the_path_or_as_a_body_is_never_unpickled(target: Target, method: str) -> None:
    bomb = target.bomb
    paths = [f"/api/v1/sessions/{quote(bomb, safe='')}", "/api/v1/sessions", "/api/v1/status", "/ws/v1"]
    for token, path in itertools.product(["", target.view, target.token], paths):
        assert target.rest(method, path, token, bomb)[0] < 500, path
    target.assert_unharmed()


def frames_with(bomb: bytes) -> Iterator[bytes]:
    """A hello with a bomb in each of its places, one after the other."""
    body = Hello().to_body()[0]
    for field in [*body, "more"]:
        yield frame([[int(Kind.HELLO), 0, [{**body, field: bomb}], []]])
    for kind in Kind:
        yield frame([[int(kind), 0, [body], [len(bomb)]]]) + bomb
    yield frame([[int(Kind.HELLO), 0, bomb, []]])
    yield frame([[int(Kind.HELLO), bomb, [body], []]])
    yield frame([[bomb, 0, [body], []]])
    yield frame([[int(Kind.HELLO), 0, [body], bomb]])
    yield frame(bomb)
    yield frame([], bomb)
    yield struct.pack(">I", len(bomb)) + bomb
    yield frame([[int(Kind.HELLO), 0, [msgpack.ExtType(1, bomb)], []]])
    yield bomb


def frame(messages: Any, seq: Any = 0) -> bytes:
    header = msgpack.packb((seq, 0, messages))
    return struct.pack(">I", len(header)) + header


@pytest.mark.parametrize("scope", ["view", "drive"])
def test_a_bomb_in_a_hello_is_never_unpickled(target: Target, scope: str) -> None:
    token = target.view if scope == "view" else target.token
    for sent in frames_with(target.bomb):
        with websocket(target.url, token) as client:
            client.send(sent)
            assert answer(client).kind in (Kind.REFUSE, Kind.WELCOME)
    target.assert_unharmed()


def operations_with(bomb: bytes, first_id: int) -> Iterator[Message]:
    """Each operation, with the bomb as its payload."""
    bodies: dict[Kind, list[Any]] = {
        Kind.SPAWN_PROCS: [0, "bombs", {"gpus": 1}],
        Kind.SPAWN_ACTORS: [0, "bombs"],
        Kind.RUN: ["bomb", False],
        Kind.CALL: [0, "echo"],
        Kind.PORT_SEND: [1, False],
        Kind.SYNC: [1],
    }
    for number, kind in enumerate(kind for kind in Kind if 16 <= kind < 64):
        yield Message(kind, first_id + number, bodies.get(kind, [0]), [bomb])


def test_what_a_view_token_sends_is_unpickled_nowhere(target: Target) -> None:
    with loom.connect(target.url, target.token) as job, websocket(target.url, target.view) as watcher:
        welcome = say_hello(watcher, session=job.session, mode="watch")
        assert welcome.kind == Kind.WELCOME
        before = target.unpickled_for(job)
        first_id = welcome.body[0]["next_id"]
        for number, message in enumerate(operations_with(target.bomb, first_id), 1):
            kind, ident, body, parts = message
            watcher.send(frame([[int(kind), ident, body, [len(part) for part in parts]]], number) + b"".join(parts))
        watcher.send(frame([[int(Kind.MESHES), first_id + 100, [], []]], number + 1))
        with contextlib.suppress(ConnectionClosed):  # one of them was the last straw, or all have been answered
            while answer(watcher).id != first_id + 100:
                pass

        assert target.unpickled_for(job) == before
        assert not job.closed
        assert job.run(max, 1, 2) == 2
        assert target.unpickled_for(job) > before  # which is how it would have been seen
    target.assert_unharmed()


def test_what_follows_a_refused_hello_goes_nowhere(target: Target) -> None:
    with loom.connect(target.url, target.token) as job, websocket(target.url, target.view) as client:
        assert say_hello(client, session=job.session).body[0] == loom.ScopeError.code
        with contextlib.suppress(ConnectionClosed):
            for message in operations_with(target.bomb, 1):
                client.send(b"".join(unnumbered_frame(message)))
        with pytest.raises(ConnectionClosed):
            client.recv(timeout=BOUND)
        assert job.run(max, 1, 2) == 2
    target.assert_unharmed()


# -- requests that nobody would make by hand ------------------------------------------------------------------


def operations(target: Target) -> list[Any]:
    schema = schemathesis.openapi.from_url(
        f"{target.http}/api/v1/openapi.json", headers={"Authorization": f"Bearer {target.token}"}
    )
    return [result.ok() for result in schema.get_all_operations()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_request_of_the_schema_is_answered_with_500(target: Target) -> None:
    with loom.connect(target.url, target.token) as job:
        job.print_logs = False
        job.run(print, "something to read")
        for operation in operations(target):

            @given(case=operation.as_strategy())
            @settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
            def request(case: Any) -> None:
                response = case.call(headers={"Authorization": f"Bearer {target.token}"}, timeout=BOUND)
                assert response.status_code < 500, (case, response.text)

            request()
        assert job.run(max, 1, 2) == 2
    target.assert_unharmed()


@pytest.mark.parametrize(
    "query",
    [
        *("tail=-1", "tail=99999999999999999999", "rank=-1", "rank=1", "rank=99999999999999999999", "rank=x"),
        *("stream=x", "mesh=%00", "mesh=x&rank=0", "follow=x", "tail="),
    ],
)
def test_strange_parameters_of_a_living_sessions_logs(target: Target, job: loom.Job, query: str) -> None:
    status, body = target.rest("GET", f"/api/v1/sessions/{job.session}/logs?{query}", target.view)

    assert status == 200 or (status in (404, 422) and json.loads(body))


# -- floods -------------------------------------------------------------------------------------------------


def test_every_kind_of_bad_handshake_is_refused(target: Target) -> None:
    statuses = [status_of(exchange(target.url, request)) for request in TRIES.values()]

    assert statuses == [400, 401, 401, 401, 401, 401]
    target.assert_unharmed()


def test_who_attacks_another_machine_with_the_benchmark_is_refused() -> None:
    with pytest.raises(ValueError, match=r"127\.0\.0\.1"):
        asyncio.run(attack("ws://10.0.0.5:8470", 1, 1))


QUICK = {"half-open", "slow headers", "garbage", "wrong tokens", "upgrades without frames"}


@pytest.fixture(scope="module")
def besieged() -> Iterator[LocalCluster]:
    """A gateway that has room for few connections without a token."""
    with LocalCluster(1, gateway_options=["--max-connections-per-address", "50"]) as cluster:
        yield cluster


@pytest.mark.guarantees("strangers", "2,000 connections without a token, of each kind, keep nobody out")
@pytest.mark.parametrize(
    ("kind", "hosts"),
    [
        *(pytest.param(kind, 1, marks=() if kind in QUICK else pytest.mark.slow) for kind in KINDS),
        ("half-open", 20),
        *(pytest.param(kind, 20, marks=pytest.mark.slow) for kind in KINDS if kind != "half-open"),
    ],
)
def test_connections_without_a_token_keep_nobody_out_and_are_bounded(
    besieged: LocalCluster, kind: str, hosts: int
) -> None:
    gateway = psutil.Process(besieged.pids[0])

    async def hold(job: loom.Job) -> None:
        hostile = Hostile(besieged.url, 200, hosts)
        await asyncio.wait_for(hostile.begin(kind), BOUND)
        try:
            for number in range(20):
                assert await asyncio.to_thread(job.run, max, number, 0) == number
            assert await asyncio.to_thread(Gateway(besieged.url, besieged.token, BOUND).sessions)
            newcomer = await asyncio.to_thread(
                loom.connect, besieged.url, besieged.token, job.session, mode="watch", timeout=BOUND
            )
            await asyncio.to_thread(newcomer.detach)
            assert gateway.num_fds() < before + min(50 * hosts, 200) + 60
        finally:
            await hostile.end()

    with loom.connect(besieged.url, besieged.token) as job:
        before = gateway.num_fds()
        asyncio.run(hold(job))
        assert job.run(max, 1, 2) == 2


@pytest.mark.slow
def test_a_session_works_while_200_bad_handshakes_and_tokens_come_in_a_second() -> None:
    plan = handshake_benchmark.HandshakePlan(rounds=1, seconds=10.0, per_second=200)

    figures = handshake_benchmark.measure(plan, "test", lambda said: None)

    Console(width=100).print(figures.as_table())
    assert sum(figures.answers.values()) == 2000
    assert set(figures.answers) <= {"400", "401", "429"}
    assert all(calls.count > 1 for calls in (*figures.idle, *figures.attacked))
