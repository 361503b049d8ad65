"""Sessions through networks that break WebSockets or requests."""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import loom
from loom.wire.length_prefix import CONTENT_TYPE, behind_length
from loom_proxy.local import LocalCluster
from loom_proxy.session import transport_and_handshake
from loom_proxy.transport import http as http_transport
from loom_proxy.transport.http import HttpTransport
from tests.integration.calls.test_failures import driver_pid
from tests.integration.session.http_sessions import BOUND, MIB, lose_tunnel, port_of, through
from tests.support import nginx as reverse_proxy
from tests.support.actors import Counter, Hang
from tests.support.network.delay_proxy import DelayProxy, Link, Passed
from tests.support.network.gate import Gate
from tests.support.network.http_proxy import Fault, HttpProxy, Lossy, without_websockets
from tests.support.network.narrow_proxy import NarrowProxy


@pytest.mark.slow
@pytest.mark.parametrize("status", [200, 400, 403, 404, 426, 502, 503, None])
def test_http_is_used_where_something_breaks_websockets(
    cluster: LocalCluster, status: int | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A proxy of another test may have had this one's port.
    monkeypatch.setattr(transport_and_handshake, "_logged", set())
    with HttpProxy(port_of(cluster), without_websockets(status)) as proxy:
        for _ in range(2):
            with loom.connect(f"ws://127.0.0.1:{proxy.port}", cluster.token) as job:
                assert job.transport == "http"
    told = [record for record in caplog.records if record.name == "loom"]
    assert [record.levelno for record in told] == [logging.WARNING], "it is said once"
    assert "HTTP" in told[0].getMessage()


def test_a_websocket_that_was_asked_for_is_not_replaced(cluster: LocalCluster) -> None:
    with (
        HttpProxy(port_of(cluster), without_websockets(426)) as proxy,
        pytest.raises(loom.NotAGateway, match="426"),
    ):
        loom.connect(f"ws://127.0.0.1:{proxy.port}", cluster.token, transport="websocket")


class Swallowing(DelayProxy):
    """Lets WebSockets be opened, and nothing through them after that."""

    def _passed(self, link: Link, data: bytes, to_server: bool) -> Passed:
        opened = not to_server and data.startswith(b"HTTP/1.1 101")
        return data, partial(link.stall, 3600.0) if opened else None


@pytest.fixture
def swallowing(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a gateway behind a network that keeps what WebSockets carry."""
    monkeypatch.setattr("loom_proxy.transport.websocket.LONGEST_WAIT", 1)
    monkeypatch.setattr("loom_proxy.transport.base.PING_AFTER", 0.5)
    monkeypatch.setattr("loom_proxy.transport.base.SILENCE", 1.5)
    with Swallowing(port_of(cluster), delay=0) as proxy:
        yield f"ws://127.0.0.1:{proxy.port}"


def test_http_is_used_where_something_keeps_what_websockets_carry(cluster: LocalCluster, swallowing: str) -> None:
    with loom.connect(swallowing, cluster.token) as job:
        assert job.transport == "http"
        assert job.run(len, "four") == 4


def test_a_websocket_that_carries_nothing_is_given_up(cluster: LocalCluster, swallowing: str) -> None:
    with pytest.raises(loom.NotAGateway, match="nothing came through it"):
        loom.connect(swallowing, cluster.token, transport="websocket")


@pytest.mark.parametrize("status", [200, 404, 502, None])
def test_where_neither_works_the_websockets_error_is_raised(cluster: LocalCluster, status: int | None) -> None:
    decide = without_websockets(status)
    with (
        HttpProxy(port_of(cluster), lambda method, target: decide(method, "/ws/v1")) as proxy,
        pytest.raises(loom.NotAGateway, match=f"/ws/v1.*{'HTTP ' + str(status) if status else 'closed'}"),
    ):
        loom.connect(f"ws://127.0.0.1:{proxy.port}", cluster.token)


@pytest.mark.parametrize("transport", ["auto", "http"])
def test_a_refusal_is_the_same_over_http_and_no_reason_for_it(
    cluster: LocalCluster, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    with HttpProxy(port_of(cluster), lambda method, target: None) as proxy:
        url = f"ws://127.0.0.1:{proxy.port}"
        with pytest.raises(loom.AuthenticationError, match="does not accept the token"):
            loom.connect(url, "wrong", transport=transport)
        with pytest.raises(loom.UnknownSession, match="nobody"):
            loom.connect(url, cluster.token, session="nobody", transport="http")
    assert not caplog.records


def test_the_environment_chooses_the_transport(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOM_TRANSPORT", "http")
    with loom.connect(cluster.url, cluster.token) as job:
        assert job.transport == "http"
    with loom.connect(cluster.url, cluster.token, transport="auto") as job:
        assert job.transport == "websocket"


def test_a_transport_that_there_is_not(cluster: LocalCluster) -> None:
    with pytest.raises(loom.UnknownTransport, match=r"'pigeon'.*auto, websocket, http"):
        loom.connect(cluster.url, cluster.token, transport="pigeon")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_lost_and_repeated_requests_cost_nothing(cluster: LocalCluster, seed: int) -> None:
    faults = Lossy(seed, share=0.3)
    with HttpProxy(port_of(cluster), faults) as proxy, through(proxy, cluster, "http") as job:
        counter = job.hosts.slice(hosts=0).spawn_procs().spawn("counter", Counter)
        for start in range(0, 200, 10):
            futures = [counter.add.call_one(1) for _ in range(10)]
            assert [future.get(timeout=BOUND) for future in futures] == list(range(start + 1, start + 11))
        data = os.urandom(3 * MIB)
        assert counter.echo.call_one(data).get(timeout=BOUND) == data
        assert counter.value.call_one().get(timeout=BOUND) == 200
        assert not [event for event in job.events(timeout=0) if event.name == "disconnected"]
    assert set(faults.met) == set(Fault), "every fault was met"


@pytest.mark.parametrize(
    ("code", "way"),
    [
        ("rate_limited", "/up"),
        ("protocol_mismatch", "/down"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("rate_limited", "/down"),
                ("limit_reached", "/up"),
                ("limit_reached", "/down"),
                ("protocol_mismatch", "/up"),
            )
        ),
    ],
)
def test_a_request_that_is_refused_for_now_is_repeated(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, code: str, way: str
) -> None:
    """As one of which the line has lost a part, so that the gateway waits for its end in vain."""
    ask = http_transport._KeepAlive.ask
    refusals = [json.dumps({"error": {"code": code, "message": "not now"}}).encode()] * 3

    def refuse(self: Any, method: str, path: str, body: Any = None, **options: Any) -> tuple[Any, bytes]:
        if way in path and refusing and refusals:
            return SimpleNamespace(status=429, reason="Refused"), refusals.pop()
        return ask(self, method, path, body, **options)

    refusing = False
    monkeypatch.setattr(http_transport._KeepAlive, "ask", refuse)
    with loom.connect(cluster.url, cluster.token, transport="http") as job:
        assert job.run(abs, -1) == 1
        refusing = True

        assert [job.run(abs, -number) for number in range(3)] == [0, 1, 2]
        assert not refusals


@pytest.mark.parametrize(
    "cut",
    [b"Content-Length: 10\r\n\r\n%b", b"Transfer-Encoding: chunked\r\n\r\n5\r\n%b\r\n", b"\r\n%b"],
    ids=["length", "chunks", "neither"],
)
def test_an_answer_that_ends_between_two_frames_is_asked_for_again(cut: bytes) -> None:
    first, second = behind_length([b"a"]), behind_length([b"b"])
    bodies = [cut % first, b"Content-Length: 10\r\n\r\n" + first + second]

    class Gateway(http.server.BaseHTTPRequestHandler):
        """Stands in for a gateway whose first answer is cut."""

        def do_POST(self) -> None:
            self.say(201, b'Content-Length: 34\r\n\r\n{"tunnel": "x", "poll_seconds": 9}')

        def do_GET(self) -> None:
            self.say(200, b"Content-Type: %b\r\n" % CONTENT_TYPE.encode() + bodies.pop(0))

        def say(self, status: int, rest: bytes) -> None:
            self.wfile.write(b"HTTP/1.1 %d OK\r\n" % status + rest)
            self.close_connection = True

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        try:
            transport = HttpTransport.open(f"ws://127.0.0.1:{server.server_port}/ws/v1", "token", BOUND)
            assert transport.receive() == [b"a", b"b"]
            transport.close()
        finally:
            server.shutdown()
            serving.join()


def test_a_tunnel_that_is_lost_is_made_again(cluster: LocalCluster) -> None:
    with loom.connect(cluster.url, cluster.token, transport="http") as job:
        counter = job.hosts.slice(hosts=0).spawn_procs().spawn("counter", Counter)
        assert counter.add.call_one(1).get(timeout=BOUND) == 1
        lose_tunnel(job)
        assert [counter.add.call_one(1).get(timeout=BOUND) for _ in range(3)] == [2, 3, 4]
        names = [event.name for event in job.events(timeout=0)]
        assert names == ["disconnected", "resumed"]


def test_a_session_goes_on_in_a_network_that_breaks_websockets(cluster: LocalCluster) -> None:
    gate = Gate(port_of(cluster))
    with contextlib.ExitStack() as home:
        home.enter_context(gate)
        job = loom.connect(f"ws://127.0.0.1:{gate.port}", cluster.token)
        counter = job.hosts.slice(hosts=0).spawn_procs().spawn("counter", Counter)
        assert counter.add.call_one(1).get(timeout=BOUND) == 1
        assert job.transport == "websocket"
    with HttpProxy(port_of(cluster), without_websockets(403), listen=gate.port), job:
        assert [counter.add.call_one(1).get(timeout=BOUND) for _ in range(3)] == [2, 3, 4]
        assert job.transport == "http"


def test_a_network_that_is_away_for_longer_than_requests_are_repeated(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_transport, "PATIENCE", 0.2)
    away = threading.Event()
    with (
        HttpProxy(port_of(cluster), lambda method, target: 503 if away.is_set() else None) as proxy,
        through(proxy, cluster, "http") as job,
    ):
        counter = job.hosts.slice(hosts=0).spawn_procs().spawn("counter", Counter)
        assert counter.add.call_one(1).get(timeout=BOUND) == 1
        away.set()
        waiting = counter.add.call_one(1)
        assert next(event for event in job.events(timeout=BOUND) if event.name == "disconnected")
        away.clear()
        assert waiting.get(timeout=BOUND) == 2


@pytest.mark.slow
def test_a_large_call_goes_over_a_narrow_line(cluster: LocalCluster) -> None:
    with NarrowProxy(port_of(cluster), rate=8 << 10, queue=MIB) as line, through(line, cluster, "http") as job:
        assert job.run(len, os.urandom(MIB // 4)) == MIB // 4
        assert job.transport == "http"
        assert list(job.events(timeout=0)) == []


def test_a_proxy_that_takes_no_large_bodies_is_named(cluster: LocalCluster) -> None:
    def decide(method: str, target: str) -> int | None:
        return 413 if method == "POST" and refusing.is_set() else None

    refusing = threading.Event()
    with HttpProxy(port_of(cluster), decide) as proxy:
        job = loom.connect(f"ws://127.0.0.1:{proxy.port}", cluster.token, transport="http")
        refusing.set()
        with pytest.raises(loom.TooLarge, match="client_max_body_size"):
            job.run(len, bytes(MIB))
        assert job.closed
    with loom.connect(cluster.url, cluster.token, session=job.session, take_over=True):
        pass  # which ends it


@pytest.fixture
def nginx(cluster: LocalCluster, tmp_path: Path) -> Iterator[str]:
    """URL of the gateway behind nginx as it comes: it passes no upgrade on, and buffers bodies and answers."""
    with reverse_proxy.nginx(
        tmp_path, f"location /team/ {{ proxy_pass http://127.0.0.1:{port_of(cluster)}/; }}"
    ) as port:
        yield f"http://127.0.0.1:{port}/team"


def test_a_session_behind_an_nginx_that_breaks_websockets(cluster: LocalCluster, nginx: str) -> None:
    with pytest.raises(loom.NotAGateway):
        loom.connect(nginx, cluster.token, transport="websocket")
    with pytest.raises(loom.AuthenticationError):
        loom.connect(nginx, "wrong")
    with loom.connect(nginx, cluster.token) as job:
        assert job.transport == "http"
        counter = job.hosts.slice(hosts=0).spawn_procs().spawn("counter", Counter)
        futures = [counter.add.call_one(1) for _ in range(300)]
        assert [future.get(timeout=BOUND) for future in futures] == list(range(1, 301))
        data = os.urandom(16 * MIB)
        assert counter.echo.call_one(data).get(timeout=BOUND) == data
        hanging = job.hosts.spawn_procs().spawn("hang", Hang).forever.call()
        os.kill(driver_pid(cluster, job), signal.SIGKILL)
        with pytest.raises(loom.SessionLost):
            hanging.get(timeout=BOUND)
