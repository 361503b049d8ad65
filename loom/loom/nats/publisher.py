"""`Publisher`: the publications on NATS for the weaver's pushes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from loom.control.reports import DEVICE_NUMBERS
from loom.nats.envelopes import Body, EnvelopeKind

Publication = tuple[EnvelopeKind, Body]
"""A message to publish on NATS: its kind and its body."""

PART = 100  # replicas or devices in one message: a server's default limit is 1 MiB
BEAT_EVERY = 1.0  # seconds between two heartbeats of a replica


class Publisher:
    """A converter of messages of ``/ws/v1/weaver``, or parts of them, to publications."""

    def __init__(self) -> None:
        self._groups: dict[str, str] = {}
        # The last publications of each replica and device, and the time of each replica's heartbeat.
        self._statuses: dict[str, tuple[Any, ...]] = {}
        self._beats: dict[str, float] = {}
        self._devices: dict[str, Body] = {}

    def forget(self) -> None:
        """Forget the published state, so that all of it is published again."""
        self._statuses.clear()
        self._devices.clear()

    def snapshot(self, message: Mapping[str, Any]) -> Iterator[Publication]:
        """Yield messages with all replicas and devices."""
        replicas, devices = message["replicas"], message["devices"]
        self._groups = {replica["id"]: replica["group"] for replica in replicas}
        self._statuses = {id: status for id, status in self._statuses.items() if id in self._groups}
        self._beats = {id: beat for id, beat in self._beats.items() if id in self._groups}
        parts = max(1, -(-len(replicas) // PART), -(-len(devices) // PART))
        for part in range(parts):
            some = slice(part * PART, (part + 1) * PART)
            shown = {"replicas": replicas[some], "devices": devices[some], "part": part + 1, "parts": parts}
            yield _update("snapshot", {"status": message["status"], **shown})
        for replica in replicas:
            yield from self._training_status(replica["id"], replica)
        yield from self.devices(devices)

    def event(self, event: Mapping[str, Any]) -> Iterator[Publication]:
        """Yield the messages about an event."""
        kind = event["kind"]
        if kind == "registered":
            self._groups[event["replica"]] = event["group"]
        if kind == "failed":
            renamed = {"replica_id": "replica", "current_step": "step", "device_uuids": "devices", "event_id": "id"}
            yield EnvelopeKind.REPLICA_FAIL, _picked(event, "reason", "action", "time", **renamed)
        elif kind == "command":
            yield EnvelopeKind.WEAVER_COMMAND, _weaver_command(event)
        elif kind == "config" or (kind in ("applied", "refused") and event["do"] == "update_config"):
            yield EnvelopeKind.CONFIG_INFO, _config_info(event)
        yield self.added(event)

    def added(self, event: Mapping[str, Any]) -> Publication:
        """Return a message that repeats an event with more details."""
        return _update("event", dict(event))

    def delta(self, message: Mapping[str, Any], now: float) -> Iterator[Publication]:
        """Yield messages with the replicas' latest reports."""
        replicas, devices = message["replicas"], message.get("devices", {})
        for id, replica in replicas.items():
            yield from self._training_status(id, replica)
            # Deltas come more often than heartbeats, whose times jitter: allow a tenth less than the interval.
            if replica["connected"] and now >= self._beats.get(id, 0.0) + 0.9 * BEAT_EVERY:
                self._beats[id] = now
                yield EnvelopeKind.HEARTBEAT, {"replica_id": id, **_picked(replica, "phase", current_step="step")}
        for some in _parts(list(replicas.items())):
            yield _update("delta", {"replicas": dict(some)})
        for some in _parts(list(devices.items())):
            yield _update("delta", {"devices": dict(some)})

    def devices(self, devices: Iterable[Mapping[str, Any]]) -> Iterator[Publication]:
        """Yield messages about the devices whose status has changed."""
        before, self._devices = self._devices, {}
        for device in devices:
            status = device["status"] or {}
            body = {
                **_picked(device, "kind", "server", "type", "memory", "state", "reason"),
                **_picked(device, device_uuid="uuid", replica_ids="replicas"),
                **_picked(status, *DEVICE_NUMBERS, "throttled", "error", "xid"),
            }
            # Publish a new measurement even if its values are the same.
            self._devices[device["uuid"]] = {**body, "measured": status.get("time")}
            if before.get(device["uuid"]) != self._devices[device["uuid"]]:
                yield EnvelopeKind.DEVICE_STATUS, body

    def away(self, reason: str) -> Publication:
        """Return a message that the weaver is away."""
        return _update("away", {"reason": reason})

    def _training_status(self, id: str, replica: Mapping[str, Any]) -> Iterator[Publication]:
        status = replica["reported"], replica["state"], replica["step"]
        if self._statuses.get(id) == status:
            return
        self._statuses[id] = status
        body = _picked(
            replica, "state", "epoch", "max_step", "metrics", "status_type", current_step="step", time="reported"
        )
        group = {"group": self._groups[id]} if id in self._groups else {}
        yield EnvelopeKind.TRAINING_STATUS, {"replica_id": id, **group, **body}


def _weaver_command(event: Mapping[str, Any]) -> dict[str, object]:
    target = event["target"]
    targets = [target] if isinstance(target, str) else target
    renamed = {"command_id": "command", "command_type": "do", "event_id": "id"}
    fields = _picked(event, "params", "replicas", "by", "cause", "time", **renamed)
    return {**fields, "target_replica_ids": targets}


def _config_info(event: Mapping[str, Any]) -> dict[str, object]:
    changes = event["changes"]
    renamed = {"replica_id": "replica", "current_step": "step", "command_id": "command", "event_id": "id"}
    fields = _picked(event, "refused", "by", "reason", "time", **renamed)
    fields["config_params"] = {key: change["new"] for key, change in changes.items()}
    fields["old_params"] = {key: change.get("old") for key, change in changes.items()}
    return fields


def _update(type: str, data: Body) -> Publication:
    return EnvelopeKind.UI_UPDATE, {"type": type, "data": data}


def _parts(items: Sequence[tuple[str, Any]]) -> Iterator[Sequence[tuple[str, Any]]]:
    for start in range(0, len(items), PART):
        yield items[start : start + PART]


def _picked(source: Mapping[str, Any], *same: str, **renamed: str) -> dict[str, object]:
    """Return the fields that are not None; ``renamed`` ones have another name in the source."""
    names = {**dict(zip(same, same, strict=True)), **renamed}
    return {name: source[there] for name, there in names.items() if source.get(there) is not None}
