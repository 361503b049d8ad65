"""What a program imports from `loom` means the same on the laptop, in `Job.run` and in an actor."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import loom
from loom import ActorError, SupervisionError, ValueMesh, as_completed, wait
from loom_proxy.local import LocalCluster
from tests.support.actors import BadLuck, Counter, Gate, Hang, open_gate

BOUND = 30.0
"""Seconds that no wait may take."""

# Monarch asks for the state of new actors 250 ms after it has made them, and then every 250 ms. If a process dies
# while it asks, calls from an actor may never fail. So processes die here as soon as they are there.


# -- a controller that is moved -----------------------------------------------------------------------------


def count_on(hosts: Any) -> list[str]:
    """A controller as it is written on the laptop: it starts the actors anew when a process dies."""
    story = []
    for attempt in ("first", "second"):
        counters = hosts.spawn_procs(name=attempt).spawn("counters", Counter)
        pids = list(counters.pid.call().get(timeout=BOUND).values())
        if attempt == "first":
            os.kill(pids[1], signal.SIGKILL)
        try:
            counters.slice(hosts=0).fail.call_one("bad").get(timeout=BOUND)
        except loom.ActorError as error:
            story.append(type(error.exception).__name__)
        try:
            for _ in range(100):
                counters.add.call(1).get(timeout=BOUND)
        except loom.SupervisionError as error:
            story.append(f"lost one: {isinstance(error, RuntimeError)}")
        else:
            story.append(f"counted to {list(counters.value.call().get(timeout=BOUND).values())}")
    return story


def count_on_by_names(hosts: Any) -> list[str]:
    """The same with names of `from loom import …`, and with the base of all of Loom's exceptions."""
    story = []
    counters = hosts.spawn_procs(name="by_names").spawn("counters", Counter)
    os.kill(next(iter(counters.pid.call().get(timeout=BOUND).values())), signal.SIGKILL)
    try:
        counters.slice(hosts=1).fail.call_one("bad").get(timeout=BOUND)
    except ActorError as error:
        story.append(error.code)
    for kind in (SupervisionError, loom.LoomError):
        try:
            for _ in range(100):
                counters.add.call(1).get(timeout=BOUND)
        except kind as error:
            story.append(error.code)
    return story


class Controller(loom.Actor):
    """Runs a controller. It owns what that spawns, and so has to say that it handles failures."""

    @loom.endpoint
    def run(self, controller: Callable[..., Any], *args: Any) -> Any:
        return controller(*args)

    def __supervise__(self, failure: loom.MeshFailure) -> bool:
        return True


def on_the_laptop(job: loom.Job, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def in_the_driver(job: loom.Job, function: Callable[..., Any], *args: Any) -> Any:
    return job.run(function, *args)


def in_an_actor(job: loom.Job, function: Callable[..., Any], *args: Any) -> Any:
    controller = job.hosts.slice(hosts=0).spawn_procs(name="controller").spawn("controller", Controller)
    return controller.run.call_one(function, *args).get(timeout=3 * BOUND)


everywhere = pytest.mark.parametrize("run", [on_the_laptop, in_the_driver, in_an_actor])
in_the_cluster = pytest.mark.parametrize("run", [in_the_driver, in_an_actor])

Run = Callable[..., Any]


@everywhere
def test_a_controller_goes_on_after_a_process_was_killed_wherever_it_runs(job: loom.Job, run: Run) -> None:
    assert run(job, count_on, job.hosts) == ["BadLuck", "lost one: True", "BadLuck", "counted to [100, 100]"]


@everywhere
def test_names_that_a_program_imported_catch_wherever_it_runs(job: loom.Job, run: Run) -> None:
    assert run(job, count_on_by_names, job.hosts) == ["actor_error", "supervision", "supervision"]


SYNCED = """
from loom import ActorError, LoomError, Point, SupervisionError, ValueMesh, WaitTimeout

def names(procs, Counter):
    counters = procs.spawn("counters", Counter)
    values = counters.add.call(1).get(timeout=30)
    counters.slice(hosts=0).die.broadcast()
    found = [isinstance(values, ValueMesh), all(isinstance(point, Point) for point, _ in values.items())]
    try:
        counters.slice(hosts=1).fail.call_one("bad").get(timeout=30)
    except ActorError as error:
        found.append(error.exception.number)
    try:
        for _ in range(1000):
            counters.slice(hosts=0).value.call_one().get(timeout=30)
    except SupervisionError as error:
        found.append(isinstance(error, LoomError))
    return found
"""


def call_synced(procs: Any) -> list[Any]:
    import synced_names

    return synced_names.names(procs, Counter)  # type: ignore[no-any-return]


@everywhere
def test_names_at_the_top_of_a_synced_module_mean_the_same(
    job: loom.Job, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "synced_names.py").write_text(SYNCED)
    job.sync(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    assert run(job, call_synced, job.hosts.spawn_procs()) == [True, True, 1, True]


# -- the other names ----------------------------------------------------------------------------------------


def kinds(hosts: Any, procs: Any, counters: Any) -> list[bool]:
    future = counters.add.call(1)
    values = future.get(timeout=BOUND)
    return [
        isinstance(hosts, loom.HostMesh),
        isinstance(procs, loom.ProcMesh),
        isinstance(procs, loom.HostMesh),
        isinstance(counters, loom.ActorMeshProxy),
        isinstance(counters.add, loom.Endpoint),
        isinstance(future, loom.Future),
        isinstance(values, ValueMesh),
        issubclass(type(values), loom.ValueMesh),
        isinstance(values.extent, loom.Extent),
        isinstance(loom.Point(1, loom.Extent(["a"], [2])), loom.Point),
        isinstance(loom.default_bootstrap_cmd(), loom.BootstrapCommand),
        isinstance(values, loom.ProcMesh),
    ]


@everywhere
def test_objects_are_of_the_public_classes_wherever_they_are(tidied: loom.Job, run: Run) -> None:
    procs = tidied.hosts.spawn_procs()
    found = run(tidied, kinds, tidied.hosts, procs, procs.spawn("counters", Counter))

    assert found == [True, True, False, True, True, True, True, True, True, True, True, False]


def late(hang: Any) -> list[str]:
    future = hang.forever.call_one()
    caught = []
    for get in (future.get, future.result):
        try:
            get(timeout=0.01)
        except loom.WaitTimeout as error:
            caught.append(f"{isinstance(error, TimeoutError)}: {error}")
    return caught


@everywhere
def test_a_wait_that_takes_too_long_is_a_wait_timeout(tidied: loom.Job, run: Run) -> None:
    hang = tidied.hosts.slice(hosts=1).spawn_procs().spawn("hang", Hang)

    text = "True: no answer within 0.01 s; the operation goes on, and can be waited for again"
    assert run(tidied, late, hang) == [text, text]


def wait_for_gates(gates: Any, pipes: list[str]) -> list[Any]:
    """Opens the gates of the two hosts, the second one first."""
    futures = [gates.slice(hosts=host).wait.call_one([pipes[host]] * 2) for host in (0, 1)]
    nobody = wait(futures, timeout=0.05)
    open_gate(pipes[1])
    first = wait(futures, timeout=BOUND, return_when="FIRST_COMPLETED")
    order = []
    for future in as_completed(futures, timeout=BOUND):
        order.append(futures.index(future))
        if len(order) == 1:
            open_gate(pipes[0])
    both = wait(futures, timeout=BOUND)
    return [len(nobody.done), [futures.index(future) for future in first.done], order, len(both.done)]


async def wait_on_a_loop(counters: Any) -> list[Any]:
    futures = [counters.add.call(1), counters.slice(hosts=1).fail.call_one("bad")]
    done = []
    async for future in as_completed(futures, timeout=BOUND):
        try:
            done.append((futures.index(future), list((await future).values())))
        except ActorError as error:
            done.append((futures.index(future), error.exception.number))
    return sorted(done)


def run_on_a_loop(counters: Any) -> list[Any]:
    return asyncio.run(wait_on_a_loop(counters))


def fail_first(counters: Any, hang: Any) -> list[bool]:
    futures = [hang.forever.call_one(), counters.slice(hosts=0).fail.call_one("bad")]
    done, rest = wait(futures, timeout=BOUND, return_when="FIRST_EXCEPTION")
    try:
        next(as_completed([futures[0]], timeout=0.01))
    except loom.WaitTimeout as error:
        return [done == {futures[1]}, rest == {futures[0]}, "1 of 1 futures had no answer" in str(error)]
    return []


@everywhere
def test_wait_and_as_completed_take_the_futures_that_a_program_has(
    tidied: loom.Job, run: Run, tmp_path: Path
) -> None:
    procs = tidied.hosts.spawn_procs()
    counters, gates = procs.spawn("counters", Counter), procs.spawn("gates", Gate)
    pipes = [str(tmp_path / str(host)) for host in (0, 1)]
    for pipe in pipes:
        os.mkfifo(pipe)

    assert run(tidied, wait_for_gates, gates, pipes) == [0, [1], [1, 0], 2]
    assert run(tidied, run_on_a_loop, counters) == [(0, [1, 1]), (1, 1)]
    hang = tidied.hosts.slice(hosts=1).spawn_procs().spawn("hang", Hang)
    assert run(tidied, fail_first, counters, hang) == [True, True, True]


# -- errors that travel -------------------------------------------------------------------------------------


def give_errors(procs: Any) -> list[BaseException]:
    errors: list[BaseException] = []
    counters = procs.spawn("counters", Counter)
    counters.slice(hosts=0).die.broadcast()
    try:
        counters.slice(hosts=1).fail.call_one("bad").get(timeout=BOUND)
    except loom.ActorError as error:
        errors.append(error)
    try:
        for _ in range(1000):
            counters.slice(hosts=0).value.call_one().get(timeout=BOUND)
    except loom.SupervisionError as error:
        errors.append(error)
    return errors


def kinds_of(errors: list[BaseException]) -> list[bool]:
    return [isinstance(errors[0], loom.ActorError), isinstance(errors[1], loom.SupervisionError)]


@in_the_cluster
def test_errors_that_were_caught_in_the_cluster_travel_to_the_laptop_and_back(tidied: loom.Job, run: Run) -> None:
    failed, lost = run(tidied, give_errors, tidied.hosts.spawn_procs())

    assert type(failed) is loom.ActorError
    assert type(failed.exception) is BadLuck
    assert "Traceback" in failed.exception_formatted
    assert type(lost) is loom.SupervisionError
    assert run(tidied, kinds_of, [failed, lost]) == [True, True]


def raise_what_it_caught(counters: Any) -> None:
    try:
        counters.slice(hosts=0).fail.call_one("bad").get(timeout=BOUND)
    except loom.ActorError:
        raise


def test_an_error_that_a_function_lets_pass_is_looms_on_the_laptop(tidied: loom.Job) -> None:
    counters = tidied.hosts.spawn_procs().spawn("counters", Counter)
    with pytest.raises(loom.ActorError, match="BadLuck") as raised:
        tidied.run(raise_what_it_caught, counters)
    assert type(raised.value) is loom.ActorError
    assert type(raised.value.exception) is BadLuck


# -- a client in the cluster --------------------------------------------------------------------------------


def as_a_client(url: str, token: str, own: Any) -> list[Any]:
    """Has the meshes of two sessions: its own driver's, which are Monarch's, and those of a job that it opens."""
    with loom.connect(url, token) as job:
        theirs = job.hosts.spawn_procs().spawn("theirs", Counter)
        found: list[Any] = [type(mesh).__module__.partition(".")[0] for mesh in (own, theirs)]
        found.append([isinstance(mesh, loom.ActorMeshProxy) for mesh in (own, theirs)])
        futures = [own.add.call(1), theirs.add.call(2)]
        done, rest = wait(futures, timeout=BOUND)
        found += [len(done), len(rest), [list(future.get().values()) for future in futures]]
        for mesh in (own, theirs):
            try:
                mesh.slice(hosts=0).fail.call_one("bad").get(timeout=BOUND)
            except loom.ActorError as error:
                found.append(error.exception.number)
        port, receiver = loom.Channel.open(job=job)
        port.send("through the job")
        found.append(receiver.recv().get(timeout=BOUND))
        try:
            loom.send(theirs.add, (1,), {}, loom.Channel.open()[0])
        except loom.WrongArguments as error:
            found.append("a Port of Channel.open()" in str(error))
        return found


@in_the_cluster
def test_a_program_in_the_cluster_may_be_a_client_too(tidied: loom.Job, run: Run, cluster: LocalCluster) -> None:
    own = tidied.hosts.spawn_procs().spawn("own", Counter)

    found = run(tidied, as_a_client, cluster.url, cluster.token, own)

    assert found == [
        "monarch",
        "loom_proxy",
        [True, True],
        2,
        0,
        [[1, 1], [2, 2]],
        1,
        2,
        "through the job",
        True,
    ]
