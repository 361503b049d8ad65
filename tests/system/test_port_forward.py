"""``kube://NAMESPACE/SERVICE``: a gateway reached by a ``kubectl port-forward`` that is kept alive."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import loom
from loom_proxy.kubernetes.port_forward import PortForward, parse_kube_address
from loom_proxy.local import LocalCluster
from tests.support.actors import Counter
from tests.support.forwards import forwarding, lead_to, put_on_path

BOUND = 30.0


PROGRAM = """
import sys, loom
job = loom.connect("kube://research/loom-gateway", sys.argv[1])
print("connected", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in on PATH; the folder with where it leads."""
    return put_on_path(tmp_path, monkeypatch)


@pytest.fixture
def service(kubectl: Path, cluster: LocalCluster) -> str:
    """A service in Kubernetes that has the gateway."""
    return lead_to(cluster, kubectl)


@pytest.fixture
def job(service: str, cluster: LocalCluster) -> Iterator[loom.Job]:
    with loom.connect(service, cluster.token) as job:
        yield job


def test_a_service_in_kubernetes_is_reached_by_its_name(job: loom.Job, service: str) -> None:
    counters = job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("counters", Counter, 1)

    assert set(counters.add.call(1).get(BOUND).values()) == {2}
    assert job.url == service
    assert job.weaver.status() is not None


def test_a_forward_that_ends_is_started_again_and_loses_nothing(job: loom.Job) -> None:
    counters = job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("counters", Counter, 1)
    counters.add.call(1).get(BOUND)
    (kubectl,) = forwarding(os.getpid())

    kubectl.send_signal(signal.SIGKILL)
    answers = [counters.add.call(1) for _ in range(20)]

    assert [set(answer.get(BOUND).values()) for answer in answers] == [{3 + number} for number in range(20)]
    (again,) = forwarding(os.getpid())
    assert again.pid != kubectl.pid


@pytest.mark.guarantees(
    "strangers",
    "Whoever has taken the port of a `kubectl port-forward` gets no token; that of a context goes to its "
    "address only",
)
def test_who_takes_the_port_gets_no_token_and_the_forward_moves(job: loom.Job) -> None:
    counters = job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("counters", Counter, 1)
    counters.add.call(1).get(BOUND)
    before = job._connection.url
    port = int(before.removesuffix("/ws/v1").rpartition(":")[2])
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    received: list[bytes] = []
    over = threading.Event()

    def take_the_port() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):  # kubectl has not ended
                taken.bind(("127.0.0.1", port))
                break
            time.sleep(0.001)
        with contextlib.suppress(OSError):
            taken.listen()
            while True:
                with taken.accept()[0] as sock:
                    received.append(sock.recv(1 << 16))

    taking = threading.Thread(target=take_the_port, daemon=True)
    taking.start()
    (kubectl,) = forwarding(os.getpid())
    kubectl.send_signal(signal.SIGKILL)
    answers = [counters.add.call(1) for _ in range(20)]

    assert [set(answer.get(BOUND).values()) for answer in answers] == [{3 + number} for number in range(20)]
    over.set()
    with contextlib.suppress(OSError):
        taken.shutdown(socket.SHUT_RDWR)
    taken.close()
    taking.join(BOUND)
    assert not any(b"authorization" in request.lower() for request in received)


@pytest.mark.slow
def test_a_forward_through_which_nobody_answers_is_started_again(
    job: loom.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a dead link: kubectl waits for its own connection, and goes on to accept others."""
    monkeypatch.setattr("loom_proxy.forwarded_port.RENEW_AFTER", 0.5)
    monkeypatch.setattr("loom_proxy.session.connection.CONNECT_TIMEOUT", 1.0)
    monkeypatch.setattr("loom_proxy.transport.base.SILENCE", 6.0)
    counters = job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("counters", Counter, 1)
    counters.add.call(1).get(BOUND)
    (kubectl,) = forwarding(os.getpid())

    kubectl.suspend()
    answers = [counters.add.call(1) for _ in range(20)]

    assert [set(answer.get(BOUND).values()) for answer in answers] == [{3 + number} for number in range(20)]
    (again,) = forwarding(os.getpid())
    assert again.pid != kubectl.pid
    assert not kubectl.is_running()


def test_a_forward_that_is_new_is_left_alone(service: str) -> None:
    forward = PortForward(parse_kube_address(service))
    try:
        before = forwarding(os.getpid())
        forward.renew()
        assert forwarding(os.getpid()) == before
        assert forward.starts == 1
    finally:
        forward.close()


def test_the_forwarded_gateway_may_have_a_path(service: str) -> None:
    """As behind Kubetorch's nginx."""
    forward = PortForward(parse_kube_address(f"{service}:8080/research/loom-headless:8470"))
    try:
        assert forward.url == f"ws://127.0.0.1:{forward.port}/research/loom-headless:8470"
    finally:
        forward.close()


def test_the_forward_ends_with_the_job(service: str, cluster: LocalCluster) -> None:
    with loom.connect(service, cluster.token):
        found = forwarding(os.getpid())

    psutil.wait_procs(found, BOUND)
    assert len(found) == 1
    assert not forwarding(os.getpid())


def test_who_follows_the_weaver_is_told_when_the_session_and_its_forward_are_over(
    service: str, cluster: LocalCluster
) -> None:
    job = loom.connect(service, cluster.token)
    updates = job.weaver.watch()
    next(updates)
    job.close()

    with pytest.raises(loom.SessionClosed):
        list(updates)


def test_the_forward_ends_with_a_program_that_is_killed(service: str, cluster: LocalCluster) -> None:
    command = [sys.executable, "-c", PROGRAM, cluster.token]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "connected\n"
        found = forwarding(program.pid)
        program.kill()

    assert len(found) == 1
    assert not psutil.wait_procs(found, BOUND)[1]


def test_what_kubectl_says_is_told(kubectl: Path) -> None:
    with pytest.raises(loom.PortForwardFailed, match=r'svc/nothing in namespace default.*"nothing" not found'):
        loom.connect("kube://default/nothing", "token")

    assert not forwarding(os.getpid())


def test_without_kubectl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(loom.MissingDependency, match="needs kubectl"):
        loom.connect("kube://default/loom-gateway", "token")


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("kube://default/loom", ("default", "svc/loom", 8470, "")),
        ("kube://a-b/loom-gateway:80/", ("a-b", "svc/loom-gateway", 80, "")),
        ("kube://a-b/pod/loom-0", ("a-b", "pod/loom-0", 8470, "")),
        ("kube://a-b/nginx:8080/a/b:8470/", ("a-b", "svc/nginx", 8080, "/a/b:8470")),
    ],
)
def test_an_address_names_a_namespace_and_what_is_in_it(url: str, address: tuple[str, str, int, str]) -> None:
    assert parse_kube_address(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "kube://",
        "kube://loom",
        "kube://A/b",
        "kube://a/b:0",
        "kube://a/b:70000",
        "kube://a/b/c/d",
        "kube://a/b:1?c",
    ],
)
def test_an_address_of_another_form_is_refused(url: str) -> None:
    with pytest.raises(loom.InvalidAddress, match="kube://NAMESPACE/SERVICE"):
        loom.connect(url, "token")
