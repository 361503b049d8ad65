"""TLS to a real gateway, with an authority of the test's own."""

from __future__ import annotations

import json
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import trustme

import loom
from loom import Actor, endpoint
from loom.rest_client import Gateway
from loom_proxy.local import LocalCluster
from loom_proxy.transport.tls import TlsSocket
from tests.support.processes import run, run_loom

BOUND = 60.0


class Echo(Actor):
    @endpoint
    def echo(self, value: object) -> object:
        return value


class Files(NamedTuple):
    ca: str
    certificate: str
    key: str


def issue(folder: Path, *names: str) -> Files:
    """A certificate for these names, of an authority of its own."""
    authority = trustme.CA()
    issued = authority.issue_cert(*names)
    files = Files(*(str(folder / name) for name in ("ca.pem", "certificate.pem", "key.pem")))
    authority.cert_pem.write_to_path(files.ca)
    issued.cert_chain_pems[0].write_to_path(files.certificate)
    issued.private_key_pem.write_to_path(files.key)
    return files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return issue(tmp_path_factory.mktemp("ours"), "127.0.0.1")


@pytest.fixture(scope="module")
def cluster(files: Files) -> Iterator[LocalCluster]:
    options = ["--tls-cert", files.certificate, "--tls-key", files.key]
    with LocalCluster(1, gateway_options=options) as running:
        yield running


@pytest.fixture
def environment(cluster: LocalCluster) -> dict[str, str]:
    return {**os.environ, "LOOM_URL": cluster.url, "LOOM_TOKEN": cluster.token}


def test_a_session_over_tls(cluster: LocalCluster, files: Files) -> None:
    assert cluster.url.startswith("wss://")
    with loom.connect(cluster.url, cluster.token, ca=files.ca) as job:
        assert job.run(max, 1, 2) == 2


def test_the_authority_may_come_from_the_environment(
    cluster: LocalCluster, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOM_CA", files.ca)
    with loom.connect(cluster.url, cluster.token) as job:
        assert job.run(max, 1, 2) == 2


def test_large_data_in_both_directions_while_another_thread_calls(cluster: LocalCluster, files: Files) -> None:
    data = os.urandom(16 << 20)
    with loom.connect(cluster.url, cluster.token, ca=files.ca) as job:
        echoes = job.hosts.spawn_procs(per_host={"gpus": 2}).spawn("echoes", Echo)
        large, small = (echoes.slice(hosts=0, gpus=number) for number in range(2))
        done = threading.Event()
        numbers: list[object] = []

        def call() -> None:
            while not done.is_set():
                numbers.append(small.echo.call_one(len(numbers)).get(BOUND))

        calling = threading.Thread(target=call)
        calling.start()
        try:
            for _ in range(3):
                assert large.echo.call_one(data).get(BOUND) == data
        finally:
            done.set()
            calling.join(BOUND)

        assert numbers == list(range(len(numbers)))
        assert numbers


@pytest.mark.slow
def test_many_threads_over_one_tls_connection(cluster: LocalCluster, files: Files) -> None:
    with loom.connect(cluster.url, cluster.token, ca=files.ca) as job:
        echo = job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("echo", Echo)
        wrong: list[object] = []

        def call(thread: int) -> None:
            for number in range(50):
                sent = bytes([thread]) * (1 + number * 997)
                if echo.echo.call_one(sent).get(BOUND) != sent:
                    wrong.append((thread, number))

        threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND)

        assert not wrong
        assert not any(thread.is_alive() for thread in threads)


def test_a_lost_tls_connection_is_made_again(cluster: LocalCluster, files: Files) -> None:
    with loom.connect(cluster.url, cluster.token, ca=files.ca) as job:
        job._connection._transport._socket.shutdown(socket.SHUT_RDWR)

        assert job.run(max, 1, 2) == 2
        assert next(event for event in job.events(BOUND) if event.name == "resumed")


# -- what is refused ----------------------------------------------------------------------------------------


def test_an_authority_that_nobody_vouches_for(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOOM_CA", raising=False)
    with pytest.raises(loom.UntrustedGateway, match=r"no trust.*ca=FILE"):
        loom.connect(cluster.url, cluster.token)
    with pytest.raises(loom.UntrustedGateway, match=r"no trust.*--ca FILE"):
        Gateway(cluster.url, cluster.token).status()


def test_another_authority_than_the_one_that_is_trusted(cluster: LocalCluster, tmp_path: Path) -> None:
    with pytest.raises(loom.UntrustedGateway, match=r"no trust"):
        loom.connect(cluster.url, cluster.token, ca=issue(tmp_path, "127.0.0.1").ca)


def test_the_certificate_of_another_host(cluster: LocalCluster, files: Files) -> None:
    by_name = cluster.url.replace("127.0.0.1", "localhost")
    with pytest.raises(loom.UntrustedGateway, match=r"not valid for 'localhost'.*another host's"):
        loom.connect(by_name, cluster.token, ca=files.ca)
    with pytest.raises(loom.UntrustedGateway, match="another host's"):
        Gateway(by_name, cluster.token, ca=files.ca).status()


def test_no_tls_to_a_gateway_that_speaks_it(cluster: LocalCluster) -> None:
    with pytest.raises(loom.NotAGateway, match="write wss://"):
        loom.connect(cluster.url.replace("wss:", "ws:"), cluster.token)


def test_tls_to_a_server_that_speaks_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(loom.NotAGateway, match="speaks no TLS: use ws://"):
            loom.connect(f"wss://127.0.0.1:{server.getsockname()[1]}", "token")
        answering.join(BOUND)


def test_tls_to_a_server_that_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(loom.NotAGateway, match="in time"):
        loom.connect(f"wss://127.0.0.1:{server.getsockname()[1]}", "token", timeout=0.2)


@pytest.mark.parametrize(("content", "said"), [(None, "No such file"), ("no certificate", "no certificate in PEM")])
def test_a_ca_that_is_none(cluster: LocalCluster, tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "authority.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(loom.InvalidAddress, match=f"(?s)authority.pem.*{said}"):
        loom.connect(cluster.url, cluster.token, ca=str(path))


@pytest.mark.slow
def test_a_gateway_without_the_files_of_its_certificate(files: Files, tmp_path: Path) -> None:
    other = issue(tmp_path, "127.0.0.1")
    wrong = {
        "No such file": ["--tls-cert", files.certificate, "--tls-key", str(tmp_path / "nowhere.pem")],
        "nowhere.crt": ["--tls-cert", str(tmp_path / "nowhere.crt")],
        "--tls-key needs --tls-cert": ["--tls-key", files.key],
        "and its key": ["--tls-cert", files.certificate],
        "MISMATCH": ["--tls-cert", files.certificate, "--tls-key", other.key],
    }
    for said, options in wrong.items():
        ended = run("-m", "loom_gateway", "--worker", "tcp://127.0.0.1:1", "--port", "0", *options)
        assert (ended.returncode, said in ended.stderr) == (2, True), ended.stderr


# -- the commands -------------------------------------------------------------------------------------------


def test_status_and_logs_over_tls(cluster: LocalCluster, files: Files, environment: dict[str, str]) -> None:
    shown = run_loom("status", "--json", "--ca", files.ca, env=environment)
    assert json.loads(shown.stdout)["workers"][0]["reachable"]

    with loom.connect(cluster.url, cluster.token, ca=files.ca) as job:
        job.print_logs = False
        job.run(print, "over TLS")
        job.flush_logs()
        logs = run_loom("logs", "--mesh", "driver", env={**environment, "LOOM_CA": files.ca})
        assert "over TLS" in logs.stdout


def test_status_without_trust_is_exit_code_5(environment: dict[str, str]) -> None:
    ended = run_loom("status", env=environment)

    assert ended.returncode == 5
    assert "--ca FILE" in ended.stderr


# -- the socket ---------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    ours: TlsSocket
    theirs: ssl.SSLSocket


@pytest.fixture
def pair(files: Files) -> Iterator[Pair]:
    """Both ends of a TLS connection whose kernel queues are short."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    accepted: list[ssl.SSLSocket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        accepting = threading.Thread(
            target=lambda: accepted.append(context.wrap_socket(server.accept()[0], server_side=True))
        )
        accepting.start()
        plain = socket.create_connection(server.getsockname(), BOUND)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with plain:
            ours = TlsSocket(plain, ssl.create_default_context(cafile=files.ca), "127.0.0.1")
            ours.settimeout(None)
            accepting.join(BOUND)
            accepted[0].settimeout(BOUND)
            with accepted[0]:
                yield Pair(ours, accepted[0])


def receive(sock: ssl.SSLSocket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count and (data := sock.recv(65536)):
        received += data
    return bytes(received)


def test_what_the_socket_does_not_take_at_once_comes_after_all(pair: Pair) -> None:
    data = os.urandom(1 << 20)

    taken = pair.ours.try_send(data)
    assert 0 < taken < len(data)
    assert pair.ours.try_send(data) == 0  # the socket is full
    sending = threading.Thread(target=pair.ours.sendall, args=(data[taken:],))
    sending.start()

    assert receive(pair.theirs, len(data)) == data
    sending.join(BOUND)


def test_the_rest_of_a_last_record_is_sent_without_being_asked(pair: Pair) -> None:
    data = os.urandom(200_000)
    taken = 0
    while not taken or pair.ours._sending.acquire(blocking=False):
        if taken:
            pair.ours._sending.release()
        assert taken < len(data), "the socket took everything"
        taken += pair.ours.try_send(data[taken : taken + 3000])

    assert receive(pair.theirs, taken) == data[:taken]


def test_nothing_that_has_come_stays_unseen(pair: Pair) -> None:
    data = os.urandom(100_000)
    sending = threading.Thread(target=pair.theirs.sendall, args=(data,))
    sending.start()
    received = b""
    while len(received) < len(data):
        received += pair.ours.recv(1000)
    sending.join(BOUND)

    assert received == data
    with pytest.raises(BlockingIOError):
        pair.ours.recv(1000, socket.MSG_DONTWAIT)


def test_the_end_of_a_connection_is_seen(pair: Pair) -> None:
    pair.theirs.sendall(b"last")
    pair.theirs.shutdown(socket.SHUT_WR)

    assert pair.ours.recv(1000) == b"last"
    assert pair.ours.recv(1000) == b""


def test_an_end_that_comes_with_the_last_data_is_seen(pair: Pair) -> None:
    pair.theirs.setblocking(False)
    pair.theirs.sendall(b"last")
    with pytest.raises(ssl.SSLWantReadError):  # TLS's own end is sent; the connection below stays open
        pair.theirs.unwrap()

    assert pair.ours.recv(1000) == b"last"
    pair.ours.settimeout(BOUND)
    assert pair.ours.recv(1000) == b""


def test_bytes_that_are_no_tls_are_an_error(pair: Pair) -> None:
    plain = socket.socket(fileno=os.dup(pair.theirs.fileno()))
    with plain:
        plain.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))

    with pytest.raises(ssl.SSLError):
        pair.ours.recv(1000)
