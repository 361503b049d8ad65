"""Watching a weaver whose gateway does not answer any more."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from websockets.sync.server import ServerConnection, serve

import loom
from loom.weaver.views import Away, Snapshot
from loom_proxy.weaver.watch import WeaverWatch

BOUND = 30.0

SNAPSHOT = json.dumps({"type": "snapshot", "status": {}, "replicas": [], "devices": []})


@pytest.fixture
def silent_gateway() -> Iterator[str]:
    """Accepts, reads nothing (no ping either), and goes on when it is over."""
    over = threading.Event()

    def stall(socket: ServerConnection) -> None:
        socket.recv_messages.pause()
        over.wait(BOUND)

    with serve(stall, "127.0.0.1", 0, ping_interval=None) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        host, port = server.socket.getsockname()[:2]
        yield f"ws://{host}:{port}"
        over.set()
        server.shutdown()
        thread.join(BOUND)


def test_a_connection_that_is_lost_is_an_update_and_prints_nothing(
    silent_gateway: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch = WeaverWatch(silent_gateway, None)
    watch._options |= {"ping_interval": 0.05, "ping_timeout": 0.05, "close_timeout": 0.1}
    with caplog.at_level(logging.WARNING):
        first = next(watch.updates(timeout=BOUND))
    assert isinstance(first, Away)
    assert "keepalive ping timeout" in first.reason
    assert caplog.records == []


@pytest.mark.guarantees("ports", "So does a watch of the weaver")
@pytest.mark.parametrize("is_async", [False, True])
def test_a_watch_goes_on_with_the_next_token_when_one_expires(is_async: bool) -> None:
    shown: list[str] = []
    tokens = iter(["first", "second"])

    def expire(socket: ServerConnection) -> None:
        assert socket.request is not None
        shown.append(socket.request.headers["Authorization"])
        if len(shown) == 1:
            socket.close(4000, "token_revoked")
        socket.send(SNAPSHOT)
        socket.recv(BOUND)

    with serve(expire, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        watch = WeaverWatch(f"ws://127.0.0.1:{server.socket.getsockname()[1]}", lambda: next(tokens))

        async def both() -> list[object]:
            updates = watch.updates_async(timeout=BOUND)
            return [await anext(updates), await anext(updates)]

        away, snapshot = asyncio.run(both()) if is_async else itertools.islice(watch.updates(timeout=BOUND), 2)
        server.shutdown()
    assert isinstance(away, Away)
    assert isinstance(snapshot, Snapshot)
    assert shown == ["Bearer first", "Bearer second"]


@pytest.mark.guarantees("strangers", "The token does not follow a redirect")
@pytest.mark.parametrize("code", [301, 302, 307, 308])
@pytest.mark.parametrize("is_async", [False, True])
def test_the_token_does_not_follow_a_redirect(code: int, is_async: bool) -> None:
    shown: list[str] = []

    class Elsewhere(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            shown.append(str(self.headers["Authorization"]))
            self.send_error(404)

        def log_message(self, *what: object) -> None:
            pass

    class Redirecting(Elsewhere):
        def do_GET(self) -> None:
            self.send_response(code)
            self.send_header("Location", f"ws://localhost:{elsewhere.server_port}/")
            self.send_header("Content-Length", "0")
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Elsewhere) as elsewhere, HTTPServer(("127.0.0.1", 0), Redirecting) as server:
        for each in (elsewhere, server):
            threading.Thread(target=each.serve_forever, args=(0.02,), daemon=True).start()
        watch = WeaverWatch(f"ws://127.0.0.1:{server.server_port}", "a secret")

        async def first() -> object:
            return await anext(watch.updates_async(timeout=BOUND))

        with pytest.raises(loom.NotAGateway, match=str(code)):
            asyncio.run(first()) if is_async else next(watch.updates(timeout=BOUND))
        for each in (elsewhere, server):
            each.shutdown()
    assert shown == []
