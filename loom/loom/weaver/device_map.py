"""Which replica runs on which devices: the map that turns a broken GPU into the processes to tell.

It is many to many: a replica may span devices, and a device may serve several replicas. A device is on the list of
a replica exactly when the replica is on the list of the device, whatever happens to either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from loom.control.device import Device
from loom.errors import UnknownDevice
from loom.weaver.states import DeviceState

__all__ = ["DeviceReplicaMap"]


class DeviceReplicaMap:
    """Devices, replicas and which belongs to which.

    Replicas are known here by their ids. A device stays known, and failed if it has failed, when its last replica
    leaves, so that whoever registers it next is not told that it is well; `forget` ends that.
    """

    def __init__(self) -> None:
        self._devices: dict[str, Device] = {}
        self._states: dict[str, DeviceState] = {}
        self._reasons: dict[str, str] = {}
        self._replicas: dict[str, dict[str, None]] = {}
        self._devices_of: dict[str, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._devices)

    def __contains__(self, uuid: str) -> bool:
        return uuid in self._devices

    def __iter__(self) -> Iterator[Device]:
        return iter(self._devices.values())

    def device(self, uuid: str) -> Device:
        """A device.

        Raises:
            UnknownDevice: no replica has registered it.
        """
        self._check(uuid)
        return self._devices[uuid]

    def state(self, uuid: str) -> DeviceState:
        """A device's state.

        Raises:
            UnknownDevice: no replica has registered it.
        """
        self._check(uuid)
        return self._states.get(uuid, DeviceState.ACTIVE)

    def reason(self, uuid: str) -> str | None:
        """Why a device is not active; None where it is."""
        return self._reasons.get(uuid)

    def replicas_of(self, uuid: str) -> list[str]:
        """The replicas on a device, in the order in which they came."""
        return list(self._replicas.get(uuid, ()))

    def devices_of(self, replica: str) -> list[str]:
        """The uuids of a replica's devices, in the order in which they came."""
        return list(self._devices_of.get(replica, ()))

    def register(self, replica: str, devices: Iterable[Device]) -> None:
        """Map a replica to these devices and no others, as it says each time that it registers."""
        wanted = {device.uuid: device for device in devices}
        for uuid in self.devices_of(replica):
            if uuid not in wanted:
                self.remove(replica, uuid)
        for device in wanted.values():
            self.add(replica, device)

    def add(self, replica: str, device: Device) -> None:
        """Have a replica run on one more device, whose description replaces an older one."""
        self._devices[device.uuid] = device
        self._replicas.setdefault(device.uuid, {})[replica] = None
        self._devices_of.setdefault(replica, {})[device.uuid] = None

    def remove(self, replica: str, uuid: str) -> None:
        """Take a replica off a device; harmless where it is not on it."""
        for ours, of, other in ((self._replicas, uuid, replica), (self._devices_of, replica, uuid)):
            if of in ours:
                ours[of].pop(other, None)
                if not ours[of]:
                    del ours[of]

    def drain(self, replica: str) -> list[str]:
        """Take a replica off all its devices; return their uuids."""
        uuids = self.devices_of(replica)
        for uuid in uuids:
            self.remove(replica, uuid)
        return uuids

    def fail(self, uuid: str, reason: str) -> list[str]:
        """Note that a device has failed; return the replicas on it, which stay on it until they leave.

        Raises:
            UnknownDevice: no replica has registered it.
        """
        return self._set(uuid, DeviceState.FAILED, reason)

    def deactivate(self, uuid: str, reason: str) -> list[str]:
        """Note that a device is not to be used, unless it has failed, which is worse; return the replicas on it.

        Raises:
            UnknownDevice: no replica has registered it.
        """
        if self.state(uuid) is DeviceState.FAILED:
            return self.replicas_of(uuid)
        return self._set(uuid, DeviceState.INACTIVE, reason)

    def reactivate(self, uuid: str) -> list[str]:
        """Note that a device is well again; return the replicas on it.

        Raises:
            UnknownDevice: no replica has registered it.
        """
        self._check(uuid)
        self._states.pop(uuid, None)
        self._reasons.pop(uuid, None)
        return self.replicas_of(uuid)

    def restore(self, device: Device, state: DeviceState, reason: str | None) -> None:
        """Put back a device as it was stored, with no replica."""
        self._devices[device.uuid] = device
        if state is not DeviceState.ACTIVE:
            self._set(device.uuid, state, reason or "")

    def forget(self, uuid: str) -> None:
        """Know nothing of a device any more; its replicas are taken off it."""
        for replica in self.replicas_of(uuid):
            self.remove(replica, uuid)
        for known in (self._devices, self._states, self._reasons):
            known.pop(uuid, None)

    def _set(self, uuid: str, state: DeviceState, reason: str) -> list[str]:
        self._check(uuid)
        self._states[uuid] = state
        self._reasons[uuid] = reason
        return self.replicas_of(uuid)

    def _check(self, uuid: str) -> None:
        if uuid not in self._devices:
            few = ", ".join(list(self._devices)[:5]) or "none"
            more = f" and {len(self) - 5} more" if len(self) > 5 else ""
            raise UnknownDevice(f"no device {uuid!r:.80}; registered: {few}{more}")
