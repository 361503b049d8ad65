"""What a `PodMesh` does where Kubetorch's own connection to its controller is gone."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

import loom
from loom import images
from loom_proxy.kubernetes import deployment as pod_mesh
from loom_proxy.kubernetes.deployment import PodMesh

kt = pytest.importorskip("kubetorch")


class Controller(http.server.BaseHTTPRequestHandler):
    """Knows one workload."""

    def do_GET(self) -> None:
        found = self.path.split("?")[0].endswith("/loom")
        body = json.dumps({"name": "loom"} if found else {"message": "no such workload"}).encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def no_kubectl() -> str:
    raise RuntimeError("kubectl port-forward exited (rc=1): network is unreachable")


class Remote:
    """In the place of Kubetorch's handle of what is deployed: its connection breaks during a call."""

    service_name = "loom"

    def __init__(self, failures: int, error: Exception | None = None) -> None:
        self.calls = 0
        self._failures = failures
        self._error = error or ConnectionError("Connection refused")

    def teardown(self) -> None:
        self.calls += 1
        if self.calls <= self._failures:
            raise self._error


@pytest.fixture
def controller() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Controller) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch, controller: str) -> PodMesh:
    """Kubetorch's client has been made while a port was forwarded that is not any more."""
    gone = kt.globals.ControllerClient("http://127.0.0.1:1")
    monkeypatch.setattr(kt.globals, "controller_client", lambda: gone)
    monkeypatch.setattr(kt.globals, "service_url", lambda *args, **kwargs: controller)
    mesh = PodMesh("workers", kt.Compute(cpus=1, namespace="ours"), "ours", "loom")
    mesh.remote = Remote(failures=0)
    return mesh


def test_kubetorch_is_reached_where_it_forwards_a_port_now(mesh: PodMesh) -> None:
    assert mesh.exists()


def test_pods_that_may_be_somebody_elses_count_as_theirs(
    mesh: PodMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kt.globals, "service_url", no_kubectl)

    assert mesh.exists()

    assert "its pods will stay until they are removed by kill(): kubectl port-forward exited" in caplog.text


def test_pods_are_removed_though_the_connection_breaks(mesh: PodMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_mesh, "AGAIN_AFTER", 0.0)
    mesh.remote = remote = Remote(failures=3)

    mesh.remove()

    assert remote.calls == 4


def test_pods_that_are_not_removed_for_long_are_named(mesh: PodMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_mesh, "REMOVE_WITHIN", 0.2)
    mesh.remote = Remote(failures=1000)

    with pytest.raises(loom.DeploymentFailed, match="loom was not removed: Connection refused"):
        mesh.remove()


def test_a_refusal_to_remove_pods_is_told_at_once(mesh: PodMesh) -> None:
    refusal = kt.ControllerRequestError("DELETE", "http://here", 403, "not yours")
    mesh.remote = remote = Remote(failures=1, error=refusal)

    with pytest.raises(loom.DeploymentFailed, match=r"loom was not removed: .*not yours"):
        mesh.remove()

    assert remote.calls == 1


def test_of_several_meshes_all_are_removed_that_can_be(mesh: PodMesh) -> None:
    refusal = kt.ControllerRequestError("DELETE", "http://here", 403, "not yours")
    meshes = {"workers": kt.Compute(cpus=1, namespace="ours"), "loaders": kt.Compute(cpus=1, namespace="ours")}
    job = loom.KubernetesJob(meshes=meshes, namespace="ours")
    remotes = [Remote(failures=1, error=refusal), Remote(failures=0)]
    for of, remote in zip(job._meshes, remotes, strict=True):
        of.remote = remote

    with pytest.raises(loom.DeploymentFailed, match="not yours"):
        job.kill()
    assert [remote.calls for remote in remotes] == [1, 1]

    job.kill()
    assert [remote.calls for remote in remotes] == [2, 2]


@pytest.mark.parametrize("injectable", [False, True])
def test_only_pods_of_an_injectable_job_are_marked_and_have_the_right_for_faults_of_a_network(
    injectable: bool,
) -> None:
    compute = kt.Compute(cpus=1, env_vars={"MINE": "1"})
    mesh = PodMesh("workers", compute, compute.namespace, "loom", injectable=injectable)

    mesh.complete_compute()
    mesh.complete_compute()  # a job that is applied again

    (container,) = compute.pod_spec["containers"]
    given = {one["name"]: one.get("value") for one in container["env"]}
    assert given["MINE"] == "1"
    assert given.get("LOOM_INJECTABLE") == ("1" if injectable else None)
    assert container["securityContext"]["capabilities"]["add"].count("NET_ADMIN") == injectable
    assert ("nftables" in compute.image.contents) == injectable


def test_pods_with_gpus_ask_for_them_and_have_the_image_for_them() -> None:
    compute = kt.Compute(gpus=2)

    PodMesh("workers", compute, compute.namespace, "loom").complete_compute()

    (container,) = compute.pod_spec["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert compute.image.image_id == images.GPU_BASE
