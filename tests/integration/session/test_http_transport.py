"""Sessions over plain HTTP do what they do over a WebSocket."""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import os
import signal
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import loom
from loom.token_file import TokenFile
from loom_proxy.local import LocalCluster
from tests.integration.calls.test_failures import driver_pid
from tests.integration.calls.test_large import forget_peak, gateway_of, peak_mib
from tests.integration.gateway.test_tls import issue
from tests.integration.session.http_sessions import BOUND, MIB, Talker, port_of, request
from tests.support.actors import BadLuck, Counter, Hang
from tests.support.gateways import attach
from tests.support.network.http_proxy import HttpProxy, without_websockets


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


@pytest.mark.slow
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
