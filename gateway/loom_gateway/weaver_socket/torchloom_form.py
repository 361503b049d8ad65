"""`TorchloomForm`: one user's replicas and devices in the form of torchLoom's page.

Clients of the weaver's WebSocket ask for it with ``?form=torchloom``.

::

    {"type": "status_update", "data": {"step", "replicaGroups", "communicationStatus", "timestamp", "devices", …}}
    {"type": "training_status", "data": {"replica_id", "status_type", "current_step", "metrics", …}}
    {"type": "device_status", "data": {"device_id", "status", "utilization", …}}

A ``status_update`` has everything, so a client that is slow gets fewer of them and lacks nothing. The others are of
what has changed, in between.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from loom.process import tasks
from loom.process.tasks import Turns
from loom.weaver.states import LIVING, DeviceState, ReplicaState
from loom.wire.plain import exact_json
from loom_gateway.weaver_socket.readers import FeedReader

ROUND = 1.0
"""Seconds between two rounds of messages, at least."""

MAX_RATE = 150_000
"""Characters a second that one client is sent, on average."""

MOST_CHANGED = 200
"""Messages about single replicas, or devices, in a round; the ``status_update`` has the others."""

_REBUILDING = frozenset((ReplicaState.REGISTERING.value, ReplicaState.RECOVERING.value))
_LIVING = frozenset(state.value for state in LIVING)


class FormReader(FeedReader):
    """The reader of a client that asks for torchLoom's form."""


class TorchloomForm:
    """The newest state of one user's replicas and devices, and the clients that are sent it."""

    def __init__(self) -> None:
        self.readers: dict[FormReader, None] = {}
        """The clients that have a first ``status_update``."""
        self._replicas: dict[str, dict[str, Any]] = {}
        self._devices: dict[str, dict[str, Any]] = {}
        self._changed: dict[str, None] = {}
        self._changed_devices: dict[str, None] = {}
        self._stale = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None

    async def begin(self, body: dict[str, Any], readers: list[FormReader]) -> None:
        """Take a snapshot of the weaver's, and send it to clients that are new."""
        self._replicas = {one["id"]: dict(one) for one in body["replicas"]}
        self._devices = {one["uuid"]: dict(one) for one in body["devices"]}
        text = await self._status_update()
        for reader in readers:
            reader.add(text, is_snapshot=True)
            self.readers[reader] = None
        if self._task is None:
            self._task = tasks.keep_running("send torchLoom's form", self._send_rounds)

    def leave(self, reader: FormReader) -> None:
        self.readers.pop(reader, None)
        if not self.readers:
            self.close()

    def close(self) -> list[FormReader]:
        """Send nothing more; return the clients."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        readers, self.readers = list(self.readers), {}
        return readers

    def take(self, body: dict[str, Any], more: dict[str, Any]) -> None:
        """Take a push of the weaver's, with what it has for pages."""
        if "event" in body:
            self._take_event(body["event"], more)
        else:
            for id, changes in body["changes"]["replicas"].items():
                self._change(id, changes)
            for uuid, status in body["changes"]["devices"].items():
                self._change_device(uuid, {"status": status})
        for id in more.get("forgotten", ()):
            self._replicas.pop(id, None)
        for uuid, state in more.get("device_states", {}).items():
            if state is None:
                self._devices.pop(uuid, None)
            else:
                self._devices.setdefault(uuid, {"status": None})
                self._change_device(uuid, state)
        self._stale.set()

    def _take_event(self, event: dict[str, Any], more: dict[str, Any]) -> None:
        if "info" in more:
            self._replicas[more["info"]["id"]] = dict(more["info"])
            self._changed[more["info"]["id"]] = None
        id, changes = event.get("replica"), event.get("changes")
        if id in self._replicas and isinstance(changes, dict):
            new = {key: change["new"] for key, change in changes.items()}
            self._change(id, {"config": {**self._replicas[id]["config"], **new}})

    def _change(self, id: str, changes: dict[str, Any]) -> None:
        if id in self._replicas:
            self._replicas[id].update(changes)
            self._changed[id] = None

    def _change_device(self, uuid: str, changes: dict[str, Any]) -> None:
        if uuid in self._devices:
            self._devices[uuid].update(changes)
            self._changed_devices[uuid] = None

    async def _send_rounds(self) -> None:
        while True:
            await self._stale.wait()
            self._stale.clear()
            sent = await self._send_round()
            await asyncio.sleep(max(ROUND, sent / MAX_RATE))

    async def _send_round(self) -> int:
        """Send each client that is not behind what has changed; return how many characters that are."""
        turns, texts = Turns(), []
        changed, self._changed = list(self._changed)[:MOST_CHANGED], {}
        for id in changed:
            if id in self._replicas:
                texts.append(exact_json({"type": "training_status", "data": _training(self._replicas[id])}))
                await turns.rest()
        devices, self._changed_devices = list(self._changed_devices)[:MOST_CHANGED], {}
        for uuid in devices:
            if uuid in self._devices:
                texts.append(exact_json({"type": "device_status", "data": _device(self._devices[uuid])}))
                await turns.rest()
        texts.append(await self._status_update())
        for reader in self.readers:
            if not reader.is_behind:
                for text in texts:
                    reader.add_state(text)
        return sum(map(len, texts))

    async def _status_update(self) -> str:
        """Return the message with everything, made in turns: this loop relays every session's calls."""
        turns = Turns()
        groups: dict[str, _Group] = {}
        training, devices = [], []
        for replica in list(self._replicas.values()):
            training.append(exact_json(_training(replica)))
            groups.setdefault(replica["group"] or replica["id"], _Group()).add(replica, self._devices)
            await turns.rest()
        for device in list(self._devices.values()):
            devices.append(exact_json(_device(device)))
            await turns.rest()
        shown = []
        for name, group in groups.items():
            shown.append(f"{exact_json(name)}: {exact_json(group.shown(name))}")
            await turns.rest()
        states = {replica["state"] for replica in self._replicas.values()}
        step = max((replica["step"] or 0 for replica in self._replicas.values()), default=0)
        status = "rebuilding" if states & _REBUILDING else "stable"
        head = f'"step": {step}, "communicationStatus": "{status}", "timestamp": {time.time():.3f}'
        lists = f'"devices": [{", ".join(devices)}], "training_status": [{", ".join(training)}]'
        return f'{{"type": "status_update", "data": {{{head}, "replicaGroups": {{{", ".join(shown)}}}, {lists}}}}}'


def away() -> str:
    """Return the message that the weaver is away, and what is shown is not up to date."""
    data = {"communicationStatus": "rebuilding", "timestamp": round(time.time(), 3)}
    return exact_json({"type": "status_update", "data": data})


class _Group:
    """The replicas of one group, as one entry of ``replicaGroups``."""

    def __init__(self) -> None:
        self._states: Counter[str] = Counter()
        self._gpus: dict[str, dict[str, Any]] = {}
        self._step = self._max_step = 0

    def add(self, replica: dict[str, Any], devices: dict[str, dict[str, Any]]) -> None:
        self._states[replica["state"]] += 1
        self._step = max(self._step, replica["step"] or 0)
        self._max_step = max(self._max_step, replica["max_step"] or 0)
        for uuid in replica["devices"]:
            if uuid in devices:
                self._gpus[uuid] = _gpu(devices[uuid], replica["config"])

    def shown(self, name: str) -> dict[str, Any]:
        living = Counter({state: count for state, count in self._states.items() if state in _LIVING})
        (status, _), *_ = (living or self._states).most_common(1)
        progress = 100 * self._step / self._max_step if self._max_step else None
        more = {"step": self._step, "maxStep": self._max_step or None}
        return {"id": name, "gpus": self._gpus, "status": status, "stepProgress": progress, **more}


def _gpu(device: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    use, is_active = device.get("status") or {}, device["state"] == DeviceState.ACTIVE.value
    return {
        "id": device["uuid"],
        "server": device["server"],
        "status": "active" if is_active else "offline",
        "utilization": _percent(use.get("utilization")) if is_active else 0,
        "temperature": use.get("temperature"),
        "batch": config.get("batch_size", config.get("batch")),
        "lr": config.get("learning_rate", config.get("lr")),
        "opt": config.get("optimizer", config.get("opt")),
    }


def _device(device: dict[str, Any]) -> dict[str, Any]:
    use, replicas = device.get("status") or {}, device["replicas"]
    return {
        "device_id": device["uuid"],
        "replica_id": replicas[0] if replicas else None,
        "replica_ids": list(replicas),
        "server_id": device["server"],
        "status": "active" if device["state"] == DeviceState.ACTIVE.value else "offline",
        "state": device["state"],
        "reason": device["reason"],
        "utilization": _percent(use.get("utilization")),
        "temperature": use.get("temperature"),
        "memory_used": use.get("memory_used"),
        "memory_total": device["memory"],
    }


def _training(replica: dict[str, Any]) -> dict[str, Any]:
    return {
        "replica_id": replica["id"],
        "group": replica["group"],
        "status_type": replica.get("status_type"),
        "status": replica["state"],
        "current_step": replica["step"],
        "epoch": replica["epoch"],
        "max_step": replica["max_step"],
        "metrics": replica["metrics"],
        "config": replica["config"],
        "timestamp": replica["reported"],
    }


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 1)
