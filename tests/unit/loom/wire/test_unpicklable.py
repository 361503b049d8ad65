"""What cannot travel, and what the error says of it."""

from __future__ import annotations

import collections
import datetime
import fractions
import functools
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest

from loom.actor import Actor, endpoint
from loom.errors import PythonVersionMismatch, UnpicklableError
from loom.wire import unpicklable
from loom.wire.codec import Decoder, Encoder, Reference, dumps, loads
from loom.wire.handshake import python_version

OTHER_PYTHON = (python_version()[0], python_version()[1] + 1)

laptop = Encoder(ship_project=True)


GLOBAL_LOCK = threading.Lock()


class HoldsLock:
    def __init__(self) -> None:
        self.name = "holds"
        self.guard = threading.Lock()


class SharesLock:
    def method(self) -> str:
        return SharesLock.__name__

    guard = threading.Lock()


class LockedParent:
    guard = threading.Lock()


class CallsParent(LockedParent):
    def __init__(self) -> None:
        super().__init__()


Pair = collections.namedtuple("Pair", ["left", "right"])


def uses_global_lock() -> bool:
    return GLOBAL_LOCK.locked()


def uses_global_lock_in_a_comprehension() -> list[bool]:
    return [GLOBAL_LOCK.locked() for _ in range(2)]


def uses_lock_by_default(guard: Any = GLOBAL_LOCK, *, other: int = 0) -> bool:
    return bool(guard.locked())


def closes_over_lock() -> Callable[[], bool]:
    guard = threading.Lock()

    def function() -> bool:
        return guard.locked()

    return function


def actor_whose_endpoint_closes_over_lock() -> type:
    guard = threading.Lock()

    class Guarded(Actor):
        def __init__(self) -> None:
            super().__init__()

        @endpoint
        def enter(self) -> bool:
            return guard.locked()

    return Guarded


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (HoldsLock, "it.guard"),
        (lambda: {"model": {"parts": [1, HoldsLock()]}}, "it['model']['parts'][1].guard"),
        (lambda: Pair(1, {"lock": threading.Lock()}), "it[1]['lock']"),
        (lambda: SharesLock, "it.guard"),
        (lambda: CallsParent, "it.guard"),
        (SharesLock, "it (its class).guard"),
        (lambda: closes_over_lock(), "it (its closure's guard)"),
        (lambda: uses_global_lock, "it (its global GLOBAL_LOCK)"),
        (lambda: uses_global_lock_in_a_comprehension, "it (its global GLOBAL_LOCK)"),
        (lambda: uses_lock_by_default, "it (its default"),
        (lambda: actor_whose_endpoint_closes_over_lock(), "it.enter (its closure's guard)"),
        (lambda: (actor_whose_endpoint_closes_over_lock(), (), {}), "it[0].enter (its closure's guard)"),
    ],
    ids=[
        "instance attribute",
        "nested dict",
        "named tuple",
        "class attribute",
        "inherited class attribute",
        "class attribute of an instance",
        "closure variable",
        "global of a function",
        "global of a comprehension",
        "default",
        "closure of an endpoint",
        "closure of an endpoint among arguments",
    ],
)
def test_an_error_names_what_cannot_be_pickled(make: Callable[[], Any], path: str) -> None:
    with pytest.raises(UnpicklableError) as caught:
        laptop.dumps(make(), "it")

    text = str(caught.value)
    assert text.startswith(path), text
    assert "cannot be pickled: it is a _thread.lock (cannot pickle '_thread.lock' object)" in text
    assert "Make it inside the actor" in text


def test_an_error_about_a_ring_of_objects_names_the_attribute() -> None:
    first, second = HoldsLock(), HoldsLock()
    del first.guard
    first.other, second.other = second, first  # type: ignore[attr-defined]

    with pytest.raises(UnpicklableError, match=r"^it\.other\.guard cannot be pickled"):
        laptop.dumps(first, "it")


def test_an_error_names_the_module_that_is_missing_here(tmp_path: Path) -> None:
    module = ModuleType("gone_soon")
    exec("class Thing: pass", module.__dict__)
    sys.modules["gone_soon"] = module
    try:
        parts = dumps(module.Thing())
    finally:
        del sys.modules["gone_soon"]

    with pytest.raises(UnpicklableError, match=r"the result cannot be unpickled on this side: .*gone_soon"):
        Decoder().loads(parts, "the result")


@pytest.mark.parametrize(
    "code",
    [HoldsLock, SharesLock, uses_global_lock, lambda: 1, actor_whose_endpoint_closes_over_lock()],
    ids=["class", "class of a project", "function", "lambda", "actor"],
)
def test_code_by_value_is_refused_if_the_peers_python_differs(code: Any) -> None:
    with pytest.raises(PythonVersionMismatch) as caught:
        Encoder(ship_project=True, peer_python=OTHER_PYTHON).dumps((code, 1))

    text = str(caught.value)
    assert f"{__name__}.{code.__qualname__}" in text
    assert f"this is Python {python_version()[0]}.{python_version()[1]}" in text
    assert f"the cluster runs Python {OTHER_PYTHON[0]}.{OTHER_PYTHON[1]}" in text


@pytest.mark.parametrize(
    "data",
    [
        {"rate": [0.1, 1, None], "name": "run"},
        bytes(64 << 10),
        fractions.Fraction(1, 3),
        datetime.date(2026, 1, 31),
        json.JSONEncoder,
        numpy.linalg.norm,
        collections.OrderedDict(a=1),
        Reference(3),
    ],
)
def test_data_and_installed_code_travel_even_if_the_peers_python_differs(data: Any) -> None:
    assert loads(Encoder(ship_project=True, peer_python=OTHER_PYTHON).dumps(data)) == data


def test_code_by_value_travels_if_the_peers_python_is_the_same() -> None:
    encoder = Encoder(ship_project=True, peer_python=list(python_version()))

    assert loads(encoder.dumps(lambda: 41 + 1))() == 42


class Link:
    def __init__(self, next: Any) -> None:
        self.next = next


def chain(length: int) -> Any:
    link = None
    for _ in range(length):
        link = Link(link)
    return link


class Locked:
    __slots__ = ("guard",)

    def __init__(self) -> None:
        self.guard = threading.Lock()


class StrangeGetattr:
    def __init__(self) -> None:
        self.guard = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class StrangeText:
    def __reduce__(self) -> Any:
        raise StrangeError

    def __repr__(self) -> str:
        raise ZeroDivisionError


class StrangeError(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


class Raises:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getstate__(self) -> Any:
        raise self.error


def many(last: Any) -> list[Any]:
    return [*(Link(number) for number in range(100_000)), last]


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: many(threading.Lock()), r"it\[100000\]"),
        (lambda: many(HoldsLock()), r"it\[100000\]\.guard"),
        (lambda: {number: HoldsLock() if number == 99_999 else Link(1) for number in range(100_000)}, r".*\.guard"),
        (lambda: Link(many(Link(Link(HoldsLock())))), r"it\.next\[100000\]\.next\.next\.guard"),
        (lambda: Locked(), r"it\.guard"),
        (lambda: [StrangeGetattr()], r"it\[0\]"),
        (lambda: {StrangeText: StrangeText()}, "it"),
        (lambda: functools.partial(print, HoldsLock()), r"it \(its arguments\)\[0\]\.guard"),
        (lambda: collections.deque([HoldsLock()]), r"it\[0\]\.guard"),
        (lambda: HoldsLock().__init__, r"it \(its object\)\.guard"),  # type: ignore[misc]
        (lambda: (number for number in range(3)), "it cannot be pickled: it is a generator"),
        (lambda: [sys._getframe()], r"it\[0\] cannot be pickled: it is a frame"),
        (lambda: {"a": {"b": memoryview(bytearray(5))[::2].obj, "c": threading.Lock()}}, r"it\['a'\]\['c'\]"),
    ],
)
def test_what_cannot_be_pickled_is_told_soon_and_as_that(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any], path: str
) -> None:
    monkeypatch.setattr(unpicklable, "SECONDS", 60.0)  # as much as a busy machine needs
    value = make()
    began = time.process_time()

    with pytest.raises(UnpicklableError, match=f"^{path}"):
        laptop.dumps(value, "it")

    assert time.process_time() - began < 10  # 12 to 28 s were seen


@pytest.mark.parametrize("kind", [KeyError, IndexError, AttributeError, OSError, MemoryError, StopIteration])
def test_what_raises_when_it_is_pickled_is_told(kind: type[Exception]) -> None:
    text = rf"^it\[0\] cannot be pickled: it is a .*\.Raises \({kind.__name__}: '?strange'?\)"
    with pytest.raises(UnpicklableError, match=text):
        laptop.dumps([Raises(kind("strange"))], "it")


def test_a_recursion_without_an_end_is_told() -> None:
    with pytest.raises(UnpicklableError, match="nested too deeply"):
        laptop.dumps([Raises(RecursionError())], "it")


@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: {"a": [value]}, lambda value: Link((value,))])
def test_what_is_nested_too_deeply_is_told(wrap: Callable[[Any], Any]) -> None:
    text = r"^it cannot be pickled: it is nested too deeply, as .*\.Link"
    with pytest.raises(UnpicklableError, match=text) as caught:
        laptop.dumps(wrap(chain(100_000)), "it")

    assert "list" in str(caught.value)


def nested_in(wrap: Callable[[Any], Any], depth: int = 20_000) -> Any:
    nested: Any = None
    for _ in range(depth):
        nested = wrap(nested)
    return nested


@pytest.mark.parametrize("around", [lambda it: it, lambda it: (len, (it,), {}), lambda it: ((), {"x": [1, it]})])
@pytest.mark.parametrize(
    ("wrap", "inside"),
    [
        (lambda it: [it], "list inside list;"),
        (lambda it: (it,), "tuple inside tuple;"),
        (lambda it: {"a": it}, "dict inside dict;"),
        (lambda it: [*range(20), it], "list inside list;"),
        (lambda it: collections.deque([it]), "collections.deque inside collections.deque;"),
        (lambda it: [{"a": (it,)}], "(list|tuple|dict)( inside (list|tuple|dict)){3};"),
        (lambda it: lambda: it, "function inside function;"),
    ],
)
def test_the_containers_that_are_nested_too_deeply_are_named(
    wrap: Callable[[Any], Any], inside: str, around: Callable[[Any], Any]
) -> None:
    with pytest.raises(UnpicklableError, match=f"^it cannot be pickled: it is nested too deeply, as {inside}"):
        laptop.dumps(around(nested_in(wrap)), "it")
