"""The pods of a job: deployed again, killed under sessions, with workers that restart, and not deployed at all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import OneMachineCluster, missing
from tests.support.cluster.laptop import real_kubectl
from tests.support.needs import skipped_if
from tests.support.paths import ROOT
from tests.system.cluster.test_kubernetes_job import Program, gone, program

pytestmark = [
    skipped_if(missing()),
    pytest.mark.timeout(400),
    pytest.mark.slow,
]

PODS = ROOT / "tests/support/cluster/programs" / "pods.py"


def policies(cluster: OneMachineCluster) -> list[str]:
    """The network policies of the job."""
    found = cluster.laptop.run(["kubectl", "get", "networkpolicy", "-o", "json"])
    return [item["metadata"]["name"] for item in json.loads(found.stdout)["items"]]


UNPULLABLE = "registry.example/nothing:1"


@pytest.fixture(scope="module")
def cluster() -> Iterator[OneMachineCluster]:
    with OneMachineCluster(missing_images=[UNPULLABLE], kubectl=real_kubectl()) as cluster:
        yield cluster


@pytest.fixture
def run(cluster: OneMachineCluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Program]:
    with program(cluster, tmp_path, request.param, of=PODS) as running:
        yield running
    for service in {pod.owner for pod in cluster.pods()}:
        cluster.remove(service)


@pytest.mark.parametrize("run", ["again"], indirect=True)
def test_a_job_that_is_applied_again_keeps_its_workers_its_gateway_and_its_sessions(
    run: Program, cluster: OneMachineCluster
) -> None:
    assert run.until("again")["same"]
    gateways = run.until("gateways")
    assert gateways["before"] == gateways["after"] is not None
    assert run.until("changed")["same"]
    run.until("still")
    run.until("closed")
    assert gone(cluster, "loom")


@pytest.mark.guarantees(
    "nothing lost",
    "A pod of a `KubernetesJob` that is killed ends its own sessions only: calls of the others that went through "
    "it are answered once, and their replicas come to the weaver of another pod",
)
@pytest.mark.parametrize("run", ["pod_lost"], indirect=True)
def test_a_pod_that_is_killed_ends_its_own_sessions_only(run: Program, cluster: OneMachineCluster) -> None:
    sessions = run.until("sessions")["pods"]
    assert len(set(sessions)) == 3
    had = run.until("weaver")["address"]
    cluster.kill_pod(next(pod.name for pod in cluster.pods("loom") if pod.address == had))
    run.go_on()

    assert run.until("gone")["error"] is not None
    called = run.until("called")
    assert called["errors"] == []
    assert called["right"] == [True, True], "no call is lost or made twice"
    assert called["disconnected"] > 0, "no client was connected through the pod"
    new = run.until("new")
    assert new["hosts"] == 3
    assert new["weaver"] not in (None, had)
    run.until("closed")


@pytest.mark.parametrize("run", ["restarted"], indirect=True)
def test_a_worker_is_restarted_over_http(run: Program) -> None:
    restarted = run.until("restarted")

    assert restarted["other"]
    assert restarted["name"]
    run.until("usable")
    assert "no pod of this job that answers is 'nobody'" in run.until("unknown")["text"]
    run.until("closed")


@pytest.mark.parametrize("run", ["no_namespace"], indirect=True)
def test_a_namespace_that_does_not_exist(run: Program) -> None:
    refused = run.until("refused")

    assert refused["error"] == "DeploymentFailed"
    assert "kubectl create namespace nowhere" in refused["text"]


@pytest.mark.parametrize("run", ["no_image"], indirect=True)
def test_an_image_that_cannot_be_pulled(run: Program) -> None:
    refused = run.until("refused")

    assert refused["error"] == "DeploymentFailed"
    assert "ImagePullBackOff" in refused["text"]


@pytest.mark.parametrize("run", ["no_pods"], indirect=True)
def test_labels_that_no_pod_has(run: Program) -> None:
    refused = run.until("refused")

    assert refused["error"] == "DeploymentFailed"
    assert "no pod in namespace default has the labels app=nobody" in refused["text"]


WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self._finder = finder

    def __getattr__(self, name):
        return getattr(self._finder, name)

    def find_spec(self, name, path=None, target=None):
        missing = name.partition(".")[0] in {names!r}
        return None if missing else self._finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
"""What has Python find no module of these names."""


@pytest.mark.parametrize(
    ("modules", "why"),
    [
        (["monarch"], "needs torchmonarch, not installed here"),
        (["loom", "loom_gateway", "loom_proxy"], "has no Loom in its image (No module named 'loom"),
    ],
    ids=["torchmonarch", "Loom"],
)
def test_an_image_without(
    cluster: OneMachineCluster, tmp_path: Path, shared: Path, modules: list[str], why: str
) -> None:
    (shared / "sitecustomize.py").write_text(WITHOUT.format(names=modules))

    with program(cluster, tmp_path, "no_modules", str(shared), of=PODS) as run:
        refused = run.until("refused")
    for service in {pod.owner for pod in cluster.pods()}:
        cluster.remove(service)

    assert refused["error"] == "DeploymentFailed"
    assert why in refused["text"]
    assert "loom.images.cpu_image()" in refused["text"]
    assert re.search(r"pod loom-\S+ (has|cannot)", refused["text"])


NEXT_DATA_SERVER_FAILS = """
import os, sys

if "kubetorch.data_store.pod_data_server" in sys.orig_argv:
    try:
        os.remove(os.path.join(os.path.dirname(__file__), "fail"))
    except FileNotFoundError:
        pass
    else:
        os._exit(1)
"""
"""What makes Kubetorch's server wait in vain for its data server, as on a machine with too much to do; once."""


def test_a_pod_that_kubetorch_leaves_without_its_class_is_deployed_again(
    cluster: OneMachineCluster, tmp_path: Path, shared: Path
) -> None:
    (shared / "sitecustomize.py").write_text(NEXT_DATA_SERVER_FAILS)
    (shared / "fail").touch()

    with program(cluster, tmp_path, "one_without_its_class", str(shared), of=PODS) as run:
        said = run.until("warning")["text"]
        opened = run.until("open")
        run.until("closed")

    assert not (shared / "fail").exists()
    assert "deploying unlucky again (1 of at most 2 times)" in said
    assert "has not loaded LoomPod yet" in said
    assert opened == {"event": "open", "pods": 2, "starts": [1, 1]}
    assert gone(cluster, "unlucky")


@pytest.mark.timeout(600)
def test_a_pod_that_comes_back_without_its_class_is_deployed_again_while_the_job_is_open(
    cluster: OneMachineCluster, tmp_path: Path, shared: Path
) -> None:
    (shared / "sitecustomize.py").write_text(NEXT_DATA_SERVER_FAILS)

    with program(cluster, tmp_path, "one_back_without_its_class", str(shared), of=PODS) as run:
        (other,) = run.until("open")["others"]
        (shared / "fail").touch()
        cluster.kill_pod(other)
        said = run.until("warning")["text"]
        back = run.until("back")
        right = {"event": "back", "pods": 2, "starts": [1, 1], "events": ["host_lost", "host_back"]}
        assert back == right, run.told()
        run.go_on()
        run.until("closed")

    assert not (shared / "fail").exists()
    assert "deploying unlucky again (1 of at most 2 times)" in said
    assert gone(cluster, "unlucky")


@pytest.mark.guarantees("ports", "The policies go with the pods")
@pytest.mark.parametrize("run", ["detached"], indirect=True)
def test_a_job_that_is_detached_keeps_its_pods_and_its_session(run: Program, cluster: OneMachineCluster) -> None:
    run.until("detached")
    assert len(cluster.pods("loom")) == 2
    assert len(policies(cluster)) == 1
    run.go_on()

    assert run.until("again")["value"] == 2

    run.until("closed")
    assert gone(cluster, "loom")
    assert policies(cluster) == []


@pytest.mark.parametrize("run", ["injectable"], indirect=True)
def test_what_runs_in_the_pods_of_an_injectable_job_can_be_struck(run: Program, cluster: OneMachineCluster) -> None:
    assert run.until("marked")["replicas"] == {"first": True, "second": True}
    cut = run.until("cut")
    assert cut["evidence"]["percent"] == 1, cut
    kept = run.until("pod")
    assert kept["evidence"] == {}
    assert "Add the kustomize component images/kubernetes/chaos" in kept["reason"]
    assert "is no process of this gateway's: kill it there" in run.until("refused")["text"]
    run.until("closed")
    assert gone(cluster, "loom")
