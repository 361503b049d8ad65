"""Exports to the trackers' own packages: each point is there once over cuts, and kills of every process."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loom.exporters.tracker import event_of
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


class Export:
    """The process of ``loom export`` to a tracker, which may be killed."""

    def __init__(self, kind: str, url: str, folder: Path) -> None:
        self._kind, self._url, self._folder = kind, url, folder
        self._starts = 0
        self.start()

    def start(self) -> None:
        self._starts += 1
        arguments = ["export", "--to", self._kind, "--folder", str(self._folder), "--replica", "exported"]
        with (self._folder / f"{self._kind}.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SOON, *arguments, "--url", self._url, "--token", TOKEN],
                env=environment(self._folder),
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

    def end(self) -> int:
        await_true(
            lambda: self.log.count('"event": "exporting"') == self._starts, 120
        )  # else nobody takes the signal
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
