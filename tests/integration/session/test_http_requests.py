"""The requests of a session over plain HTTP: what a tunnel takes and what it refuses."""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

import loom
from loom.wire.frames import decode_frame
from loom.wire.handshake import Hello, error_from_refusal
from loom.wire.length_prefix import MAX_BATCH, TUNNELS, behind_length
from loom.wire.messages import Kind
from loom.wire.stream import unnumbered_frame
from loom_proxy.local import LocalCluster
from loom_proxy.transport.http import HttpTransport
from tests.integration.calls.test_failures import rest
from tests.integration.session.http_sessions import BOUND, MIB, port_of, request


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


@pytest.mark.parametrize("n", ["?n=2", "?n=999"])
def test_a_number_that_is_not_the_next_ends_the_tunnel_and_not_the_session(
    cluster: LocalCluster, tunnel: str, n: str
) -> None:
    assert request(cluster, "POST", f"{tunnel}/up{n}", b"") == (404, "connection_lost")
    assert request(cluster, "GET", f"{tunnel}/down{n}") == (404, "connection_lost")


@pytest.mark.parametrize("n", ["", "?n=", "?n=0", "?n=-1", "?n=x", f"?n={'9' * 30}", "?n=%00"])
def test_what_is_no_number_of_a_batch(cluster: LocalCluster, tunnel: str, n: str) -> None:
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
