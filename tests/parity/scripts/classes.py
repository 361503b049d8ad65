"""Classes that actors may be of, and what their methods may take, give and raise."""

from __future__ import annotations

import builtins
import dataclasses
import enum
import gc
import logging
from typing import Any, Generic, NamedTuple, TypeVar

from loom import Actor, endpoint
from tests.parity.actors import Counter, Note, Trouble

T = TypeVar("T")


class Box(Actor, Generic[T]):
    def __init__(self, content: T) -> None:
        self.content = content

    @endpoint
    def open(self) -> T:
        return self.content


@dataclasses.dataclass
class Pair(Actor):
    left: int
    right: int = 2

    @endpoint
    def total(self) -> int:
        return self.left + self.right


class Empty(Actor):
    """Has no endpoint."""

    def plain(self) -> str:
        return "plain"


class Kinds(Actor):
    """Has methods of every kind."""

    limit = 3

    @endpoint
    def call(self, k: int) -> int:
        return k

    @endpoint
    def get(self) -> str:
        return "get"

    @endpoint
    def name(self) -> str:
        return "name"

    @endpoint
    def only(self, a: int, /, b: int = 2, *, c: int = 3) -> tuple[int, int, int]:
        return a, b, c

    @endpoint
    def anything(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    @endpoint
    def logs(self) -> tuple[str, bool]:
        return self.logger.name, self.logger.isEnabledFor(logging.DEBUG)

    @endpoint
    def give_error(self) -> Exception:
        return Trouble("given", 4)

    @endpoint
    def raise_group(self) -> None:
        group = getattr(builtins, "ExceptionGroup", Trouble)  # from Python 3.11 on
        raise group("two", [ValueError("one"), Trouble("two", 2)])

    @endpoint
    def raise_base(self, which: str) -> None:
        raise {"stop": StopIteration, "key": KeyError, "time": TimeoutError, "assert": AssertionError}[which](which)

    @staticmethod
    def static(k: int) -> int:
        return -k

    @classmethod
    def of_class(cls, k: int) -> tuple[str, int]:
        return cls.__name__, k


class Color(enum.Enum):
    RED = 1


class Place(NamedTuple):
    x: int
    y: int


def generic_and_data_classes(hosts: Any, api: Any) -> Any:
    return [
        api.spawn(Box, "inside").open.call().get(timeout=30),
        api.spawn(Pair, 1, right=4).total.call().get(timeout=30),
        api.as_endpoint(api.spawn(Empty).plain).call().get(timeout=30),
    ]


def endpoints_named_as_adverbs(hosts: Any, api: Any) -> Any:
    kinds = api.spawn(Kinds).slice(hosts=0, gpus=0)
    return [
        kinds.call.call_one(5).get(timeout=30),
        kinds.get.call_one().get(timeout=30),
        kinds.name.call_one().get(timeout=30),
    ]


def parameters_of_every_kind(hosts: Any, api: Any) -> Any:
    kinds = api.spawn(Kinds).slice(hosts=0, gpus=0)
    return [
        kinds.only.call_one(1).get(timeout=30),
        kinds.only.call_one(1, b=5, c=6).get(timeout=30),
        kinds.anything.call_one(1, 2, a=3, self_=4).get(timeout=30),
        api.mistake(lambda: kinds.only.call_one(a=1)),
        api.mistake(lambda: kinds.only.call_one(1, 2, 3)),
        api.mistake(lambda: kinds.only.call_one(1, d=4)),
    ]


def methods_of_every_kind(hosts: Any, api: Any) -> Any:
    kinds = api.spawn(Kinds).slice(hosts=0, gpus=0)
    return [
        api.as_endpoint(kinds.static).call_one(5).get(timeout=30),
        api.as_endpoint(kinds.of_class).call_one(5).get(timeout=30),
        api.mistake(lambda: kinds.static(5)),
        api.mistake(lambda: kinds.limit()),
    ]


def a_logger(hosts: Any, api: Any) -> Any:
    return api.spawn(Kinds).slice(hosts=0, gpus=0).logs.call_one().get(timeout=30)


def exceptions_as_values_and_groups(hosts: Any, api: Any) -> Any:
    kinds = api.spawn(Kinds).slice(hosts=0, gpus=0)
    group = api.raised(lambda: kinds.raise_group.call_one().get(timeout=30))
    inner = getattr(getattr(group, "exception", None), "exceptions", ())
    return kinds.give_error.call_one().get(timeout=30), group, [*map(type, inner)], [error.args for error in inner]


def built_in_exceptions_of_every_kind(hosts: Any, api: Any) -> Any:
    kinds = api.spawn(Kinds).slice(hosts=1, gpus=0)
    return [
        api.raised(lambda which=which: kinds.raise_base.call_one(which).get(timeout=30))
        for which in ("stop", "key", "time", "assert")
    ]


def values_of_the_programs_own_classes(hosts: Any, api: Any) -> Any:
    one = api.spawn(Counter).slice(hosts=0, gpus=0)
    color = one.echo.call_one(Color.RED).get(timeout=30)
    place = one.echo.call_one(Place(1, 2)).get(timeout=30)
    pair = one.echo.call_one([Place(1, 2)] * 2).get(timeout=30)
    return color.name, place.x, place.y, pair[0] is pair[1], one.type_of.call_one(Color.RED).get(timeout=30)[1]


def one_class_twice(hosts: Any, api: Any) -> Any:
    first, second = api.procs.spawn("same", Counter, 1), api.procs.spawn("same", Counter, 10)
    first.add.call(1).get(timeout=30)
    return first.value.call().get(timeout=30), second.value.call().get(timeout=30)


def actors_outlive_the_programs_references(hosts: Any, api: Any) -> Any:
    procs = hosts.slice(hosts=slice(0, 1)).spawn_procs(name="dropped")
    counters = procs.spawn("counters", Counter, 3)
    del procs
    gc.collect()
    return counters.add.call(1).get(timeout=30)


def broadcasts_then_calls_in_order(hosts: Any, api: Any) -> Any:
    notes = api.spawn(Note)
    for number in range(50):
        notes.write.broadcast(number)
    notes.slice(gpus=0).write.call("half").get(timeout=30)
    return notes.read.call().get(timeout=30)
