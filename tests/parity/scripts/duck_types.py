"""What only behaves like an endpoint: Monarch takes it."""

from __future__ import annotations

import operator
from typing import Any

from loom import Actor, endpoint
from tests.parity.actors import Counter


class Streams:
    """Has what an accumulator asks for, and counts."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.calls = 0

    def stream(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.inner.stream(*args, **kwargs)


class Sends:
    """Has what ``send`` asks for, and notes the selection."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.selections: list[str] = []

    def _send(self, args: Any, kwargs: Any, port: Any = None, selection: Any = "all") -> None:
        self.selections.append(selection)
        self.inner._send(args, kwargs, port, selection)


class Later:
    """A descriptor of the user's that gives an endpoint."""

    def __init__(self, method: Any) -> None:
        self.method = method

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return endpoint(self.method)


class Described(Actor):
    """Its endpoints come from a descriptor, a lambda, a mixin and a base class."""

    @Later
    def twice(self, k: int) -> int:
        return 2 * k

    half = endpoint(lambda self, k: k // 2)


class Mixin:
    @endpoint
    def third(self, k: int) -> int:
        return k // 3

    @endpoint
    def hidden(self) -> int:
        return 0


class Derived(Mixin, Described):
    def hidden(self) -> int:
        return 1


def an_accumulator_of_what_streams(hosts: Any, api: Any) -> Any:
    wrapped = Streams(api.spawn(Counter, 1).add)
    total = api.Accumulator(wrapped, 0, operator.add).accumulate(2).get(timeout=30)
    return total, wrapped.calls


def sending_to_what_sends(hosts: Any, api: Any) -> Any:
    wrapped = Sends(api.spawn(Counter, 1).add)
    port, receiver = api.Channel.open()
    api.send(wrapped, (2,), {}, port)
    values = sorted(receiver.recv().get(timeout=30) for _ in range(4))
    api.send(wrapped, (), {"k": 1}, port, selection="choose")
    return values, receiver.recv().get(timeout=30), wrapped.selections


def endpoints_that_a_descriptor_gives(hosts: Any, api: Any) -> Any:
    described = api.spawn(Described).slice(hosts=0, gpus=0)
    return described.twice.call_one(21).get(timeout=30), described.half.call_one(42).get(timeout=30)


def endpoints_of_a_mixin_and_a_base(hosts: Any, api: Any) -> Any:
    derived = api.spawn(Derived).slice(hosts=0, gpus=0)
    return [
        derived.third.call_one(9).get(timeout=30),
        derived.twice.call_one(4).get(timeout=30),
        api.mistake(lambda: derived.hidden()),
        api.as_endpoint(derived.hidden).call_one().get(timeout=30),
    ]


def what_behaves_like_none(hosts: Any, api: Any) -> Any:
    class Empty:
        def stream(self) -> Any:
            return iter([])

    return api.Accumulator(Empty(), 7, operator.add).accumulate().get(timeout=30)
