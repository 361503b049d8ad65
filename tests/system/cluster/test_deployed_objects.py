"""`loom.cls` and `loom.fn` with a ``kubetorch.Compute``, by the WebSocket and in Kubetorch's own way."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.cluster import OneMachineCluster, missing
from tests.support.cluster.laptop import real_kubectl
from tests.support.needs import skipped_if
from tests.support.paths import ROOT
from tests.system.cluster.test_kubernetes_job import Program, gone, program

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
    with OneMachineCluster(kubectl=real_kubectl()) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The researcher's folder, which Kubetorch ships, if it ships it, and which the pods do not see."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "pyproject.toml").touch()
    (folder / "shelf.py").write_text(SHELF)
    return Path(shutil.copy(OBJECTS, folder))


@contextmanager
def objects(cluster: OneMachineCluster, project: Path, what: str) -> Iterator[Program]:
    with program(cluster, project.parent, what, of=project) as running:
        yield running


@pytest.fixture
def no_pods_left(cluster: OneMachineCluster) -> Iterator[None]:
    yield
    for service in {pod.owner for pod in cluster.pods()}:
        cluster.remove(service)


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

    with objects(cluster, project, "existing") as third:
        existing = third.until("existing")
        assert existing["value"] == 59
        assert existing["unknown"][0] == "EndpointNotFound"
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
