"""Which replica runs on which devices: the map that turns a broken GPU into the processes to tell.

It is many to many: a replica may span devices, and a device may serve several replicas. A device is on the list of
a replica exactly when the replica is on the list of the device, whatever happens to either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from loom.control.device import Device
from loom.errors import UnknownDevice
from loom.weaver.states import DeviceState
from loom.weaver.views import few


@dataclass(slots=True)
class _KnownDevice:
    device: Device
    state: DeviceState = DeviceState.ACTIVE
    reason: str | None = None
    replicas: dict[str, None] = field(default_factory=dict)


class DeviceReplicaMap:
    """Devices, replicas and which belongs to which.

    Replicas are known here by their ids. A device stays known, and failed if it has failed, when its last replica
    leaves, so that whoever registers it next is not told that it is well; `forget` ends that.

    Methods raise `UnknownDevice` for a device that no replica has registered, unless they say otherwise.
    """

    def __init__(self) -> None:
        self._known: dict[str, _KnownDevice] = {}
        self._devices_of: dict[str, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, uuid: str) -> bool:
        return uuid in self._known

    def __iter__(self) -> Iterator[Device]:
        return (known.device for known in self._known.values())

    def device(self, uuid: str) -> Device:
        """Return a device."""
        return self._find(uuid).device

    def state(self, uuid: str) -> DeviceState:
        """Return a device's state."""
        return self._find(uuid).state

    def reason(self, uuid: str) -> str | None:
        """Return why a device is not active; None if it is."""
        return self._find(uuid).reason

    def replicas_of(self, uuid: str) -> list[str]:
        """Return the replicas on a device, in the order in which they came; none on one that is not known."""
        return list(self._known[uuid].replicas) if uuid in self._known else []

    def devices_of(self, replica: str) -> list[str]:
        """Return the uuids of a replica's devices, in the order in which they came."""
        return list(self._devices_of.get(replica, ()))

    def register(self, replica: str, devices: Iterable[Device]) -> None:
        """Let a replica run on these devices and no others, as it says when it registers."""
        wanted = {device.uuid: device for device in devices}
        for uuid in self.devices_of(replica):
            if uuid not in wanted:
                self.remove(replica, uuid)
        for device in wanted.values():
            self.add(replica, device)

    def add(self, replica: str, device: Device) -> None:
        """Let a replica run on one more device, whose description replaces an older one."""
        known = self._known.setdefault(device.uuid, _KnownDevice(device))
        known.device = device
        known.replicas[replica] = None
        self._devices_of.setdefault(replica, {})[device.uuid] = None

    def remove(self, replica: str, uuid: str) -> None:
        """Take a replica off a device; harmless if it is not on it."""
        if uuid in self._known:
            self._known[uuid].replicas.pop(replica, None)
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

    def fail(self, uuid: str, reason: str) -> None:
        """Note that a device has failed. Its replicas stay on it until they leave."""
        known = self._find(uuid)
        known.state, known.reason = DeviceState.FAILED, reason

    def deactivate(self, uuid: str, reason: str) -> None:
        """Note that a device is not used any more, unless it has failed, which is worse."""
        known = self._find(uuid)
        if known.state is not DeviceState.FAILED:
            known.state, known.reason = DeviceState.INACTIVE, reason

    def reactivate(self, uuid: str) -> None:
        """Note that a device is well again."""
        known = self._find(uuid)
        known.state, known.reason = DeviceState.ACTIVE, None

    def restore(self, device: Device, state: DeviceState, reason: str | None) -> None:
        """Put back a device as it was stored, with no replica."""
        self._known[device.uuid] = _KnownDevice(device, state, reason)

    def forget(self, uuid: str) -> None:
        """Know nothing of a device any more; its replicas are taken off it."""
        for replica in self.replicas_of(uuid):
            self.remove(replica, uuid)
        self._known.pop(uuid, None)

    def _find(self, uuid: str) -> _KnownDevice:
        try:
            return self._known[uuid]
        except KeyError:
            raise UnknownDevice(f"no device {uuid!r:.80}; registered: {few(self._known)}") from None
