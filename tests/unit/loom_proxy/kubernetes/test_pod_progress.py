"""What is shown while the pods of a `loom.KubernetesJob` are waited for."""

from __future__ import annotations

import io
import os
import pty
import select
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import loom
from loom_proxy.kubernetes import deployment as pod_progress
from loom_proxy.kubernetes.deployment import PodMesh, PodState

READY = PodState("loom-1", "10.0.0.1", True, "")
UNPULLABLE = PodState("loom-2", "", False, 'ImagePullBackOff: Back-off pulling image "mine:1"')
WAITING = "deploying me-loom: 1 of 2 pods ready: loom-2: ImagePullBackOff: Back-off pulling image"

BOUND = 30.0


@pytest.fixture(autouse=True)
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOOM_PROGRESS", raising=False)
    monkeypatch.setattr(pod_progress, "AFTER", 0.0)
    monkeypatch.setattr(pod_progress, "LOOK_EVERY", 0.01)


class Screen:
    """A terminal, of which stderr is one end while it is used as a context manager."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self._stderr = open(slave, "w")  # noqa: SIM115 - closed with the other end
        self.text = ""

    def __enter__(self) -> None:
        self._before, sys.stderr = sys.stderr, self._stderr

    def __exit__(self, *error: object) -> None:
        sys.stderr = self._before

    def close(self) -> None:
        self._stderr.close()
        os.close(self._master)

    def until(self, text: str) -> None:
        while text not in self.text:
            readable, _, _ = select.select([self._master], [], [], BOUND)
            assert readable, f"it shows nothing more than {self.text[-500:]!r}"
            self.text += os.read(self._master, 65536).decode(errors="replace")


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    screen = Screen()
    yield screen
    screen.close()


def test_a_terminal_shows_how_many_pods_are_ready_and_why_the_others_are_not(screen: Screen) -> None:
    with screen, pod_progress.pods_shown(lambda: "deploying me-loom", lambda: [READY, UNPULLABLE]):
        screen.until(WAITING)


def test_what_is_done_and_how_far_it_is_are_shown_as_they_change(screen: Screen) -> None:
    doing = ["deploying me-loom"]
    pods = [READY, UNPULLABLE]

    with screen, pod_progress.pods_shown(lambda: doing[0], lambda: list(pods)):
        screen.until(WAITING)
        pods[1] = READY
        screen.until("deploying me-loom: 2 of 2 pods ready, ")
        doing[0] = "starting the workers and the gateway"
        screen.until("starting the workers and the gateway: 2 of 2 pods ready, ")


def test_pods_that_cannot_be_seen_do_not_disturb_the_wait(screen: Screen) -> None:
    asked = threading.Event()

    def pods() -> list[PodState]:
        asked.set()
        raise ConnectionError("no way to Kubernetes")

    with screen, pod_progress.pods_shown(lambda: "deploying me-loom", pods):
        assert asked.wait(BOUND)


def test_nothing_is_shown_and_nobody_is_asked_where_stderr_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    asked = threading.Event()

    def pods() -> list[PodState]:
        asked.set()
        return []

    with pod_progress.pods_shown(lambda: "deploying me-loom", pods):
        threads = [thread.name for thread in threading.enumerate()]

    assert "loom-progress" not in threads
    assert not asked.is_set()
    assert stderr.getvalue() == ""


def test_a_job_shows_its_pods_while_it_is_deployed(
    screen: Screen, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    kt = pytest.importorskip("kubetorch")

    def deploy(mesh: PodMesh, init_args: Any) -> None:
        screen.until(f"deploying {mesh.service_name}: 1 of 2 pods ready: loom-2: ImagePullBackOff")
        raise loom.DeploymentFailed("seen")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(PodMesh, "exists", lambda mesh: False)
    monkeypatch.setattr(PodMesh, "pods", lambda mesh: [READY, UNPULLABLE])
    monkeypatch.setattr(PodMesh, "deploy", deploy)
    job = loom.KubernetesJob(compute=kt.Compute(cpus=1, replicas=2))

    with screen, pytest.raises(loom.DeploymentFailed, match="seen"):
        job.apply()
