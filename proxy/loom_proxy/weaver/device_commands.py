"""`DeviceCommands`: the methods of `WeaverMethods` that take devices out of use, and put them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loom.errors import WrongArguments
from loom.weaver.views import DeviceInfo
from loom.wire.plain import plain
from loom_proxy.weaver.command import CommandProxy

Target = str | Sequence[str]
"""A replica's id, a group, a glob over both, ``"*"`` for all, or several ids."""


class DeviceCommands:
    """Commands about devices, for a class that can give commands and list devices."""

    def command(
        self,
        kind: str,
        params: dict[str, Any] | None = None,
        target: str | Sequence[str] = "*",
        *,
        wait: float = 0.0,
    ) -> CommandProxy:
        """Give a command to replicas; see `WeaverMethods.command`."""
        raise NotImplementedError

    def devices(self) -> dict[str, DeviceInfo]:
        """Return every device by its uuid; see `WeaverMethods.devices`."""
        raise NotImplementedError

    def deactivate(self, device: str | None = None, group: str | None = None) -> CommandProxy:
        """Take a device out of use, or all devices that the replicas of a group use, and notify the replicas there.

        `loom.train` on GPUs moves its groups off, and starts none there before a `reactivate`. Other replicas hear
        of it by ``@t.on_device_change``; those without such a function refuse.

        Args:
            device: uuid of the device.
            group: name of the group, or of one replica.

        Raises:
            WrongArguments: both are given, or neither.
            UnknownDevice: no replica has registered the device.
            UnknownReplica: no replica of the group lives on a device.
        """
        return self._change_use("deactivate_device", device, group, None)

    def deactivate_device(self, device_uuid: str, target: Target | None = None) -> CommandProxy:
        """Take a device out of use, and notify replicas: those on it, unless ``target`` names others.

        Raises:
            UnknownDevice: no replica has registered it.
        """
        return self._change_use("deactivate_device", device_uuid, None, target)

    def reactivate(
        self, device: str | None = None, group: str | None = None, *, target: Target | None = None
    ) -> CommandProxy:
        """Put a device into use again, or all that a group was on when they failed or were deactivated.

        Args:
            device: uuid of the device.
            group: name of the group, or of one replica.
            target: the replicas to notify of a device; None for those on it.

        Raises:
            WrongArguments: both a device and a group are given, or neither.
            UnknownDevice: no replica has registered the device, or no device of the group is out of use.
        """
        return self._change_use("reactivate", device, group, target)

    def _change_use(self, kind: str, device: str | None, group: str | None, target: Target | None) -> CommandProxy:
        device, group = plain(device, "device"), plain(group, "group")
        if group is not None and device is None:
            return self.command(kind, {"group": group}, [])
        if device is None or group is not None:
            raise WrongArguments("give the uuid of a device or the name of a group, and not both")
        if target is None:
            found = self.devices().get(str(device))
            target = [] if found is None else found.replicas
        return self.command(kind, {"device": device}, target)
