"""Lists of all users: one user's part of them is bounded, and the others' is whole."""

from __future__ import annotations

import time
from typing import Any

import msgpack
import pytest

from loom.token_file import ADMIN
from loom.weaver.keys import EVERYONE
from loom.weaver.server import guests_and_admins
from loom.weaver.server.guests_and_admins import bounded
from loom.weaver.views import ReplicaInfo, WeaverEvent
from tests.unit.loom.weaver.running import running

ROOM = 60_000


@pytest.mark.guarantees(
    "weaver",
    "`/metrics` shows a user their own numbers; one with many or long names leaves the lists of all users "
    "readable, and the others' parts whole",
)
@pytest.mark.parametrize("operation", ["replicas", "events", "devices", "goodput"])
async def test_one_users_names_leave_the_lists_of_all_users_readable(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guests_and_admins, "ALL_ITEMS", ROOM)
    async with running() as weaver:
        weaver.server.users.of("bob")
        links = [await weaver.threadlet(f"train_{number}") for number in range(20)]
        many = {f"{number:0199d}": 1.0 for number in range(300)}
        for link in links:
            link.send("status", [[1, time.time(), 1, None, None, many, {**many}]])
        for link in links:
            await link.receive("stored")

        found = await weaver.client.ask(
            operation, user=EVERYONE, **({"limit": 100} if operation == "events" else {})
        )

        assert len(msgpack.packb(found)) < ROOM + 1000
        if operation == "replicas":
            assert {ReplicaInfo.from_body(one).id for one in found} == {f"train_{number}" for number in range(20)}
            assert all(set(one["left_out"]) >= {"config", "metrics"} for one in found)
            own = await weaver.client.ask(operation, user=ADMIN)
            assert len(own[0]["metrics"]) == 300  # of one user alone, everything is there
        elif operation == "events":
            assert {WeaverEvent.from_body(one).data["user"] for one in found} == {ADMIN, "bob"}


def items(count: int, size: int) -> list[dict[str, Any]]:
    return [{"id": number, "text": "x" * size} for number in range(count)]


def test_the_room_that_small_lists_leave_is_the_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests_and_admins, "ALL_ITEMS", ROOM)
    each = {"anna": items(10, 100), "bob": items(10, 2_000), "carol": items(3, 1_000_000), "dave": []}

    answer = bounded(each)

    assert [answer[user] for user in ("anna", "bob", "dave")] == [each["anna"], each["bob"], []]
    assert [(len(one["text"]), one["left_out"]) for one in answer["carol"]] == [(200, ["text"])] * 3


def test_of_more_items_than_there_is_room_for_the_last_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests_and_admins, "ALL_ITEMS", ROOM)

    answer = bounded({"anna": items(1_000, 500), "bob": items(2, 50)})

    assert answer["bob"] == items(2, 50)
    assert [one["id"] for one in answer["anna"]] == list(range(1_000 - len(answer["anna"]), 1_000))
    assert ROOM / 2 < len(msgpack.packb(answer)) <= ROOM
