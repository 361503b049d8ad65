"""What OpenAPI says of the weaver's answers fits the answers: the views are written down once."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI

from loom.control.commands import Acknowledgement, Change
from loom.weaver.replicas import Replica
from loom.weaver.states import DeviceState, ReplicaState
from loom.weaver.views import (
    CommandState,
    CoursePoint,
    DeviceInfo,
    FaultRecord,
    GoodputRecord,
    InjectionState,
    ProfileInfo,
    ReplicaInfo,
    WeaverEvent,
    WeaverStatus,
)
from loom_gateway.rest.weaver import weaver_routes

APPLIED = Acknowledgement(True, 7, {"lr": Change(0.1, 0.2)})
FAULT = FaultRecord("train_0", "killed", 1.0, 2.0)
VIEWS = [
    WeaverStatus("w", 1.0, 2.0, {"running": 1}, 1, 0, 5, 9),
    ReplicaInfo.from_body(Replica("train_0").info("anna", ["GPU-0"])),
    ReplicaInfo("train_0", ReplicaState.RUNNING, metrics={"loss": 0.5}, devices=("GPU-0",)),
    DeviceInfo("GPU-0", DeviceState.FAILED, "gpu", "node", "H200", 1 << 30, "broken", ("train_0",), {"power": 1.0}),
    ProfileInfo("train_0", 10.0, 3, 1, "py-spy", "main;train 3\n"),
    WeaverEvent(5, 1.0, "applied", "train_0", {"changes": {}, "cause": 4}),
    CommandState("c", ("train_0",), True, {"train_0": APPLIED}),
    CommandState("c", ("train_0",), False, {"train_0": Acknowledgement.failed("it is away", waiting=True)}),
    InjectionState("i", ("train_0",), True, {"train_0": Acknowledgement(True, evidence={"pid": 5})}, {"pid": 6}),
    GoodputRecord(
        "train", 1.0, 2.0, 1, 0.5, {"compute": 1.0}, (FaultRecord("r", "x", 1.0, 2.0),), (CoursePoint(2.0, {}),)
    ),
]


@pytest.fixture(scope="module")
def schemas() -> dict[str, Any]:
    app = FastAPI()
    app.include_router(weaver_routes(None, None, None))  # type: ignore[arg-type]
    return dict(app.openapi()["components"]["schemas"])


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: type(view).__name__)
def test_an_answer_has_the_fields_that_its_schema_names(schemas: dict[str, Any], view: Any) -> None:
    schema = schemas[type(view).__name__]

    body = view.to_body()

    assert set(schema["required"]) <= set(body)
    assert schema.get("additionalProperties") or set(body) <= set(schema["properties"])


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: type(view).__name__)
def test_an_answer_is_read_as_it_was_given(view: Any) -> None:
    assert type(view).from_body(view.to_body()) == view


def test_an_acknowledgement_says_no_more_than_there_is(schemas: dict[str, Any]) -> None:
    body = APPLIED.to_body()

    assert body == {
        "ok": True,
        "reason": None,
        "step": 7,
        "changes": {"lr": {"old": 0.1, "new": 0.2}},
        "refused": {},
    }
    assert set(schemas["Acknowledgement"]["required"]) <= set(body)


def test_only_what_people_may_tell_replicas_is_a_command_of_rest(schemas: dict[str, Any]) -> None:
    kinds = schemas["GiveCommand"]["properties"]["kind"]["enum"]

    of_devices = ["deactivate_device", "reactivate"]
    assert kinds == ["update_config", "pause", "resume", "stop", "drain", "save", "evaluate", *of_devices]


def test_a_newer_gateway_may_say_more() -> None:
    told = {**VIEWS[2].to_body(), "invented": 5}

    assert ReplicaInfo.from_body(told) == VIEWS[2]
