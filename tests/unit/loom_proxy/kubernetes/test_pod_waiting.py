"""How a `loom.KubernetesJob` waits for its pods. The pods are stand-ins here, and real in tests/cluster."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest

import loom
from loom_proxy.kubernetes import rollout as pod_waiting
from loom_proxy.kubernetes.deployment import PodState, answer
from loom_proxy.kubernetes.rollout import MOST_AGAIN, PodStart, fails_again, is_final

LOADING = {"detail": "Server is loading the callable. Please retry in a moment."}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_waiting, "ASK_EVERY", 0.0)
    monkeypatch.setattr(pod_waiting, "UNLOADED_FOR", 0.0)


class Mesh:
    """Two pods, of which the second is asked; one that loads its class at its Nth deployment.

    Args:
        loads_at: the number of that deployment, the first being 0.
        says: what it answers until then.
    """

    namespace = "default"

    def __init__(
        self,
        name: str = "workers",
        loads_at: int = 0,
        says: Callable[[], Any] = lambda: LOADING,
        ready: bool = True,
    ) -> None:
        self.name = name
        self.service_name = f"me-{name}"
        self.pods_wanted = 2
        self.deployed = 0
        self.asked = 0
        self.silent = 0  # for so many questions, the worker of the last pod does not listen yet
        self._loads_at = loads_at
        self._says = says
        self._ready = ready
        self.others: list[Mesh] = []
        self.failed: list[str] = []

    def pods(self) -> list[PodState]:
        return [PodState(f"{self.name}-{n}", self.address(n), self._ready or n == 0, "") for n in (0, 1)]

    def address(self, n: int) -> str:
        return f"{self.name}.{n}"

    def deploy(self) -> None:
        self.deployed += 1

    def failed_steps(self) -> list[str]:
        return self.failed

    def loaded(self, n: int) -> bool:
        return n == 0 or self.deployed >= self._loads_at

    def status(self) -> dict[str, Any]:
        self.asked += 1
        asked = self.asked % 2  # any pod is asked
        if not self.loaded(asked):
            return answer(self._says())
        pods = [
            state(mesh, n, gateway=mesh is self and n == 0)
            for mesh in (self, *self.others)
            for n in (0, 1)
            if mesh.loaded(n)
        ]
        if self.silent:
            self.silent -= 1
            pods[-1]["worker"] |= {"listening": False, "state": "starting"}
        return {"pods": pods, "gateway": self.address(0)}


def state(mesh: Mesh, n: int, gateway: bool) -> dict[str, Any]:
    return {
        "name": f"{mesh.name}-{n}",
        "address": mesh.address(n),
        "mesh": mesh.name,
        "versions": {"python": ".".join(map(str, sys.version_info[:3])), "monarch-loom": loom.__version__},
        "worker": {"listening": True, "state": "listening", "starts": 1, "problem": ""},
        "gateway": gateway,
        "gateway_listening": gateway,
        "gateway_starts": 1,
        "gateway_problem": "",
    }


def raised_in_a_pod(error_type: str, message: str) -> Exception:
    """What Kubetorch's own client raises for an error of a pod."""
    httpx = pytest.importorskip("httpx")
    http_client = pytest.importorskip("kubetorch.serving.http_client")
    answer = {"error_type": error_type, "message": message, "traceback": "Traceback …", "pod_name": "me-1"}
    try:
        http_client.CustomResponse(500, json=answer, request=httpx.Request("POST", "http://pod")).raise_for_status()
    except Exception as error:  # noqa: BLE001 - of a class that Kubetorch has made
        return error
    raise AssertionError("Kubetorch's client has raised nothing")


def wait(*meshes: Mesh, timeout: float = 60.0) -> PodStart:
    meshes[0].others = list(meshes[1:])
    start = PodStart(meshes, timeout, lambda mesh: mesh.deploy())  # type: ignore[arg-type, attr-defined]
    start.wait()
    return start


def test_pods_that_load_their_class_are_deployed_once() -> None:
    mesh = Mesh()

    wait(mesh)

    assert mesh.deployed == 0


def test_a_step_of_the_image_that_has_failed_ends_the_wait() -> None:
    mesh = Mesh()
    mesh.failed = ["pod me-1: the image's step `pip install it` failed: no such thing"]

    with pytest.raises(loom.DeploymentFailed, match=r"^pod me-1: the image's step .* correct the image"):
        wait(mesh)


def test_a_worker_that_does_not_listen_yet_is_waited_for() -> None:
    mesh = Mesh()
    mesh.silent = 3

    wait(mesh)

    assert (mesh.silent, mesh.asked, mesh.deployed) == (0, 4, 0)


@pytest.mark.parametrize("deployments", range(1, MOST_AGAIN + 1))
def test_a_pod_that_stays_without_its_class_is_deployed_again(
    deployments: int, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = Mesh(loads_at=deployments)

    with caplog.at_level(logging.WARNING, "loom_proxy"):
        start = wait(mesh)

    assert mesh.deployed == deployments
    assert len(caplog.records) == deployments
    assert "deploying me-workers again (1 of at most 2 times): one of the pods" in caplog.text
    assert "has not loaded LoomPod yet: Server is loading the callable" in caplog.text
    assert start.doing == "starting the workers and the gateways"


class Clock:
    """Time that passes only in sleep."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_pod_has_twice_as_long_the_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(pod_waiting, "time", clock)
    monkeypatch.setattr(pod_waiting, "ASK_EVERY", 1.0)
    monkeypatch.setattr(pod_waiting, "UNLOADED_FOR", 10.0)
    mesh = Mesh(loads_at=2)
    deployed = []

    def deploy(mesh: Any) -> None:
        deployed.append(clock.now)
        mesh.deploy()

    PodStart([mesh], 60.0, deploy).wait()  # type: ignore[list-item]

    first, second = deployed
    assert 10 <= first < 15
    assert 20 <= second - first < 25


def test_what_is_done_is_said_while_it_is_deployed_again() -> None:
    mesh = Mesh(loads_at=1)
    said = []

    def deploy(mesh: Any) -> None:
        said.append(start.doing)
        mesh.deploy()

    start = PodStart([mesh], 60.0, deploy)  # type: ignore[list-item]
    start.wait()

    assert said == ["deploying me-workers again (1 of at most 2 times)"]


def test_a_deployment_that_is_refused_then_changes_nothing() -> None:
    mesh = Mesh(loads_at=1)

    def deploy(mesh: Any) -> None:
        mesh.deploy()
        if mesh.deployed == 1:
            raise loom.DeploymentFailed("the controller is busy")

    PodStart([mesh], 60.0, deploy).wait()  # type: ignore[list-item]

    assert mesh.deployed == 1


def test_a_pod_that_never_loads_its_class_is_named() -> None:
    mesh = Mesh(loads_at=MOST_AGAIN + 1)

    with pytest.raises(loom.DeploymentFailed) as raised:
        wait(mesh, timeout=1.0)

    assert mesh.deployed == MOST_AGAIN
    assert "pod workers-1 is ready and has not loaded LoomPod yet: Server is loading" in str(raised.value)
    assert "although it was deployed 2 times more; see `kubectl logs -n default workers-1`" in str(raised.value)


def test_only_the_mesh_of_a_pod_without_its_class_is_deployed_again() -> None:
    first, second = Mesh("loaders"), Mesh("trainers", loads_at=1)

    wait(first, second)

    assert (first.deployed, second.deployed) == (0, 1)


def test_a_pod_that_gives_a_reason_is_not_deployed_again() -> None:
    def refuse() -> Any:
        raise ValueError("the constructor does not like this")

    mesh = Mesh(loads_at=1, says=refuse)

    with pytest.raises(loom.DeploymentFailed, match="ValueError: the constructor does not like this"):
        wait(mesh, timeout=0.5)

    assert mesh.deployed == 0


def test_a_pod_whose_image_lacks_something_ends_the_wait_at_once() -> None:
    def lack() -> Any:
        raise raised_in_a_pod("ModuleNotFoundError", "No module named 'loom_gateway'")

    mesh = Mesh("trainers", loads_at=1, says=lack)

    with pytest.raises(
        loom.DeploymentFailed, match=r"pod me-1 has no Loom in its image \(No module .*use loom\.images\.cpu"
    ):
        wait(Mesh("loaders"), mesh)

    assert mesh.deployed == 0


@pytest.mark.parametrize(
    ("error_type", "final"),
    [("ImportError", True), ("MissingDependency", True), ("WrongArguments", True), ("RuntimeError", False)],
)
def test_what_a_pod_raised_is_known_by_its_class_not_by_its_words(error_type: str, final: bool) -> None:
    assert is_final(raised_in_a_pod(error_type, "after an ImportError")) is final


def test_a_worker_whose_port_is_taken_is_not_waited_for() -> None:
    pod = state(Mesh(), 0, gateway=False)
    of_a_port = {**pod["worker"], "listening": False, "starts": 0, "problem": "process 7 listens there"}

    assert not fails_again({"pods": [{**pod, "worker": {**of_a_port, "state": "starting"}}]})
    assert fails_again({"pods": [{**pod, "worker": {**of_a_port, "state": "port_taken"}}]})


def test_pods_that_are_not_ready_yet_are_not_deployed_again() -> None:
    mesh = Mesh(loads_at=1, ready=False)

    with pytest.raises(loom.DeploymentFailed):
        wait(mesh, timeout=0.5)

    assert mesh.deployed == 0


def test_a_start_that_nobody_wants_any_more_ends() -> None:
    mesh = Mesh(loads_at=5)
    start = PodStart([mesh], 60.0, lambda mesh: mesh.deploy(), lambda: mesh.deployed > 0)  # type: ignore[list-item, attr-defined, call-arg]

    start.wait()

    assert mesh.deployed == 1
