"""Exports to trackers: by a gateway's settings for every run, and by ``loom export``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from loom.errors import WrongArguments
from loom.process.listen import free_ports
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import TOKEN, Gateway, await_true, gateway_of, run_gateway
from tests.support.processes import run_loom
from tests.support.trackers import environment, read_marks, read_points
from tests.support.weaver_training import training
from tests.support.weavers import await_weaver

pytest.importorskip("tensorboard")


def steps(folder: Path) -> list[int]:
    return sorted(step for step, _ in read_points("tensorboard", folder, "exported", "loss"))


@pytest.fixture
def gateway(cluster: LocalCluster, tmp_path: Path) -> Iterator[Gateway]:
    with gateway_of(cluster, "--export", "tensorboard", "--export-folder", str(tmp_path)) as running:
        yield running


def stopped(proxy: WeaverProxy) -> int:
    """Stop the training; return the number of its steps."""
    proxy.stop("exported").get(30)
    await_true(lambda: not proxy.replica("exported").connected)
    made = proxy.replica("exported").step
    assert made is not None
    return made + 1


def test_a_gateway_exports_every_run_each_point_once_over_its_restart(gateway: Gateway, tmp_path: Path) -> None:
    proxy = WeaverProxy(gateway.url, TOKEN)
    with training(await_weaver(proxy), "exported"):
        await_true(lambda: len(steps(tmp_path)) > 10)
        gateway.end()
        gateway.start()
        await_weaver(proxy)
        proxy.update_config("exported", learning_rate=0.05).get(30)
        made = stopped(proxy)
    changed = "applied update_config by gateway learning_rate: 0.1 → 0.05"
    await_true(lambda: any("finished" in mark for mark in read_marks("tensorboard", tmp_path, "exported")))

    marks = read_marks("tensorboard", tmp_path, "exported")
    assert steps(tmp_path) == list(range(made))
    assert sum(changed in mark for mark in marks) == 1
    assert len({mark.split()[0] for mark in marks}) == len(marks)


def test_a_tracker_that_is_away_keeps_nothing_from_another_one(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_ports(1)[0]}")
    both = ("--export", "mlflow", "--export", "tensorboard", "--export-folder", str(tmp_path))
    with gateway_of(cluster, *both) as gateway:
        proxy = WeaverProxy(gateway.url, TOKEN)
        with training(await_weaver(proxy), "exported"):
            await_true(lambda: len(steps(tmp_path)) > 10)
            made = stopped(proxy)
        await_true(lambda: any("finished" in mark for mark in read_marks("tensorboard", tmp_path, "exported")))

    assert steps(tmp_path) == list(range(made))


def test_a_gateway_refuses_a_tracker_that_it_does_not_know(cluster: LocalCluster) -> None:
    ended = run_gateway(Gateway(cluster.workers, "--export", "excel"))

    assert ended.returncode == 2
    assert "there is no tracker 'excel'; there are wandb, mlflow, trackio, tensorboard" in ended.stderr


def test_loom_export_writes_once_what_is_there(cluster: LocalCluster, tmp_path: Path) -> None:
    proxy = WeaverProxy(cluster.url, cluster.token)
    export = ["export", "--to", "tensorboard", "--once", "--folder", str(tmp_path), "--replica", "exported"]
    access = ["--url", cluster.url, "--token", cluster.token]
    with training(await_weaver(proxy), "exported"):
        await_true(lambda: "exported" in proxy.replicas() and (proxy.replica("exported").step or 0) > 20)
        first = run_loom(*export, *access, env=environment(tmp_path))
        there = steps(tmp_path)
        proxy.stop("exported").get(30)
    second = run_loom(*export, *access, env=environment(tmp_path))
    made = proxy.replica("exported").step
    assert made is not None

    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert json.loads(first.stdout)["tracker"] == "tensorboard"
    assert there == list(range(len(there)))
    assert len(there) > 20
    assert steps(tmp_path) == list(range(made + 1))


def test_a_link_to_a_run_is_with_the_replica_and_in_the_status(cluster: LocalCluster) -> None:
    proxy = WeaverProxy(cluster.url, cluster.token)
    with training(await_weaver(proxy), "linked"):
        await_true(lambda: "linked" in proxy.replicas())
        proxy.link("linked", "mlflow", "https://mlflow.example/#/runs/7")
        status = run_loom("status", "--url", cluster.url, "--token", cluster.token).stdout
        shown = proxy.replica("linked").links
        with pytest.raises(WrongArguments):
            proxy.link("linked", "mlflow", "javascript:alert(1)")

    assert shown == {"mlflow": "https://mlflow.example/#/runs/7"}
    assert "linked: mlflow https://mlflow.example/#/runs/7" in status
    assert proxy.link("linked", "mlflow") == {}
