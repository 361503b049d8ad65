"""The failure of a device: the replicas to notify, and the policy for them.

The relation of replicas and devices is many to many: a replica may span devices, and a device may serve several
replicas. A device is on the list of a replica exactly when the replica is on the list of the device, whatever
happens to either. Every replica on a device that fails is notified, whatever the policy says; the policy has an
action for each group of replicas.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from loom.control.arguments import check_name
from loom.control.handshake import Device
from loom.errors import LimitReached, NotFound, WrongArguments
from loom.weaver.states import DeviceState
from loom.weaver.views import few


@dataclass(slots=True)
class _KnownDevice:
    device: Device
    state: DeviceState = DeviceState.ACTIVE
    reason: str | None = None
    replicas: dict[str, None] = field(default_factory=dict)
    left_by: tuple[str, ...] = ()  # replicas and groups on the device when it was taken out of use


class DeviceReplicaMap:
    """A many-to-many map of devices and replica ids.

    A device stays known, with its state, when its last replica leaves, so that a failed device is not taken for a
    healthy one when another replica registers it. `forget` removes it.
    """

    def __init__(self) -> None:
        self.watched = False
        """True if `changed` is kept."""
        self.changed: dict[str, None] = {}
        """The devices that were added, changed or forgotten, until they are taken out of this dict."""
        self._known: dict[str, _KnownDevice] = {}
        self._devices_of: dict[str, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, uuid: str) -> bool:
        return uuid in self._known

    def __iter__(self) -> Iterator[Device]:
        return (known.device for known in self._known.values())

    def device(self, uuid: str) -> Device:
        return self._find(uuid).device

    def state(self, uuid: str) -> DeviceState:
        return self._find(uuid).state

    def reason(self, uuid: str) -> str | None:
        return self._find(uuid).reason

    def replicas_of(self, uuid: str) -> list[str]:
        """Return the replicas on a device, in the order in which they came; an unknown device has none."""
        return list(self._known[uuid].replicas) if uuid in self._known else []

    def devices_of(self, replica: str) -> list[str]:
        """Return the uuids of a replica's devices, in the order in which they came."""
        return list(self._devices_of.get(replica, ()))

    def register(self, replica: str, devices: Iterable[Device]) -> None:
        """Assign exactly these devices to a replica."""
        wanted = {device.uuid: device for device in devices}
        for uuid in self.devices_of(replica):
            if uuid not in wanted:
                self.remove(replica, uuid)
        for device in wanted.values():
            self.add(replica, device)

    def add(self, replica: str, device: Device) -> None:
        """Assign one more device to a replica; the device's description replaces an older one."""
        known = self._known.get(device.uuid)
        if known is None:
            known = self._known[device.uuid] = _KnownDevice(device)
        elif known.device == device and replica in known.replicas:
            return
        known.device = device
        known.replicas[replica] = None
        self._devices_of.setdefault(replica, {})[device.uuid] = None
        self._note_change(device.uuid)

    def remove(self, replica: str, uuid: str) -> None:
        """Take a replica off a device; do nothing if the replica is not on it."""
        if uuid in self._known:
            self._known[uuid].replicas.pop(replica, None)
            self._note_change(uuid)
        ours = self._devices_of.get(replica, {})
        ours.pop(uuid, None)
        if not ours:
            self._devices_of.pop(replica, None)

    def drain(self, replica: str) -> list[str]:
        """Take a replica off all its devices; return their uuids."""
        uuids = self.devices_of(replica)
        for uuid in uuids:
            self.remove(replica, uuid)
        return uuids

    def fail(self, uuid: str, reason: str, left_by: Iterable[str] = ()) -> None:
        """Mark a device as failed. Its replicas stay on it until they leave.

        Args:
            left_by: the replicas and groups on it, for `out_of_use`.
        """
        known = self._find(uuid)
        known.state, known.reason = DeviceState.FAILED, reason
        known.left_by = tuple(dict.fromkeys([*known.left_by, *left_by]))
        self._note_change(uuid)

    def deactivate(self, uuid: str, reason: str, left_by: Iterable[str] = ()) -> None:
        """Mark a device as inactive, unless it has failed, which is worse; ``left_by`` is as for `fail`."""
        known = self._find(uuid)
        if known.state is not DeviceState.FAILED:
            known.state, known.reason = DeviceState.INACTIVE, reason
            known.left_by = tuple(dict.fromkeys([*known.left_by, *left_by]))
            self._note_change(uuid)

    def reactivate(self, uuid: str) -> None:
        known = self._find(uuid)
        known.state, known.reason, known.left_by = DeviceState.ACTIVE, None, ()
        self._note_change(uuid)

    def left_by(self, uuid: str) -> tuple[str, ...]:
        """Return the replicas and groups on a device when it was taken out of use; () for an active device."""
        return self._find(uuid).left_by

    def out_of_use(self, name: str) -> list[str]:
        """Return the uuids of the devices that a replica or group was on when they were taken out of use."""
        return [uuid for uuid, known in self._known.items() if name in known.left_by]

    def restore(self, device: Device, state: DeviceState, reason: str | None, left_by: Iterable[str] = ()) -> None:
        self._known[device.uuid] = _KnownDevice(device, state, reason, left_by=tuple(left_by))

    def forget(self, uuid: str) -> None:
        """Forget a device, and take its replicas off it."""
        for replica in self.replicas_of(uuid):
            self.remove(replica, uuid)
        self._known.pop(uuid, None)
        self._note_change(uuid)

    def _note_change(self, uuid: str) -> None:
        if self.watched:
            self.changed[uuid] = None

    def _find(self, uuid: str) -> _KnownDevice:
        try:
            return self._known[uuid]
        except KeyError:
            text = f"no device {uuid!r:.80}; registered: {few(self._known)}"
            raise NotFound(text, code="unknown_device") from None


class Action(str, Enum):
    """The action for a replica whose device has failed."""

    NOTIFY = "notify"
    """Only notify the replica."""
    PAUSE = "pause"
    STOP = "stop"
    RESPAWN = "respawn"
    """Log an event ``respawn_wanted``, for a program that can respawn the replica elsewhere."""


MAX_POLICIES = 1000
"""Groups, and globs, of one user with an action of their own."""


class Policy:
    """The action for each group: its own, or that of the newest glob that matches it."""

    def __init__(self) -> None:
        self._actions: dict[str, Action] = {}

    def __iter__(self) -> Iterator[tuple[str, Action]]:
        return iter(self._actions.items())

    def set(self, group: str, action: str) -> Action:
        """Set the action of a group, or of all groups that a glob matches (``"*"`` matches all)."""
        if action not in tuple(Action):
            names = ", ".join(one.value for one in Action)
            raise WrongArguments(f"there is no action {action!r:.80}; choose one of {names}")
        check_name("a group", group)
        if group not in self._actions and len(self._actions) >= MAX_POLICIES:
            raise LimitReached(f"there are policies for {MAX_POLICIES} groups: set one of those, or use a glob")
        self._actions.pop(group, None)  # reinsert at the end: the newest glob wins
        self._actions[group] = Action(action)
        return self._actions[group]

    def action(self, group: str) -> Action:
        """Return the action of a group; the default is `Action.NOTIFY`."""
        if group in self._actions:
            return self._actions[group]
        for pattern, action in reversed(self._actions.items()):
            if fnmatch.fnmatchcase(group, pattern):
                return action
        return Action.NOTIFY
