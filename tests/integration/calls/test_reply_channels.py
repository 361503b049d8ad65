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
def worker(job: loom.Job) -> Any:
    return job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("workers", Worker).slice(hosts=0, gpus=0)


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


def test_calls_with_meshes_and_without_are_not_mixed_up(job: loom.Job) -> None:
    procs = job.hosts.spawn_procs(per_host={"gpus": 1})
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


def test_an_actor_that_dies_of_a_broadcast_fails_the_calls_that_wait_for_it(worker: Any, pipe: str) -> None:
    waiting = worker.wait.call_one(pipe)
    worker.raise_error.broadcast("nobody listens")
    behind = [worker.echo.call_one(number) for number in range(3)]
    assert not waiting.done()
    open_gate(pipe)
    assert waiting.get(timeout=BOUND) == "open"
    for future in behind:
        with pytest.raises(loom.SupervisionError, match=r"\.echo\(\)") as raised:
            future.get(timeout=BOUND)
        assert "nobody listens" in str(raised.value)
    with pytest.raises(loom.SupervisionError, match="nobody listens"):
        worker.echo.call_one("later").get(timeout=BOUND)


def test_an_actor_that_leaves_fails_its_calls(worker: Any) -> None:
    leaving, behind = worker.leave.call_one(), worker.echo.call_one("behind")
    for future in (leaving, behind):
        with pytest.raises(loom.SupervisionError, match="SystemExit"):
            future.get(timeout=BOUND)


def test_a_stopped_actor_answers_no_more(worker: Any, job: loom.Job) -> None:
    assert worker.echo.call_one(1).get(timeout=BOUND) == 1
    job.meshes["workers"].stop().get(timeout=BOUND)
    with pytest.raises(loom.SupervisionError):
        worker.echo.call_one(2).get(timeout=BOUND)


def test_threads_that_call_two_actors_get_their_own_answers(job: loom.Job) -> None:
    workers = job.hosts.spawn_procs().spawn("workers", Worker)
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
