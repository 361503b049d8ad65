"""Sessions over plain HTTP: what they do over a WebSocket, through networks that break WebSockets or requests."""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import logging
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import loom
from loom import Actor, endpoint
from loom.token_file import TokenFile
from loom.wire.batches import CONTENT_TYPE, MAX_BATCH, TUNNELS
from loom.wire.frames import decode_frame
from loom.wire.handshake import Hello, error_from_refusal
from loom.wire.lane import behind_length
from loom.wire.messages import Kind
from loom.wire.stream import unnumbered_frame
from loom_proxy.local import LocalCluster
from loom_proxy.session import handshake
from loom_proxy.transport import http as http_transport
from loom_proxy.transport.http import HttpTransport
from tests.integration.calls.test_failures import driver_pid, rest
from tests.integration.calls.test_large import forget_peak, gateway_of, peak_mib
from tests.integration.calls.test_ports import attach
from tests.integration.gateway.test_tls import issue
from tests.support import nginx as reverse_proxy
from tests.support.actors import BadLuck, Counter, Hang
from tests.support.network.delay_proxy import DelayProxy, Link, Passed
from tests.support.network.gate import Gate
from tests.support.network.http_proxy import Fault, HttpProxy, Lossy, without_websockets

BOUND = 30.0

MIB = 2**20


class Talker(Actor):
    """Sends, prints and streams."""

    @endpoint
    def count(self, port: Any, numbers: int) -> None:
        for number in range(numbers):
            port.send(number)

    @endpoint
    def say(self, text: str) -> None:
        print(text)

    @endpoint
    def ranks(self) -> int:
        return int(loom.current_rank().rank)


def port_of(cluster: LocalCluster) -> int:
    port = urlsplit(cluster.url).port
    assert port is not None
    return port


@contextlib.contextmanager
def through(proxy: HttpProxy, cluster: LocalCluster, transport: str | None = None) -> Iterator[loom.Job]:
    with loom.connect(f"ws://127.0.0.1:{proxy.port}", cluster.token, transport=transport) as job:
        yield job


@pytest.fixture(scope="module")
def http_job(cluster: LocalCluster) -> Iterator[loom.Job]:
    """A session over HTTP, for tests that leave it as it is."""
    with loom.connect(cluster.url, cluster.token, transport="http") as job:
        yield job


@pytest.fixture(scope="module")
def counters(http_job: loom.Job) -> Any:
    return http_job.hosts.spawn_procs(per_host={"gpus": 2}, name="procs").spawn("counters", Counter, 10)


@pytest.fixture(scope="module")
def talkers(http_job: loom.Job) -> Any:
    return http_job.meshes["procs"].spawn("talkers", Talker)


# -- a session ----------------------------------------------------------------------------------------------


def test_a_job_says_what_it_runs_over(http_job: loom.Job, job: loom.Job) -> None:
    assert (http_job.transport, job.transport) == ("http", "websocket")
    assert "over http" in repr(http_job)
    assert "over websocket" in repr(job)


def test_calls_and_slices(counters: Any) -> None:
    assert list(counters.rank.call().get(timeout=BOUND).values())[3] == {"hosts": 1, "gpus": 1}
    one = counters.slice(hosts=0, gpus=1)
    futures = [one.add.call_one(1) for _ in range(500)]
    assert [future.get(timeout=BOUND) for future in futures] == list(range(11, 511))


def test_an_exception_comes_back_as_it_was_raised(counters: Any) -> None:
    with pytest.raises(loom.ActorError) as caught:
        counters.slice(hosts=0, gpus=0).fail.call_one("on purpose").get(timeout=BOUND)
    assert isinstance(caught.value.exception, BadLuck)


def test_streams(counters: Any, talkers: Any) -> None:
    assert sorted(future.get(timeout=BOUND) for future in talkers.ranks.stream()) == [0, 1, 2, 3]


def test_ports(http_job: loom.Job, counters: Any, talkers: Any) -> None:
    port, receiver = http_job.channel()
    counted = talkers.slice(hosts=0, gpus=0).count.call_one(port, 3000)
    assert [receiver.recv().get(timeout=BOUND) for _ in range(3000)] == list(range(3000))
    counted.get(timeout=BOUND)


def test_large_data_both_ways(counters: Any) -> None:
    data = os.urandom(16 * MIB)
    assert counters.slice(hosts=0, gpus=0).echo.call_one(data).get(timeout=BOUND) == data


def test_functions_in_the_driver(http_job: loom.Job) -> None:
    assert http_job.run(lambda x: x + 1, 2) == 3


def test_printed_lines(http_job: loom.Job, counters: Any, talkers: Any) -> None:
    came = threading.Event()
    remove = http_job.on_log(lambda line: line.text == "hello over HTTP" and came.set())
    http_job.meshes["procs"].logging_option(stream_to_client=True).get(timeout=BOUND)
    talkers.slice(hosts=0, gpus=0).say.call_one("hello over HTTP").get(timeout=BOUND)
    assert came.wait(BOUND)
    remove()


def test_events(cluster: LocalCluster) -> None:
    with loom.connect(cluster.url, cluster.token, transport="http") as job:
        job.hosts.spawn_procs().spawn("counters", Counter).fail.broadcast("nobody listens")
        event = next(event for event in job.events(timeout=BOUND) if event.name == "failure")
        assert "nobody listens" in event.details["report"]


def test_a_session_is_left_and_attached_to_over_either(cluster: LocalCluster) -> None:
    first = loom.connect(cluster.url, cluster.token, transport="http")
    # Nothing is waited for: what has been called before leaving is done all the same.
    first.hosts.spawn_procs().spawn("counters", Counter, 1).add.broadcast(1)
    first.detach()
    with pytest.raises(loom.SessionClosed):
        first.hosts.spawn_procs()
    second = attach(cluster, first.session)
    assert second.transport == "websocket"
    assert list(second.meshes["counters"].add.call(1).get(timeout=BOUND).values()) == [3, 3]
    second.detach()
    with loom.connect(cluster.url, cluster.token, session=first.session, transport="http", take_over=True) as third:
        assert list(third.meshes["counters"].add.call(1).get(timeout=BOUND).values()) == [4, 4]


@pytest.mark.parametrize("kind", ["websocket", "http"])
def test_a_connection_on_which_nothing_happens_is_not_lost(
    cluster: LocalCluster, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loom_proxy.transport.websocket.LONGEST_WAIT", 1)
    monkeypatch.setattr("loom_proxy.transport.base.PING_AFTER", 0.5)
    monkeypatch.setattr("loom_proxy.transport.base.SILENCE", 2.5)
    with loom.connect(cluster.url, cluster.token, transport=kind) as job:
        assert not list(job.events(timeout=4.0))


def test_closing_ends_the_session(cluster: LocalCluster) -> None:
    with loom.connect(cluster.url, cluster.token, transport="http") as job:
        hanging = job.hosts.spawn_procs().spawn("hang", Hang).forever.call()
    assert job.closed
    with pytest.raises(loom.LoomError):
        hanging.get(timeout=BOUND)
    with pytest.raises(loom.UnknownSession):
        loom.connect(cluster.url, cluster.token, session=job.session, transport="http")


def test_another_client_takes_over(cluster: LocalCluster) -> None:
    first = loom.connect(cluster.url, cluster.token, transport="http")
    with pytest.raises(loom.SessionInUse):
        loom.connect(cluster.url, cluster.token, session=first.session, transport="http")
    with loom.connect(
        cluster.url, cluster.token, session=first.session, take_over=True, transport="http"
    ) as second:
        ended = next(event for event in first.events(timeout=BOUND) if event.name == "ended")
        assert isinstance(ended.error, loom.SessionTakenOver)
        assert second.run(lambda: 1) == 1


def test_a_dead_driver_is_told_to_its_client(cluster: LocalCluster) -> None:
    with loom.connect(cluster.url, cluster.token, transport="http") as job:
        hanging = job.hosts.spawn_procs().spawn("hang", Hang).forever.call()
        os.kill(driver_pid(cluster, job), signal.SIGKILL)
        with pytest.raises(loom.SessionLost, match="SIGKILL"):
            hanging.get(timeout=BOUND)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize("way", ["there", "back"])
def test_the_gateway_holds_little_of_what_moves(cluster: LocalCluster, counters: Any, way: str) -> None:
    one = counters.slice(hosts=1, gpus=0)
    data = bytes(64 * MIB)
    one.echo.call_one(data[: 4 * MIB]).get(timeout=BOUND)
    gateway = gateway_of(cluster)
    forget_peak(gateway)
    before = peak_mib(gateway, "VmRSS")
    if way == "there":
        assert one.append.call_one([data], last=1).get(timeout=BOUND)[1] == 1
    else:
        assert len(one.echo.call_one(data).get(timeout=BOUND)) == len(data)
    assert peak_mib(gateway, "VmHWM") - before < 24


# -- what is in between -------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 400, 403, 404, 426, 502, 503, None])
def test_http_is_used_where_something_breaks_websockets(
    cluster: LocalCluster, status: int | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "_logged", set())  # a proxy of another test may have had this one's port
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


def lose_tunnel(job: loom.Job) -> None:
    """Close a job's tunnel behind its back."""
    transport = job._connection._transport
    assert isinstance(transport, HttpTransport)
    transport._up.ask("DELETE", transport._path, timeout=BOUND, connect_timeout=BOUND)


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


# -- TLS ----------------------------------------------------------------------------------------------------


def test_tls_is_verified_over_http_too(cluster: LocalCluster, tmp_path: Path) -> None:
    files = issue(tmp_path, "127.0.0.1")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(files.certificate, files.key)
    with HttpProxy(port_of(cluster), without_websockets(403), tls) as proxy:
        url = f"wss://127.0.0.1:{proxy.port}"
        for transport in ("http", "auto"):
            with pytest.raises(loom.UntrustedGateway, match="certificate"):
                loom.connect(url, cluster.token, transport=transport)
        with loom.connect(url, cluster.token, ca=files.ca) as job:
            assert job.transport == "http"
            data = os.urandom(2 * MIB)
            assert job.run(lambda x: x, data) == data
            calls = [job.run(lambda n: n, n, detach=True) for n in range(20)]
            assert [call.result(timeout=BOUND) for call in calls] == list(range(20))


def test_a_gateway_with_tls_of_its_own(tmp_path: Path) -> None:
    files = issue(tmp_path, "127.0.0.1")
    options = ["--tls-cert", files.certificate, "--tls-key", files.key]
    with (
        LocalCluster(1, gateway_options=options) as own,
        loom.connect(own.url, own.token, ca=files.ca, transport="http") as job,
    ):
        data = os.urandom(2 * MIB)
        assert job.run(lambda x: x, data) == data


# -- tokens -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalCluster, TokenFile]]:
    """A gateway with a file of tokens."""
    file = TokenFile(tmp_path_factory.mktemp("tokens") / "tokens.json")
    with LocalCluster(1, gateway_options=["--tokens", str(file.path)]) as running:
        yield running, file


def test_scopes_are_the_same_over_http(guarded: tuple[LocalCluster, TokenFile]) -> None:
    cluster, file = guarded
    _, view = file.create("a watcher", "view", user="admin")
    with pytest.raises(loom.ScopeError, match="needs a token of scope drive"):
        loom.connect(cluster.url, view, transport="http")
    with loom.connect(cluster.url, cluster.token, transport="http") as job:
        watcher = loom.connect(cluster.url, view, session=job.session, mode="watch", transport="http")
        assert watcher.runs() == {}
        watcher.detach()


def test_a_revoked_token_is_cut_off_over_http(guarded: tuple[LocalCluster, TokenFile]) -> None:
    cluster, file = guarded
    token, text = file.create("a driver", "drive")
    job = loom.connect(cluster.url, text, transport="http")
    hanging = job.hosts.spawn_procs().spawn("hang", Hang).forever.call()
    file.revoke(token.id)
    with pytest.raises(loom.TokenRevoked, match="'a driver'"):
        hanging.get(timeout=BOUND)


def test_a_tunnel_is_not_there_for_another_token(guarded: tuple[LocalCluster, TokenFile]) -> None:
    cluster, file = guarded
    _, other = file.create("another", "drive")
    status, answer = request(cluster, "POST", "")
    assert status == 201
    path = f"/{answer['tunnel']}"
    assert request(cluster, "POST", f"{path}/up?n=1", b"", token=other) == (404, "connection_lost")
    assert request(cluster, "GET", f"{path}/down?n=1", token=other) == (404, "connection_lost")
    assert request(cluster, "DELETE", path, token=other) == (404, "connection_lost")
    assert request(cluster, "POST", f"{path}/up?n=1", b"") == (200, {"taken": 1})
    assert request(cluster, "DELETE", path)[0] == 204
    assert request(cluster, "DELETE", path) == (404, "connection_lost")


# -- nginx --------------------------------------------------------------------------------------------------


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


# -- requests -----------------------------------------------------------------------------------------------


def request(
    cluster: LocalCluster, method: str, path: str, body: Any = None, token: str | None = None, **options: Any
) -> tuple[int, Any]:
    """Status and error code of a request to a tunnel; what it answers, where there is no error."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port_of(cluster), timeout=BOUND)) as connection:
        headers = {"Authorization": f"Bearer {cluster.token if token is None else token}"}
        connection.request(method, TUNNELS + path, body, headers, **options)
        response = connection.getresponse()
        answer = response.read()
    if response.headers.get_content_type() != "application/json":
        return response.status, answer
    decoded = json.loads(answer)
    return response.status, decoded["error"]["code"] if "error" in decoded else decoded


@pytest.fixture
def tunnel(cluster: LocalCluster) -> Iterator[str]:
    """The path of an open tunnel on which nothing has been said."""
    status, answer = request(cluster, "POST", "")
    assert status == 201
    path = f"/{answer['tunnel']}"
    yield path
    request(cluster, "DELETE", path)


@pytest.mark.parametrize(
    ("method", "rest_of_path"),
    [("POST", "/up?n=1"), ("GET", "/down?n=1"), ("DELETE", "")],
    ids=["up", "down", "close"],
)
def test_a_tunnel_is_for_who_has_its_token_and_knows_its_name(
    cluster: LocalCluster, tunnel: str, method: str, rest_of_path: str
) -> None:
    assert request(cluster, method, tunnel + rest_of_path, token="wrong") == (401, "authentication")
    assert request(cluster, method, tunnel + rest_of_path, token="") == (401, "authentication")
    assert request(cluster, method, f"/{'x' * 32}" + rest_of_path) == (404, "connection_lost")


def test_a_tunnel_needs_a_token(cluster: LocalCluster) -> None:
    assert request(cluster, "POST", "", token="wrong") == (401, "authentication")


@pytest.mark.parametrize("n", ["", "?n=", "?n=0", "?n=-1", "?n=x", "?n=2", f"?n={'9' * 30}", "?n=%00"])
def test_a_number_that_is_not_the_next(cluster: LocalCluster, tunnel: str, n: str) -> None:
    assert request(cluster, "POST", f"{tunnel}/up{n}", b"") == (400, "protocol_mismatch")
    assert request(cluster, "GET", f"{tunnel}/down{n}") == (400, "protocol_mismatch")


@pytest.mark.parametrize("body", [b"\x00", b"\x00\x00\x00\x05abc", b"\xff" * 100])
def test_a_body_that_is_no_batch(cluster: LocalCluster, tunnel: str, body: bytes) -> None:
    assert request(cluster, "POST", f"{tunnel}/up?n=1", body) == (400, "protocol_mismatch")


def test_a_body_that_was_cut_is_not_taken(cluster: LocalCluster, tunnel: str) -> None:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port_of(cluster), timeout=BOUND)) as connection:
        connection.putrequest("POST", f"{TUNNELS}{tunnel}/up?n=1")
        connection.putheader("Authorization", f"Bearer {cluster.token}")
        connection.putheader("Content-Length", "100")
        connection.endheaders(bytes(4))
    whole = behind_length(unnumbered_frame(Hello(session="nobody").message()))
    assert request(cluster, "POST", f"{tunnel}/up?n=1", whole) == (200, {"taken": 1})
    status, answer = request(cluster, "GET", f"{tunnel}/down?n=1")
    assert status == 200
    assert b"no session named 'nobody'" in answer


def test_a_body_that_says_it_is_too_large(cluster: LocalCluster, tunnel: str) -> None:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port_of(cluster), timeout=BOUND)) as connection:
        connection.putrequest("POST", f"{TUNNELS}{tunnel}/up?n=1")
        connection.putheader("Authorization", f"Bearer {cluster.token}")
        connection.putheader("Content-Length", str(1 << 40))
        connection.endheaders()
        response = connection.getresponse()
        assert response.status == 413
        error = json.loads(response.read())["error"]
    assert error["code"] == "too_large"
    assert str(MAX_BATCH) in error["message"]


def test_a_body_that_turns_out_to_be_too_large(cluster: LocalCluster, tunnel: str) -> None:
    pieces = (bytes(MIB + 2) for _ in range(4))
    too_large = request(cluster, "POST", f"{tunnel}/up?n=1", pieces, encode_chunked=True)
    assert too_large == (413, "too_large")


def test_a_first_frame_that_is_no_hello(cluster: LocalCluster) -> None:
    transport = HttpTransport.open(f"{cluster.url}/ws/v1", cluster.token, BOUND)
    transport.send_all(behind_length([b"nonsense"]))
    frames = transport.receive()
    assert frames
    (message,) = decode_frame(frames[0]).messages
    assert message.kind == Kind.REFUSE
    assert isinstance(error_from_refusal(message), loom.ProtocolMismatch)
    assert transport.receive() is None
    transport.close()


def test_a_tunnel_that_nobody_polls_is_closed() -> None:
    with LocalCluster(hosts=1, gateway_options=["--tunnel-idle", "1"]) as cluster:
        transport = HttpTransport.open(f"{cluster.url}/ws/v1", cluster.token, BOUND)
        transport.send_all(behind_length(unnumbered_frame(Hello().message())))
        assert transport.receive()
        deadline = time.monotonic() + BOUND
        while any(session["client_connected"] for session in rest(cluster, "/api/v1/sessions")["sessions"]):
            assert time.monotonic() < deadline, "the client still counts as connected"
            time.sleep(0.05)
        assert transport.receive() is None
        transport.close()


def test_a_gateway_that_ends_does_not_wait_for_polls() -> None:
    with LocalCluster(hosts=1) as own:
        job = loom.connect(own.url, own.token, transport="http", reconnect_timeout=0)
        os.kill(own.pids[0], signal.SIGTERM)
        ended = next(event for event in job.events(timeout=BOUND) if event.name == "ended")
        assert isinstance(ended.error, (loom.SessionLost, loom.ConnectionLost, loom.SessionClosed))


def test_a_program_that_is_over_leaves_no_thread_waiting(cluster: LocalCluster) -> None:
    """A program that ends without closing its job ends, though a poll is under way."""
    program = f"import loom; loom.connect({cluster.url!r}, {cluster.token!r}, transport='http')"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=BOUND, stdin=subprocess.DEVNULL)
