"""Signatures: endpoints are found by their shape, and arguments that do not fit are refused before sending."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from types import ModuleType
from typing import Any

import pytest

import loom.actor
from loom.errors import WrongArguments
from loom.signatures import CallSignature, constructor, endpoints


def stand_ins() -> ModuleType:
    """`loom.actor` as it is where torchmonarch is not installed."""
    with pytest.MonkeyPatch.context() as laptop:
        laptop.setitem(sys.modules, "monarch", None)
        spec = importlib.util.spec_from_file_location("stand_ins", loom.actor.__file__)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def actor_class(kit: Any) -> Any:
    """The same actor class, written with Monarch's names or with their stand-ins."""

    class Base(kit.Actor):
        @kit.endpoint
        def inherited(self) -> None: ...

    class Counter(Base):
        limit = 3

        def __init__(self, start: int, *, step: int = 1) -> None: ...

        @kit.endpoint
        def add(self, k: int, times: int = 1) -> None: ...

        @kit.endpoint(explicit_response_port=True)
        def answer(self, port: Any, question: str) -> None: ...

        @kit.endpoint
        def anything(self, *args: Any, **kwargs: Any) -> None: ...

        @kit.endpoint
        def strict(self, a: int, /, b: int, *, c: int, d: int = 4) -> None: ...

        def helper(self, x: int) -> None: ...

    return Counter


@pytest.fixture(params=["monarch", "stand-ins"])
def counter(request: pytest.FixtureRequest) -> Any:
    return actor_class(loom.actor if request.param == "monarch" else stand_ins())


def test_the_endpoints_of_a_class_are_found(counter: Any) -> None:
    assert set(endpoints(counter)) == {"inherited", "add", "answer", "anything", "strict"}


def test_a_signature_leaves_out_self_and_the_response_port(counter: Any) -> None:
    found = endpoints(counter)

    assert [name for name, _, _ in found["add"].parameters] == ["k", "times"]
    assert [name for name, _, _ in found["answer"].parameters] == ["question"]
    assert found["inherited"].parameters == ()


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("inherited", (), {}),
        ("add", (1,), {}),
        ("add", (1, 2), {}),
        ("add", (1,), {"times": 2}),
        ("add", (), {"k": 1}),
        ("answer", ("why",), {}),
        ("anything", (1, 2, 3), {"x": 4}),
        ("strict", (1, 2), {"c": 3}),
        ("strict", (1,), {"b": 2, "c": 3, "d": 4}),
    ],
)
def test_arguments_that_fit_are_taken(counter: Any, name: str, args: Any, kwargs: Any) -> None:
    endpoints(counter)[name].check(args, kwargs)


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "text"),
    [
        ("inherited", (1,), {}, "too many positional arguments"),
        ("add", (), {}, "missing a required argument: 'k'"),
        ("add", (1, 2, 3), {}, "too many positional arguments"),
        ("add", (1,), {"k": 1}, "multiple values for argument 'k'"),
        ("add", (1,), {"step": 1}, "got an unexpected keyword argument 'step'"),
        ("answer", ("port", "why"), {}, "too many positional arguments"),
        ("strict", (1, 2), {}, "'c'"),
        ("strict", (), {"a": 1, "b": 2, "c": 3}, "'a'"),
        ("strict", (1, 2, 3), {}, "too many positional arguments"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_the_signature(
    counter: Any, name: str, args: Any, kwargs: Any, text: str
) -> None:
    signature = endpoints(counter)[name]

    with pytest.raises(WrongArguments) as caught:
        signature.check(args, kwargs)

    assert str(caught.value).startswith(f"Counter.{name}(") or name == "inherited"
    assert str(signature) in str(caught.value)
    assert text in str(caught.value)


def test_the_constructor_is_checked_too(counter: Any) -> None:
    signature = constructor(counter)

    signature.check((10,), {"step": 2})
    with pytest.raises(WrongArguments, match=r"Counter\(start, \*, step=.*missing a required argument: 'start'"):
        signature.check((), {"step": 2})


@pytest.mark.parametrize("kit", [loom.actor, stand_ins()], ids=["monarch", "stand-ins"])
def test_a_class_without_a_constructor_takes_no_arguments(kit: Any) -> None:
    class Bare(kit.Actor):  # type: ignore[misc]
        pass

    constructor(Bare).check((), {})
    with pytest.raises(WrongArguments, match=r"Bare\(\): too many positional arguments"):
        constructor(Bare).check((1,), {})


def test_a_signature_is_the_same_after_it_has_travelled(counter: Any) -> None:
    signature = endpoints(counter)["strict"]
    travelled = CallSignature(signature.name, [list(parameter) for parameter in signature.parameters])  # type: ignore[misc]

    assert travelled.parameters == signature.parameters
    assert str(travelled) == str(signature)


def test_the_order_and_kinds_of_parameters_are_kept() -> None:
    def function(self: Any, a: int, /, b: int, *args: int, c: int, d: int = 1, **kwargs: int) -> None: ...

    kinds = [inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD]
    kinds += [
        inspect.Parameter.VAR_POSITIONAL,
        *[inspect.Parameter.KEYWORD_ONLY] * 2,
        inspect.Parameter.VAR_KEYWORD,
    ]

    signature = CallSignature.of("function", function, 1)

    assert signature.parameters == tuple(
        (name, int(kind), name == "d")
        for name, kind in zip(["a", "b", "args", "c", "d", "kwargs"], kinds, strict=True)
    )
