"""What a client that asks for torchLoom's form is sent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from loom_gateway.weaver_socket import torchloom_form
from loom_gateway.weaver_socket.torchloom_form import FormReader, TorchloomForm, away

BOUND = 10.0


class Client:
    """A client of the form: the messages that it has taken."""

    def __init__(self, reads: bool = True) -> None:
        self.reader = FormReader()
        self.taken: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._reading = asyncio.ensure_future(self.reader.send_to(self._take)) if reads else None

    async def _take(self, message: Any) -> None:
        self.taken.put_nowait(json.loads(message["text"]))

    async def next(self, kind: str) -> dict[str, Any]:
        while True:
            message = await asyncio.wait_for(self.taken.get(), BOUND)
            if message["type"] == kind:
                data: dict[str, Any] = message["data"]
                return data

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()


def replica(number: int, **more: Any) -> dict[str, Any]:
    plain = {"id": f"train_{number}", "group": "train", "state": "running", "step": 10 + number, "epoch": None}
    plain |= {"max_step": 100, "metrics": {"loss": 0.5}, "reported": 5.0, "config": {"learning_rate": 0.1}}
    return {**plain, "devices": [f"GPU-{number}"], **more}


def device(number: int, **more: Any) -> dict[str, Any]:
    plain = {"uuid": f"GPU-{number}", "state": "active", "server": "node", "memory": 80, "reason": None}
    return {**plain, "replicas": [f"train_{number}"], "status": {"utilization": 0.25, "temperature": 60}, **more}


def snapshot(count: int = 2) -> dict[str, Any]:
    return {"replicas": [replica(n) for n in range(count)], "devices": [device(n) for n in range(count)]}


def delta(replicas: dict[str, Any] | None = None, devices: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"changes": {"replicas": replicas or {}, "devices": devices or {}}}


@pytest.fixture
async def form(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TorchloomForm]:
    monkeypatch.setattr(torchloom_form, "ROUND", 0.01)
    made = TorchloomForm()
    yield made
    made.close()


@contextlib.asynccontextmanager
async def client(form: TorchloomForm, count: int = 2) -> AsyncIterator[Client]:
    made = Client()
    await form.begin(snapshot(count), [made.reader])
    try:
        yield made
    finally:
        made.close()


async def test_a_client_begins_with_everything(form: TorchloomForm) -> None:
    async with client(form) as one:
        data = await one.next("status_update")

    assert set(data) == {
        *("step", "replicaGroups", "communicationStatus", "timestamp", "devices", "training_status")
    }
    assert (data["step"], data["communicationStatus"]) == (11, "stable")
    (group,) = data["replicaGroups"].values()
    assert (group["id"], group["status"], group["stepProgress"]) == ("train", "running", 11.0)
    gpu = {"id": "GPU-0", "server": "node", "status": "active", "utilization": 25.0, "temperature": 60}
    assert group["gpus"]["GPU-0"] == {**gpu, "batch": None, "lr": 0.1, "opt": None}
    assert [one["device_id"] for one in data["devices"]] == ["GPU-0", "GPU-1"]
    assert data["training_status"][0]["metrics"] == {"loss": 0.5}


async def test_what_changes_is_sent_by_itself_and_in_the_next_update(form: TorchloomForm) -> None:
    async with client(form) as one:
        await one.next("status_update")
        form.take(
            delta({"train_0": {"step": 12, "metrics": {"loss": math.nan}, "status_type": "batch_update"}}), {}
        )
        training = await one.next("training_status")
        assert (training["replica_id"], training["current_step"]) == ("train_0", 12)
        assert (training["status_type"], training["metrics"]) == ("batch_update", {"loss": "NaN"})
        assert (await one.next("status_update"))["step"] == 12

        form.take(delta(devices={"GPU-1": {"utilization": 0.75}}), {})
        assert (await one.next("device_status"))["utilization"] == 75.0
        form.take(delta(), {"device_states": {"GPU-1": {"uuid": "GPU-1", "state": "failed"}, "GPU-0": None}})
        await one.next("device_status")
        data = await one.next("status_update")
        assert data["replicaGroups"]["train"]["gpus"].keys() == {"GPU-1"}
        assert data["replicaGroups"]["train"]["gpus"]["GPU-1"]["status"] == "offline"
        assert data["replicaGroups"]["train"]["gpus"]["GPU-1"]["utilization"] == 0


async def test_replicas_come_go_and_change_their_configuration(form: TorchloomForm) -> None:
    async with client(form) as one:
        await one.next("status_update")
        event = {"id": 1, "kind": "registered", "replica": "eval_0"}
        form.take({"event": event}, {"info": replica(2, id="eval_0", group="", state="registering", devices=[])})
        data = await one.next("status_update")
        assert data["replicaGroups"]["eval_0"]["status"] == "registering"
        assert data["communicationStatus"] == "rebuilding"

        changes = {"learning_rate": {"old": 0.1, "new": 0.5}}
        form.take({"event": {"id": 2, "kind": "applied", "replica": "train_1", "changes": changes}}, {})
        assert (await one.next("training_status"))["config"] == {"learning_rate": 0.5}
        form.take(delta(), {"forgotten": ["eval_0", "train_0", "train_1"]})
        while (await one.next("status_update"))["replicaGroups"]:
            pass


async def test_a_client_that_does_not_read_is_sent_no_more(form: TorchloomForm) -> None:
    slow = Client(reads=False)
    async with client(form) as quick:
        await form.begin(snapshot(), [slow.reader])
        waiting = []
        for step in range(20, 25):
            form.take(delta({"train_0": {"step": step}}), {})
            while (await quick.next("status_update"))["step"] != step:
                pass
            waiting.append(len(slow.reader._waiting))

    assert len(set(waiting)) == 1


async def test_a_round_has_a_bounded_number_of_messages(
    form: TorchloomForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchloom_form, "MOST_CHANGED", 3)
    async with client(form, 10) as one:
        await one.next("status_update")
        form.take(delta({f"train_{n}": {"step": 50} for n in range(10)}), {})
        kinds = []
        while not kinds or kinds[-1] != "status_update":
            kinds.append((await asyncio.wait_for(one.taken.get(), BOUND))["type"])

    assert kinds == ["training_status"] * 3 + ["status_update"]


async def test_the_form_rests_without_clients(form: TorchloomForm) -> None:
    one = Client()
    await form.begin(snapshot(), [one.reader])
    assert form._task is not None

    form.leave(one.reader)
    one.close()

    assert form._task is None
    assert json.loads(away())["data"]["communicationStatus"] == "rebuilding"
