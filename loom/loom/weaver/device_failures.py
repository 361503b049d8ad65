"""Device failures: every replica on the device is notified, and its group's policy is carried out."""

from __future__ import annotations

from typing import Any

from loom.control.commands import CommandKind
from loom.weaver.dispatcher import Dispatcher
from loom.weaver.outbox import Outbox
from loom.weaver.policy import Action
from loom.weaver.registry import Registry
from loom.weaver.replicas import Replica
from loom.weaver.states import LIVING, DeviceState
from loom.weaver.views import WeaverEvent


class DeviceFailures:
    """The handling of device failures, and the failures since the weaver's start."""

    def __init__(self, known: Registry, outbox: Outbox, dispatcher: Dispatcher) -> None:
        self._known = known
        self._outbox = outbox
        self._dispatcher = dispatcher
        self._notified: dict[str, tuple[WeaverEvent, set[str]]] = {}
        """For each device the event of its failure, and the process instances that were notified."""

    def fail(self, device: str, reason: str, by: str, now: float) -> WeaverEvent:
        """Record that a device has failed, notify the replicas on it, and carry out their policies.

        Monitors may report a failure again and again; a repeated report changes nothing unless new processes use
        the device.
        """
        known = self._known.devices.device(device)
        affected = [self._known.replicas[id] for id in self._known.devices.replicas_of(device)]
        processes = {replica.instance for replica in affected if replica.state in LIVING}
        if device in self._notified and self._known.devices.state(device) is DeviceState.FAILED:
            event, notified = self._notified[device]
            if processes <= notified:
                return event
        self._known.devices.fail(device, reason)
        self._known.save_device(device)
        chain: list[dict[str, Any]] = []
        event = self._known.events.append(
            now, "device_failed", None, device=known.to_body(), reason=reason, by=by, replicas=chain
        )
        self._notified[device] = event, processes
        living = [replica for replica in affected if replica.state in LIVING]
        by_action: dict[Action, list[str]] = {}
        for replica in living:
            by_action.setdefault(self._known.policy.action(replica.group), []).append(replica.id)
        given: dict[str, list[str]] = {replica.id: [] for replica in living}
        what = {"device": device, "reason": reason}
        ids = [replica.id for replica in living]
        commands = [self._dispatcher.give(CommandKind.DEVICE_FAILED, what, ids, by, now, event.id)] if ids else []
        for action, kind in ((Action.PAUSE, CommandKind.PAUSE), (Action.STOP, CommandKind.STOP)):
            if action in by_action:
                commands.append(self._dispatcher.give(kind, what, by_action[action], by, now, event.id))
        for command in commands:
            for id in command.replicas:
                given[id].append(command.id)
        for replica in affected:
            done = self._known.policy.action(replica.group).value if replica in living else None
            entry = {"replica": replica.id, "group": replica.group, "state": replica.state.value, "action": done}
            chain.append({**entry, "commands": given.get(replica.id, [])})
        for id in by_action.get(Action.RESPAWN, ()):
            want_respawn(self._known, self._known.replicas[id], reason, event.id, now, device)
        self._outbox.urgent = True
        return event


def want_respawn(
    known: Registry, replica: Replica, reason: str, cause: int | None, now: float, device: str | None = None
) -> None:
    """Log that a replica needs a respawn elsewhere."""
    about = {"session": replica.session, "procs": replica.procs, "rank": replica.rank, "group": replica.group}
    devices = known.devices.devices_of(replica.id)
    known.events.append(
        now, "respawn_wanted", replica.id, reason=reason, device=device, devices=devices, cause=cause, **about
    )
