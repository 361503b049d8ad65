"""What full watchers get: in the snapshot, with events, and when something has changed; others get none of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from loom.token_file import ADMIN
from loom.weaver.client import WeaverPushes
from loom.weaver.server import pushes
from tests.unit.loom.weaver.raw_threadlet import BOUND, GPU
from tests.unit.loom.weaver.running import Running, running


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes are pushed with each tick."""
    monkeypatch.setattr(pushes, "CHANGES_EVERY", 0.0)


@asynccontextmanager
async def watched(weaver: Running, full: bool = True) -> AsyncIterator[tuple[WeaverPushes, dict[str, Any]]]:
    """A watch and its snapshot."""
    async with weaver.client.watch(ADMIN, full) as watch:
        kind, body = await asyncio.wait_for(watch.next(), BOUND)
        assert kind == "snapshot"
        yield watch, body


async def pushed(watch: WeaverPushes, wanted: Callable[[dict[str, Any]], Any]) -> Any:
    """What is found in the first push in which there is something."""
    while True:
        _, body = await asyncio.wait_for(watch.next(), BOUND)
        if found := wanted(body):
            return found


def further(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda body: body.get("more", {}).get(name)


async def test_a_full_snapshot_has_policies_goodput_and_the_newest_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "NEWEST_EVENTS", 3)
    async with running() as weaver:
        await weaver.threadlet()
        await weaver.client.ask("policy", group="train", action="stop")
        async with watched(weaver) as (_, full), watched(weaver, full=False) as (_, plain):
            more = full.pop("more")

    assert set(full) == set(plain) == {"status", "replicas", "devices"}
    assert more["policies"] == {"train": "stop"}
    assert [(job["job"], job["user"], job["course"]) for job in more["goodput"]] == [("train", ADMIN, [])]
    assert len(more["events"]) == 3
    assert more["events"][-1]["kind"] == "policy"


async def test_events_that_describe_a_replica_anew_have_it_beside_them_and_those_with_changes_do_not() -> None:
    async with running() as weaver, watched(weaver) as (watch, _):
        link = await weaver.threadlet()
        info = await pushed(watch, lambda body: body.get("event", {}).get("kind") == "registered" and body["more"])
        assert (info["info"]["id"], info["info"]["config"]) == ("train_0", {"learning_rate": 0.001})

        link.send("status", [[1, time.time(), 7, None, None, {}, {"learning_rate": 0.1}]])
        body = await pushed(watch, lambda body: body.get("event", {}).get("kind") == "config" and body)
        assert body["event"]["changes"] == {"learning_rate": {"old": 0.001, "new": 0.1}}
        assert "more" not in body

        await weaver.client.ask("command", kind="update_config", params={"learning_rate": 0.5})
        _, id, *_ = await link.receive("command")
        link.send("ack", id, 9, {"ok": True, "changes": {"learning_rate": {"old": 0.1, "new": 0.5}}})
        body = await pushed(watch, lambda body: body.get("event", {}).get("kind") == "applied" and body)
        assert body["event"]["changes"] == {"learning_rate": {"old": 0.1, "new": 0.5}}
        assert "more" not in body

        await weaver.client.ask("command", kind="pause")
        body = await pushed(watch, lambda body: body.get("event", {}).get("kind") == "command" and body)
        assert "more" not in body


async def test_handlers_devices_policies_and_goodput_are_pushed_when_they_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pushes, "GOODPUT_EVERY", 0.0)
    async with running() as weaver:
        link = await weaver.threadlet()
        async with watched(weaver) as (watch, _):
            link.send("handlers", {"batch": "int"})
            described = (await pushed(watch, further("replicas")))["train_0"]
            assert described == {"handlers": {"learning_rate": "float", "batch": "int"}}

            for url, links in (("https://mlflow/1", {"mlflow": "https://mlflow/1"}), ("", {})):
                await weaver.client.ask("link", replica="train_0", tracker="mlflow", url=url)
                assert (await pushed(watch, further("replicas")))["train_0"]["links"] == links

            await weaver.client.ask("fail_device", device="GPU-0", reason="too hot")
            device = (await pushed(watch, further("device_states")))["GPU-0"]
            assert (device["state"], device["reason"], device["replicas"]) == ("failed", "too hot", ["train_0"])
            assert (device["type"], "status" in device) == ("H200", False)

            await weaver.client.ask("policy", group="train", action="pause")
            assert await pushed(watch, further("policies")) == {"train": "pause"}

            (job,) = await pushed(watch, further("goodput"))
            assert (job["job"], job["replicas"], job["course"]) == ("train", 1, [])

            link.send("bye", "done", "finished")
            (job,) = await pushed(
                watch, lambda body: [job for job in body.get("more", {}).get("goodput", ()) if not job["replicas"]]
            )
            assert job["job"] == "train"


async def test_replicas_that_are_forgotten_are_pushed() -> None:
    async with running() as weaver:
        weaver.admin.weaver.known._keep_ended = 0
        early, link, again = [await weaver.threadlet(f"train_{number}") for number in range(3)]
        early.send("bye", "done", "finished")
        await weaver.until(lambda: "train_0" not in weaver.admin.weaver.known.replicas)
        async with watched(weaver) as (watch, _):
            link.send("bye", "done", "finished")
            assert await pushed(watch, further("forgotten")) == ["train_1"]

            known = weaver.admin.weaver.known
            known.forgotten["train_2"] = known.forgotten["train_3"] = None
            known.add("train_3")
            assert await pushed(watch, further("forgotten")) == ["train_2"]
        await weaver.until(lambda: not known.devices.watched)
        again.send("bye", "done", "finished")
        await weaver.until(lambda: "train_2" not in known.replicas)
        assert not known.forgotten


async def test_many_changes_are_pushed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "MAX_CHANGES", 2)
    async with running() as weaver, watched(weaver) as (watch, _):
        names = [f"train_{number}" for number in range(5)]
        links = {name: await weaver.threadlet(name) for name in names}
        await weaver.until(lambda: len(weaver.admin.weaver.known.replicas) == 5)
        for link in links.values():
            link.send("status", [[1, time.time(), 7, None, None, {}, None]])
        seen: dict[str, Any] = {}

        def reported(body: dict[str, Any]) -> bool:
            changed = body.get("changes", {}).get("replicas", {})
            assert len(changed) <= 2
            seen.update({id: one["step"] for id, one in changed.items()})
            return seen == dict.fromkeys(names, 7)

        await pushed(watch, reported)


async def test_a_device_that_is_forgotten_is_pushed_as_none() -> None:
    async with running() as weaver:
        link = await weaver.threadlet()
        async with watched(weaver) as (watch, _):
            link.send("bye", "done", "finished")

            assert await pushed(watch, further("device_states")) == {"GPU-0": None}


async def test_only_the_newest_faults_of_a_job_are_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "NEWEST_FAULTS", 2)
    async with running() as weaver:
        for number in range(3):
            link = await weaver.threadlet(f"train_{number}", devices=[])
            link.send("bye", f"reason {number}", "failed")
            with pytest.raises(EOFError):
                await link.receive("refuse")
        async with watched(weaver) as (_, full):
            (job,) = full["more"]["goodput"]

        assert [fault["reason"] for fault in job["faults"]] == ["reason 1", "reason 2"]
        assert len((await weaver.client.ask("goodput"))[0]["faults"]) == 3


async def test_others_get_nothing_of_it_and_it_ends_with_the_last_full_watch() -> None:
    async with running() as weaver:
        link = await weaver.threadlet()
        async with watched(weaver, full=False) as (plain, _):
            async with watched(weaver) as (full, _):
                link.send("devices", time.time(), {"GPU-0": {"utilization": 0.5}})
                await weaver.client.ask("fail_device", device="GPU-0")
                await pushed(full, further("device_states"))
            await weaver.until(lambda: not weaver.admin.weaver.known.devices.watched)
            await weaver.client.ask("command", kind="reactivate", params={"device": "GPU-0"})
            link.send("handlers", {"batch": "int"})
            link.send("status", [[1, time.time(), 7, None, None, {}, None]])
            seen: list[dict[str, Any]] = []
            await pushed(
                plain,
                lambda body: (
                    seen.append(body)
                    or body.get("changes", {}).get("replicas", {}).get("train_0", {}).get("step") == 7
                ),
            )

        assert not any("more" in body for body in seen)
        assert not weaver.admin.weaver.known.devices.changed


async def test_a_watch_becomes_full_with_a_second_snapshot() -> None:
    async with running() as weaver, watched(weaver, full=False) as (watch, plain):
        watch.refresh(full=True)

        assert "more" not in plain
        assert await pushed(watch, lambda body: body.get("more"))


async def test_new_acknowledgements_are_given_once_there_are_some() -> None:
    async with running() as weaver:
        links = {id: await weaver.threadlet(id, devices=[GPU]) for id in ("train_0", "train_1")}
        given = await weaver.client.do("command", "anna", kind="pause", target=["train_0", "train_1", "train_2"])
        ids = {id: (await link.receive("command"))[1] for id, link in links.items()}

        def after(count: int) -> asyncio.Future[Any]:
            asked = weaver.client.do("command_state", "", id=given["id"], after=count, wait=BOUND)
            return asyncio.ensure_future(asked)

        assert list((await after(0))["outcomes"]) == ["train_2"]
        waiting = after(1)
        links["train_1"].send("ack", ids["train_1"], 1, {"ok": True})
        state = await waiting
        assert (list(state["outcomes"]), state["done"]) == (["train_1"], False)
        waiting = after(2)
        links["train_0"].send("ack", ids["train_0"], 1, {"ok": True})
        state = await waiting
        assert (list(state["outcomes"]), state["done"]) == (["train_0"], True)
        state = await after(3)
        assert (state["outcomes"], state["done"]) == ({}, True)


async def test_no_new_acknowledgement_in_time_is_none() -> None:
    async with running() as weaver:
        await weaver.threadlet()
        given = await weaver.client.do("command", "anna", kind="pause")

        state = await weaver.client.do("command_state", "", id=given["id"], after=0, wait=0.01)

        assert (state["outcomes"], state["done"]) == ({}, False)


async def test_an_injection_of_an_id_is_one() -> None:
    async with running() as weaver:
        await weaver.threadlet(injectable=True)
        fault: dict[str, Any] = {"fault": "sigkill", "target": "train_0", "id": "chosen-0"}

        given = [await weaver.client.do("inject", "anna", **fault) for _ in range(2)]

        assert [one["id"] for one in given] == ["chosen-0"] * 2
        assert len(await weaver.client.ask("events", kind="command")) == 1


async def test_a_command_about_a_device_without_a_target_is_for_those_on_it() -> None:
    async with running() as weaver:
        await weaver.threadlet("train_0")
        await weaver.threadlet("train_1", devices=[{**GPU, "uuid": "GPU-1"}])

        given = await weaver.client.do("command", "anna", kind="deactivate_device", params={"device": "GPU-1"})
        every = await weaver.client.do("command", "anna", kind="pause")

        assert (list(given["replicas"]), list(every["replicas"])) == (["train_1"], ["train_0", "train_1"])


async def test_a_second_full_watch_takes_nothing_from_the_first() -> None:
    async with running() as weaver:
        link = await weaver.threadlet()
        async with watched(weaver) as (first, _):
            monitored = weaver.admin._pushes._further
            link.send("handlers", {"batch": "int"})
            await weaver.client.ask("policy", group="train", action="pause")
            async with watched(weaver) as (second, full):
                assert full["more"]["policies"] == {"train": "pause"}
                assert await pushed(first, further("policies")) == {"train": "pause"}
                await weaver.client.ask("policy", group="train", action="stop")
                for watch in (first, second):
                    assert await pushed(watch, lambda body: further("policies")(body) == {"train": "stop"})
            assert monitored._wanted


async def test_without_a_job_no_goodput_is_pushed() -> None:
    async with running() as weaver, watched(weaver):
        now = weaver.server.users.clock()

        assert weaver.admin._pushes._further.changes(now + 2 * pushes.GOODPUT_EVERY) == {}
