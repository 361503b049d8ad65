"""Sessions on session hosts, served by gateways that keep nothing: calls, logs, shares and ends by any of them."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import loom
from loom.errors import AuthenticationError, LoomError
from loom_proxy.local import LocalCluster
from tests.support.actors import Counter
from tests.support.gateways import BOUND, TOKEN, await_true
from tests.support.session_hosts import HostedCluster


@pytest.fixture(scope="module")
def hosted(cluster: LocalCluster) -> Iterator[HostedCluster]:
    with HostedCluster(cluster.workers) as running:
        yield running


def spoken(job: loom.Job) -> Any:
    """A counter in the session's processes."""
    return job.hosts.slice(hosts=0).spawn_procs(per_host={"gpus": 1}).spawn("counter", Counter, 0)


def names(hosted: HostedCluster, gateway: Any) -> set[str]:
    return {one["name"] for one in hosted.rest("/api/v1/sessions", gateway)["sessions"]}


def test_a_session_is_the_same_by_each_gateway(hosted: HostedCluster) -> None:
    first, second = hosted.gateways
    with hosted.connect(gateway=first) as job:
        counter = spoken(job)
        assert counter.add.call_one(2).get(timeout=BOUND) == 2
        await_true(lambda: job.session in names(hosted, second))
        about = hosted.rest(f"/api/v1/sessions/{job.session}/meshes", second)
        with hosted.connect(job.session, second, mode="watch") as watching:
            assert watching.session == job.session
        with hosted.connect(job.session, second, mode="call") as caller:
            assert caller.session == job.session
        status = hosted.rest("/api/v1/status", second)
        job.detach()
    with hosted.connect(job.session, second) as job:
        assert job.session in names(hosted, first)

    assert about["hosts"]
    assert status["workers_missing"] == ""
    for gateway in hosted.gateways:
        await_true(lambda gateway=gateway: job.session not in names(hosted, gateway))
        ended = hosted.rest("/api/v1/sessions?ended=true", gateway)["ended"]
        assert job.session in [one["name"] for one in ended]


@pytest.mark.slow
def test_new_sessions_go_to_the_host_that_has_the_fewest(hosted: HostedCluster) -> None:
    with contextlib.ExitStack() as jobs:
        await_true(lambda: not names(hosted, hosted.gateways[0]))
        opened = [jobs.enter_context(hosted.connect(gateway=hosted.gateways[0])) for _ in range(4)]
        hosts = [hosted.host_of(job.session).name for job in opened]

    assert sorted(hosts) == ["host0", "host0", "host1", "host1"]


def log_of(gateway: Any, session: str, follow: bool = False) -> str:
    follows = "?follow=true" if follow else ""
    request = urllib.request.Request(f"http://{gateway.address}/api/v1/sessions/{session}/logs{follows}")
    request.add_header("Authorization", f"Bearer {TOKEN}")
    with urllib.request.urlopen(request, timeout=BOUND) as answer:
        return str(answer.read().decode())


def test_a_log_is_read_by_each_gateway_also_after_the_end(hosted: HostedCluster) -> None:
    first, second = hosted.gateways
    with hosted.connect(gateway=first) as job:
        await_true(lambda: job.session in names(hosted, second))
        job.run(print, "said in the driver")
        for gateway in hosted.gateways:
            await_true(lambda gateway=gateway: "said in the driver" in log_of(gateway, job.session))
        with ThreadPoolExecutor() as pool:
            followed = pool.submit(log_of, second, job.session, follow=True)
            job.run(print, "said later")
            job.close()  # which ends what follows
            assert "said later" in followed.result(BOUND)

    for gateway in hosted.gateways:
        assert "said in the driver" in log_of(gateway, job.session)
    with pytest.raises(urllib.error.HTTPError) as refused:
        log_of(second, "session-unknown")
    assert refused.value.code == 404


def test_a_share_holds_at_each_gateway_and_its_end_too(hosted: HostedCluster) -> None:
    first, second = hosted.gateways
    path = "/shares/ben"
    with hosted.connect(gateway=first) as job:
        await_true(lambda: job.session in names(hosted, second))
        hosted.rest(f"/api/v1/sessions/{job.session}{path}", first, "PUT", {"scope": "view"})

        def shared() -> Any:
            (found,) = [
                one for one in hosted.rest("/api/v1/sessions", second)["sessions"] if one["name"] == job.session
            ]
            return found["shared"]

        await_true(lambda: shared() == {"ben": "view"})
        hosted.rest(f"/api/v1/sessions/{job.session}{path}", second, "DELETE")
        assert shared() == {}


def test_it_is_ended_by_another_gateway_and_its_client_learns_why(hosted: HostedCluster) -> None:
    first, second = hosted.gateways
    job = hosted.connect(gateway=first)
    await_true(lambda: job.session in names(hosted, second))
    hosted.rest(f"/api/v1/sessions/{job.session}", second, "DELETE")

    with pytest.raises(LoomError, match="ended over REST"):
        job.run(int)
    job.close()


@pytest.mark.slow
def test_requests_over_http_come_to_any_gateway(hosted: HostedCluster) -> None:
    with loom.connect(hosted.url, TOKEN, transport="http") as job:
        assert job.run(lambda: 7) == 7
        assert len(job.run(bytes, 3 << 20)) == 3 << 20


def test_a_wrong_token_is_refused_by_the_gateway(hosted: HostedCluster) -> None:
    with pytest.raises(AuthenticationError):
        loom.connect(hosted.url, "a wrong token")


def test_what_a_neighbour_sends_to_a_session_host_harms_nobody(hosted: HostedCluster) -> None:
    with hosted.connect() as job:
        for host in hosted.hosts:
            for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64):
                with socket.create_connection(("127.0.0.1", host.port), BOUND) as neighbour:
                    with contextlib.suppress(OSError):
                        neighbour.sendall(garbage)
                        neighbour.shutdown(socket.SHUT_WR)
                        while neighbour.recv(4096):
                            pass
        assert job.run(lambda: 8) == 8


@pytest.mark.slow
def test_calls_go_on_exactly_once_while_gateways_are_killed(cluster: LocalCluster) -> None:
    with HostedCluster(cluster.workers, hosts=1) as hosted, hosted.connect() as job:
        counter = spoken(job)
        answered: list[int] = []

        def call() -> None:
            for _ in range(300):
                answered.append(counter.add.call_one(1).get(timeout=BOUND))

        calling = threading.Thread(target=call)
        calling.start()
        for turn in range(4):
            await_true(lambda turn=turn: len(answered) > 60 * turn)
            hosted.gateways[turn % 2].end()
            with hosted.connect() as other:
                assert other.run(lambda: 9) == 9
            hosted.gateways[turn % 2].start()
        calling.join(BOUND)

        assert answered == list(range(1, 301))


@pytest.mark.slow
def test_a_host_that_is_started_again_has_its_sessions(cluster: LocalCluster) -> None:
    with HostedCluster(cluster.workers, gateways=1) as hosted, hosted.connect() as job:
        counter = spoken(job)
        assert counter.add.call_one(1).get(timeout=BOUND) == 1
        host = hosted.host_of(job.session)
        host.end()
        waiting = counter.add.call_one(1)
        with hosted.connect() as other:  # on the other host
            assert other.run(lambda: 1) == 1
        host.start()

        assert waiting.get(timeout=BOUND) == 2


@pytest.mark.slow
def test_a_host_that_is_told_to_stop_gets_no_new_session_and_ends_without_one(cluster: LocalCluster) -> None:
    with HostedCluster(cluster.workers, gateways=1, host_options=["--drain", "60"]) as hosted:
        with hosted.connect() as job:
            host = hosted.host_of(job.session)
            host.process.send_signal(signal.SIGTERM)
            ready = hosted.rest("/readyz")
            opened = []
            for _ in range(3):
                with hosted.connect() as other:
                    opened.append(hosted.host_of(other.session).name)
            assert job.run(lambda: 3) == 3
            assert host.process.poll() is None

        assert host.process.wait(BOUND) == 0
        await_true(lambda: not names(hosted, hosted.gateways[0]))
        assert hosted.rest("/api/v1/status", hosted.gateways[0])["workers_missing"] == ""  # nor is the host
        assert ready["status"] == "ok"
        assert host.name not in opened


def test_a_gateway_with_another_key_serves_nothing_and_says_why(hosted: HostedCluster) -> None:
    stranger = hosted.gateway("stranger", key=hosted.secret("another-key"))
    try:
        stranger.start()
        with pytest.raises(urllib.error.HTTPError) as refused:
            hosted.rest("/readyz", stranger)
        about = hosted.rest("/api/v1/status", stranger)
    finally:
        stranger.end()

    assert refused.value.code == 503
    assert "no_session_host" in refused.value.read().decode()
    assert "has another --host-key" in about["workers_missing"]


def page(gateway: Any, path: str, method: str = "GET", cookie: str = "", body: Any = None) -> tuple[int, str]:
    """The status of an answer to a page, and the cookie that it sets."""
    headers = {"Cookie": cookie, "Origin": f"http://{gateway.address}", "Content-Type": "application/json"}
    headers["X-Loom-Page"] = "1"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{gateway.address}{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=BOUND) as answer:
            return answer.status, str(answer.headers.get("Set-Cookie", "")).partition(";")[0]
    except urllib.error.HTTPError as error:
        return error.code, ""


def test_a_page_that_has_signed_in_or_out_has_done_so_at_each_gateway(hosted: HostedCluster) -> None:
    first, second = hosted.gateways
    _, cookie = page(first, "/api/v1/page/sign-in", "POST", body={"token": TOKEN, "path": "/"})
    assert cookie
    assert page(second, "/api/v1/status", cookie=cookie)[0] == 200

    assert page(first, "/api/v1/page/sign-out", "POST", cookie)[0] == 200

    await_true(lambda: page(second, "/api/v1/status", cookie=cookie)[0] == 401)


def code_of(gateway: Any) -> str:
    """A code of `loom dashboard`."""
    request = urllib.request.Request(f"http://{gateway.address}/api/v1/page/code", b"{}", method="POST")
    request.add_header("Authorization", f"Bearer {TOKEN}")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=BOUND) as answer:
        return str(json.load(answer)["code"])


def test_a_code_of_one_gateway_signs_in_once_at_another(hosted: HostedCluster) -> None:
    first, second = hosted.gateways
    code = code_of(first)

    status, cookie = page(second, "/api/v1/page/sign-in", "POST", body={"code": code, "path": "/"})
    assert (status, bool(cookie)) == (200, True)
    assert page(first, "/api/v1/status", cookie=cookie)[0] == 200
    assert page(first, "/api/v1/page/sign-in", "POST", body={"code": code, "path": "/"})[0] == 401
