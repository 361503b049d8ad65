"""The weaver's connections: who is refused, who is given up, and what one that ends leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from typing import Any

import pytest

import loom
from loom.control.frame import pack
from loom.token_file import ADMIN
from loom.weaver import connection
from loom.weaver.server import handlers, server, threadlets, user_weaver
from loom.weaver.states import ReplicaState
from tests.unit.loom.weaver.raw_threadlet import BOUND, hello_of
from tests.unit.loom.weaver.running import KEYS, running


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (["dance"], "the first frame on the link is a hello, not 'dance'"),
        (["hello", {"protocol": 7}], "the threadlet speaks version 7"),
        (["hello", hello_of("wrong", "train_0", "i")], "the key is not of this weaver"),
    ],
)
async def test_who_does_not_introduce_itself_is_refused(frame: list[Any], text: str) -> None:
    async with running() as weaver:
        link = await weaver.connect()
        link.send(*frame)

        assert text in (await link.receive("refuse"))[2]
        with pytest.raises(EOFError):
            await link.receive("refuse")


@pytest.mark.parametrize(
    "frame",
    [
        ["dance"],
        ["status", [["one", time.time(), 1, None, None, {}, None]]],
        ["status", [[1, "now", 1, None, None, {}, None]]],
        ["status", [[1, time.time(), -1, None, None, {}, None]]],
        ["status", [[1, time.time()]]],
        ["status", [[1, time.time(), 1, None, None, {"loss": "low"}, None]]],
        ["status", [[1, time.time(), 1, None, None, {"": 1.0}, None]]],
        ["beat", "now", 1, "step"],
    ],
)
async def test_a_frame_that_makes_no_sense_ends_the_connection(frame: list[Any]) -> None:
    async with running() as weaver:
        link = await weaver.threadlet()
        link.send(*frame)

        assert (await link.receive("refuse"))[1] == "protocol_mismatch"


async def test_who_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threadlets, "HELLO_WITHIN", 0.05)
    async with running() as weaver:
        link = await weaver.connect()

        with pytest.raises(EOFError):
            await link.receive("refuse")


async def test_a_hello_may_come_in_pieces() -> None:
    async with running() as weaver:
        link = await weaver.connect()
        for byte in pack(["hello", hello_of(KEYS.of(ADMIN), "train_0", "i")]):
            link._writer.write(bytes([byte]))
            await asyncio.sleep(0)

        assert await link.receive("welcome")


async def test_a_process_that_lives_is_not_dead_because_its_connection_is_lost() -> None:
    async with running() as weaver:
        link = await weaver.threadlet()
        replica = weaver.admin.weaver.known.replicas["train_0"]

        link.close()
        await weaver.until(lambda: replica.state is not ReplicaState.RUNNING)

        assert replica.state is ReplicaState.RECOVERING


async def test_a_process_at_another_address_is_not_looked_for_on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    async def py_spy(pid: int) -> str:
        return "of a process of this host"

    monkeypatch.setattr(user_weaver, "py_spy", py_spy)
    async with running() as weaver:
        link = await weaver.connect(local_addr=("127.0.0.2", 0))
        link.send("hello", hello_of(KEYS.of(ADMIN), "train_0", "i"))
        await link.receive("welcome")
        asking = asyncio.ensure_future(weaver.client.do("stacks", "anna", replica="train_0"))
        _, id = await link.receive("stack")
        link.send("stack", id, "in train()")

        assert await asking == "in train()"


async def test_a_threadlet_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_UNREAD", 1 << 16)
    async with running() as weaver:
        await weaver.threadlet()
        replica = weaver.admin.weaver.known.replicas["train_0"]
        for _ in range(2000):
            await weaver.client.ask("command", kind="update_config", params={"text": "x" * 100_000})
            if replica.link is None:
                break

        assert replica.link is None


async def test_a_replica_that_says_goodbye_has_ended_as_it_says() -> None:
    async with running() as weaver:
        for replica, ending, state in (("train_0", "finished", "finished"), ("train_1", "failed", "failed")):
            link = await weaver.threadlet(replica, devices=[])
            link.send("bye", "because", ending)
            with pytest.raises(EOFError):
                await link.receive("refuse")

            assert (await weaver.client.ask("replica", id=replica))["state"] == state
        given = await weaver.client.do("command", "anna", kind="pause", target=["train_0", "train_1"])
        reasons = {id: outcome["reason"] for id, outcome in given["outcomes"].items()}
        assert reasons == {
            "train_0": "replica 'train_0' has finished",
            "train_1": "replica 'train_1' has failed: because",
        }


async def test_a_weaver_that_nobody_needs_ends() -> None:
    async with running(linger=0.05) as weaver:
        await asyncio.wait_for(weaver.server.users.ended.wait(), BOUND)

        assert weaver.server.users.failure is None


async def test_a_client_that_speaks_nonsense_is_disconnected() -> None:
    async with running() as weaver:
        reader, writer = await asyncio.open_unix_connection(weaver.client.place)
        writer.write(pack(["dance", 1]))

        assert await asyncio.wait_for(reader.read(), BOUND) == b""
        writer.close()


async def test_a_second_process_cannot_be_a_replica_that_lives() -> None:
    async with running() as weaver:
        await weaver.threadlet()
        link = await weaver.connect()
        link.send("hello", hello_of(KEYS.of(ADMIN), "train_0", "another"))

        _, code, text = await link.receive("refuse")

        assert code == "replica_taken"
        assert "is the replica 'train_0': give each process a replica_id of its own" in text


async def test_a_process_that_connects_again_takes_its_own_place() -> None:
    async with running() as weaver:
        first = await weaver.threadlet()
        await weaver.threadlet()  # under the same instance

        with pytest.raises(EOFError):
            await first.receive("refuse")
        (event,) = await weaver.client.ask("events", kind="reconnected")
        assert event["replica"] == "train_0"


async def test_a_new_process_takes_the_place_of_one_that_left() -> None:
    async with running() as weaver:
        first = await weaver.threadlet()
        given = await weaver.client.do("command", "anna", kind="pause")
        first.close()
        await weaver.until(lambda: weaver.admin.weaver.known.replicas["train_0"].link is None)
        second = await weaver.connect()
        second.send("hello", hello_of(KEYS.of(ADMIN), "train_0", "another", group="eval"))
        await second.receive("welcome")

        outcome = (await weaver.client.do("command_state", "anna", id=given["id"]))["outcomes"]["train_0"]
        assert outcome["reason"] == "a new process became 'train_0' before it had applied this"
        assert (await weaver.client.ask("replica", id="train_0"))["group"] == "eval"


async def test_a_weaver_that_cannot_store_anything_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(now: float) -> None:
        raise sqlite3.OperationalError("disk full")

    async with running() as weaver:
        monkeypatch.setattr(weaver.admin.weaver, "begin_commit", fail)
        weaver.admin.commit()
        weaver.admin.commit()

        assert weaver.server.users.ended.is_set()
        assert str(weaver.server.users.failure) == "disk full"


async def test_an_operation_that_breaks_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(asked: object, asker: object) -> None:
        raise KeyError("step")

    async with running() as weaver:
        monkeypatch.setattr(weaver.admin.requests, "do", fail)

        with pytest.raises(loom.LoomError, match=r"the weaver failed: KeyError\('step'\)"):
            await weaver.client.ask("status")


async def test_a_watcher_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_UNREAD_BY_WATCHER", 1 << 16)
    async with running() as weaver:
        reader, writer = await asyncio.open_unix_connection(weaver.client.place, limit=1 << 10)
        writer.write(pack(["hello", KEYS.gateway()]) + pack(["watch", 0, ADMIN]))
        await weaver.until(lambda: bool(weaver.admin._pushes))
        for number in range(2000):
            with contextlib.suppress(loom.WeaverUnavailable):
                await weaver.client.ask(
                    "note", kind="much", replica=None, data={"text": "x" * 1000, "number": number}
                )
            if not weaver.admin._pushes:
                break
            await asyncio.sleep(0)

        assert not weaver.admin._pushes
        del reader
        writer.close()


@pytest.mark.guarantees("weaver", "Replicas and jobs that ended leave `/metrics` after 10 minutes")
async def test_replicas_and_jobs_that_ended_leave_the_numbers_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as weaver:
        link = await weaver.threadlet(devices=[])
        await weaver.threadlet("train_1", group="other", devices=[])
        link.send("bye", "done", "finished")
        with pytest.raises(EOFError):
            await link.receive("refuse")

        early = await weaver.client.ask("numbers")
        monkeypatch.setattr(handlers, "KEPT_IN_METRICS", 0.0)
        late = await weaver.client.ask("numbers")

        assert set(early["of_replicas"]) == {"train_0", "train_1"}
        assert [job["job"] for job in early["of_jobs"]] == ["train", "other"]
        assert set(late["of_replicas"]) == {"train_1"}
        assert [job["job"] for job in late["of_jobs"]] == ["other"]
