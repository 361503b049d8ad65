"""Runs of real processes: starts under one name, a change, deaths of the training and the weaver, two users."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import loom
from loom_gateway.sessions.state_dir import DriverFiles
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import BOUND, TOKEN, Gateway, await_true, gateway_of
from tests.support.processes import read_json, run_loom
from tests.support.users import House
from tests.support.weaver_training import training
from tests.support.weavers import await_another, await_weaver

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def gateway(cluster: LocalCluster) -> Iterator[Gateway]:
    with gateway_of(cluster) as running:
        yield running


@pytest.fixture(scope="module")
def weaver(gateway: Gateway) -> WeaverProxy:
    found = WeaverProxy(gateway.url, TOKEN)
    await_weaver(found)
    return found


@contextmanager
def started(gateway: Gateway, *before: str) -> Iterator[subprocess.Popen[str]]:
    """A training under ``loom run``, which trains when this begins; it is killed in the end."""
    loom_run = [str(Path(sys.executable).with_name("loom")), "run", "--name", "kept", "--"]
    train = [sys.executable, "-m", "tests.support.weaver_training", "kept_0", "kept"]
    environment = {**os.environ, "LOOM_URL": gateway.url, "LOOM_TOKEN": TOKEN}
    with subprocess.Popen(
        [*loom_run, *before, *train], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            read_json(process)
            yield process
        finally:
            process.kill()


def steps(weaver: WeaverProxy) -> int:
    found = weaver.runs("kept", limit=1)
    return -1 if not found or found[0].state != "running" else found[0].step or 0


def test_two_starts_are_two_runs_with_their_changes_ends_and_curves(gateway: Gateway, weaver: WeaverProxy) -> None:
    with started(gateway, "env", "API_KEY=hunter2") as first:
        await_true(lambda: steps(weaver) > 5)
        weaver.update_config("kept_0", learning_rate=0.5).get(BOUND)
        before = weaver.status()["weaver"]
        os.kill(DriverFiles(str(gateway.state / "weaver" / "weaver")).read_record().pid, signal.SIGKILL)
        await_another(weaver, before)
        reached = steps(weaver)
        await_true(lambda: steps(weaver) > reached + 5)
        first.kill()
        await_true(lambda: weaver.runs("kept")[0].state != "running")
    with started(gateway) as second:
        await_true(lambda: steps(weaver) > 5)
        weaver.stop("kept_0").get(BOUND)
        second.wait(BOUND)
        await_true(lambda: weaver.runs("kept")[0].state != "running")

    latest, earlier = weaver.runs("kept")
    assert (latest.state, earlier.state, earlier.first) == ("stopped", "crashed", "kept_0")
    assert latest.by
    assert earlier.command[:2] == ("env", "API_KEY=***")
    assert earlier.commit
    assert earlier.start["versions"]["python"]
    (change,) = [mark for mark in earlier.timeline if mark["kind"] == "command"]
    assert (change["do"], change["applied"], change["changes"]["learning_rate"]["new"]) == ("update_config", 1, 0.5)
    assert [mark["kind"] for mark in earlier.timeline if mark["kind"] != "command"] == [
        "started",
        "crashed",
        "ended",
    ]
    for run in (latest, earlier):
        made = [point.step for point in run.history("loss")]
        assert made == list(range(len(made)))
        assert len(made) > 5
        assert run.history("loss")[0].time >= run.began - 60
        (curve,) = gateway.rest(f"/runs/{run.id}/curves/loss?by=step&ranks=band")["curves"]
        assert [step for section in curve["sections"] for step in section["step"]] == made


@pytest.mark.slow
def test_the_command_line_and_rest_show_and_edit_them(gateway: Gateway, weaver: WeaverProxy) -> None:
    with started(gateway):
        await_true(lambda: steps(weaver) > 1)
    await_true(lambda: weaver.runs("kept")[0].state != "running")
    at = ("--url", gateway.url, "--token", TOKEN)
    (run, *_) = weaver.runs("kept")

    def said(*words: str) -> str:
        done = run_loom("runs", *words, *at)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "removed" not in said("tag", run.id, "best", "old")
    said("tag", run.id[:6], "--remove", "old")
    said("note", run.id, "**half the rate**")
    listed = said("list", "kept", "--column", "config.learning_rate")
    assert run.id in listed
    assert "best" in listed
    assert "0.1" in listed
    shown = said("show", run.id)
    assert "crashed" in shown
    assert "half the rate" in shown
    assert "started kept_0" in shown
    as_json = json.loads(said("show", run.id, "--json"))
    assert as_json["tags"] == ["best"]
    assert as_json["summary"]["loss"][3] == as_json["step"]
    assert "loss" in said("compare", run.id, run.id, "--step", "1")
    said("archive", run.id)
    assert run.id not in said("list")
    assert run.id in said("list", "--archived")
    said("archive", run.id, "--back")
    refused = run_loom("runs", "rm", "kept", *at)
    assert refused.returncode == 2
    assert "name the id to remove it" in refused.stderr
    said("rm", run.id)
    assert run_loom("runs", "show", run.id, *at).returncode == loom.UnknownRun.exit_status
    found = loom.runs(url=gateway.url, token=TOKEN)
    assert run.id not in [one.id for one in found]


def test_runs_become_data_frames(gateway: Gateway, weaver: WeaverProxy) -> None:
    pandas = pytest.importorskip("pandas")
    with started(gateway):
        await_true(lambda: steps(weaver) > 5)

    frame = loom.runs("kept", url=gateway.url, token=TOKEN).to_pandas()
    curve = weaver.run("kept").to_pandas("loss")

    assert isinstance(frame, pandas.DataFrame)
    assert {"name", "state", "config.learning_rate", "summary.loss"} <= set(frame.columns)
    assert curve.index.name == "step"
    assert list(curve.columns) == ["loss"]
    assert len(curve) > 5


def test_two_users_see_and_edit_their_own_runs(cluster: LocalCluster, tmp_path: Path) -> None:
    house = House(list(cluster.workers), tmp_path)
    try:
        ann, bob, root = (house.weaver(user) for user in ("ann", "bob", "root"))
        await_weaver(ann)
        with training(ann.address(), "train_0", group="train"), training(bob.address(), "train_0", group="train"):
            await_true(lambda: all(user.runs("train") for user in (ann, bob)))
            (mine,), (other,) = ann.runs(), bob.runs()

            assert mine.id != other.id
            mine.tag("mine")
            assert [one.tags for one in bob.runs()] == [()]
            for refused in (bob.run, lambda id: bob.runs(id)[0]):
                with pytest.raises((loom.NotFound, IndexError)):
                    refused(mine.id)
            assert {(one.user, one.id) for one in house.weaver("root", "*").runs()} == {
                ("ann", mine.id),
                ("bob", other.id),
            }
            assert root.runs() == []
            assert house.weaver("root", "ann").run("train").tags == ("mine",)
            with pytest.raises(loom.ScopeError):
                house.weaver("bob", "ann").runs()
            with pytest.raises(loom.errors.RunLives):
                mine.remove()
    finally:
        house.gateway.close()
