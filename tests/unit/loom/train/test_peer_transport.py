"""The state that one training group gives another: only to the job's processes, and nothing that runs code."""

from __future__ import annotations

import contextlib
import http.client
import os
import pickle
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import TCPStore
from torch.distributed._serialization import _streaming_save

import loom
from loom.mutual_auth import Exchange, Purpose, Side, new_nonce
from loom.mutual_auth.over_http import CHALLENGE_HEADER, NONCE_HEADER, PROOF_HEADER, ProvenAnswer
from loom.process.listen import open_store
from loom.train.loop.peer_transport import CONNECTIONS, PeerTransport

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")

TIMEOUT = timedelta(seconds=20)
STATE = {"user": {"weight": torch.arange(6.0).reshape(2, 3), "names": ("a", 1, None)}, "torchft": {"step": 7}}


@pytest.fixture
def giver() -> Iterator[PeerTransport]:
    transport = PeerTransport("127.0.0.1", "the job's key", 20)
    transport.send_checkpoint([1], 7, STATE, TIMEOUT)
    yield transport
    transport.shutdown()


@pytest.fixture
def taker() -> Iterator[PeerTransport]:
    transport = PeerTransport("127.0.0.1", "the job's key", 20)
    yield transport
    transport.shutdown()


def port_of(transport: PeerTransport) -> int:
    return int(transport.metadata().split(":")[2].split("/")[0])


def get(port: int, path: str = "/checkpoint/7", **headers: str) -> tuple[int, bytes, str]:
    """Status, body and challenge."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers.get(CHALLENGE_HEADER, "")
    finally:
        connection.close()


def proven(port: int, key: str = "the job's key") -> dict[str, str]:
    """What a request for the state has whose sender knows a key."""
    exchange = Exchange(Purpose.PEER, key, new_nonce(), get(port)[2])
    return {
        CHALLENGE_HEADER: exchange.answering,
        NONCE_HEADER: exchange.asking,
        PROOF_HEADER: exchange.proof(Side.ASKS, "GET", f"127.0.0.1:{port}", "/checkpoint/7"),
    }


def test_a_process_of_the_job_gets_the_state(giver: PeerTransport, taker: PeerTransport) -> None:
    state = taker.recv_checkpoint(0, giver.metadata(), 7, TIMEOUT)

    assert torch.equal(state["user"]["weight"], STATE["user"]["weight"])
    assert state["user"]["names"] == ("a", 1, None)
    assert state["torchft"] == {"step": 7}


@pytest.mark.guarantees(
    "ports", "A training group's state goes only to processes of its job, which prove that they know its key"
)
def test_who_does_not_know_the_key_gets_nothing(giver: PeerTransport) -> None:
    port = port_of(giver)
    good = proven(port)
    wrong: list[dict[str, str]] = [
        {},
        proven(port, "another key"),
        {**proven(port), PROOF_HEADER: ""},
        {**proven(port), NONCE_HEADER: ""},
        {name: said for name, said in proven(port).items() if name != CHALLENGE_HEADER},
        {**proven(port), CHALLENGE_HEADER: new_nonce()},
    ]
    for headers in wrong:
        status, body, _ = get(port, **headers)
        assert status == 403
        assert b"weight" not in body
    assert get(port, **good)[0] == 200
    assert get(port, **good)[0] == 403  # it was overheard


def test_another_jobs_process_gets_nothing_and_is_told_nothing(giver: PeerTransport) -> None:
    stranger = PeerTransport("127.0.0.1", "another job's key", 20)
    try:
        with pytest.raises(loom.AuthenticationError, match="is no process of this job: it lacks the key"):
            stranger.recv_checkpoint(0, giver.metadata(), 7, TIMEOUT)
    finally:
        stranger.shutdown()


def test_a_step_that_is_not_there_is_an_error(giver: PeerTransport, taker: PeerTransport) -> None:
    with pytest.raises(loom.ConnectionLost, match="it has the state of step 7"):
        taker.recv_checkpoint(0, giver.metadata(), 8, TIMEOUT)


class Attacker:
    """Answers as a process of the job would, with what it likes; it saw what it was asked."""

    def __init__(self, body: bytes, proof: str = "") -> None:
        self.asked: list[dict[str, str]] = []
        attacker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                attacker.asked.append(dict(self.headers))
                self.send_response(200)
                self.send_header(CHALLENGE_HEADER, self.headers.get(NONCE_HEADER) or new_nonce())
                self.send_header(PROOF_HEADER, proof or self.headers.get(PROOF_HEADER, ""))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/checkpoint/"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.guarantees(
    "ports", "An answer in place of a peer's is not read, and what the asking process sent opens nothing"
)
def test_an_answer_without_the_key_is_not_read(taker: PeerTransport, giver: PeerTransport, tmp_path: Path) -> None:
    attacker = Attacker(pickle.dumps(Evil(tmp_path / "ran")))
    try:
        with pytest.raises(loom.AuthenticationError, match="it lacks the key"):
            taker.recv_checkpoint(0, attacker.url, 7, TIMEOUT)
    finally:
        attacker.close()

    assert not (tmp_path / "ran").exists()
    _, asked = attacker.asked
    assert "the job's key" not in str(attacker.asked)
    # What it was shown opens no other process's state.
    shown = {name: asked[name] for name in (NONCE_HEADER, PROOF_HEADER)}
    port = port_of(giver)
    assert get(port, **shown, **{CHALLENGE_HEADER: get(port)[2]})[0] == 403
    assert get(port, **shown, **{CHALLENGE_HEADER: asked[CHALLENGE_HEADER]})[0] == 403


@pytest.mark.guarantees("ports", "A peer's state cannot run code")
def test_a_state_cannot_run_code(taker: PeerTransport, tmp_path: Path) -> None:
    giver = PeerTransport("127.0.0.1", "the job's key", 20)
    giver.send_checkpoint([1], 7, {"user": Evil(tmp_path / "ran")}, TIMEOUT)
    try:
        with pytest.raises(pickle.UnpicklingError):
            taker.recv_checkpoint(0, giver.metadata(), 7, TIMEOUT)
    finally:
        giver.shutdown()

    assert not (tmp_path / "ran").exists()


def test_nobody_reads_while_the_state_may_change(giver: PeerTransport, taker: PeerTransport) -> None:
    giver.disallow_checkpoint()
    got: list[Any] = []
    reading = threading.Thread(target=lambda: got.append(taker.recv_checkpoint(0, giver.metadata(), 8, TIMEOUT)))
    reading.start()
    giver.send_checkpoint([1], 8, {"user": {}, "torchft": {"step": 8}}, TIMEOUT)
    reading.join(20)

    assert got == [{"user": {}, "torchft": {"step": 8}}]


def listeners() -> set[tuple[str, int]]:
    return {c.laddr[:2] for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}


@pytest.mark.guarantees("ports", "A training's stores and servers listen on the pod's address only")
def test_a_store_and_a_transport_listen_on_their_address_only() -> None:
    before = listeners()
    store = open_store("127.0.0.1")
    transport = PeerTransport("127.0.0.1", "key", 20)
    new = listeners() - before
    try:
        assert new == {("127.0.0.1", store.port), ("127.0.0.1", port_of(transport))}
        client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        client.set("a", "b")
        assert store.get("a") == b"b"
    finally:
        transport.shutdown()


def test_garbage_does_not_end_the_transport(giver: PeerTransport, taker: PeerTransport) -> None:
    for said in (
        b"",
        b"\x00" * 100_000,
        b"GET " + b"/" * 100_000,
        b"POST / HTTP/1.1\r\n\r\n",
        b"GET /checkpoint/x\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", port_of(giver)), 20) as sock:
            sock.settimeout(20)
            with contextlib.suppress(OSError):  # the transport may have closed the connection already
                sock.sendall(said)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass

    assert taker.recv_checkpoint(0, giver.metadata(), 7, TIMEOUT)["torchft"] == {"step": 7}


def test_what_the_stand_in_attacker_sends_would_be_read_with_the_key(
    taker: PeerTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal above is for the key, and not for a mistake of the attacker's."""
    path = tmp_path / "state"
    with path.open("wb") as file:
        _streaming_save({"user": {}}, file)
    attacker = Attacker(path.read_bytes())
    monkeypatch.setattr(ProvenAnswer, "proves", lambda _: True)
    try:
        assert taker.recv_checkpoint(0, attacker.url, 7, TIMEOUT) == {"user": {}}
    finally:
        attacker.close()


def test_a_crowd_of_strangers_keeps_no_process_out(giver: PeerTransport, taker: PeerTransport) -> None:
    crowd = [socket.create_connection(("127.0.0.1", port_of(giver))) for _ in range(CONNECTIONS + 40)]
    try:
        state = taker.recv_checkpoint(0, giver.metadata(), 7, TIMEOUT)

        assert state["torchft"] == {"step": 7}
        crowd[0].settimeout(20)
        assert crowd[0].recv(1) == b""
    finally:
        for one in crowd:
            one.close()


def test_a_request_that_never_ends_is_cut_off(giver: PeerTransport) -> None:
    with socket.create_connection(("127.0.0.1", port_of(giver)), 20) as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(b"GET /checkpoint/7 HTTP/1.1\r\n" + b"X: " + b"x" * 8000 + b"\r\n")
            stranger.sendall(b"X: " + b"x" * 9000 + b"\r\n")
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(1) == b""
