"""The weaver's operations are declared once: each has a handler, a reach and a route, and checks its arguments."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from fastapi import FastAPI

import loom
from loom.control.latencies import BOUNDS
from loom.control.operations import (
    INTERNAL,
    OPERATIONS,
    ArgumentBounds,
    AsJson,
    GetUsers,
    Operation,
    Reach,
    ReadAudit,
    TakeSessions,
    is_required,
    takes,
)
from loom.token_file import ADMIN
from loom.weaver.client import WeaverClient
from loom.weaver.keys import EVERYONE
from loom_gateway.rest.weaver import weaver_routes
from loom_proxy.weaver import alerts, command, methods, runs, watch
from tests.unit.loom.weaver.running import KEYS, running

EACH = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda one: one.name)
ALSO_INTERNAL = pytest.mark.parametrize(
    "operation", [*OPERATIONS.values(), *INTERNAL.values()], ids=lambda one: one.name
)

ODD = {"str": 5, "Name": 5, "Id": "short", "int": -1, "Count": -1, "float": "soon", "Wait": "soon", "Action": None}
"""What an argument is not, by the first name of its type."""


def odd_arguments(operation: type[Operation]) -> Iterator[tuple[str, Any]]:
    for one in fields(operation):  # type: ignore[arg-type]
        kind = re.findall(r"\w+", str(one.type).removeprefix("Annotated["))[0]
        if kind in ODD and "list" not in str(one.type):
            yield one.name, ODD[kind]


def enough(operation: type[Operation]) -> dict[str, Any]:
    """Arguments for all that have no default."""
    known: dict[str, Any] = {"counts": [0] * (len(BOUNDS) + 1), "data": {}}
    return {one.name: known.get(one.name, "pause") for one in fields(operation) if is_required(one)}  # type: ignore[arg-type]


@ALSO_INTERNAL
def test_an_argument_that_makes_no_sense_is_named(operation: type[Operation]) -> None:
    for name, odd in odd_arguments(operation):
        with pytest.raises(loom.WrongArguments, match=name):
            operation.read({**enough(operation), name: odd})
    for name in enough(operation):
        if name != "target":  # its handler says what it needs
            with pytest.raises(loom.WrongArguments, match=f"{name} is missing"):
                operation.read({**enough(operation), name: None})


@ALSO_INTERNAL
def test_arguments_of_a_newer_program_are_ignored(operation: type[Operation]) -> None:
    assert operation.read({**enough(operation), "newer": 1}) == operation.read(enough(operation))


@ALSO_INTERNAL
def test_what_was_given_of_it_is_read_as_it_was(operation: type[Operation]) -> None:
    asked = operation.read(enough(operation))

    assert operation.read(asked.given()) == asked
    assert asked.given().keys() >= enough(operation).keys()


@EACH
def test_it_is_described_and_has_a_route_of_its_own(operation: type[Operation]) -> None:
    app = FastAPI()
    app.include_router(weaver_routes(None, None, None))  # type: ignore[arg-type]
    described = app.openapi()["paths"][f"/api/v1{operation.route.shown_path}"][operation.route.method.lower()]
    assert described["description"] == inspect.getdoc(operation)
    shown = {one["name"] for one in described["parameters"]} - {"user", "session"}
    if operation.reads():
        inner = {one.name for one in fields(operation) if one.metadata}  # type: ignore[arg-type]
        called = {operation.route.called or "id"} - {"id"}
        assert shown == {one.name for one in fields(operation)} - inner - ({"id"} if called else set()) | called  # type: ignore[arg-type]


async def test_the_weaver_answers_each_and_reaches_as_far_as_is_declared() -> None:
    async with running() as weaver:
        link = await weaver.threadlet()
        for name, operation in OPERATIONS.items():
            given = {**enough(operation), **({operation.about: "train_0"} if operation.about else {})}
            if operation.waits and name != "command_state":
                continue  # a threadlet would have to answer
            for about, reach in (
                ({}, None),
                ({"in_session": "s"}, Reach.GUEST),
                ({"user": EVERYONE}, Reach.EVERYONE),
            ):
                told = await asyncio.gather(weaver.client.ask(name, **about, **given), return_exceptions=True)
                reached = not isinstance(told[0], loom.Denied) and "one user at a time" not in str(told[0])
                assert "knows no operation" not in str(told[0])
                assert reached is (reach is None or reach in operation.reach), (name, about, told)
        link.close()


async def test_the_weaver_answers_each_of_looms_own_and_a_session_those_about_itself() -> None:
    async with running() as weaver:
        session = WeaverClient(weaver.client.place, lambda: KEYS.of(ADMIN, "s"))
        session.came()
        for name, operation in INTERNAL.items():
            asked = operation.read(
                {**enough(operation), **({"do": "replicas"} if "do" in enough(operation) else {})}
            )
            told = await asyncio.gather(session.ask_for(asked), return_exceptions=True)
            refused = isinstance(told[0], loom.Denied) and "a session cannot ask" in str(told[0])
            assert refused is not (Reach.SESSION in operation.reach or operation is AsJson), (name, told)
            if operation is TakeSessions:  # of a host that has just said that it lives
                with pytest.raises(loom.WrongState, match="may live"):
                    await weaver.client.ask_for(asked)
            elif operation is not ReadAudit:  # it waits for something to be written
                user = EVERYONE if operation is GetUsers else None
                await weaver.client.ask_for(asked, **({} if user is None else {"user": user}))
        session.close()


@EACH
def test_the_laptop_has_a_method_that_asks_for_it(operation: type[Operation]) -> None:
    sources = [inspect.getsource(one) for one in (methods, watch, command, runs, alerts)]
    assert re.search(rf'_ask\(\s*"{operation.name}"|ask\(\s*"{operation.name}"', "".join(sources))


def test_how_long_one_may_take_follows_from_its_arguments() -> None:
    assert [takes("status", {}), takes("command", {"wait": 3.0}), takes("unknown", {})] == [0.0, 3.0, 0.0]
    assert takes("profile", {"seconds": 99}) - takes("stacks", {}) == 30.0


def test_bounds_are_those_that_pydantic_reads() -> None:
    assert [type(one).__name__ for one in ArgumentBounds(ge=1, le=2, min_length=1, max_length=3)] == [
        "Ge",
        "Le",
        "MinLen",
        "MaxLen",
    ]
    assert len(list(ArgumentBounds(pattern="a"))) == 1
