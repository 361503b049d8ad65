"""Kubetorch in the one-machine cluster: its real client on the laptop, its real pod server in each pod."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import OneMachineCluster, missing
from tests.support.cluster.laptop import real_kubectl
from tests.support.needs import skipped_if

pytest.importorskip("kubetorch")
pytestmark = skipped_if(missing())

UNPULLABLE = "registry.example/nothing:1"

COUNTER = """
import os, subprocess

class Counter:
    def __init__(self, start=0):
        self.n = start

    def add(self, k):
        self.n += k
        return self.n

    def where(self):
        return {"pod": os.environ["POD_NAME"], "address": os.environ["POD_IP"], "pid": os.getpid(),
                "folder": os.getcwd(), "parent": os.getppid()}

    def leave(self):
        # A child, and a process that is no descendant of this one.
        child = subprocess.Popen(["sleep", "1000"])
        left = subprocess.check_output(["sh", "-c", "setsid sleep 2000 >/dev/null & echo $!"])
        return [child.pid, int(left)]

    def alive(self, pids):
        def state(pid):
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0]
        return [pid for pid in pids if os.path.exists(f"/proc/{pid}") and state(pid) != "Z"]

    def version(self):
        return VERSION

VERSION = 1
"""

DEPLOY = """
import json, sys, time
import kubetorch as kt
from counter import Counter

def deployed():
    return kt.cls(Counter).to(compute, init_args={"start": 10})

def answer(name, *arguments):
    # Of several pods, one may be asked that is still loading the class, and says so. Now and then Kubetorch leaves
    # one without it for good: then it has to be deployed again, as Loom does for its own.
    global counter
    began = time.monotonic()
    again = began + 20
    while True:
        found = getattr(counter, name)(*arguments)
        if not (isinstance(found, dict) and "retry in a moment" in found.get("detail", "")):
            return found
        if time.monotonic() > began + 60:
            raise TimeoutError(found["detail"])
        if time.monotonic() > again:
            print("DEPLOYED AGAIN")
            counter, again = deployed(), time.monotonic() + 20
        time.sleep(0.2)

replicas, calls = int(sys.argv[1]), json.loads(sys.argv[2])
compute = kt.Compute(cpus="0.1", replicas=replicas, launch_timeout=90, image=kt.Image(image_id=sys.argv[3]))
compute.distribute("local", workers=replicas)
try:
    counter = deployed()
    answers = [answer(name, *arguments) for name, *arguments in calls]
    print("ANSWERS", json.dumps(answers))
    if "teardown" in sys.argv:
        counter.teardown()
except Exception as error:
    print("ERROR", json.dumps([type(error).__name__, str(error)]))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[OneMachineCluster]:
    with OneMachineCluster(missing_images=[UNPULLABLE], kubectl=real_kubectl()) as cluster:
        yield cluster


@pytest.fixture
def project(cluster: OneMachineCluster, tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    (folder / "counter.py").write_text(COUNTER)
    (folder / "deploy.py").write_text(DEPLOY)
    yield folder
    cluster.remove("counter")


def deploy(
    cluster: OneMachineCluster,
    project: Path,
    replicas: int,
    *calls: list[Any],
    image: str = "local",
    teardown: bool = False,
    env: dict[str, str] | None = None,
) -> Any:
    """Deploy the counter from the laptop, and call its methods: the answers."""
    command = [sys.executable, "deploy.py", str(replicas), json.dumps(calls), image, *["teardown"] * teardown]
    done = cluster.laptop.run(command, cwd=project, timeout=110.0, env=env)
    found = [line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("ANSWERS", "ERROR"))]
    logs = "\n".join(cluster.logs(pod.name)[-3000:] for pod in cluster.pods())
    said = f"{done.stdout}\n{done.stderr}\n{logs}"
    assert found, said
    print(said)  # shown if the test fails
    return json.loads(found[0][1])


def test_a_class_deployed_from_the_laptop_answers_over_http(cluster: OneMachineCluster, project: Path) -> None:
    answers = deploy(cluster, project, 1, ["add", 5], ["where"], teardown=True)
    assert answers[0] == 15
    # The code came by rsync: the pod does not see the laptop's folder.
    assert answers[1]["folder"].endswith("/home")
    assert answers[1]["parent"] == 1
    assert cluster.pods("counter") == []


@pytest.mark.slow
def test_three_replicas_have_three_addresses_and_a_lost_one_comes_back(
    cluster: OneMachineCluster, project: Path
) -> None:
    assert deploy(cluster, project, 3, ["add", 5]) == [15]
    pods = cluster.wait_ready("counter", 3)
    name = "counter-headless.default.svc.cluster.local"
    assert cluster.resolve(name) == sorted(pod.address for pod in pods)
    cluster.kill_pod(pods[0].name)
    again = cluster.wait_ready("counter", 3, timeout=60.0)
    cluster.wait_until(
        lambda: cluster.resolve(name) == sorted(pod.address for pod in again), 10.0, "DNS to have the new pod"
    )


@pytest.mark.slow
def test_a_redeploy_loads_the_new_code_and_ends_the_children_of_the_old(
    cluster: OneMachineCluster, project: Path
) -> None:
    first, (child, left) = deploy(cluster, project, 1, ["where"], ["leave"])
    (project / "counter.py").write_text(COUNTER.replace("VERSION = 1", "VERSION = 2"))
    version, second, alive = deploy(cluster, project, 1, ["version"], ["where"], ["alive", [child, left]])
    assert version == 2
    assert (second["pod"], second["pid"] != first["pid"]) == (first["pod"], True)
    assert alive == [left]


@pytest.mark.slow
def test_an_image_that_cannot_be_pulled_is_an_error_at_once(cluster: OneMachineCluster, project: Path) -> None:
    kind, text = deploy(cluster, project, 1, image=UNPULLABLE)
    assert kind == "ImagePullError"
    assert UNPULLABLE in text


@pytest.mark.slow
def test_a_namespace_that_does_not_exist_is_an_error(cluster: OneMachineCluster, project: Path) -> None:
    kind, _ = deploy(cluster, project, 1, env={"KT_NAMESPACE": "nowhere"})
    # Kubetorch fails at the first thing that it does there: the upload of the code.
    assert kind == "RsyncError"


@pytest.mark.slow
def test_pods_that_run_already_are_given_a_class_by_their_labels(cluster: OneMachineCluster, project: Path) -> None:
    server = [
        "python3",
        "-m",
        "uvicorn",
        "kubetorch.serving.http_server:app",
        "--host",
        "0.0.0.0",
        "--port",
        "32300",
    ]
    health = {"httpGet": {"path": "/health", "port": 32300}}
    cluster.run_container("own", server, labels={"team": "own"}, readiness=health)
    pod = cluster.wait_ready("own", 1)[0]
    script = (project / "deploy.py").read_text()
    selected = 'compute = kt.Compute(selector={"team": "own"})\n'
    start, end = script.index("compute = "), script.index("try:")
    (project / "deploy.py").write_text(script[:start] + selected + script[end:])
    count, where = deploy(cluster, project, 1, ["add", 1], ["where"])
    assert (count, where["pod"]) == (11, pod.name)
    cluster.remove("own")
