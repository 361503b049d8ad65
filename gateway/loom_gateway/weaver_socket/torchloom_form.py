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
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from loom.process import tasks
from loom.process.tasks import Turns
from loom.weaver.states import LIVING, DeviceState, ReplicaState
from loom.weaver.views import DeviceInfo, ReplicaInfo
from loom.wire.plain import exact_json
from loom_gateway.weaver_socket.subscribers import FeedReader

ROUND = 1.0
"""Seconds between two rounds of messages, at least."""

MAX_RATE = 150_000
"""Characters a second that one client is sent, on average."""

MOST_CHANGED = 200
"""Messages about single replicas, or devices, in a round; the ``status_update`` has the others."""

_REBUILDING = frozenset((ReplicaState.REGISTERING, ReplicaState.RECOVERING))


class FormReader(FeedReader):
    """The reader of a client that asks for torchLoom's form."""


class TorchloomForm:
    """The newest state of one user's replicas and devices, and the clients that are sent it."""

    def __init__(self) -> None:
        self.readers: dict[FormReader, None] = {}
        """The clients that have a first ``status_update``."""
        self._replicas: dict[str, ReplicaInfo] = {}
        self._devices: dict[str, DeviceInfo] = {}
        self._changed: dict[str, None] = {}
        self._changed_devices: dict[str, None] = {}
        self._stale = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None

    async def begin(self, body: Mapping[str, Any], readers: list[FormReader]) -> None:
        """Take a snapshot of the weaver's, and send it to clients that are new."""
        turns, self._replicas, self._devices = Turns(), {}, {}
        for one in body["replicas"]:
            self._replicas[one["id"]] = ReplicaInfo.from_body(one)
            await turns.rest()
        for one in body["devices"]:
            self._devices[one["uuid"]] = DeviceInfo.from_body(one)
            await turns.rest()
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

    def take(self, body: Mapping[str, Any], more: Mapping[str, Any]) -> None:
        """Take a push of the weaver's, with what it has for pages."""
        if "event" in body:
            self._take_event(body["event"], more)
        else:
            for id, changes in body["changes"]["replicas"].items():
                if id in self._replicas:
                    self._set(self._replicas[id].changed_by(changes))
            for uuid, status in body["changes"]["devices"].items():
                if uuid in self._devices:
                    self._set_device(replace(self._devices[uuid], status=status))
        for id in more.get("forgotten", ()):
            self._replicas.pop(id, None)
        for uuid, state in more.get("device_states", {}).items():
            known = self._devices.pop(uuid, None)
            if state is not None:
                self._set_device(DeviceInfo.from_body({**state, "status": known and known.status}))
        self._stale.set()

    def _take_event(self, event: Mapping[str, Any], more: Mapping[str, Any]) -> None:
        if "info" in more:
            self._set(ReplicaInfo.from_body(more["info"]))
        replica, changes = self._replicas.get(event.get("replica") or ""), event.get("changes")
        if replica is not None and isinstance(changes, dict):
            new = {key: change["new"] for key, change in changes.items()}
            self._set(replace(replica, config={**replica.config, **new}))

    def _set(self, replica: ReplicaInfo) -> None:
        self._replicas[replica.id] = replica
        self._changed[replica.id] = None

    def _set_device(self, device: DeviceInfo) -> None:
        self._devices[device.uuid] = device
        self._changed_devices[device.uuid] = None

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
            groups.setdefault(replica.group or replica.id, _Group()).add(replica, self._devices)
            await turns.rest()
        for device in list(self._devices.values()):
            devices.append(exact_json(_device(device)))
            await turns.rest()
        shown = []
        for name, group in groups.items():
            shown.append(f"{exact_json(name)}: {exact_json(group.shown(name))}")
            await turns.rest()
        states = {replica.state for replica in self._replicas.values()}
        step = max((replica.step or 0 for replica in self._replicas.values()), default=0)
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
        self._states: Counter[ReplicaState] = Counter()
        self._gpus: dict[str, Mapping[str, object]] = {}
        self._step = self._max_step = 0

    def add(self, replica: ReplicaInfo, devices: Mapping[str, DeviceInfo]) -> None:
        self._states[replica.state] += 1
        self._step = max(self._step, replica.step or 0)
        self._max_step = max(self._max_step, replica.max_step or 0)
        self._gpus |= {uuid: _gpu(devices[uuid], replica.config) for uuid in replica.devices if uuid in devices}

    def shown(self, name: str) -> Mapping[str, object]:
        living = Counter({state: count for state, count in self._states.items() if state in LIVING})
        (status, _), *_ = (living or self._states).most_common(1)
        progress = 100 * self._step / self._max_step if self._max_step else None
        more = {"step": self._step, "maxStep": self._max_step or None}
        return {"id": name, "gpus": self._gpus, "status": status, "stepProgress": progress, **more}


def _gpu(device: DeviceInfo, config: Mapping[str, object]) -> Mapping[str, object]:
    use, is_active = device.status or {}, device.state is DeviceState.ACTIVE
    return {
        "id": device.uuid,
        "server": device.server,
        "status": "active" if is_active else "offline",
        "utilization": _percent(use.get("utilization")) if is_active else 0,
        "temperature": use.get("temperature"),
        "batch": config.get("batch_size", config.get("batch")),
        "lr": config.get("learning_rate", config.get("lr")),
        "opt": config.get("optimizer", config.get("opt")),
    }


def _device(device: DeviceInfo) -> Mapping[str, object]:
    use = device.status or {}
    return {
        "device_id": device.uuid,
        "replica_id": device.replicas[0] if device.replicas else None,
        "replica_ids": device.replicas,
        "server_id": device.server,
        "status": "active" if device.state is DeviceState.ACTIVE else "offline",
        "state": device.state,
        "reason": device.reason,
        "utilization": _percent(use.get("utilization")),
        "temperature": use.get("temperature"),
        "memory_used": use.get("memory_used"),
        "memory_total": device.memory,
    }


def _training(replica: ReplicaInfo) -> Mapping[str, object]:
    return {
        "replica_id": replica.id,
        "group": replica.group,
        "status_type": replica.status_type,
        "status": replica.state,
        "current_step": replica.step,
        "epoch": replica.epoch,
        "max_step": replica.max_step,
        "metrics": replica.metrics,
        "config": replica.config,
        "timestamp": replica.reported,
    }


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 1)
