"""`UsableDevices`: what the weaver knows of the devices that matters for a job's groups."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from loom.weaver.states import DeviceState


@dataclass(frozen=True)
class UsableDevices:
    """The devices that a job may not use, or should leave to others, by uuid."""

    refused: Mapping[str, str] = field(default_factory=dict)
    """Why no group may use a device: a GPU that has failed or was deactivated, or a CPU slot that was deactivated.

    Groups on a CPU slot that has failed move as the policy of their group says, also to another slot of that name:
    all workers on one machine have the same.
    """
    occupied: Mapping[str, str] = field(default_factory=dict)
    """For each GPU on which a living replica of another job is, one such replica."""

    @classmethod
    def of(
        cls, job: str, uses_gpus: bool, devices: Iterable[Mapping[str, Any]], living: Collection[str]
    ) -> UsableDevices:
        """Return what follows for a job from the weaver's devices and the ids of the replicas that live."""
        own = re.compile(re.escape(job) + r"_\d+(\.\d+)?")
        refused, occupied = {}, {}
        for device in devices:
            uuid, state, gpu = device["uuid"], device["state"], device["kind"] == "gpu"
            if gpu is not uses_gpus:
                continue
            if state == DeviceState.INACTIVE or (gpu and state != DeviceState.ACTIVE):
                refused[uuid] = f"{state}, {device['reason'] or 'for no given reason'}"
            others = [id for id in device["replicas"] if id in living and not own.fullmatch(id)]
            if gpu and others:
                occupied[uuid] = others[0]
        return cls(refused, occupied)

    def refusal(self, devices: Iterable[str]) -> str:
        """Return why a group may not use some devices; "" if it may."""
        return next((f"{device}: {self.refused[device]}" for device in devices if device in self.refused), "")
