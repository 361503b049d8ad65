"""The side of a benchmark that makes the calls, in a process of its own.

Its parent writes one JSON object a line to standard input, `serve` answers each with one on standard output. When
standard input is closed the parent is gone, and so is this process. It needs nothing but the standard library,
since Ray's environment has no Loom.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = ["Caller", "MeshCaller", "Payload", "seconds_each", "serve", "wait_one_by_one"]

Payload = str
"""What an echo carries: ``"bytes"`` or ``"array"``, a numpy array of bytes."""


MANY = 100
"""Actors that `MeshCaller.pipelined_many` calls in turn."""

MESH = 8
"""Actors of the mesh that `MeshCaller.pipelined_mesh` calls."""


class Caller(Protocol):
    """One way to call an actor, set up and warm."""

    def one_call(self, count: int) -> list[float]:
        """Make ``count`` calls, each after the reply to the last; seconds of each."""

    def pipelined(self, count: int) -> float:
        """Issue ``count`` calls, then wait for all replies; seconds until the last."""

    def echo(self, payload: Payload, size: int, count: int) -> list[float]:
        """Send ``size`` bytes and receive them back, ``count`` times; seconds of each."""

    def close(self) -> None:
        """End what this caller started."""


class MeshCaller:
    """Calls an actor with the endpoints ``add`` and ``echo``; the same code for every API with futures.

    Args:
        add: issues a call that adds its argument to the actor's number and returns the sum.
        echo: issues a call that returns its argument.
        wait: waits for the results of several calls.
        close: ends what the calls need.
        many: as ``add``, for each of many actors.
        mesh: issues a call to all actors of a mesh of `MESH`; gives their numbers.
    """

    def __init__(
        self,
        add: Callable[[int], Any],
        echo: Callable[[Any], Any],
        wait: Callable[[list[Any]], list[Any]],
        close: Callable[[], None],
        many: Sequence[Callable[[int], Any]] = (),
        mesh: Callable[[int], Any] | None = None,
    ) -> None:
        self._add = add
        self._echo = echo
        self._wait = wait
        self.close = close
        self._many = many
        self._mesh = mesh

    @classmethod
    def on(cls, hosts: Any, counter: type, close: Callable[[], None], *, crowd: bool = False) -> MeshCaller:
        """A caller of actors of a class, spawned on a host mesh of one host; Monarch's API or one like it.

        Args:
            hosts: the host mesh.
            counter: the class.
            close: ends what the calls need.
            crowd: with the many actors and the mesh as well, which take CPU time while nobody calls them.
        """
        procs = hosts.spawn_procs(per_host={"gpus": 1}, name="procs")
        one = procs.spawn("counters", counter).slice(hosts=0, gpus=0)
        if not crowd:
            return cls(one.add.call_one, one.echo.call_one, wait_one_by_one, close)
        many = [procs.spawn(f"many_{n}", counter).slice(hosts=0, gpus=0) for n in range(MANY)]
        mesh = hosts.spawn_procs(per_host={"gpus": MESH}, name="mesh").spawn("mesh", counter)
        return cls(
            one.add.call_one,
            one.echo.call_one,
            wait_one_by_one,
            close,
            [actor.add.call_one for actor in many],
            mesh.add.call,
        )

    def one_call(self, count: int) -> list[float]:
        return seconds_each(lambda: self._wait([self._add(1)]), count)

    def pipelined(self, count: int) -> float:
        start = time.perf_counter()
        sums = self._wait([self._add(1) for _ in range(count)])
        seconds = time.perf_counter() - start
        assert sums == list(range(sums[0], sums[0] + count)), "the calls did not run once each, in order"
        return seconds

    def pipelined_many(self, count: int) -> float:
        """The same as `pipelined`, each call to the next of `MANY` actors."""
        start = time.perf_counter()
        sums = self._wait([self._many[n % MANY](1) for n in range(count)])
        seconds = time.perf_counter() - start
        of_first = sums[::MANY]
        assert of_first == list(range(of_first[0], of_first[0] + len(of_first))), "calls were lost or out of order"
        return seconds

    def pipelined_mesh(self, count: int) -> float:
        """The same as `pipelined`, each call to all actors of a mesh of `MESH`."""
        assert self._mesh is not None
        start = time.perf_counter()
        sums = self._wait([self._mesh(1) for _ in range(count)])
        seconds = time.perf_counter() - start
        first, last = [list(each.values()) for each in (sums[0], sums[-1])]
        assert len(first) == MESH
        assert last == [number + count - 1 for number in first], "a call missed an actor"
        return seconds

    def echo(self, payload: Payload, size: int, count: int) -> list[float]:
        sent = _make(payload, size)
        echoed: Any = None

        def echo_once() -> None:
            nonlocal echoed
            echoed = None  # what the last call returned is not held while the next one runs
            [echoed] = self._wait([self._echo(sent)])

        seconds = seconds_each(echo_once, count)
        assert type(echoed) is type(sent)
        assert memoryview(echoed).tobytes() == memoryview(sent).tobytes(), "the echo is not what was sent"
        return seconds


def seconds_each(function: Callable[[], object], count: int) -> list[float]:
    """Call ``function`` ``count`` times; seconds of each call."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return seconds


def wait_one_by_one(futures: Sequence[Any]) -> list[Any]:
    """The results of futures with a method ``get``, as a program with a list of them collects them."""
    return [future.get() for future in futures]


def _make(payload: Payload, size: int) -> Any:
    data = os.urandom(size)
    if payload == "bytes":
        return data
    import numpy

    return numpy.frombuffer(data, dtype=numpy.uint8).copy()


def serve(make_caller: Callable[[], Caller]) -> None:
    """Make a caller and answer the parent's questions until it asks to close."""
    questions = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    # Children inherit 0 and 1: they are not to read the questions, and what they print is no answer.
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    pending: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read_questions() -> None:
        for line in questions:
            pending.put(json.loads(line))
        os._exit(1)  # the parent is gone; every child of this process notices that this one is

    threading.Thread(target=read_questions, name="questions", daemon=True).start()

    def answer(value: object) -> None:
        answers.write(json.dumps(value).encode() + b"\n")

    caller = make_caller()
    answer("ready")
    while (question := pending.get())["do"] != "close":
        answer(getattr(caller, question["do"])(**question["with"]))
    caller.close()
    answer("closed")
    os._exit(0)  # Monarch's and Ray's own threads may outlast the interpreter's end
