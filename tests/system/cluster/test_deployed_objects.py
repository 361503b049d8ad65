"""`loom.cls` and `loom.fn` with a ``kubetorch.Compute``, by the WebSocket and in Kubetorch's own way."""

from __future__ import annotations

import shutil
import subprocess
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.cluster import OneMachineCluster, missing
from tests.support.cluster.laptop import real_kubectl
from tests.support.cluster.network import NGINX_PORT
from tests.support.needs import skipped_if
from tests.support.paths import ROOT
from tests.system.cluster.test_kubernetes_job import Program, gone, program
from tests.system.cluster.test_loom_pods import NEXT_DATA_SERVER_FAILS

pytestmark = [skipped_if(missing()), pytest.mark.timeout(300), pytest.mark.slow]

OBJECTS = ROOT / "tests/support/cluster/programs" / "objects.py"

OUTAGE = 5.0
"""Seconds for which the laptop's link is dead."""

SHELF = """
import os


class Empty(Exception):
    pass


class Shelf:
    def __init__(self, start=0):
        if start < 0:
            raise ValueError(f"a start of {start}")
        self.n = start

    def put(self, k):
        self.n += k
        return self.n

    def take(self, k):
        if k > self.n:
            raise Empty(f"{k} wanted, {self.n} there")
        self.n -= k
        return k

    def each(self):
        yield from range(self.n)

    def where(self):
        return os.environ["POD_NAME"]

    def talk(self, text):
        print(text, flush=True)


def doubled(number):
    return 2 * number
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[OneMachineCluster]:
    with OneMachineCluster(("default", "research"), kubectl=real_kubectl()) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The researcher's folder, which Kubetorch ships, if it ships it, and which the pods do not see."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "pyproject.toml").touch()
    (folder / "shelf.py").write_text(SHELF)
    return Path(shutil.copy(OBJECTS, folder))


@contextmanager
def objects(
    cluster: OneMachineCluster, project: Path, *what: str, env: dict[str, str] | None = None
) -> Iterator[Program]:
    with program(cluster, project.parent, *what, env=env, of=project) as running:
        yield running


@pytest.fixture
def no_pods_left(cluster: OneMachineCluster) -> Iterator[None]:
    yield
    for namespace in ("default", "research"):
        for service in {pod.owner for pod in cluster.pods(namespace=namespace)}:
            cluster.remove(service, namespace)


def test_an_object_in_pods_of_its_own_is_called_over_the_sessions_websocket_by_several_programs(
    cluster: OneMachineCluster, project: Path, no_pods_left: None
) -> None:
    with objects(cluster, project, "held") as first:
        made = first.until("made")
        assert (made["name"], made["value"]) == ("shelf", 11)
        assert made["where"] in {pod.name for pod in cluster.pods("shelf")}
        calls = first.until("calls")
        assert calls["error"] == ["Empty", "100 wanted, 11 there", True]
        assert calls["refused"][0] == "WrongArguments"
        assert calls["unknown"][0] == "EndpointNotFound"
        assert calls["generator"] == list(range(11))
        assert calls["awaited"] == [12, 13, 14]
        assert calls["on_loop"] == list(range(14))
        with cluster.outage():
            first.go_on()
            first.until("asked")
            time.sleep(OUTAGE)
        assert first.until("resumed")["values"] == list(range(15, 35))

        with objects(cluster, project, "found") as second:
            found = second.until("found")
            assert found["value"] == 39
            assert found["error"] == ["Empty", "1000 wanted, 39 there", True]
            assert found["generator"] == [0, 1]
            with cluster.outage():
                second.go_on()
                second.until("asked")
                time.sleep(OUTAGE)
            assert second.until("resumed")["values"] == list(range(40, 60))
        first.go_on()
        assert first.until("shared")["value"] == 59
    assert not any("inaudible" in line for line in first.said)

    with objects(cluster, project, "existing") as third:
        existing = third.until("existing")
        assert existing["value"] == 59
        assert existing["unknown"][0] == "EndpointNotFound"
        printed = third.until("printed")["text"]
        assert "[shelf" in printed
        assert "audible" in printed
        anew = third.until("anew")
        assert anew["value"] == 100
        assert anew["old"] is not None
        assert third.until("named")["value"] == 100
        assert third.until("gone")["error"][0] == "NotFound"
    assert gone(cluster, "shelf")


def test_a_function_is_found_by_the_prefix_of_its_service(
    cluster: OneMachineCluster, project: Path, no_pods_left: None
) -> None:
    with objects(cluster, project, "prefixed") as run:
        assert run.until("made") == {"event": "made", "name": "ada-doubled", "value": 8}
        bobs = run.until("bobs")["error"]
        assert bobs[0] == "NotFound"
        assert "bob-doubled" in bobs[1]
        assert run.until("adas")["value"] == 10
        assert run.until("there") == {"event": "there", "name": "ada-doubled", "value": 12}
        refused = run.until("no_token")["error"]
        assert refused[0] == "AuthenticationError"
        assert "LOOM_TOKEN" in refused[1]
        assert run.until("token")["value"] == 14
        run.until("gone")
    assert gone(cluster, "ada-doubled")


def test_what_cannot_be_made_leaves_nothing(cluster: OneMachineCluster, project: Path, no_pods_left: None) -> None:
    with objects(cluster, project, "failing") as run:
        assert run.until("constructor")["error"][:2] == ["ValueError", "a start of -1"]
        assert run.until("nothing")["error"][0] == "NotFound"
        assert run.until("positional")["error"][0] == "WrongArguments"
        assert run.until("mode")["error"][0] == "Invalid"
    assert gone(cluster, "bad")


def test_http_is_kubetorchs_own_way(cluster: OneMachineCluster, project: Path, no_pods_left: None) -> None:
    with objects(cluster, project, "http") as run:
        made = run.until("made")
        assert (made["kind"], made["value"]) == ("KubetorchObject", 11)
        assert made["error"][:2] == ["Empty", "100 wanted, 11 there"]
        found = run.until("found")
        assert "at http" in found["kind"]
        assert found["value"] == 12
        assert run.until("again")["value"] == 12
        function = run.until("function")
        assert (function["value"], function["named"]) == (42, 8)
        run.until("closed")
    assert gone(cluster, "plain", "doubled")


def test_a_pod_that_kubetorch_leaves_without_the_class_is_deployed_again_for_a_call_over_http(
    cluster: OneMachineCluster, project: Path, shared: Path, no_pods_left: None
) -> None:
    (shared / "sitecustomize.py").write_text(NEXT_DATA_SERVER_FAILS)
    (shared / "fail").touch()

    with objects(cluster, project, "http_again", str(shared)) as run:
        assert run.until("made")["value"] == 11
        run.until("closed")

    assert not (shared / "fail").exists()
    assert any("deploying Shelf again (1 of at most 2 times)" in line for line in run.said)
    assert gone(cluster, "unlucky")


def test_the_public_way_of_kubetorch_deploys_the_pods_of_a_job_too(
    cluster: OneMachineCluster, project: Path, no_pods_left: None
) -> None:
    with objects(cluster, project, "by_hand") as run:
        assert run.until("deployed")["pods"] == 2
        assert run.until("called") == {"event": "called", "values": [4, 4], "hosts": 2}
        run.until("closed")
    assert gone(cluster, "mine")


@contextmanager
def kubetorchs_own_forward(cluster: OneMachineCluster) -> Iterator[None]:
    """Kubetorch's client calls ``localhost``, with the port of ``KT_API_URL``."""
    command = ["kubectl", "port-forward", "-n", "kubetorch", "svc/kubetorch-controller", f"{NGINX_PORT}:8080"]
    forward = cluster.laptop.popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert forward.stdout is not None
        assert "Forwarding" in forward.stdout.readline()
        yield
    finally:
        forward.kill()
        forward.communicate()


def test_the_address_of_nginx_and_another_namespace(
    cluster: OneMachineCluster, project: Path, no_pods_left: None
) -> None:
    env = {"KT_API_URL": cluster.kt_api_url, "KT_NAMESPACE": "research", "LOOM_INSECURE": "1"}
    with kubetorchs_own_forward(cluster), objects(cluster, project, "elsewhere", env=env) as run:
        opened = run.until("open")
        assert opened["url"] == f"{cluster.kt_api_url}/research/study-headless:8470".replace("http", "ws")
        assert (opened["transport"], opened["synced"]) == ("websocket", [project.parent.name])
        assert run.until("own") == {"event": "own", "value": 2, "by_name": [2, 4, True]}
        assert run.until("made")["value"] == 5
        assert run.until("here")["error"][0] == "NotFound"
        assert run.until("named")["value"] == 6
        run.until("closed")
    assert cluster.pods(namespace="research") == []


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel of the Loom that is installed, as far as its name tells."""
    path = tmp_path / f"monarch_loom-{version('monarch-loom')}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("loom/__init__.py", "")
    return path


def test_a_step_of_an_image_that_fails_is_told_and_looms_own_line_does_not(
    cluster: OneMachineCluster, project: Path, wheel: Path, no_pods_left: None
) -> None:
    with objects(cluster, project, "images", str(wheel)) as run:
        kind, text, _ = run.until("broken")["error"]
        assert kind == "DeploymentFailed"
        assert "nothing-like-it==1.0` failed: error: nothing-like-it is not installed" in text
        assert run.until("installed")["value"] == 2
        run.until("closed")
    assert gone(cluster, "broken", "installed")
