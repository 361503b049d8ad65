"""`loom.KubernetesJob` on a cluster: Kubetorch's client and pod server, nginx, DNS, pods that die, a dead link."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.cluster import OneMachineCluster, missing
from tests.support.cluster.laptop import real_kubectl
from tests.support.example_notebook import check_elsewhere
from tests.support.needs import skipped_if
from tests.support.paths import ROOT
from tests.system.cluster.test_pages import IMAGES
from tests.system.images.test_manifests import BASE

pytestmark = [skipped_if(missing()), pytest.mark.timeout(900)]  # 460 s beside three other clusters

PROGRAM = ROOT / "tests/support/cluster/programs" / "digits.py"

OUTAGE = 30.0
"""Seconds for which the laptop's link is dead."""

SERVER = [
    sys.executable,
    "-m",
    "uvicorn",
    "kubetorch.serving.http_server:app",
    "--host",
    "0.0.0.0",
    "--port",
    "32300",
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[OneMachineCluster]:
    with OneMachineCluster(images=IMAGES, kubectl=real_kubectl()) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_pods_left(cluster: OneMachineCluster) -> Iterator[None]:
    """What a test that fails leaves is not for the next one."""
    yield
    for service in {pod.owner for pod in cluster.pods()}:
        cluster.remove(service)
    cluster.laptop.run(["kubectl", "delete", "networkpolicy", "--all"]).check_returncode()


@pytest.fixture
def volume() -> Iterator[Path]:
    """A folder that all pods share, as a volume is. They have a /tmp of their own each."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def plain(cluster: OneMachineCluster) -> Iterator[dict[str, str]]:
    """What `kubectl apply -k images/kubernetes/base` runs, with three workers and a volume for checkpoints.

    What its clients have in their environment.
    """
    manifests = copy.deepcopy(BASE)
    of_kind = {manifest["kind"]: manifest for manifest in manifests}
    for owner in (of_kind["Deployment"], of_kind["StatefulSet"]):
        pod = owner["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        container["args"] = [argument.replace("count=2", "count=3") for argument in container["args"]]
        container["volumeMounts"].append({"name": "checkpoints", "mountPath": "/srv/checkpoints"})
        pod["volumes"].append({"name": "checkpoints", "persistentVolumeClaim": {"claimName": "checkpoints"}})
    of_kind["StatefulSet"]["spec"]["replicas"] = 3
    claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": "checkpoints", "namespace": "default"}}
    cluster.apply(claim, *manifests)
    try:
        cluster.wait_ready("loom-worker", 3)
        cluster.wait_ready("loom-gateway", 1)
        token = base64.b64decode(of_kind["Secret"]["data"]["token"]).decode()
        yield {
            "LOOM_TOKEN": token,
            "CHECKPOINTS": f"/srv/checkpoints/{secrets.token_hex(4)}",  # the claim outlives its pods
            "LOOM_URL": f"{cluster.ingress_url}/default/loom-gateway:8470".replace("http", "ws", 1),
            "LOOM_INSECURE": "1",  # nobody else is on this network
        }
    finally:
        cluster.remove("loom-worker")
        cluster.remove("loom-gateway")


class Program:
    """The researcher's program, on the laptop."""

    def __init__(self, process: subprocess.Popen[str], cluster: OneMachineCluster) -> None:
        self.process = process
        self.said: list[str] = []
        """The lines of its output that were read."""
        self._cluster = cluster

    def until(self, event: str) -> dict[str, Any]:
        """What it says when it comes to a point."""
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                self.said.append(line)
                if line.startswith("{"):
                    found: dict[str, Any] = json.loads(line)
                    if found["event"] == event:
                        return found
        except pytest.fail.Exception as timeout:
            raise AssertionError(f"it did not come to {event}:\n{self.told()}\n{stacks()}") from timeout
        raise AssertionError(f"it ended before {event}:\n{self.told()}")

    def told(self) -> str:
        """What the program and the pods have said last."""
        told = ["".join(self.said[-60:])]
        for pod in self._cluster.pods():
            log = self._cluster.execute(pod.name, ["sh", "-c", "tail -n 30 ~/.loom/pod/keeper.log || true"])
            told.append(f"pod {pod.name} at {pod.address}:\n{self._cluster.logs(pod.name)[-1500:]}\n{log}")
        return "\n".join(told)

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def stacks() -> str:
    """Where the Python processes that this one has started are: what a test that hangs waits for."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, subprocess.TimeoutExpired):
            if "python" not in process.name():
                continue
            command = ["py-spy", "dump", "--nonblocking", "--pid", str(process.pid)]
            found.append(subprocess.run(command, capture_output=True, text=True, timeout=10).stdout)
    return "\n".join(found)


@contextmanager
def program(
    cluster: OneMachineCluster, volume: Path, *arguments: str, env: dict[str, str] | None = None, of: Path = PROGRAM
) -> Iterator[Program]:
    process = cluster.laptop.popen(
        [sys.executable, str(of), *arguments],
        env={"CHECKPOINTS": str(volume), **(env or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield Program(process, cluster)
    finally:
        process.kill()
        process.communicate()


def gone(cluster: OneMachineCluster, *services: str) -> bool:
    return not any(cluster.pods(service) for service in services)


def survives(
    researcher: Program, cluster: OneMachineCluster, opened: dict[str, Any], victims: str, silent: bool = False
) -> None:
    """See a program through: its demo, a pod that is killed and replaced, a dead link, and the end.

    Args:
        opened: what the program said of the job; the pods of its session and of the weaver are not killed.
        victims: the workload of whose pods one is killed.
        silent: the link stays up, and nothing comes through it.
    """
    assert researcher.until("demo")["accuracy"] > 0.95
    researcher.until("training")
    cluster.kill_pod(next(pod.name for pod in cluster.pods(victims) if pod.address not in opened["needed"]))
    researcher.until("restored")
    researcher.until("host_back")
    assert researcher.until("counted")["values"] == [1, 1, 1]
    with cluster.outage(silent):
        researcher.go_on()
        researcher.until("asked")
        time.sleep(OUTAGE)
    assert researcher.until("answered")["values"] == [[number] for number in range(2, 52)]
    result = researcher.until("result")
    assert result["ending"] == "stopped"
    assert result["failures"] == 1, "\n".join(result["events"])
    researcher.until("closed")


@pytest.mark.slow
@pytest.mark.parametrize("silent", [False, True], ids=["down", "silent"])
@pytest.mark.parametrize("how", ["compute", "http"])
def test_digits_on_three_pods_survive_a_pod_that_is_killed_and_a_link_that_is_dead(
    cluster: OneMachineCluster, volume: Path, how: str, silent: bool
) -> None:
    with program(cluster, volume, how, "--kill") as researcher:
        opened = researcher.until("open")
        assert opened["hosts"] == 3
        assert opened["transport"] == {"compute": "websocket", "http": "http"}[how]
        survives(researcher, cluster, opened, "loom", silent)
    assert gone(cluster, "loom")


@pytest.mark.slow
def test_the_same_in_two_named_meshes(cluster: OneMachineCluster, volume: Path) -> None:
    with program(cluster, volume, "meshes", "--kill") as researcher:
        opened = researcher.until("open")
        assert opened["meshes"] == ["dataloaders", "workers"]
        assert opened["hosts"] == 3
        policies = cluster.laptop.run(["kubectl", "get", "networkpolicy", "-o", "name"]).stdout.split()
        assert {name.rpartition("/")[2] for name in policies} == {"loom-workers-ports", "loom-dataloaders-ports"}
        survives(researcher, cluster, opened, "loom-dataloaders")
    assert gone(cluster, "loom-workers", "loom-dataloaders")


@pytest.mark.slow
def test_the_same_on_pods_that_are_selected(cluster: OneMachineCluster, volume: Path) -> None:
    cluster.run_container("mine", SERVER, replicas=3, readiness={"httpGet": {"path": "/health", "port": 32300}})
    try:
        with program(cluster, volume, "selector", "--kill") as researcher:
            opened = researcher.until("open")
            assert opened["hosts"] == 3
            survives(researcher, cluster, opened, "mine")
        assert len(cluster.pods("mine")) == 3
    finally:
        cluster.remove("mine")


@pytest.mark.slow
def test_the_same_with_plain_manifests(cluster: OneMachineCluster, volume: Path, plain: dict[str, str]) -> None:
    with program(cluster, volume, "url", "--kill", env=plain) as researcher:
        opened = researcher.until("open")
        assert opened["hosts"] == 3
        survives(researcher, cluster, opened, "loom-worker")


@pytest.mark.slow
def test_a_gateway_of_plain_manifests_is_reached_by_the_name_of_its_service(
    cluster: OneMachineCluster, volume: Path, plain: dict[str, str]
) -> None:
    env = {**plain, "LOOM_URL": "kube://default/loom-gateway"}
    with program(cluster, volume, "url", "--kill", env=env) as researcher:
        opened = researcher.until("open")
        assert opened["hosts"] == 3
        survives(researcher, cluster, opened, "loom-worker", silent=True)


@pytest.mark.slow
def test_the_example_notebook_runs_on_pods_and_its_cells_run_there(cluster: OneMachineCluster) -> None:
    def run(command: Sequence[str]) -> str:
        done = cluster.laptop.run(command, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    compute = "kt.Compute(cpus=1, replicas=2, image=kt.Image(image_id='local'))"
    opens = f"import kubetorch as kt; job = loom.KubernetesJob(compute={compute}).apply()"
    check_elsewhere(run, opens, "job.kill()")
    assert gone(cluster, "loom")
