"""The operations on alerts as a gateway asks a running weaver for them."""

from __future__ import annotations

import json

import pytest

from loom.errors import Denied, UnknownAlert, WrongArguments
from loom.token_file import ADMIN
from loom.weaver.keys import EVERYONE
from tests.unit.loom.weaver.running import running


async def test_a_gateway_sets_lists_tests_and_removes_rules() -> None:
    async with running() as weaver:
        client = weaver.client
        made = await client.do("set_alert", "ann", rule="crashed", webhook="https://h.example.com/secret")
        assert (made["rule"], made["by"], made["webhook"]) == ("crashed", "ann", "https://h.example.com/…")
        assert [one["user"] for one in await client.do("alerts", "", user=EVERYONE)] == [ADMIN]
        listed = json.loads(await client.do_json("alerts", "", user=ADMIN))
        assert listed == [{**made, "user": ADMIN}]
        tested = await client.do("test_alert", "ann", alert=made["id"], wait=0.05)
        assert (tested["test"], tested["deliveries"][0]["state"]) == (True, "waiting")
        (logged,) = await client.do("alert_log", "")
        assert logged == tested
        (event,) = [one for one in await client.do("events", "") if one["kind"] == "alerted"]
        assert (event["alert"], event["rule"], event["quiet"]) == (tested["id"], "crashed", False)
        await client.do("remove_alert", "ann", alert=made["id"])
        assert await client.do("alerts", "") == []
        (logged,) = await client.do("alert_log", "")
        assert logged["deliveries"][0]["state"] == "given up"
        with pytest.raises(UnknownAlert):
            await client.do("test_alert", "ann", alert=made["id"])


@pytest.mark.parametrize("operation", ["alerts", "alert_log", "set_alert", "remove_alert", "test_alert"])
async def test_a_guest_of_a_session_has_nothing_to_do_with_its_owners_alerts(operation: str) -> None:
    async with running() as weaver:
        with pytest.raises(Denied):
            await weaver.client.do(operation, "bob", in_session="s1", alert="a", rule="crashed")


async def test_a_rule_is_set_for_one_user() -> None:
    async with running() as weaver:
        with pytest.raises(WrongArguments, match="name the user"):
            await weaver.client.do("set_alert", "root", user=EVERYONE, rule="crashed")
