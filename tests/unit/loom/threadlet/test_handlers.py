"""Handlers: which types they may ask for, and what becomes of each key of an update."""

from __future__ import annotations

import enum
import functools
from typing import Any

import pytest

from loom.errors import WrongArguments
from loom.threadlet import HandlerRegistry
from loom.threadlet.handlers import Outcome


class Box:
    def __init__(self) -> None:
        self.got: list[Any] = []

    def take(self, value: float) -> None:
        self.got.append(value)

    def take_named(self, key: str, value: int) -> None:
        self.got.append((key, value))

    def __call__(self, value: int) -> None:
        self.got.append(value)


def apply(registry: HandlerRegistry, **update: Any) -> list[Outcome]:
    return [registry.apply(key, value) for key, value in update.items()]


def test_the_handler_gets_the_converted_value() -> None:
    registry, box = HandlerRegistry(), Box()
    registry.register("learning_rate", box.take)

    outcomes = apply(registry, learning_rate="0.002")

    assert outcomes == [Outcome("learning_rate", 0.002)]
    assert box.got == [0.002]
    assert registry.types() == {"learning_rate": "float"}


def test_without_annotation_it_gets_what_came() -> None:
    registry, got = HandlerRegistry(), []
    registry.register("any", lambda value: got.append(value))
    registry.register("in_c", got.append)

    apply(registry, any="0.002", in_c={"a": 1})

    assert got == ["0.002", {"a": 1}]
    assert registry.types() == {"any": "Any", "in_c": "Any"}


def test_what_can_be_called_with_one_value_can_be_a_handler() -> None:
    registry, box = HandlerRegistry(), Box()
    registry.register("object", box)
    registry.register("part", functools.partial(box.take_named, "part"))

    apply(registry, object="1", part="2")

    assert box.got == [1, ("part", 2)]


def test_a_bad_value_is_refused_with_key_value_and_type() -> None:
    registry, box = HandlerRegistry(), Box()
    registry.register("learning_rate", box.take)

    (outcome,) = apply(registry, learning_rate="fast")

    assert outcome.refused == "learning_rate: 'fast' is not of type float"
    assert box.got == []


def test_a_key_without_handler_is_refused_and_the_others_are_named() -> None:
    registry = HandlerRegistry()
    assert "it has handlers for: none" in str(apply(registry, lr=1)[0].refused)
    registry.register("momentum", print)
    registry.register("batch_size", print)

    assert apply(registry, lr=1)[0].refused == (
        "lr: no handler for it in this replica; it has handlers for: batch_size, momentum"
    )


def test_a_handler_that_raises_is_a_refusal() -> None:
    registry = HandlerRegistry()

    def handle(value: int) -> None:
        raise ValueError(f"{value} does not divide 64")

    registry.register("batch_size", handle)

    assert apply(registry, batch_size=48)[0].refused == (
        "batch_size: the handler raised ValueError: 48 does not divide 64"
    )


def test_an_interrupt_goes_through() -> None:
    registry = HandlerRegistry()

    def handle(value: int) -> None:
        raise KeyboardInterrupt

    registry.register("batch_size", handle)

    with pytest.raises(KeyboardInterrupt):
        apply(registry, batch_size=48)


def test_each_key_of_an_update_stands_for_itself() -> None:
    registry, box = HandlerRegistry(), Box()
    for key in ("a", "b", "c"):
        registry.register(key, box.take)

    outcomes = apply(registry, a=1, b="x", none=0, c="3")

    assert [(one.key, one.refused is None) for one in outcomes] == [
        ("a", True),
        ("b", False),
        ("none", False),
        ("c", True),
    ]
    assert box.got == [1.0, 3.0]


def test_a_later_handler_takes_the_place() -> None:
    registry, first, second = HandlerRegistry(), Box(), Box()
    registry.register("a", first.take)
    registry.register("a", second)

    apply(registry, a="1")

    assert (first.got, second.got) == ([], [1])
    assert len(registry) == 1
    assert "a" in registry


def test_annotations_may_name_what_is_local_to_the_caller() -> None:
    class Color(enum.Enum):
        RED = 1

    registry, got = HandlerRegistry(), []

    def handle(value: Color) -> None:
        got.append(value)

    registry.register("color", handle, locals())
    apply(registry, color="RED")

    assert got == [Color.RED]


@pytest.mark.parametrize("key", ["", "x" * 201, 5])
def test_a_key_is_a_text_of_some_length(key: Any) -> None:
    with pytest.raises(WrongArguments, match="key is a text"):
        HandlerRegistry().register(key, print)


def test_functions_that_take_no_single_value_are_refused_at_once() -> None:
    def none() -> None: ...
    def two(a: int, b: int) -> None: ...
    def keyword(*, a: int) -> None: ...

    for function in (none, two, keyword):
        with pytest.raises(WrongArguments, match="handler for 'a' has to take one value"):
            HandlerRegistry().register("a", function)  # type: ignore[arg-type]


def test_types_that_nothing_is_converted_to_are_refused_at_once() -> None:
    def takes_bytes(value: bytes) -> None: ...
    def takes_unknown(value: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(WrongArguments, match="asks for bytes; values are converted to int, float"):
        HandlerRegistry().register("a", takes_bytes)
    with pytest.raises(WrongArguments, match="Nowhere"):
        HandlerRegistry().register("a", takes_unknown)
