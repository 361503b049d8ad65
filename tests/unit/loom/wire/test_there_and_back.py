"""Values of a user's project on their way to a process that does not have it, through one more, and back."""

from __future__ import annotations

import contextvars
import enum
import pickle
import re
import struct
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest

from loom.errors import UnpicklableError
from loom.wire.codec import Decoder, Encoder
from tests.support.by_value import baskets, trees, values
from tests.support.by_value.values import VALUES

CLUSTER = """
import pickle, struct, sys
import cloudpickle
from loom.wire.by_value import repair_cloudpickle
from loom.wire.codec import Encoder, loads

repair_cloudpickle()
requests, answers = sys.stdin.buffer, sys.stdout.buffer
while head := requests.read(8):
    parts = pickle.loads(requests.read(struct.unpack("<q", head)[0]))
    try:
        value, look = loads(parts)
        value, look = pickle.loads(cloudpickle.dumps((value, look)))  # as Monarch passes it on
        answer = [bytes(part) for part in Encoder().dumps((value, look(value)))]
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    answer = pickle.dumps(answer)
    answers.write(struct.pack("<q", len(answer)) + answer)
    answers.flush()
"""

laptop = Encoder(ship_project=True)
home = Decoder(at_home=True)

Trip = Callable[[Any, Callable[[Any], Any]], tuple[Any, Any]]


@pytest.fixture(scope="module")
def there() -> Iterator[Callable[[Any, Callable[[Any], Any]], list[bytes]]]:
    """A process that looks at a value, and sends it back with what it has seen."""
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/"
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def send(value: Any, look: Callable[[Any], Any]) -> list[bytes]:
            sent = pickle.dumps([bytes(part) for part in laptop.dumps((value, look), "it")])
            requests.write(struct.pack("<q", len(sent)) + sent)
            requests.flush()
            (size,) = struct.unpack("<q", answers.read(8))
            answer: Any = pickle.loads(answers.read(size))
            assert isinstance(answer, list), answer
            return answer

        yield send
        requests.close()


@pytest.fixture(scope="module")
def trip(there: Callable[[Any, Callable[[Any], Any]], list[bytes]]) -> Trip:
    return lambda value, look: home.loads(there(value, look))


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_the_same_there_and_comes_back(trip: Trip, name: str) -> None:
    value, look = VALUES[name]

    back, seen = trip(value, look)

    assert seen == look(value)
    assert type(back) is type(value)
    if isinstance(value, enum.Enum | type | contextvars.ContextVar) and not isinstance(value, types.GenericAlias):
        assert back is value
    if not isinstance(value, list | types.FunctionType):  # iterators have been asked once
        assert look(back) == look(value)


class Limited:
    limit = 3

    def within(self, n: int) -> bool:
        return n <= self.limit


def test_a_class_here_is_not_changed_by_its_objects_that_come_back(
    trip: Trip, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = Limited.within
    parts = laptop.dumps(Limited())
    assert parts
    monkeypatch.setattr(Limited, "limit", 5)

    def change(value: Any) -> None:
        type(value).limit = 7

    back, _ = trip(Limited(), change)

    assert type(back) is Limited
    assert (Limited.limit, Limited.within) == (5, method)


def test_objects_come_back_to_the_next_process_of_the_same_program(
    there: Callable[[Any, Callable[[Any], Any]], list[bytes]],
) -> None:
    parts = there((Limited(), values.Outer.Inner(), values.Color.RED), lambda value: None)
    for cls in (Limited, values.Outer.Inner, values.Outer, values.Color):
        tracker = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.pop(cls)  # as in a new process
        cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.pop(tracker)

    (limited, inner, color), _ = home.loads(parts)

    assert (type(limited), type(inner), color) == (Limited, values.Outer.Inner, values.Color.RED)


def test_a_module_travels_without_what_it_does_not_use(trip: Trip) -> None:
    back, seen = trip(trees, lambda module: (module.picked(2), repr(module.baskets.LOCK)))

    assert seen[0] == 2
    assert "tests.support.by_value.baskets.LOCK is on the laptop only: _thread.lock cannot be pickled" in seen[1]
    assert isinstance(back, types.ModuleType)


def test_a_use_of_what_did_not_travel_is_told(trip: Trip) -> None:
    def use(module: Any) -> str:
        try:
            module.picked_alone(2)
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"
        return "used"

    _, seen = trip(trees, use)

    assert seen.startswith("UnpicklableError: tests.support.by_value.baskets.fits_alone is on the laptop only")


def test_a_function_that_uses_a_lock_of_its_module_is_refused_here() -> None:
    with pytest.raises(UnpicklableError, match=r"^it \(its global LOCK\) cannot be pickled: it is a _thread.lock"):
        laptop.dumps(baskets.fits_alone, "it")


def test_a_class_of_a_native_extension_that_names_another_module_travels_by_where_it_is() -> None:
    native = type(iter(re.finditer("a", "a")))  # a class in C that no module has
    with pytest.raises(UnpicklableError, match="native extension"):
        laptop.dumps(native, "it")
    module = types.ModuleType("native_extension")
    vars(module)[native.__name__] = native
    sys.modules["native_extension"] = module
    try:
        assert home.loads(laptop.dumps([native, native], "it")) == [native, native]
    finally:
        del sys.modules["native_extension"]
