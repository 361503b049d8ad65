"""Calls to single actors, whose replies come over a standing port: right answers to the right callers."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import loom
from loom import Actor, endpoint
from tests.support.actors import Caller, Counter, open_gate

BOUND = 30.0


class Worker(Actor):
    """Waits when it is told to, and dies in several ways."""

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def wait(self, pipe: str) -> str:
        with open(pipe) as opened:
            opened.read()
        return "open"

    @endpoint
    def raise_error(self, text: str) -> None:
        raise ValueError(text)

    @endpoint
    def leave(self) -> None:
        sys.exit("left")

    @endpoint
    def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "gate")
    os.mkfifo(path)
    yield path
    # Whoever still waits there is let go: opened both ways, a pipe does not wait.
    os.close(os.open(path, os.O_RDWR))


@pytest.fixture
def worker(procs: loom.ProcMeshProxy, tidied: loom.Job) -> Any:
    return procs.spawn("workers", Worker).slice(hosts=0, gpus=0)


@pytest.fixture
def mortal(tidied: loom.Job) -> Any:
    """A worker whose process may end with it."""
    return tidied.hosts.spawn_procs(per_host={"gpus": 1}).spawn("workers", Worker).slice(hosts=0, gpus=0)


def test_an_answer_does_not_wait_for_the_next_call(worker: Any, pipe: str) -> None:
    quick, slow = worker.echo.call_one("quick"), worker.wait.call_one(pipe)
    assert quick.get(timeout=BOUND) == "quick"
    assert not slow.done()
    open_gate(pipe)
    assert slow.get(timeout=BOUND) == "open"


def test_values_and_errors_reach_their_own_callers(worker: Any) -> None:
    futures = [
        worker.raise_error.call_one(str(number)) if number % 3 == 0 else worker.echo.call_one(number)
        for number in range(300)
    ]
    for number, future in enumerate(futures):
        if number % 3 == 0:
            with pytest.raises(loom.ActorError) as raised:
                future.get(timeout=BOUND)
            assert raised.value.exception.args == (str(number),)
        else:
            assert future.get(timeout=BOUND) == number


def test_calls_with_meshes_and_without_are_not_mixed_up(tidied: loom.Job) -> None:
    procs = tidied.hosts.spawn_procs(per_host={"gpus": 1})
    counters = procs.spawn("counters", Counter)
    caller = procs.spawn("callers", Caller, counters).slice(hosts=1, gpus=0)
    futures = []
    for number in range(50):
        futures.append((caller.held_sizes.call_one(), {"hosts": 2, "gpus": 1}))
        mesh = counters if number % 2 else counters.slice(hosts=0)
        sizes = {"hosts": 2, "gpus": 1} if number % 2 else {"gpus": 1}
        futures.append((caller.kind.call_one(mesh), ("monarch._src.actor.actor_mesh", "ActorMesh", sizes)))
    for future, expected in futures:
        assert future.get(timeout=BOUND) == expected


def test_an_actor_that_dies_of_a_broadcast_fails_the_calls_that_wait_for_it(mortal: Any, pipe: str) -> None:
    waiting = mortal.wait.call_one(pipe)
    mortal.raise_error.broadcast("nobody listens")
    behind = [mortal.echo.call_one(number) for number in range(3)]
    assert not waiting.done()
    open_gate(pipe)
    assert waiting.get(timeout=BOUND) == "open"
    for future in behind:
        with pytest.raises(loom.SupervisionError, match=r"\.echo\(\)") as raised:
            future.get(timeout=BOUND)
        assert "nobody listens" in str(raised.value)
    with pytest.raises(loom.SupervisionError, match="nobody listens"):
        mortal.echo.call_one("later").get(timeout=BOUND)


def test_an_actor_that_leaves_fails_its_calls(mortal: Any) -> None:
    leaving, behind = mortal.leave.call_one(), mortal.echo.call_one("behind")
    for future in (leaving, behind):
        with pytest.raises(loom.SupervisionError, match="SystemExit"):
            future.get(timeout=BOUND)


def test_a_stopped_actor_answers_no_more(worker: Any, shared: loom.Job) -> None:
    assert worker.echo.call_one(1).get(timeout=BOUND) == 1
    shared.meshes["workers"].stop().get(timeout=BOUND)
    with pytest.raises(loom.SupervisionError):
        worker.echo.call_one(2).get(timeout=BOUND)


@pytest.mark.slow
def test_threads_that_call_two_actors_get_their_own_answers(tidied: loom.Job) -> None:
    workers = tidied.hosts.spawn_procs().spawn("workers", Worker)
    wrong: list[Any] = []

    def call(thread: int) -> None:
        mine = workers.slice(hosts=thread % 2)
        futures = [(number, mine.echo.call_one((thread, number))) for number in range(200)]
        wrong.extend(value for number, future in futures if (value := future.get(BOUND)) != (thread, number))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * BOUND)
    assert not wrong


def test_arguments_that_name_a_class_and_plain_ones_keep_their_order(worker: Any) -> None:
    values = [Path(f"/{number}") if number % 3 == 0 else {"number": number} for number in range(300)]
    futures = [worker.echo.call_one(value) for value in values]
    assert [future.get(timeout=BOUND) for future in futures] == values


@pytest.mark.parametrize(
    "value", ["\x93 \u0393", b"\x93\x00", 0x93, [0x93939393] * 3, {"a": (1, 2.5, None, True)}, b"", "", ()]
)
def test_plain_values_are_what_they_were(worker: Any, value: Any) -> None:
    assert worker.echo.call_one(value).get(timeout=BOUND) == value
    assert worker.echo.call_one(value=value).get(timeout=BOUND) == value


def test_what_the_driver_does_not_unpickle_cannot_fail_there(worker: Any) -> None:
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    assert worker.echo.call_one(deep).get(timeout=BOUND) == deep


# -- many actors ----------------------------------------------------------------------------------------------


def _channels() -> int:
    """How many reply channels the driver has. Runs there."""
    return sum(thread.name == "reply channel" for thread in threading.enumerate())


def test_actors_have_a_channel_each_beyond_the_64th(job: loom.Job) -> None:
    procs = job.hosts.spawn_procs(per_host={"gpus": 2})
    meshes = [procs.spawn(f"workers{number}", Worker) for number in range(17)]
    workers = [mesh.slice(hosts=host, gpus=gpu) for mesh in meshes for host in range(2) for gpu in range(2)]

    first = [worker.echo.call_one(number) for number, worker in enumerate(workers)]
    again = [worker.echo.call_one(-number) for number, worker in enumerate(workers)]

    assert [future.get(timeout=BOUND) for future in first] == list(range(68))
    assert [-future.get(timeout=BOUND) for future in again] == list(range(68))
    assert job.run(_channels) == 68


def _with_room_for_two(workers: list[Any]) -> tuple[list[Any], list[bool], int]:
    """Call actors over as many channels as there is room for. Runs in the driver."""
    import asyncio
    import queue

    from loom_gateway.driver.monarch.mesh_table import MeshEntry, MeshTable
    from loom_gateway.driver.monarch.reply_channels import ReplyChannels

    came: queue.SimpleQueue[Any] = queue.SimpleQueue()

    class Replies:
        def answer(self, reply: Any, value: Any, error: Any, eager: bool) -> None:
            came.put((reply, value, error))

        def gathered(self, more: bool) -> None:
            pass

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    channels = ReplyChannels(loop, Replies(), MeshTable(), most=2, idle=10 * BOUND)  # type: ignore[arg-type]
    before, answers = _channels(), []

    def call(number: int) -> bool:
        entry = MeshEntry("actors", "workers", workers[number], number, ranks=(number,))
        channel = channels.to(number, entry)
        if channel is None:
            return False
        endpoint = workers[number].echo
        assert channel.takes("echo", endpoint)
        channel.call((number, None), "echo", endpoint, (number,), {})
        answers.append(came.get(timeout=BOUND))
        return True

    taken = [call(0), call(1), call(2)]  # the third has to be called in Monarch's own way
    for channel in channels._channels.values():
        channel.used -= 11 * BOUND
    taken += [call(0), call(2), call(1)]  # the third has the place of the second, and the second none now
    deadline = threading.Event()
    while _channels() > before + 2 and not deadline.wait(0.01):
        pass
    return answers, taken, _channels() - before


def test_an_idle_channel_gives_way_to_another_actor(job: loom.Job) -> None:
    workers = job.hosts.spawn_procs(per_host={"gpus": 2}).spawn("workers", Worker)
    three = [workers.slice(hosts=0, gpus=0), workers.slice(hosts=0, gpus=1), workers.slice(hosts=1, gpus=0)]

    answers, taken, left = job.run(_with_room_for_two, three)

    assert taken == [True, True, False, True, True, False]
    assert answers == [((number, None), number, None) for number in (0, 1, 0, 2)]
    assert left == 2
