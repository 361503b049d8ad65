"""Faults in pods of plain manifests, with the component `images/kubernetes/chaos` and without its right."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cluster import OneMachineCluster, missing
from tests.support.cluster.laptop import real_kubectl
from tests.support.docs import Page
from tests.support.needs import skipped_if
from tests.support.paths import EXAMPLES, ROOT
from tests.system.cluster.test_kubernetes_job import Program
from tests.system.cluster.test_pages import IMAGES, ran, token

pytestmark = [
    skipped_if(missing()),
    pytest.mark.skipif(real_kubectl() is None, reason="needs kubectl 1.31 or newer"),
    pytest.mark.timeout(500),
    pytest.mark.slow,
]

NAMESPACE = "training"
PLAN = EXAMPLES / "chaos" / "pods.yaml"
PROGRAM = ROOT / "tests/support/cluster/programs" / "chaos.py"
LOOM = [sys.executable, "-c", "from loom.cli import main; main()"]

CARRIED_OUT_WITHIN = 400.0
"""Seconds, on a machine that does other things too."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[OneMachineCluster]:
    """A cluster with what the page about faults says to type."""
    with OneMachineCluster(images=IMAGES, kubectl=real_kubectl()) as cluster:
        shutil.copytree(ROOT / "images" / "kubernetes", cluster.laptop.home / "images" / "kubernetes")
        base = cluster.laptop.home / "images" / "kubernetes" / "base"
        (base / "token.env").write_text("token=the-token-of-the-gateway-in-this-test\n")
        (deploying,) = Page.of("docs/guide/faults-in-pods.md").blocks("sh")
        ran(cluster, list(deploying.lines))
        cluster.wait_ready("loom-worker", 2, namespace=NAMESPACE)
        cluster.wait_ready("loom-gateway", 1, namespace=NAMESPACE)
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: OneMachineCluster) -> dict[str, str]:
    """What a client has in its environment that comes through the ingress."""
    url = f"{cluster.ingress_url}/{NAMESPACE}/loom-gateway:8470".replace("http", "ws", 1)
    return {"LOOM_URL": url, "LOOM_TOKEN": token(cluster), "LOOM_INSECURE": "1"}


@pytest.fixture
def researcher(cluster: OneMachineCluster, client: dict[str, str]) -> Iterator[Program]:
    """A program whose training runs in both workers' pods."""
    command = [sys.executable, str(PROGRAM), "100000"]
    process = cluster.laptop.popen(
        command, env=client, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        running = Program(process, cluster)
        running.until("training")
        yield running
    finally:
        process.kill()
        process.communicate()


def loom(cluster: OneMachineCluster, client: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return cluster.laptop.run([*LOOM, *words], env=client, timeout=CARRIED_OUT_WITHIN)


def stopped(researcher: Program) -> dict[str, Any]:
    """What came of the training, which is ended."""
    assert researcher.process.stdin is not None
    researcher.process.stdin.write("stop\n")
    researcher.process.stdin.flush()
    result = researcher.until("result")
    researcher.until("closed")
    return result


def uids(cluster: OneMachineCluster) -> dict[str, str]:
    pods = cluster.pods("loom-worker", NAMESPACE)
    return {pod.name: cluster.described(pod.name, NAMESPACE)["metadata"]["uid"] for pod in pods}


def test_the_plan_for_pods_holds(cluster: OneMachineCluster, client: dict[str, str], researcher: Program) -> None:
    workers = uids(cluster)
    (gateway,) = cluster.pods("loom-gateway", NAMESPACE)

    done = loom(cluster, client, "inject", "run", str(PLAN), "--report", "report")

    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((cluster.laptop.home / "report" / "report.json").read_text())
    assert report["held"]
    faults = {one["fault"]: one for one in report["faults"]}
    assert list(faults) == ["sigkill", "partition", "lost_host", "dead_gateway"]
    assert not any(one["failed"] for one in faults.values())
    (cut,) = faults["partition"]["removal"].values()
    assert cut["dropped"] > 0
    (lost,) = faults["lost_host"]["evidence"].values()
    assert workers[lost["pod"]] == lost["uid"]
    replaced = {name for name, uid in uids(cluster).items() if workers[name] != uid}
    assert replaced == {lost["pod"]}
    (still,) = cluster.pods("loom-gateway", NAMESPACE)
    assert still.pid == gateway.pid  # in whose container the gateway was started again
    assert "is started again" in cluster.logs(gateway.name, NAMESPACE)
    assert stopped(researcher)["ending"] == "stopped"


def test_a_worker_may_delete_workers_and_do_nothing_else(cluster: OneMachineCluster) -> None:
    (gateway,) = cluster.pods("loom-gateway", NAMESPACE)
    account = "/var/run/secrets/kubernetes.io/serviceaccount"
    asks = f'curl -s --cacert {account}/ca.crt -H "Authorization: Bearer $(cat {account}/token)"'
    pods = f"https://$KUBERNETES_SERVICE_HOST/api/v1/namespaces/{NAMESPACE}/pods"
    dry = """-X DELETE -d '{"dryRun": ["All"]}'"""

    def answered(words: str) -> dict[str, Any]:
        said = cluster.execute("loom-worker-0", ["sh", "-c", f"{asks} {words}"], NAMESPACE)
        found: dict[str, Any] = json.loads(said)
        return found

    assert answered(f"{dry} {pods}/loom-worker-1")["metadata"]["name"] == "loom-worker-1"
    for refused in (f"{dry} {pods}/{gateway.name}", pods, f"{pods}/loom-worker-0", pods.replace("pods", "secrets")):
        assert answered(refused)["code"] == 403


def test_a_lost_host_without_the_right_is_refused_with_the_component_that_gives_it(
    cluster: OneMachineCluster, client: dict[str, str], researcher: Program
) -> None:
    workers = uids(cluster)
    ran(cluster, [f"kubectl -n {NAMESPACE} delete rolebinding loom-lost-host"])

    done = loom(cluster, client, "inject", "once", "lost_host", "--replica", "train_0", "--json")

    assert done.returncode == 1, done.stdout + done.stderr
    (refused,) = json.loads(done.stdout)["outcomes"].values()
    assert "may not delete it" in refused["reason"]
    assert "Add the kustomize component images/kubernetes/chaos" in refused["reason"]
    assert uids(cluster) == workers
    assert stopped(researcher)["failures"] == 0
