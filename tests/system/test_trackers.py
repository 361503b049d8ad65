"""Exports to the trackers' own packages: each point is there once over cuts, and kills of every process."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loom.exporters.naming import event_of
from loom.process.listen import free_ports
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import TOKEN, await_true, gateway_of
from tests.support.network.gate import Gate
from tests.support.trackers import environment, read_marks, read_points
from tests.support.weaver_training import training
from tests.support.weavers import await_weaver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

KINDS = ("tensorboard", "mlflow", "trackio", "wandb")
CUTS = 30
SOON = "from loom.exporters import exporter; exporter.INTERVAL = 0.3; from loom.cli import main; main()"
"""An export that makes many passes, so that many are cut."""


_made: list[Export] = []


@pytest.fixture(autouse=True)
def _none_is_left() -> Iterator[None]:
    """Kill the exports of a test that failed."""
    yield
    for export in _made:
        if export.process.poll() is None:
            export.process.kill()
            export.process.wait()
    _made.clear()


class Export:
    """The process of ``loom export`` to a tracker, which may be killed."""

    def __init__(self, kind: str, url: str, folder: Path, **variables: str) -> None:
        self._kind, self._url, self._folder = kind, url, folder
        self._environment = {**environment(folder), **variables}
        self._token = variables.get("TOKEN", TOKEN)
        self._said = 0
        """The announcements of the processes before."""
        _made.append(self)
        self.start()

    def start(self) -> None:
        arguments = ["export", "--to", self._kind, "--folder", str(self._folder), "--replica", "exported"]
        with (self._folder / f"{self._kind}.log").open("a") as log:
            self._said = self._announcements()
            self.process = subprocess.Popen(
                [sys.executable, "-c", SOON, *arguments, "--url", self._url, "--token", self._token],
                env=self._environment,
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.start()

    @property
    def log(self) -> str:
        return (self._folder / f"{self._kind}.log").read_text()

    def _announcements(self) -> int:
        return self.log.count('"event": "exporting"')

    def begun(self) -> None:
        """Wait until the process exports: before, it takes no signal."""
        await_true(lambda: self._announcements() > self._said, 120)

    def end(self) -> int:
        self.begun()
        self.process.terminate()
        return self.process.wait(120)


def test_each_point_is_once_in_each_tracker(cluster: LocalCluster, tmp_path: Path) -> None:
    for module in KINDS:
        pytest.importorskip(module)
    rng = random.Random(58)
    with gateway_of(cluster) as gateway, Gate(int(gateway.url.rpartition(":")[2])) as gate:
        proxy = WeaverProxy(gateway.url, TOKEN)
        with training(await_weaver(proxy), "exported"):
            await_true(lambda: "exported" in proxy.replicas())
            exports = {kind: Export(kind, f"ws://127.0.0.1:{gate.port}", tmp_path) for kind in KINDS}
            for kind in KINDS:
                await_true(lambda kind=kind: read_points(kind, tmp_path, "exported", "loss") != [], 120)
            for cut in range(CUTS):
                time.sleep(rng.uniform(0.1, 1.5))  # the cuts are at any moment of a pass
                gate.cut()
                if cut % 3 == 0:
                    exports[rng.choice(KINDS)].kill()
                if cut in (10, 20):
                    gateway.end()
                    gateway.start()
                if cut == 15:
                    gateway.weavers()[0].kill()
                if cut % 10 == 5:
                    await_weaver(proxy)
                    proxy.update_config("exported", learning_rate=0.1 / (1 + cut)).get(60)
            await_weaver(proxy)
            proxy.stop("exported").get(60)
            await_true(lambda: not proxy.replica("exported").connected)
            steps = proxy.replica("exported").step
        assert steps is not None
        events = {event.id for event in proxy.events(0, replica="exported", limit=10_000)}
        ended = {kind: export.end() for kind, export in exports.items()}

    assert ended == dict.fromkeys(KINDS, 0), {kind: export.log[-2000:] for kind, export in exports.items()}
    for kind in KINDS:
        points = read_points(kind, tmp_path, "exported", "loss")
        marks = sorted(event_of(mark) for mark in read_marks(kind, tmp_path, "exported"))
        assert sorted(step for step, _ in points) == list(range(steps + 1)), kind
        assert len(set(marks)) == len(marks), kind
        assert set(marks) <= events, kind
        assert len(marks) >= 6, kind


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """The URL of a real MLflow server on this machine."""
    program = shutil.which("mlflow")
    if program is None:
        pytest.skip("the program mlflow is not installed, or not on PATH: pip install mlflow")
    (port,) = free_ports(1)
    where = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    stores = ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", str(folder / "a")]
    url = f"http://127.0.0.1:{port}"
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [program, "server", *where, *stores], stdout=log, stderr=log, start_new_session=True
        )

    def answers() -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
        if server.poll() is not None:
            pytest.skip(f"mlflow server does not start: {(folder / 'server.log').read_text()[-500:]}")
        return False

    try:
        await_true(answers, 180)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has not started
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_each_point_is_once_in_a_mlflow_server_over_ten_kills_of_the_export(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    mlflow = pytest.importorskip("mlflow")
    rng = random.Random(10)
    proxy = WeaverProxy(cluster.url, cluster.token)
    with mlflow_server(tmp_path) as url, training(await_weaver(proxy), "exported"):
        await_true(lambda: "exported" in proxy.replicas())
        export = Export("mlflow", cluster.url, tmp_path, TOKEN=cluster.token, MLFLOW_TRACKING_URI=url)
        client = mlflow.MlflowClient(url)

        def runs() -> list[Any]:
            found = client.get_experiment_by_name("loom")
            return [] if found is None else client.search_runs([found.experiment_id])

        await_true(lambda: any("loss" in run.data.metrics for run in runs()), 120)
        for _ in range(10):
            export.begun()
            time.sleep(rng.uniform(0.1, 3.0))  # the kills are at any moment of a pass
            export.kill()
        await_true(lambda: "mlflow" in proxy.replica("exported").links)
        proxy.stop("exported").get(60)
        await_true(lambda: not proxy.replica("exported").connected)
        made = proxy.replica("exported").step
        assert export.end() == 0, export.log[-2000:]
        (run,) = runs()
        points = client.get_metric_history(run.info.run_id, "loss")
        link = proxy.replica("exported").links["mlflow"]

    assert made is not None
    assert sorted(point.step for point in points) == list(range(made + 1))
    assert link == f"{url}/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
