"""Bodies of messages: what travels, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loom.errors import ProtocolMismatch
from loom.wire.bodies import (
    CallOne,
    CancelOperation,
    EndpointCall,
    ForgetMeshes,
    OperationError,
    OperationResult,
    SpawnProcs,
)
from loom.wire.body import BODIES, Body
from loom.wire.handshake import Hello
from loom.wire.messages import Kind

NUMBERS = st.integers(0, 2**40)
TEXTS = st.text(max_size=10)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "Any": st.none() | NUMBERS,
    "int": NUMBERS,
    "Id": st.integers(-(2**40), 2**40),
    "int | None": st.none() | NUMBERS,
    "bool": st.booleans(),
    "bool | None": st.booleans() | st.none(),
    "float": st.floats(0, 1e9),
    "float | None": st.none() | st.floats(0, 1e9),
    "str": TEXTS,
    "str | None": st.none() | TEXTS,
    "bytes": st.binary(max_size=10),
    "Sequence[Any]": st.lists(TEXTS, max_size=3),
    "Sequence[Any] | None": st.none() | st.lists(TEXTS, max_size=3),
    "Sequence[int]": st.lists(NUMBERS, max_size=3),
    "Sequence[str]": st.lists(TEXTS, max_size=3),
    "Mapping[str, Any]": st.dictionaries(TEXTS, NUMBERS, max_size=3),
    "Mapping[str, int]": st.dictionaries(TEXTS, NUMBERS, max_size=3),
    "Mapping[str, str]": st.dictionaries(TEXTS, TEXTS, max_size=3),
    "Mapping[str, Sequence[int]]": st.dictionaries(TEXTS, st.lists(NUMBERS, max_size=3), max_size=3),
}


@st.composite
def bodies(draw: st.DrawFn) -> Body:
    cls = draw(st.sampled_from(sorted(BODIES.values(), key=lambda each: each.KIND)))
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    return cls(**{field.name: draw(VALUES[str(field.type)]) for field in fields})


def test_every_kind_has_a_body() -> None:
    assert set(BODIES) == set(Kind)
    assert BODIES[Kind.HELLO] is Hello


@pytest.mark.parametrize("cls", BODIES.values(), ids=lambda cls: cls.__name__)
def test_every_body_is_documented(cls: type[Body]) -> None:
    assert cls.__doc__
    assert not cls.__doc__.startswith(f"{cls.__name__}(")  # which a dataclass without one has


@given(bodies())
def test_a_body_arrives_as_it_was_sent(body: Body) -> None:
    arrived = msgpack.unpackb(msgpack.packb(body.to_body()))

    assert type(body).from_body(arrived) == body


def test_a_message_of_a_body() -> None:
    message = CallOne(7, "add").message(12, [b"payload"])

    assert message == (Kind.CALL_ONE, 12, (7, "add"), [b"payload"])


def test_the_fields_of_a_call_and_of_its_result_are_read_without_a_body() -> None:
    assert EndpointCall.fields((7, "add")) == (7, "add")
    assert OperationResult.fields((1.5,)) == (1.5, None)
    assert OperationResult.fields((1.5, 3)) == (1.5, 3)


@pytest.mark.parametrize("body", [(7,), (7, "add", 1), ("7", "add"), (True, "add"), (7, None)])
def test_the_fields_of_a_call_are_checked(body: tuple[Any, ...]) -> None:
    with pytest.raises(ProtocolMismatch, match="not a message CALL"):
        EndpointCall.fields(body)


@pytest.mark.parametrize("body", [(), ("soon",), (-1.0,), (1.5, "first"), (1.5, 3, 4)])
def test_the_fields_of_a_result_are_checked(body: tuple[Any, ...]) -> None:
    with pytest.raises(ProtocolMismatch, match="not a message RESULT"):
        OperationResult.fields(body)


@pytest.mark.parametrize("index", [None, 3])
def test_the_message_of_a_result_is_that_of_its_body(index: int | None) -> None:
    body = OperationResult(1.5, index)

    made, plain = OperationResult.message_of(12, [b"payload"], 1.5, index), body.message(12, [b"payload"])
    assert (made.kind, made.id, list(made.body), made.parts) == (plain.kind, plain.id, plain.body, plain.parts)


def test_what_has_a_default_does_not_travel() -> None:
    assert OperationResult(1.5).to_body() == [1.5]
    assert OperationResult(1.5, 3).to_body() == [1.5, 3]
    assert OperationError(1.5, "limit", 3).to_body() == [1.5, "limit", 3]
    assert CancelOperation(4).to_body() == [4]
    assert ForgetMeshes([-1, -2]).to_body() == [-1, -2]


@pytest.mark.parametrize(
    ("cls", "body", "wrong"),
    [
        (CallOne, [7], "not a message CALL_ONE of Loom's protocol, which has mesh, endpoint, trace"),
        (CallOne, [7, "add", "abc", 1], "which has mesh, endpoint, trace"),
        (CallOne, [7, "add", 1], "its trace is 1"),
        (CallOne, ["7", "add"], "its mesh is '7'"),
        (CallOne, [7, None], "its endpoint is None"),
        (CallOne, [True, "add"], "its mesh is True"),
        (SpawnProcs, [0, "procs", {"gpus": "2"}], "its per_host is"),
        (SpawnProcs, [0, "procs", [["gpus", 2]]], "its per_host is"),
        (OperationResult, ["soon"], "its rpc_ms is 'soon'"),
        (OperationResult, [-1.0, 0], "its rpc_ms is -1.0"),
        (CancelOperation, [], "which has operation, first_chunk"),
        (ForgetMeshes, ["all"], "its meshes is"),
    ],
)
def test_a_body_that_is_not_of_the_protocol_is_refused(cls: type[Body], body: list[Any], wrong: str) -> None:
    with pytest.raises(ProtocolMismatch, match=wrong):
        cls.from_body(body)


@given(
    st.sampled_from(sorted(BODIES.values(), key=lambda each: each.KIND)),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
        lambda children: (
            st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=3), children, max_size=3)
        ),
    ).filter(lambda value: isinstance(value, list)),
)
def test_garbage_is_refused_and_nothing_else_is_raised(cls: type[Body], body: list[Any]) -> None:
    try:
        made = cls.from_body(body)
    except ProtocolMismatch:
        return
    assert cls.from_body(made.to_body()) == made or body != body  # a float that is not a number
