"""`ActorMeshProxy.reconfigure`: the training in an actor mesh is changed as if it were local."""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

import loom
from loom import Actor, endpoint
from loom.control.commands import Change
from loom.wire.bodies import OpenSession
from loom_gateway.driver.weaver_link import DriverWeaverLink
from loom_proxy.local import LocalCluster

BOUND = 30.0


class Trainer(Actor):
    """Trains until its learning rate is another."""

    def __init__(self) -> None:
        self._threadlet = loom.Threadlet(config={"learning_rate": 0.1})
        self._rate = 0.1
        self._threadlet.handler("learning_rate")(self._set_rate)

    def _set_rate(self, value: float) -> None:
        self._rate = value

    @endpoint
    def train(self, until: float) -> int:
        number = 0
        while self._rate != until:
            with self._threadlet.step(number):
                number += 1
            time.sleep(0.002)
        return number

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Idle(Actor):
    """Has no threadlet."""

    @endpoint
    def reconfigure(self, value: int) -> int:
        return value + 1


@pytest.fixture
def trainers(job: loom.Job) -> Any:
    return job.hosts.spawn_procs(name="trainers").spawn("trainers", Trainer)


def test_a_mesh_is_reconfigured_and_says_at_which_step(trainers: Any) -> None:
    training = trainers.train.call(0.002)

    answers = trainers.reconfigure(learning_rate=0.002).get(BOUND)

    steps = training.get(BOUND)
    assert answers.extent == trainers.extent
    for point, answer in answers.items():
        assert answer.ok
        assert answer.changes == {"learning_rate": Change(0.1, 0.002)}
        assert answer.step <= steps.item(**dict(point))


def test_a_slice_is_reconfigured_and_the_others_are_not(trainers: Any) -> None:
    one = trainers.slice(hosts=1)
    training = one.train.call_one(0.5), trainers.slice(hosts=0).train.call_one(0.25)

    answers = one.reconfigure(learning_rate="0.5").get(BOUND)

    assert [answer.changes for answer in answers.values()] == [{"learning_rate": Change(0.1, 0.5)}]
    assert training[0].get(BOUND)
    assert not training[1].done()
    assert trainers.slice(hosts=0).reconfigure(learning_rate=0.25).get(BOUND).item().ok
    training[1].get(BOUND)


def test_what_is_refused_comes_back_with_the_reason(trainers: Any) -> None:
    training = trainers.train.call(0.002)

    answers = trainers.reconfigure(learning_rate="fast", momentum=0.9).get(BOUND).values()

    for answer in answers:
        assert not answer.ok
        assert "fast" in answer.refused["learning_rate"]
        assert "momentum" in answer.refused["momentum"]
    trainers.reconfigure(learning_rate=0.002).get(BOUND)
    training.get(BOUND)


def test_a_process_that_dies_fails_for_itself_only(trainers: Any) -> None:
    pids = list(trainers.pid.call().get(BOUND).values())
    training = trainers.slice(hosts=0).train.call_one(0.002)
    waiting = trainers.reconfigure(learning_rate=0.002)  # which the other, that does not train, does not apply
    training.get(BOUND)
    os.kill(pids[1], signal.SIGKILL)

    first, second = waiting.get(BOUND).values()

    assert first.ok
    assert not second.ok
    assert "has failed" in second.reason


def test_actors_without_a_threadlet_say_so_and_keep_their_endpoint(job: loom.Job) -> None:
    idle = job.hosts.slice(hosts=0).spawn_procs(name="idle").spawn("idle", Idle)
    assert idle.reconfigure.call_one(1).get(BOUND) == 2

    (answer,) = loom.ActorMeshProxy.reconfigure(idle, learning_rate=1).get(BOUND).values()

    assert not answer.ok
    assert "no threadlet has registered in process 0 of 'idle'" in answer.reason


def test_bad_values_are_refused_before_anything_is_sent(trainers: Any) -> None:
    with pytest.raises(loom.WrongArguments, match="at least one key"):
        trainers.reconfigure()
    with pytest.raises(loom.WrongArguments, match=r"^config\.learning_rate\[0\]: "):
        trainers.reconfigure(learning_rate=[object()])


async def test_without_a_weaver_that_is_said(tmp_path: Any) -> None:
    import asyncio

    loop = asyncio.get_running_loop()
    opening = OpenSession("session", "admin", "a-key")
    with pytest.raises(loom.WeaverUnavailable, match="no weaver"):
        await DriverWeaverLink(None, opening, loop).client.ask("status")
    with pytest.raises(loom.WeaverUnavailable, match="away"):
        await DriverWeaverLink(str(tmp_path), opening, loop).client.ask("status")


def test_a_dead_process_is_a_failed_replica_at_once(own_cluster: LocalCluster) -> None:
    with loom.connect(own_cluster.url, own_cluster.token) as job:
        trainers = job.hosts.spawn_procs(name="trainers").spawn("trainers", Trainer)
        pids = list(trainers.pid.call().get(BOUND).values())
        os.kill(pids[0], signal.SIGKILL)
        for event in job.weaver.events(after=0, follow=True):
            if event.kind == "failed":
                break
        assert event.replica == f"trainers_0@{job.session}"
    with loom.connect(own_cluster.url, own_cluster.token) as job:
        replicas = job.weaver.replicas()
        assert {id.partition("@")[0]: one.state for id, one in replicas.items()} == {
            "trainers_0": "failed",
            "trainers_1": "finished",
        }
