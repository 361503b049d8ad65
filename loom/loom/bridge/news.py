"""From what the weaver tells its watchers to what is said on NATS."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from loom.bridge.envelopes import EnvelopeKind

__all__ = ["News", "Said"]

Said = tuple[EnvelopeKind, dict[str, Any]]
"""What a message says, and its body."""

PART = 100
"""Replicas or devices in one message: a server takes 1 MiB unless told otherwise."""

BEAT_EVERY = 1.0
"""Seconds between two heartbeats of a replica."""


class News:
    """What there is to say, and has not been said. Methods take messages of ``/ws/v1/weaver`` or parts of them."""

    def __init__(self) -> None:
        self._groups: dict[str, str] = {}
        self._statuses: dict[str, tuple[Any, ...]] = {}
        self._beats: dict[str, float] = {}
        self._devices: dict[str, dict[str, Any]] = {}

    def forget(self) -> None:
        """Take what was said as not heard."""
        self._statuses.clear()
        self._devices.clear()

    def snapshot(self, message: Mapping[str, Any]) -> Iterator[Said]:
        """All that there is now."""
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

    def event(self, event: Mapping[str, Any]) -> Iterator[Said]:
        """Something that happened."""
        kind = event["kind"]
        if kind == "registered":
            self._groups[event["replica"]] = event["group"]
        if kind == "failed":
            yield EnvelopeKind.REPLICA_FAIL, _replica_fail(event)
        elif kind == "command":
            yield EnvelopeKind.WEAVER_COMMAND, _weaver_command(event)
        elif kind == "config" or (kind in ("applied", "refused") and event["do"] == "update_config"):
            yield EnvelopeKind.CONFIG_INFO, _config_info(event)
        yield self.added(event)

    def added(self, event: Mapping[str, Any]) -> Said:
        """An event that has been said before, and says more now."""
        return _update("event", dict(event))

    def delta(self, message: Mapping[str, Any], now: float) -> Iterator[Said]:
        """What replicas have reported lately."""
        replicas, devices = message["replicas"], message.get("devices", {})
        for id, replica in replicas.items():
            yield from self._training_status(id, replica)
            # They come more often than replicas' heartbeats, whose times waver.
            if replica["connected"] and now >= self._beats.get(id, 0.0) + 0.9 * BEAT_EVERY:
                self._beats[id] = now
                beat = {"replica_id": id, "current_step": replica["step"], "phase": replica["phase"]}
                yield EnvelopeKind.HEARTBEAT, _known(beat)
        for some in _parts(list(replicas.items())):
            yield _update("delta", {"replicas": dict(some)})
        for some in _parts(list(devices.items())):
            yield _update("delta", {"devices": dict(some)})

    def devices(self, devices: Iterable[Mapping[str, Any]]) -> Iterator[Said]:
        """How devices are now."""
        before, self._devices = self._devices, {}
        for device in devices:
            status = device["status"] or {}
            body = _known(
                {
                    "device_uuid": device["uuid"],
                    **{name: device[name] for name in ("kind", "server", "type", "memory", "state", "reason")},
                    "replica_ids": device["replicas"],
                    **{name: status.get(name) for name in _DEVICE_NUMBERS},
                }
            )
            # What is measured again is said again, even where it is the same.
            self._devices[device["uuid"]] = {**body, "measured": status.get("time")}
            if before.get(device["uuid"]) != self._devices[device["uuid"]]:
                yield EnvelopeKind.DEVICE_STATUS, body

    def away(self, reason: str) -> Said:
        """Nobody knows for a while."""
        return _update("away", {"reason": reason})

    def _training_status(self, id: str, replica: Mapping[str, Any]) -> Iterator[Said]:
        status = replica["reported"], replica["state"], replica["step"]
        if self._statuses.get(id) == status:
            return
        self._statuses[id] = status
        body = {
            "replica_id": id,
            "group": self._groups.get(id),
            "state": replica["state"],
            "current_step": replica["step"],
            "epoch": replica["epoch"],
            "max_step": replica["max_step"],
            "metrics": replica["metrics"],
            "time": replica["reported"],
        }
        yield EnvelopeKind.TRAINING_STATUS, _known(body)


_DEVICE_NUMBERS = ("utilization", "memory_used", "temperature", "power")


def _replica_fail(event: Mapping[str, Any]) -> dict[str, Any]:
    return _known(
        {
            "replica_id": event["replica"],
            "reason": event["reason"],
            "current_step": event["step"],
            "device_uuids": event["devices"],
            "action": event["action"],
            "event_id": event["id"],
            "time": event["time"],
        }
    )


def _weaver_command(event: Mapping[str, Any]) -> dict[str, Any]:
    target = event["target"]
    return _known(
        {
            "command_id": event["command"],
            "command_type": event["do"],
            "target_replica_ids": [target] if isinstance(target, str) else target,
            "params": event["params"],
            "replicas": event["replicas"],
            "by": event["by"],
            "cause": event["cause"],
            "event_id": event["id"],
            "time": event["time"],
        }
    )


def _config_info(event: Mapping[str, Any]) -> dict[str, Any]:
    changes = event["changes"]
    return _known(
        {
            "replica_id": event["replica"],
            "config_params": {key: change["new"] for key, change in changes.items()},
            "old_params": {key: change.get("old") for key, change in changes.items()},
            "refused": event.get("refused"),
            "current_step": event["step"],
            "command_id": event.get("command"),
            "by": event.get("by"),
            "reason": event.get("reason"),
            "event_id": event["id"],
            "time": event["time"],
        }
    )


def _update(type: str, data: dict[str, Any]) -> Said:
    return EnvelopeKind.UI_UPDATE, {"type": type, "data": data}


def _parts(items: Sequence[tuple[str, Any]]) -> Iterator[Sequence[tuple[str, Any]]]:
    for start in range(0, len(items), PART):
        yield items[start : start + PART]


def _known(body: dict[str, Any]) -> dict[str, Any]:
    """What a body says, without what is not known."""
    return {name: value for name, value in body.items() if value is not None}
