"""How trainings and processes end, as the laptop, the weaver and the command line tell it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

import loom
from loom.cli.app import app
from loom.weaver.states import ReplicaEnding, ReplicaState
from loom.weaver.views import ReplicaInfo
from loom_proxy.local import LocalCluster

BOUND = 30.0


class Trainer(loom.Actor):
    """Makes some steps of many, and then does what it is told, with its threadlet open."""

    def __init__(self, made: int, of: int) -> None:
        self.threadlet = loom.Threadlet()
        for step in range(made):
            with self.threadlet.step(step, max_step=of):
                pass

    @loom.endpoint
    def connected(self) -> bool:
        return self.threadlet.connected

    @loom.endpoint
    def die(self, number: int, code: int) -> None:
        import os
        import sys

        print("\x1b[31mlast words\x1b[0m", file=sys.stderr, flush=True)
        if number:
            os.kill(os.getpid(), number)
            time.sleep(BOUND)  # another thread takes the signal
        os._exit(code)

    @loom.endpoint
    def step_on(self) -> None:
        step = 100
        while not self.threadlet.should_stop:
            with self.threadlet.step(step):
                time.sleep(0.01)
            step += 1
        self.threadlet.close()

    @loom.endpoint
    def fail(self) -> None:
        with self.threadlet:
            raise KeyError


def spawn(job: loom.Job, name: str, made: int = 3, of: int = 20_000) -> tuple[Any, Any]:
    procs = job.hosts.slice(hosts=0).spawn_procs(name=name)
    trainer = procs.spawn("trainer", Trainer, made, of)
    until = time.monotonic() + BOUND
    while not trainer.connected.call_one().get(timeout=BOUND):
        assert time.monotonic() < until
        time.sleep(0.02)
    return procs, trainer


def ended(job: loom.Job, group: str, is_it: Callable[[ReplicaInfo], object]) -> ReplicaInfo:
    until = time.monotonic() + BOUND
    while True:
        (replica,) = [one for one in job.weaver.replicas().values() if one.group == group]
        if replica.ending is not None and is_it(replica):
            return replica
        assert time.monotonic() < until, replica
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "code", "cause"),
    [
        (0, 7, "exit code 7"),
        (9, 0, "killed by SIGKILL"),
        pytest.param(6, 0, "killed by SIGABRT", marks=pytest.mark.slow),
        pytest.param(11, 0, "killed by SIGSEGV", marks=pytest.mark.slow),
        pytest.param(15, 0, "killed by SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_why_a_process_died_is_told_everywhere(
    cluster: LocalCluster, shared: loom.Job, number: int, code: int, cause: str
) -> None:
    name = f"dies_{number}_{code}"
    _, trainer = spawn(shared, name)

    with pytest.raises(loom.SupervisionError) as caught:
        trainer.die.call_one(number, code).get(timeout=BOUND)
    replica = ended(shared, name, lambda one: one.exit)

    assert cause in str(caught.value)
    assert str(caught.value).endswith("its last lines:\nlast words")
    assert (replica.state, replica.ending) == (ReplicaState.FAILED, ReplicaEnding.CRASHED)
    assert cause in str(replica.end_reason)
    assert replica.died_of == replica.end_reason
    seen = {"signal": number or None, "code": None if number else code, "out_of_memory": False}
    assert replica.exit == {**seen, "last_lines": ["last words"]}
    lost = next(
        one for one in shared.events(timeout=BOUND) if one.name == "process_lost" and one.details["mesh"] == name
    )
    assert cause in lost.details["reason"]
    assert lost.details["exit"] == replica.exit
    failed = [one for one in shared.weaver.events(kind="failed") if one.replica == replica.id]
    assert [(one.data["reason"], one.data["exit"]) for one in failed] == [(replica.end_reason, replica.exit)]
    shown = CliRunner().invoke(app, ["status", "--url", cluster.url], env={"LOOM_TOKEN": cluster.token})
    assert f"{replica.id} crashed: {replica.end_reason}\n    last words\n" in shown.output


def test_a_training_that_is_cut_is_cancelled_and_one_that_made_its_steps_is_completed(shared: loom.Job) -> None:
    cut, _ = spawn(shared, "cut", made=3, of=20_000)
    whole, _ = spawn(shared, "whole", made=5, of=5)

    for procs in (cut, whole):
        procs.stop("enough").get(timeout=BOUND)

    replica = ended(shared, "cut", lambda one: one.ending is ReplicaEnding.CANCELLED)
    assert (replica.state, replica.step, replica.max_step) == (ReplicaState.FINISHED, 2, 20_000)
    assert replica.end_reason == "its processes were stopped: enough"
    assert ended(shared, "whole", lambda one: True).ending is ReplicaEnding.COMPLETED


@pytest.mark.slow
def test_a_training_is_cancelled_with_its_session(cluster: LocalCluster, shared: loom.Job) -> None:
    with loom.connect(cluster.url, cluster.token) as job:
        spawn(job, "of_a_session")

    replica = ended(shared, "of_a_session", lambda one: one.ending is ReplicaEnding.CANCELLED)

    assert replica.end_reason == "its session has ended: the client closed it"


def test_a_training_that_was_told_to_stop_says_by_whom(shared: loom.Job) -> None:
    _, trainer = spawn(shared, "told")
    going = trainer.step_on.call_one()
    told = shared.weaver.command("stop", target="told").get(timeout=BOUND)
    assert all(one.ok for one in told.values())
    going.get(timeout=BOUND)

    replica = ended(shared, "told", lambda one: True)

    assert (replica.state, replica.ending, replica.ended_by) == (
        ReplicaState.FINISHED,
        ReplicaEnding.STOPPED,
        shared.session,
    )


@pytest.mark.slow
def test_an_exception_without_a_text_has_its_name_and_no_colon(shared: loom.Job) -> None:
    _, trainer = spawn(shared, "raises")
    with pytest.raises(loom.ActorError):
        trainer.fail.call_one().get(timeout=BOUND)

    replica = ended(shared, "raises", lambda one: True)

    assert (replica.ending, replica.end_reason) == (ReplicaEnding.CRASHED, "KeyError")
