"""Answers that the weaver writes as JSON, so that the gateway only passes them on."""

from __future__ import annotations

import json
from typing import Any

import pytest

import loom
from loom.control.operations import INTERNAL
from loom.token_file import ADMIN
from loom.wire.plain import exact_json
from tests.unit.loom.weaver.running import running


async def test_an_answer_that_the_weaver_writes_as_json_is_the_same_as_one_that_is_read() -> None:
    async with running() as weaver:
        link = await weaver.threadlet(config={"rate": float("nan"), "name": "\udcff", "list": [1, None, True]})
        link.send("status", [[1, 1.0, 1, None, None, {"loss": float("inf")}, None]])
        await link.receive("stored")
        for operation, arguments in (
            ("replicas", {}),
            ("replica", {"id": "train_0"}),
            ("events", {"limit": 10}),
            ("replicas", {"in_session": "of-nobody"}),
        ):
            read = exact_json(await weaver.client.ask(operation, **arguments))
            written = await weaver.client.ask_json(operation, user=ADMIN, **arguments)
            assert without_times(json.loads(written)) == without_times(json.loads(read))


async def test_a_weaver_that_writes_no_json_is_asked_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(INTERNAL, "as_json")  # which makes it an older one
    async with running() as weaver:
        await weaver.threadlet()
        (replica,) = json.loads(await weaver.client.ask_json("replicas", user=ADMIN))

        assert replica["id"] == "train_0"


async def test_an_error_of_what_is_written_as_json_is_an_error() -> None:
    async with running() as weaver:
        with pytest.raises(loom.LoomError, match="train_7"):
            await weaver.client.ask_json("replica", user=ADMIN, id="train_7")


def without_times(value: Any) -> Any:
    """A value without what changes between two questions."""
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items() if not isinstance(one, float)}
    return [without_times(one) for one in value] if isinstance(value, list) else value
