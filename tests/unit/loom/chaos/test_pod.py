"""The loss of a pod, against a server with TLS that answers as the API of Kubernetes does."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme

from loom.chaos.host import pod as module
from loom.chaos.host.pod import GRACE, KubernetesPod
from loom.chaos.host.processes import Start
from loom.errors import FaultRefused
from loom.process.listen import free_ports


@dataclass
class Api:
    """A stand-in for the API of Kubernetes: what it was asked, and what it answers."""

    port: int = 0
    status: int = 200
    answer: bytes = b'{"kind": "Pod", "metadata": {"uid": "first"}}'
    asked: list[tuple[str, str, str, dict[str, Any]]] = field(default_factory=list)
    """Method, path, ``Authorization`` and body."""


@pytest.fixture
def api(account: Path) -> Iterator[Api]:
    api = Api()

    class Handler(BaseHTTPRequestHandler):
        def do_DELETE(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            api.asked.append((self.command, self.path, self.headers["authorization"], body))
            self.send_response(api.status)
            self.send_header("content-length", str(len(api.answer)))
            self.end_headers()
            self.wfile.write(api.answer)

        def log_message(self, *_: object) -> None:
            pass

    authority = trustme.CA()
    authority.cert_pem.write_to_path(account / "ca.crt")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        api.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield api
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a pod finds the token of its service account."""
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "namespace").write_text("training")
    monkeypatch.setattr(module, "SERVICE_ACCOUNT", tmp_path)
    return tmp_path


def started(*more: str, **environment: str) -> Start:
    """How a worker was started."""
    return Start(["python", "-m", "loom_gateway.workers.host", *more], "/", environment)


@pytest.fixture
def pod(api: Api) -> KubernetesPod:
    where = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(api.port)}
    found = KubernetesPod.of(started(POD_NAME="loom-worker-1", **where))
    assert found is not None
    return found


def test_a_pod_tries_to_delete_itself_before_it_does(api: Api, pod: KubernetesPod) -> None:
    uid = pod.try_delete()
    pod.delete(uid)

    trial, real = api.asked
    assert trial[:3] == real[:3] == (
        "DELETE", "/api/v1/namespaces/training/pods/loom-worker-1", "Bearer secret"
    )  # fmt: skip
    assert trial[3]["dryRun"] == ["All"]
    assert real[3] == {
        "kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": GRACE, "preconditions": {"uid": "first"}
    }  # fmt: skip


@pytest.mark.parametrize("status", [401, 403])
def test_a_pod_without_the_right_is_told_the_component(api: Api, pod: KubernetesPod, status: int) -> None:
    api.status, api.answer = status, b'{"message": "pods is forbidden"}'

    with pytest.raises(FaultRefused) as refused:
        pod.try_delete()

    text = str(refused.value)
    assert "may not delete it: pods is forbidden" in text
    assert "Add the kustomize component images/kubernetes/chaos" in text


@pytest.mark.parametrize(
    ("status", "answer", "expected"),
    [
        (409, b'{"message": "Precondition failed"}', r"status 409\): Precondition failed"),
        (500, b"[]", r"status 500\): no reason is given"),
        (200, b"{}", "does not say which pod loom-worker-1 is"),
        (200, b"no JSON", "does not answer the pod loom-worker-1"),
    ],
)
def test_what_the_api_says_instead_is_told(
    api: Api, pod: KubernetesPod, status: int, answer: bytes, expected: str
) -> None:
    api.status, api.answer = status, answer

    with pytest.raises(FaultRefused, match=expected):
        pod.try_delete()


def test_an_api_that_another_authority_vouches_for_gets_no_token(
    api: Api, pod: KubernetesPod, account: Path
) -> None:
    trustme.CA().cert_pem.write_to_path(account / "ca.crt")

    with pytest.raises(FaultRefused, match=r"does not answer the pod loom-worker-1: .*CERTIFICATE_VERIFY_FAILED"):
        pod.try_delete()

    assert api.asked == []


def test_an_api_that_is_not_reached_is_refused(pod: KubernetesPod, account: Path) -> None:
    (port,) = free_ports(1)
    away = KubernetesPod(pod.name, pod.namespace, "127.0.0.1", port, account)

    with pytest.raises(FaultRefused, match=f":{port} does not answer .* A network policy may be in the way"):
        away.try_delete()


def test_a_worker_outside_of_kubernetes_has_no_pod(account: Path) -> None:
    assert KubernetesPod.of(started(POD_NAME="loom-worker-1")) is None


def test_the_worker_of_a_program_in_a_pod_is_not_its_pod(account: Path) -> None:
    assert (
        KubernetesPod.of(started("--exit-with-parent", KUBERNETES_SERVICE_HOST="10.96.0.1", POD_NAME="notebook-0"))
        is None
    )


@pytest.mark.parametrize("lacks", ["token", "name"])
def test_a_pod_without_the_component_is_told_its_name(account: Path, lacks: str) -> None:
    names = {} if lacks == "name" else {"POD_NAME": "loom-worker-1"}
    if lacks == "token":
        (account / "token").unlink()

    with pytest.raises(FaultRefused, match="Add the kustomize component images/kubernetes/chaos"):
        KubernetesPod.of(started(KUBERNETES_SERVICE_HOST="10.96.0.1", **names))
