"""The weaver for the code in a session: actors and functions of `Job.run`, which have no token."""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import loom
from loom import Actor, endpoint
from loom.weaver.views import Snapshot, WeaverEvent
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import BOUND, await_true, gateway_of
from tests.support.users import House
from tests.support.weaver_training import training
from tests.support.weavers import await_weaver

pytestmark = pytest.mark.timeout(120)


class Asker(Actor):
    """Asks the weaver of its session."""

    @endpoint
    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class AsyncAsker(Actor):
    """Asks the weaver in coroutines."""

    @endpoint
    async def set_rate(self, replica: str, rate: float) -> Any:
        weaver = loom.this_weaver().aio
        outcomes = await weaver.update_config(replica, learning_rate=rate)
        return (await weaver.replica(replica)).config["learning_rate"], outcomes[replica].ok


class Spawner(Actor):
    """Spawns processes by Monarch's own API, which Loom does not prepare."""

    @endpoint
    def replicas_seen_by_a_child(self) -> list[str]:
        import monarch.actor

        procs = monarch.actor.this_host().spawn_procs(per_host={"gpus": 1})
        asker = procs.spawn("asker", Asker)
        return list(asker.do.call_one(replicas).get())


# What follows runs in actors, and in the driver.


def replicas() -> list[str]:
    return sorted(loom.this_weaver().replicas())


def set_rate(replica: str, rate: float) -> tuple[Any, Any]:
    weaver = loom.this_weaver()
    outcome = weaver.update_config(replica, learning_rate=rate).get(BOUND)[replica]
    return weaver.replica(replica).config["learning_rate"], outcome.changes["learning_rate"].new


def follow_events(replica: str) -> tuple[list[str], str]:
    """Watch until the replica takes a new rate; return the events, and what the first update was."""
    weaver = loom.this_weaver()
    updates = weaver.watch(BOUND)
    first = type(next(updates)).__name__
    weaver.update_config(replica, learning_rate=0.75)
    kinds = []
    for update in updates:
        if isinstance(update, WeaverEvent) and update.kind != "spawned":  # the actors of other tests, and the asker
            kinds.append(update.kind)
            if update.kind == "applied":
                break
    return kinds, first


async def follow_events_async(replica: str) -> list[str]:
    weaver = loom.this_weaver().aio
    last = (await weaver.status())["event"]
    await weaver.pause(replica)
    kinds = []
    async for event in weaver.events(last, follow=True, replica=replica):
        kinds.append(event.kind)
        if event.kind == "paused":
            await weaver.resume(replica)
        if event.kind == "running":
            return kinds
    raise AssertionError("the events ended")


def ask_in_a_thread() -> Any:
    """Ask on a thread of the process that Monarch does not know."""
    weaver = loom.this_weaver()
    got: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=lambda: got.put(sorted(weaver.replicas())), daemon=True).start()
    return got.get(timeout=BOUND)


def error_in_a_thread() -> str:
    got: queue.Queue[str] = queue.Queue()

    def ask() -> None:
        try:
            loom.this_weaver()
        except RuntimeError as error:
            got.put(str(error))

    threading.Thread(target=ask, daemon=True).start()
    return got.get(timeout=BOUND)


def error_of(name: str, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Call a method of the weaver; return the code and the text of its error."""
    try:
        getattr(loom.this_weaver(), name)(*args, **kwargs)
    except loom.LoomError as error:
        return error.code, str(error)
    raise AssertionError("it raised nothing")


def error_without_an_answer() -> tuple[str, str]:
    from loom_proxy.weaver import client

    client.ANSWER_TIMEOUT = 0.5
    try:
        return error_of("status")
    finally:
        client.ANSWER_TIMEOUT = 10.0


def error_for_another_user(user: str) -> tuple[str | None, Any]:
    """Ask the mesh for another user's replicas, as the methods of the weaver cannot."""
    mesh: Any = loom.this_weaver().mesh
    answer: tuple[str | None, Any] = mesh.ask.call_one("replicas", {"user": user}, 10.0).get()
    return answer


def names_of_the_mesh() -> tuple[str, int, bool]:
    mesh: Any = loom.this_weaver().mesh
    return mesh._mesh_name, len(mesh), any("TOKEN" in name for name in os.environ)


def status_of(weaver: Any) -> str:
    return f"{weaver!r} {weaver.status()['weaver']}"


@pytest.fixture(scope="module")
def replica(shared: loom.Job) -> Iterator[str]:
    """A replica of the user, which no session spawned."""
    name = f"train_{shared.session}"
    with training(await_weaver(shared.weaver), name):
        await_true(lambda: (shared.weaver.replicas().get(name) or Nobody).step)
        yield name


class Nobody:
    """Stands for a replica that the weaver does not know."""

    step = None


@pytest.fixture(scope="module")
def asker(shared: loom.Job) -> Any:
    return shared.hosts.slice(hosts=0).spawn_procs(name="askers").spawn("asker", Asker)


def test_an_actor_and_a_run_see_and_command_replicas_as_the_laptop_does(
    shared: loom.Job, asker: Any, replica: str
) -> None:
    assert replica in asker.do.call_one(replicas).get(BOUND)
    assert replica in shared.run(replicas)
    assert asker.do.call_one(set_rate, replica, 0.25).get(BOUND) == (0.25, 0.25)
    assert shared.run(set_rate, replica, 0.5) == (0.5, 0.5)
    assert shared.weaver.replica(replica).config["learning_rate"] == 0.5


def test_a_coroutine_of_an_actor_does_not_block_it(shared: loom.Job, replica: str) -> None:
    actor = shared.hosts.slice(hosts=0).spawn_procs(name="askers").spawn("asker", AsyncAsker)

    assert actor.set_rate.call_one(replica, 0.125).get(BOUND) == (0.125, True)


def test_actors_and_runs_watch(shared: loom.Job, asker: Any, replica: str) -> None:
    kinds, first = asker.do.call_one(follow_events, replica).get(BOUND)

    assert first == Snapshot.__name__
    assert kinds[-2:] == ["command", "applied"]
    assert "paused" in shared.run(follow_events_async, replica)


def test_any_thread_of_an_actors_process_may_use_its_weaver(shared: loom.Job, asker: Any, replica: str) -> None:
    assert replica in asker.do.call_one(ask_in_a_thread).get(BOUND)
    assert replica in shared.run(ask_in_a_thread)


def test_processes_that_an_actor_spawns_by_itself_have_it_too(shared: loom.Job, replica: str) -> None:
    spawner = shared.hosts.slice(hosts=0).spawn_procs(name="spawners").spawn("spawner", Spawner)

    assert replica in spawner.replicas_seen_by_a_child.call_one().get(BOUND)


@pytest.mark.slow
def test_workers_outlive_sessions_whose_actors_still_know_the_weaver(cluster: LocalCluster) -> None:
    for _ in range(6):  # on a busy machine a worker ended after every fourth
        with loom.connect(cluster.url, cluster.token) as job:
            spawner = job.hosts.slice(hosts=0).spawn_procs(name="spawners").spawn("spawner", Spawner)
            spawner.replicas_seen_by_a_child.call_one().get(BOUND)


def test_the_laptops_weaver_travels_and_becomes_that_of_the_session(shared: loom.Job, asker: Any) -> None:
    seen = f"<LocalWeaver> {shared.weaver.status()['weaver']}"

    assert asker.do.call_one(status_of, shared.weaver).get(BOUND) == seen
    assert shared.run(status_of, shared.weaver) == seen


def test_a_weaver_that_is_asked_with_a_token_does_not_travel(shared: loom.Job, cluster: LocalCluster) -> None:
    with pytest.raises(loom.WrongState, match=r"loom\.this_weaver\(\)"):
        shared.run(status_of, WeaverProxy(cluster.url, cluster.token))


def test_the_mesh_is_named_weaver_and_no_token_is_there(shared: loom.Job, asker: Any) -> None:
    assert asker.do.call_one(names_of_the_mesh).get(BOUND) == ("weaver", 1, False)
    assert shared.run(names_of_the_mesh)[:2] == ("weaver", 1)


def test_errors_of_the_weaver_are_raised_in_the_actor(shared: loom.Job, asker: Any) -> None:
    unknown = asker.do.call_one(error_of, "replica", "nobody").get(BOUND)
    fault = shared.run(error_of, "inject", "dead_gateway", "*")

    assert unknown[0] == "unknown_replica"
    assert 'no replica named "nobody"' in unknown[1]
    assert fault == (
        "denied",
        "dead_gateway is injected by the gateway: a program asks it with job.weaver.inject",
    )


def test_only_the_users_own_replicas_are_seen_and_commanded(cluster: LocalCluster, tmp_path: Path) -> None:
    house = House(list(cluster.workers), tmp_path)
    try:
        ann, bob = (house.weaver(user) for user in ("ann", "bob"))
        await_weaver(ann)
        with (
            training(ann.address(), "ann_0", group="train"),
            training(bob.address(), "bob_0", group="train"),
            house.connect("ann") as job,
        ):
            await_true(lambda: "ann_0" in ann.replicas() and "bob_0" in bob.replicas())
            actor: Any = job.hosts.slice(hosts=0).spawn_procs(name="askers").spawn("asker", Asker)

            assert actor.do.call_one(replicas).get(BOUND) == ["ann_0"]
            assert job.run(set_rate, "ann_0", 0.25) == (0.25, 0.25)
            assert actor.do.call_one(error_of, "replica", "bob_0").get(BOUND)[0] == "unknown_replica"
            denied = actor.do.call_one(error_for_another_user, "bob").get(BOUND)
            assert denied == ("denied", "a session acts for its own user only")
            assert bob.replica("bob_0").config["learning_rate"] == 0.1
    finally:
        house.gateway.close()


@pytest.mark.slow
def test_a_weaver_that_does_not_answer_is_unavailable_and_answers_when_it_is_back(cluster: LocalCluster) -> None:
    with gateway_of(cluster) as gateway, gateway.connect() as job:
        actor: Any = job.hosts.slice(hosts=0).spawn_procs(name="askers").spawn("asker", Asker)
        await_weaver(job.weaver)
        assert actor.do.call_one(replicas).get(BOUND) == []
        (weaver,) = gateway.weavers()

        weaver.send_signal(signal.SIGSTOP)
        late = actor.do.call_one(error_without_an_answer).get(BOUND)
        weaver.send_signal(signal.SIGCONT)

        assert late == ("weaver_unavailable", "the weaver did not answer within 0.5 s")
        assert actor.do.call_one(replicas).get(BOUND) == []


@pytest.mark.parametrize("more", ["", "import monarch.actor\n"])
def test_a_program_on_the_laptop_is_told_to_use_the_jobs_weaver(more: str) -> None:
    code = "import loom\ntry:\n    loom.this_weaver()\nexcept RuntimeError as error:\n    print(error)"
    command = [sys.executable, "-c", more + code]

    said = subprocess.run(command, capture_output=True, text=True, timeout=BOUND, check=True)

    assert "a program on the laptop has job.weaver" in said.stdout


def test_a_thread_that_belongs_to_no_actor_is_told_to_take_the_weaver_of_one(asker: Any) -> None:
    assert "A thread takes the weaver that its actor got" in asker.do.call_one(error_in_a_thread).get(BOUND)
