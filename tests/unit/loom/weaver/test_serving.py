"""Every operation of the weaver's server, asked for by its client."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import pytest

import loom
from loom.control.operations import ReportCalls
from loom.token_file import ADMIN
from loom.weaver.client import WeaverClient
from loom.weaver.server import pushes, user_weaver
from tests.unit.loom.weaver.raw_threadlet import BOUND, GPU
from tests.unit.loom.weaver.running import KEYS, running


async def test_what_there_is_can_be_asked_for() -> None:
    async with running() as weaver:
        link = await weaver.threadlet()
        link.send("status", [[1, time.time(), 7, 1, 100, {"loss": 0.5}, {"learning_rate": 0.1}]])
        link.send("beat", time.time(), 8, "between")
        link.send("devices", time.time(), {"GPU-0": {"utilization": 0.5}})
        link.send("handlers", {"batch": "int"})
        link.send("spent", [9.0, 1.0, 0, 7, 0.5, {"compute": 5.0}])
        await link.receive("stored")
        ask = weaver.client.ask

        replica = await ask("replica", id="train_0")
        (device,) = await ask("devices")
        (job,) = await ask("goodput", job="train")

        assert (replica["step"], replica["metrics"], replica["epoch"], replica["max_step"]) == (
            8,
            {"loss": 0.5},
            1,
            100,
        )
        assert replica["handlers"] == {"learning_rate": "float", "batch": "int"}
        assert replica["config"] == {"learning_rate": 0.1}
        assert [one["id"] for one in await ask("replicas")] == ["train_0"]
        assert (device["uuid"], device["status"]["utilization"], device["replicas"]) == ("GPU-0", 0.5, ["train_0"])
        assert job["job"] == "train"
        assert await ask("goodput", job="other") == []
        assert (await ask("status"))["replicas"] == {"running": 1}
        assert await ask("metrics", replica="train_0") == ["loss"]
        assert [point[1:] for point in await ask("history", replica="train_0", metric="loss")] == [[7, 0.5]]
        assert [event["kind"] for event in await ask("events", kind="registered", replica="train_0")] == [
            "registered"
        ]
        assert await ask("address") == f"tcp://h:1/{KEYS.of(ADMIN)}"
        assert (await ask("numbers"))["of_devices"]["GPU-0"]["utilization"] == 0.5


async def test_a_command_is_applied_and_who_waits_is_told() -> None:
    async with running() as weaver:
        link = await weaver.threadlet()
        giving = asyncio.ensure_future(
            weaver.client.do("command", "anna", kind="update_config", params={"learning_rate": 0.5}, wait=BOUND)
        )
        _, id, kind, params = await link.receive("command")
        link.send("ack", id, 9, {"ok": True, "changes": {"learning_rate": {"old": 0.1, "new": 0.5}}})

        state = await giving

        assert (kind, params) == ("update_config", {"learning_rate": 0.5})
        assert (state["done"], state["outcomes"]["train_0"]["step"]) == (True, 9)
        (event,) = await weaver.client.ask("events", kind="applied")
        assert event["by"] == "anna"
        assert (await weaver.client.do("command_state", "anna", id=id))["done"]
        with pytest.raises(loom.UnknownCommand):
            await weaver.client.do("command_state", "anna", id="none")


async def test_two_may_wait_for_one_command_and_one_may_give_up() -> None:
    async with running() as weaver:
        link = await weaver.threadlet()
        given = await weaver.client.do("command", "anna", kind="pause")
        do = weaver.client.do
        waiting = [asyncio.ensure_future(do("command_state", "", id=given["id"], wait=BOUND)) for _ in range(2)]

        early = await do("command_state", "", id=given["id"], wait=0.05)
        link.send("ack", given["id"], 1, {"ok": True})

        assert not early["done"]
        assert early["outcomes"]["train_0"]["waiting"]
        assert "has not applied it in" in early["outcomes"]["train_0"]["reason"]
        assert [one["done"] for one in await asyncio.gather(*waiting)] == [True, True]
        assert (await weaver.client.ask("replica", id="train_0"))["state"] == "paused"


async def test_a_command_to_several_reaches_each() -> None:
    async with running() as weaver:
        links = [await weaver.threadlet(f"train_{number}", devices=[]) for number in range(3)]
        given = await weaver.client.do("command", "anna", kind="pause")

        assert {(await link.receive("command"))[1] for link in links} == {given["id"]}


async def test_a_fault_is_injected_into_who_is_marked_and_removed() -> None:
    async with running() as weaver:
        link = await weaver.threadlet(injectable=True)
        await weaver.threadlet("train_1", devices=[])
        given = await weaver.client.do(
            "inject", "anna", fault="slow_rank", target="train_0", params={"seconds": 0.1}
        )
        _, id, kind, params = await link.receive("command")
        link.send("ack", id, 1, {"ok": True, "evidence": {"pid": 1}})
        removing = asyncio.ensure_future(weaver.client.do("remove_fault", "anna", injection=id, wait=BOUND))
        _, removal, what, about = await link.receive("command")
        link.send("fault", id, {"gone": True})
        link.send("ack", removal, 2, {"ok": True})

        assert (given["id"], kind, params["fault"]) == (id, "inject", "slow_rank")
        assert (what, about) == ("remove_fault", {"injection": id})
        assert (await removing)["done"]
        (event,) = await weaver.client.ask("events", kind="fault_removed")
        assert event["evidence"] == {"gone": True}
        with pytest.raises(loom.NotInjectable, match="not marked as injectable: train_1"):
            await weaver.client.do("inject", "anna", fault="sigkill", target="train_1")
        with pytest.raises(loom.UnknownReplica, match=r'no replica named "nobody"; registered: train_0, train_1'):
            await weaver.client.do("inject", "anna", fault="sigkill", target="nobody")
        with pytest.raises(loom.UnknownReplica, match="no replica that lives is named by 'eval_"):
            await weaver.client.do("inject", "anna", fault="sigkill", target="eval_*")
        with pytest.raises(loom.UnknownInjection):
            await weaver.client.do("remove_fault", "anna", injection="none")


async def test_a_device_fails_and_its_policy_says_what_follows() -> None:
    async with running() as weaver:
        link = await weaver.threadlet()
        assert await weaver.client.do("policy", "anna", group="train", action="pause") == {"train": "pause"}

        event = await weaver.client.do("fail_device", "anna", device="GPU-0", reason="Xid 79")

        assert event["device"] == GPU
        assert [entry["action"] for entry in event["replicas"]] == ["pause"]
        assert {(await link.receive("command"))[2] for _ in range(2)} == {"device_failed", "pause"}
        assert await weaver.client.do("policies", "anna") == {"train": "pause"}
        again = await weaver.client.do("fail_device", "anna", device="GPU-0")
        assert again["id"] == event["id"]


async def test_a_device_is_taken_out_of_use_and_put_back() -> None:
    async with running() as weaver:
        await weaver.threadlet()
        for kind, state in (("deactivate_device", "inactive"), ("reactivate", "active")):
            await weaver.client.do("command", "anna", kind=kind, params={"device": "GPU-0"}, target=[])

            assert [one["state"] for one in await weaver.client.ask("devices")] == [state]


async def test_what_drivers_tell_is_logged() -> None:
    async with running() as weaver:
        ask = weaver.client.ask
        await weaver.threadlet(session="s", procs="5", mesh="trainers", rank=0)
        await ask("spawned", session="s", procs=5, mesh="trainers", rank=None, what="2 of trainers")
        await ask("calls", session="s", counts=[0] * 15, sum=0.0)
        noted = await ask("note", kind="shrunk", replica=None, data={"groups": 2})

        assert await ask("replicas_in", session="s", procs=5, ranks=[0], timeout=BOUND) == [[0, "train_0"]]
        assert await ask("replicas_in", session="s", procs=6, ranks=[0], timeout=0.05) == []
        gone = {"session": "s", "procs": 5, "mesh": "trainers", "rank": 0, "what": "stopped"}
        assert await ask("supervision", **gone) == ["train_0"]
        for kind in ("spawned", "supervision"):
            (event,) = await ask("events", kind=kind)
            assert event["mesh"] == "trainers"
        (event,) = await ask("events", kind="shrunk")
        assert (event["id"], event["groups"]) == (noted, 2)
        assert (await ask("numbers"))["call_latency"]["s"]["sum"] == 0.0
        replica = await ask("replica", id="train_0")
        assert (replica["state"], replica["mesh"]) == ("finished", "trainers")


async def test_of_many_sessions_the_calls_of_those_that_told_last_are_known() -> None:
    async with running() as weaver:
        for number in (*range(1000), 0, 1000):
            weaver.admin.requests.do(ReportCalls(f"s{number}", [0] * 15, 1.0))

        known = (await weaver.client.ask("numbers"))["call_latency"]
        assert len(known) == 1000
        assert "s0" in known
        assert "s1" not in known


async def test_several_may_wait_for_replicas_to_register() -> None:
    async with running() as weaver:
        wanted = {"session": "s", "procs": 5, "ranks": [0], "timeout": BOUND}
        asking = [asyncio.ensure_future(weaver.client.ask("replicas_in", **wanted)) for _ in range(2)]
        await weaver.client.ask("status")  # behind them

        await weaver.threadlet(session="s", procs="5", rank=0)

        assert await asyncio.gather(*asking) == [[[0, "train_0"]]] * 2


async def test_replicas_that_register_later_are_awaited() -> None:
    async with running() as weaver:
        asking = asyncio.ensure_future(
            weaver.client.ask("replicas_in", session="s", procs=5, ranks=[0, 1], timeout=BOUND)
        )
        for rank in (1, 0):
            await asyncio.sleep(0.02)
            await weaver.threadlet(f"train_{rank}", session="s", procs="5", rank=rank)

        assert sorted(await asking) == [[0, "train_0"], [1, "train_1"]]


@pytest.mark.parametrize(
    ("operation", "arguments", "match"),
    [
        ("fly", {}, "the weaver knows no operation 'fly'; it knows status, "),
        ("replica", {}, "id is missing"),
        ("replica", {"id": 5}, "id is a text, not 5"),
        ("events", {"after": -1}, "after is a count, not -1"),
        ("events", {"limit": "many"}, "limit is a count, not 'many'"),
        ("history", {"replica": "train_0", "metric": "accuracy"}, "reports no metric 'accuracy'"),
        ("command", {"kind": "dance"}, "there is no command 'dance'; kind is one of update_config, "),
        ("command", {"kind": "inject"}, "there is no command 'inject'; kind is one of update_config, "),
        (
            "command",
            {"kind": "inject", "params": [1]},
            "inject is not given as a command; choose one of deactivate_",
        ),
        ("command", {"kind": "pause", "params": ["now"]}, "the parameters of pause are names and values"),
        ("command", {"kind": "update_config"}, "update_config needs at least one key"),
        (
            "command",
            {"kind": "pause", "id": "of my own"},
            "id is 8 to 64 letters, digits, - and _, not 'of my own'",
        ),
        ("command", {"kind": "reactivate"}, "reactivate needs the uuid of a device"),
        ("command", {"kind": "pause", "target": 5}, "a target is a replica's id, a glob or a list of ids, not 5"),
        ("inject", {"fault": "sigkill"}, "inject needs a target"),
        ("policy", {"group": "train", "action": "panic"}, "there is no action 'panic'; choose one of notify, "),
        ("note", {"kind": "x", "data": {"id": 1}}, "data is what an event says beside id"),
        ("note", {"kind": "x", "data": 1}, "data is what an event says beside id"),
        ("calls", {"session": "s", "counts": [1]}, "counts are 15 numbers"),
        ("calls", {"session": "s", "counts": [0] * 15, "sum": "much"}, "sum is a time in seconds, not 'much'"),
        ("command_state", {"id": "c", "timeout": -1}, "timeout is from 0 to 3600 seconds"),
    ],
)
async def test_what_makes_no_sense_is_refused(operation: str, arguments: dict[str, Any], match: str) -> None:
    async with running() as weaver:
        await weaver.threadlet()

        with pytest.raises(loom.WrongArguments, match=match):
            await weaver.client.ask(operation, **arguments)


async def test_a_stack_comes_from_the_threadlet_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_py_spy(pid: int) -> None:
        return None

    monkeypatch.setattr(user_weaver, "py_spy", no_py_spy)
    async with running() as weaver:
        link = await weaver.threadlet()
        asking = asyncio.ensure_future(weaver.client.do("stacks", "anna", replica="train_0"))
        _, id = await link.receive("stack")
        link.send("stack", "another", "of nobody")
        link.send("stack", id, "in train()")

        assert await asking == "in train()"


async def test_a_stack_that_does_not_come_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_py_spy(pid: int) -> None:
        return None

    monkeypatch.setattr(user_weaver, "py_spy", no_py_spy)
    monkeypatch.setattr(user_weaver, "STACK_WITHIN", 0.05)
    async with running() as weaver:
        link = await weaver.threadlet()
        assert "did not answer" in await weaver.client.do("stacks", "anna", replica="train_0")

        link.send("bye", "done", "finished")
        await asyncio.sleep(0.05)
        assert await weaver.client.do("stacks", "anna", replica="train_0") == "it is not connected"


async def test_a_stack_of_py_spy_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    async def py_spy(pid: int) -> str:
        return f"of {pid}"

    monkeypatch.setattr(user_weaver, "py_spy", py_spy)
    async with running() as weaver:
        await weaver.threadlet()

        assert await weaver.client.do("stacks", "anna", replica="train_0") == f"of {os.getpid()}"


async def test_a_watcher_is_told_what_happens_and_what_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "CHANGES_EVERY", 0.01)
    async with running() as weaver:
        async with weaver.client.watch(ADMIN) as watch:
            assert await watch.next() == ("snapshot", await snapshot_of(weaver.client))
            link = await weaver.threadlet()

            async def until(wanted: str) -> dict[str, Any]:
                while True:
                    _, update = await watch.next()
                    if wanted in update and (wanted != "changes" or update["changes"]["replicas"]):
                        return update

            while (await until("event"))["event"]["kind"] != "registered":
                pass  # the weaver's start, which may be stored only now
            link.send("status", [[1, time.time(), 7, None, None, {}, None]])
            link.send("devices", time.time(), {"GPU-0": {"power": 100.0}, "GPU-9": {}})
            changes = (await until("changes"))["changes"]
            while changes["replicas"]["train_0"]["step"] != 7:
                changes = (await until("changes"))["changes"]


async def snapshot_of(client: WeaverClient) -> Any:
    snapshot = {name: await client.ask(name) for name in ("status", "replicas", "devices")}

    class Near(dict[str, Any]):
        """A status at another time."""

        def __eq__(self, other: object) -> bool:
            assert isinstance(other, dict)
            return {**self, "time": 0} == {**other, "time": 0}

    return {**snapshot, "status": Near(snapshot["status"])}
