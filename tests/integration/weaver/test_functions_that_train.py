"""The runs of trainings that the functions of a session name, in Python and over REST."""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import loom
from loom import Actor, endpoint
from loom_gateway.sessions.state_dir import DriverFiles
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import BOUND, TOKEN, Gateway, await_true, gateway_of
from tests.support.weavers import await_another, await_weaver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SCRIPT = """
import loom
with loom.Threadlet("child_0", group="child") as threadlet:
    assert threadlet.claim()
"""


class Trainer(Actor):
    """A rank that makes its threadlet when it is told to train."""

    @endpoint
    def train(self, run: str) -> bool:
        with loom.Threadlet(run=run) as threadlet:
            return threadlet.claim()

    @endpoint
    def ping(self) -> int:
        return os.getpid()


def train_on(trainers: Any, run: str) -> list[bool]:
    return list(trainers.train.call(run).get().values())


def evaluate_on(trainers: Any) -> int:
    return len(trainers.ping.call().get())


def train_here() -> bool:
    address = loom.driver_api.session().weaver_address()
    with loom.Threadlet("own_0", group="own", weaver=address) as threadlet:
        return threadlet.claim()


def train_in_a_child() -> int:
    address = loom.driver_api.session().weaver_address()
    environment = {**os.environ, "LOOM_WEAVER": address}
    return subprocess.run([sys.executable, "-c", SCRIPT], env=environment, check=False).returncode


@pytest.fixture(scope="module")
def gateway(cluster: LocalCluster) -> Iterator[Gateway]:
    with gateway_of(cluster) as running:
        yield running


def named(job: loom.Job) -> dict[str, list[str]]:
    return {name: [one.name for one in run.trains] for name, run in job.runs().items()}


def over_rest(gateway: Gateway, job: loom.Job) -> dict[str, list[str]]:
    listed = gateway.rest(f"/sessions/{job.session}/runs")["runs"]
    return {one["name"]: [each["id"] for each in one["trains"]] for one in listed}


def test_each_function_names_the_run_that_it_belongs_to_and_no_other(gateway: Gateway) -> None:
    weaver = WeaverProxy(gateway.url, TOKEN)
    await_weaver(weaver)
    with loom.connect(gateway.url, TOKEN) as job:
        ranks = job.hosts.spawn_procs(per_host={"gpus": 2}, name="ranks")
        trainers = ranks.spawn("trainers", Trainer)

        def run(name: str, *args: Any) -> Any:
            return job.run(*args, name=name, detach=True).result(BOUND)

        assert run("first", train_on, trainers, "one") == [True] * len(ranks)
        assert run("evaluate", evaluate_on, trainers) == len(ranks)
        assert run("second", train_on, trainers, "two") == [True] * len(ranks)
        assert run("again", train_on, trainers, "one") == [True] * len(ranks)  # the first run goes on
        assert run("here", train_here)
        assert run("child", train_in_a_child) == 0
        assert run("nothing", os.getpid)

        wanted = {
            "first": ["ranks"],
            "evaluate": [],
            "second": ["ranks"],
            "again": ["ranks"],
            "here": ["own"],
            "child": ["child"],
            "nothing": [],
        }
        assert named(job) == wanted
        ids = {name: [one.id for one in run.trains] for name, run in job.runs().items()}
        assert (ids["first"], ids["second"], ids["again"]) == (["one"], ["two"], ["one"])
        assert over_rest(gateway, job) == ids

        before = weaver.status()["weaver"]
        os.kill(DriverFiles(str(gateway.state / "weaver" / "weaver")).read_record().pid, signal.SIGKILL)
        assert named(job) == wanted
        await_another(weaver, before)
        await_true(lambda: over_rest(gateway, job) == ids)
        assert named(job) == wanted
        weaver.run("two").remove()
        assert named(job) == {**wanted, "second": []}
