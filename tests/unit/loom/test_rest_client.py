"""`loom.rest_client.Gateway` keeps its connection for the next request, as long as that is there."""

from __future__ import annotations

import http.server
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

import loom
from loom import rest_client
from loom.control.operations import OPERATIONS
from loom.rest_client import Gateway, safe_url
from loom_proxy.weaver.client import WeaverProxy
from loom_proxy.weaver.watch import WeaverWatch


class Server(http.server.ThreadingHTTPServer):
    """Answers as a gateway does to `/status`, and counts the connections."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.connections = 0
        self.close_each = False
        """Whether to close a connection, without saying so, after an answer."""
        self.closed = threading.Event()

    def shutdown_request(self, request: object) -> None:
        super().shutdown_request(request)  # type: ignore[arg-type]
        self.closed.set()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def do_GET(self) -> None:
        refused = "ended" in self.path
        error = {"error": {"code": "authentication_failed", "message": "no such token"}}
        answer = {"workers": []} if self.command == "GET" else {"name": "s"}
        body = json.dumps(error if refused else answer).encode()
        self.send_response(401 if refused else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = self.server.close_each

    def do_DELETE(self) -> None:
        time.sleep(0.5)  # as a session does whose meshes take their time to stop
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing of a test's requests is worth a line."""


@contextmanager
def serving() -> Iterator[tuple[Server, Gateway]]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server, Gateway(f"ws://127.0.0.1:{server.server_port}", "a token")
        finally:
            server.shutdown()
            thread.join()


def test_requests_share_a_connection_also_after_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest_client, "IDLE", 60.0)  # however busy the machine is
    with serving() as (server, gateway):
        gateway.status()
        with pytest.raises(loom.LoomError, match="no such token"):
            gateway.ended_sessions()
        gateway.status()

        assert server.connections == 1


def test_a_connection_that_the_gateway_has_closed_is_not_used() -> None:
    with serving() as (server, gateway):
        server.close_each = True
        gateway.status()
        assert server.closed.wait(10)
        gateway.status()

        assert server.connections == 2


def test_a_connection_is_not_kept_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest_client, "IDLE", 0.0)
    with serving() as (server, gateway):
        gateway.status()
        gateway.status()

        assert server.connections == 2


def test_threads_do_not_share_a_connection_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest_client, "IDLE", 3600.0)  # on a busy machine, a thread may wait longer for its turn
    with serving() as (server, gateway), ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: gateway.status(), range(40)))

        assert found == [{"workers": []}] * 40
        assert server.connections <= 4


def test_a_connection_with_a_high_descriptor_is_kept() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held = [os.dup(0) for _ in range(1100)]
    try:
        with serving() as (server, gateway):
            gateway.status()
            gateway.status()

            assert server.connections == 1
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_end_of_a_session_is_waited_for_longer_than_an_answer() -> None:
    with serving() as (_, gateway):
        Gateway(gateway.url, None, timeout=0.2).end_session("s")


def test_a_gateway_that_is_gone_is_unreachable() -> None:
    with serving() as (_, gateway):
        gateway.status()

    with pytest.raises(loom.GatewayUnreachable):
        Gateway(gateway.url, None, timeout=1.0).status()


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda gateway: gateway.end_session(""), "session"),
        (lambda gateway: gateway.share_session("s", "", "view"), "user"),
        (lambda gateway: gateway.unshare_session("", "ann"), "session"),
        (lambda gateway: gateway.meshes(""), "session"),
        (lambda gateway: gateway.runs(""), "session"),
        (lambda gateway: gateway.spans("", 1.0), "session"),
        (lambda gateway: next(gateway.logs("", False)), "session"),
        (lambda gateway: gateway.ask("stacks", replica=""), "replica"),
        (lambda gateway: gateway.ask("fail_device", device="", reason=""), "device"),
    ],
)
def test_an_empty_name_is_refused_before_anything_is_sent(ask: Callable[[Gateway], object], what: str) -> None:
    with pytest.raises(loom.WrongArguments, match=f"no {what} is given, only an empty text"):
        ask(Gateway("ws://127.0.0.1:1", None))


def test_a_listener_that_closes_the_connection_may_speak_tls() -> None:
    def close_one() -> None:
        connection, _ = listener.accept()
        connection.recv(1)
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(close_one)
        gateway = Gateway(f"ws://127.0.0.1:{listener.getsockname()[1]}", None)

        with pytest.raises(loom.GatewayUnreachable, match="if it speaks TLS, use wss:// or https://"):
            gateway.status()


@pytest.mark.parametrize(
    ("operation", "arguments", "asked"),
    [
        ("status", {}, ("GET", "/weaver/status", "weaver", None, 0.0)),
        ("replica", {"id": "a/b@s"}, ("GET", "/weaver/replicas/a%2Fb%40s", "id", None, 0.0)),
        ("events", {"after": None, "limit": 5}, ("GET", "/weaver/events?limit=5", "events", None, 0.0)),
        (
            "history",
            {"replica": "r", "metric": "grad/norm", "points": 9, "since": None},
            ("GET", "/weaver/replicas/r/metrics/grad%2Fnorm?points=9", "points", None, 0.0),
        ),
        (
            "command",
            {"kind": "pause", "params": {}, "target": "*", "wait": 2.0},
            (
                "POST",
                "/weaver/commands",
                "id",
                {"kind": "pause", "params": {}, "target": "*", "wait": 2.0},
                2.0,
            ),
        ),
        ("command_state", {"id": "c", "wait": 3.0}, ("GET", "/weaver/commands/c?wait=3.0", "id", None, 3.0)),
        ("remove_fault", {"injection": "i"}, ("DELETE", "/weaver/inject/i", "id", None, 0.0)),
        (
            "fail_device",
            {"device": "GPU-0", "reason": "x"},
            ("POST", "/weaver/devices/GPU-0/failure", "id", {"reason": "x"}, 0.0),
        ),
    ],
)
def test_each_operation_of_the_weaver_has_its_place(
    monkeypatch: pytest.MonkeyPatch, operation: str, arguments: dict[str, object], asked: tuple[object, ...]
) -> None:
    calls: list[tuple[object, ...]] = []

    def call(*call: object) -> dict[str, object]:
        calls.append(call)
        return {str(call[2]): "its value"}

    gateway = Gateway("ws://localhost", None)
    monkeypatch.setattr(gateway, "_call", call)

    found = gateway.ask(operation, **arguments)

    assert calls == [asked]
    assert found == ("its value" if OPERATIONS[operation].route.key else {asked[2]: "its value"})


@pytest.mark.parametrize("url", ["127.0.0.1:8470", "tcp://127.0.0.1:8470", "ws://", "ws://host:port"])
def test_what_is_no_url_of_a_gateway_is_refused_with_its_form(url: str) -> None:
    with pytest.raises(loom.InvalidAddress, match="write ws://HOST:PORT"):
        safe_url(url, insecure=True)


@pytest.mark.guarantees(
    "strangers", "`ws://` to another machine is refused unless the program says that it trusts the network"
)
@pytest.mark.parametrize(
    "url", ["ws://gateway:8470", "http://10.0.0.5:8470", "ws://[2001:db8::1]:8470", "ws://127.example"]
)
def test_a_url_without_tls_to_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.delenv("LOOM_INSECURE", raising=False)
    for refuse in (
        lambda: loom.connect(url, "a token"),
        lambda: Gateway(url, "a token"),
        lambda: WeaverProxy(url, "a token"),
        lambda: WeaverWatch(url, "a token"),
    ):
        with pytest.raises(loom.InvalidAddress, match="insecure=True, --insecure or LOOM_INSECURE=1"):
            refuse()
    assert WeaverWatch(url, "a token", insecure=True).url.startswith("ws://")
    monkeypatch.setenv("LOOM_INSECURE", "1")
    assert safe_url(url, insecure=False).startswith("ws://")


@pytest.mark.parametrize(
    "url",
    [
        "ws://127.0.0.1:8470",
        "ws://localhost",
        "ws://[::1]:8470",
        "http://127.9.9.9",
        "wss://gateway",
        "https://gateway/x",
    ],
)
def test_loopback_and_tls_need_no_such_word(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.delenv("LOOM_INSECURE", raising=False)
    assert safe_url(url, insecure=False)
