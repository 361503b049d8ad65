"""How trainings and processes end, as the laptop, the weaver and the command line tell it."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
from typer.testing import CliRunner

import loom
import loom.actor
from loom.cli.app import app
from loom.weaver.states import ReplicaEnding, ReplicaState
from loom.weaver.views import ReplicaInfo
from loom_proxy.local import LocalCluster
from tests.support.gateways import await_true

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


class _Replica(loom.Actor):
    """Makes 3 of 20,000 steps as a replica of a name."""

    def __init__(self, name: str, then: Callable[[], None] = lambda: None) -> None:
        self.threadlet = loom.Threadlet(name)
        for step in range(3):
            with self.threadlet.step(step, max_step=20_000):
                pass
        then()


class Sync(_Replica):
    @loom.endpoint
    def do(self, what: Callable[[], object]) -> object:
        return what()

    @loom.endpoint
    def own(self, name: str, what: Callable[[], object]) -> None:
        self.child = loom.actor.context().actor_instance.proc.spawn(name, Sync, name)
        self.child.do.broadcast(what)


class Async(_Replica):
    @loom.endpoint
    async def do(self, what: Callable[[], object]) -> object:
        return what()


def _raise() -> None:
    raise ValueError("no data")


def _asked(what: Callable[[], object]) -> Callable[[Any], None]:
    def do(actor: Any) -> None:
        with pytest.raises(loom.SupervisionError):
            actor.do.call_one(what).get(timeout=BOUND)

    return do


AT_STEP = "its program ended at step 2 of 20,000"

ENDS_OF_ACTORS: dict[str, tuple[Callable[[Any], object], str, str]] = {
    "sys.exit(3)": (_asked(lambda: sys.exit(3)), "crashed", "exit code 3"),
    "sys.exit(-1)": (_asked(lambda: sys.exit(-1)), "crashed", "exit code 255"),
    "sys.exit()": (_asked(sys.exit), "ended early", AT_STEP),
    "sys.exit of a text": (_asked(lambda: sys.exit("no data")), "crashed", "exit code 1: no data"),
    "an exit without an answer": (lambda actor: actor.do.broadcast(lambda: sys.exit(4)), "crashed", "exit code 4"),
    "an error without an answer": (lambda actor: actor.do.broadcast(_raise), "crashed", "ValueError: no data"),
    "a stop": (lambda actor: actor.stop().get(timeout=BOUND), "ended early", AT_STEP),
}


@pytest.mark.parametrize("kind", [Sync, Async])
def test_an_actor_that_ends_ends_its_replica_and_not_those_of_others_in_its_process(
    tidied: loom.Job, kind: type[_Replica]
) -> None:
    procs = tidied.hosts.slice(hosts=0).spawn_procs(name=f"ends of {kind.__name__}")
    names = {f"{kind.__name__} {way}": way for way in [*ENDS_OF_ACTORS, "none"]}
    actors = {name: procs.spawn(f"actor {number}", kind, name) for number, name in enumerate(names)}
    last = actors.pop(f"{kind.__name__} none")
    assert last.do.call_one(lambda: True).get(timeout=BOUND)

    for name, actor in actors.items():
        ENDS_OF_ACTORS[names[name]][0](actor)

    for name in actors:
        replica = _ended(tidied, name)
        _, ending, reason = ENDS_OF_ACTORS[names[name]]
        assert (name, replica.ending, replica.end_reason) == (name, ending, reason)
        assert replica.state is (ReplicaState.FAILED if ending == "crashed" else ReplicaState.FINISHED)
    with pytest.raises(loom.ActorError):
        last.do.call_one(_raise).get(timeout=BOUND)
    assert last.do.call_one(lambda: True).get(timeout=BOUND)
    assert tidied.weaver.replica(f"{kind.__name__} none").state is ReplicaState.RUNNING


def test_an_actor_that_cannot_be_made_or_loses_what_it_owns_ends_its_replica(tidied: loom.Job) -> None:
    procs = tidied.hosts.slice(hosts=0).spawn_procs(name="ends at once")
    procs.spawn("raises", Sync, "raises", _raise)
    procs.spawn("exits", Sync, "exits", lambda: sys.exit(5))
    owner = procs.spawn("owner", Sync, "owner")

    owner.own.call_one("child", lambda: sys.exit(6)).get(timeout=BOUND)

    ends = {name: _ended(tidied, name) for name in ("raises", "exits", "child", "owner")}
    assert {one.ending for one in ends.values()} == {ReplicaEnding.CRASHED}
    assert [ends[name].end_reason for name in ("raises", "exits", "child")] == [
        "ValueError: no data",
        "exit code 5",
        "exit code 6",
    ]
    assert "did not handle a supervision event from its child" in str(ends["owner"].end_reason)


class Aside(loom.Actor):
    """Makes a step as a replica of a name in another thread."""

    def __init__(self, name: str, aside: Callable[[Callable[[], None]], object]) -> None:
        self._name = name
        self._made = threading.Event()
        aside(self._train)

    def _train(self) -> None:
        threadlet = loom.Threadlet(self._name)
        with threadlet.step(0, max_step=20_000):
            pass
        self._made.set()

    @loom.endpoint
    def trains(self) -> bool:
        return self._made.wait(BOUND)


class AsideAsync(Aside):
    @loom.endpoint
    async def trains(self) -> bool:
        return await asyncio.to_thread(self._made.wait, BOUND)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Return the pool that all actors of a process share, whose only thread the first one has started."""
    return ThreadPoolExecutor(1)


def _in_a_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work).start()


WAYS_ASIDE: dict[str, Callable[[Callable[[], None]], object]] = {
    "thread": _in_a_thread,
    "thread of a thread": lambda work: _in_a_thread(lambda: _in_a_thread(work)),
    "timer": lambda work: threading.Timer(0.0, work).start(),
    "shared pool": lambda work: _pool().submit(work),
    "thread of a shared pool": lambda work: _pool().submit(_in_a_thread, work),
    "pool of multiprocessing": lambda work: ThreadPool(1).apply_async(work),
}


@pytest.mark.parametrize("kind", [Aside, AsideAsync])
def test_an_actor_that_ends_ends_the_replicas_of_its_threads_and_of_no_others(
    tidied: loom.Job, kind: type[Aside]
) -> None:
    procs = tidied.hosts.slice(hosts=0).spawn_procs(name=f"threads of {kind.__name__}")
    ended = [f"{kind.__name__} {way}" for way in WAYS_ASIDE]
    going = [f"{name}, going on" for name in ended]
    actors = {
        name: procs.spawn(f"actor {number}", kind, name, WAYS_ASIDE[list(WAYS_ASIDE)[number % len(WAYS_ASIDE)]])
        for number, name in enumerate([*ended, *going])
    }
    for actor in actors.values():
        assert actor.trains.call_one().get(timeout=BOUND)

    for name in ended:
        actors[name].stop().get(timeout=BOUND)

    found = {name: _ended(tidied, name) for name in ended}
    assert {(one.ending, one.end_reason) for one in found.values()} == {
        ("ended early", "its program ended at step 0 of 20,000")
    }
    assert all(actors[name].trains.call_one().get(timeout=BOUND) for name in going)
    assert {tidied.weaver.replica(name).state for name in going} == {ReplicaState.RUNNING}


def test_a_task_of_an_async_actor_that_exits_ends_its_process(tidied: loom.Job) -> None:
    async def leave() -> None:
        sys.exit(6)

    def later() -> None:
        tasks.append(asyncio.get_running_loop().create_task(leave()))

    tasks: list[asyncio.Task[None]] = []
    actor = tidied.hosts.slice(hosts=0).spawn_procs(name="task").spawn("actor", Async, "task")
    await_true(lambda: "task" in tidied.weaver.replicas())

    def call_until_it_ends() -> None:
        actor.do.call_one(later).get(timeout=BOUND)
        for _ in range(1000):  # some may come before the task does
            actor.do.call_one(lambda: True).get(timeout=BOUND)

    with pytest.raises(loom.SupervisionError, match="exit code 6"):
        call_until_it_ends()
    assert _ended(tidied, "task").died_of is not None
    await_true(lambda: "exit code 6" in str(tidied.weaver.replica("task").end_reason))


def _ended(job: loom.Job, name: str) -> ReplicaInfo:
    await_true(lambda: name in (found := job.weaver.replicas()) and found[name].ending is not None)
    return job.weaver.replica(name)
