"""Actors that the tests spawn. They travel by value: this module is no installed package."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from loom import Actor, current_rank, endpoint


class BadLuck(Exception):
    """Raised by `Counter.fail`; carries data, so that a test sees whether the object itself came back."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text, number)
        self.number = number


class NeedsCluster(Exception):
    """Can be unpickled everywhere but on the laptop, as the class of a package that is missing there."""

    def __init__(self, laptop: int) -> None:
        super().__init__("made in the cluster")
        self.laptop = laptop

    def __reduce__(self) -> Any:
        return _not_in, (self.laptop,)


def _not_in(laptop: int) -> NeedsCluster:
    if os.getpid() == laptop:
        raise ModuleNotFoundError("not here")
    return NeedsCluster(laptop)


class Counter(Actor):
    """Counts, and knows where it is."""

    def __init__(self, start: int = 0) -> None:
        self.n = start

    @endpoint
    def add(self, k: int) -> int:
        self.n += k
        return self.n

    @endpoint
    def value(self) -> int:
        return self.n

    @endpoint
    def rank(self) -> dict[str, int]:
        return dict(current_rank())

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def print_to(self, stream: Any) -> list[str]:
        print("printed by an actor", file=stream)
        return [name for name in ("stdout", "stderr") if stream is getattr(sys, name)]

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def append(self, values: list[Any], *more: Any, last: Any = None) -> list[Any]:
        return [*values, *more, last]

    @endpoint
    def fail(self, text: str) -> None:
        raise BadLuck(text, self.n)

    @endpoint
    def fail_strangely(self, laptop: int) -> None:
        raise NeedsCluster(laptop)

    @endpoint
    def unpicklable(self) -> Any:
        return threading.Lock()

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def not_an_endpoint(self) -> None: ...


class Gate(Actor):
    """Answers once somebody has opened a named pipe for writing; the test decides when."""

    @endpoint
    def wait(self, pipes: list[str]) -> str:
        with open(pipes[current_rank().rank]) as pipe:
            pipe.read()
        return "open"


def open_gate(pipe: str) -> None:
    """Let the `Gate` that reads a named pipe go on."""
    open(pipe, "w").close()


class Hang(Actor):
    """Never answers."""

    @endpoint
    def forever(self) -> None:
        threading.Event().wait()

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Caller(Actor):
    """Holds a mesh that it was given and calls it."""

    def __init__(self, counters: Any) -> None:
        self.counters = counters

    @endpoint
    def held_sizes(self) -> dict[str, int]:
        return dict(self.counters.sizes)

    @endpoint
    def kind(self, mesh: Any) -> tuple[str, str, dict[str, int]]:
        return type(mesh).__module__, type(mesh).__name__, dict(mesh.sizes)

    @endpoint
    def call(self, mesh: Any) -> list[Any]:
        return list(mesh.rank.call().get().values())

    @endpoint
    def call_held(self) -> list[Any]:
        return list(self.counters.rank.call().get().values())


class Broken(Actor):
    """Its constructor raises."""

    def __init__(self) -> None:
        raise ValueError("cannot be made")

    @endpoint
    def anything(self) -> None: ...


class WithLock(Actor):
    """Its class cannot be pickled."""

    guard = threading.Lock()

    @endpoint
    def anything(self) -> None: ...
