"""`LiveChanges`: what can be changed of a job while it runs, as handlers of its threadlet."""

from __future__ import annotations

from dataclasses import dataclass

from loom.beside import Session
from loom.errors import WrongArguments
from loom.threadlet import Threadlet
from loom.train.controller.group_pool import GroupPool
from loom.train.controller.job_events import JobEvents
from loom.train.controller.replica_slot import LeaveReason, ReplicaSlot, SlotState
from loom.train.controller.replica_slots import ReplicaSlots
from loom.train.spec import JobSpec

__all__ = ["LiveChanges"]


@dataclass
class LiveChanges:
    """Changes the number of groups, and the hosts that they are on. For the controller's thread."""

    session: Session
    job: JobSpec
    slots: ReplicaSlots
    pool: GroupPool
    events: JobEvents

    def register(self, threadlet: Threadlet) -> None:
        """Make the handlers ``groups``, ``drain_host`` and ``undrain_host``."""

        @threadlet.handler("groups")
        def set_groups(value: int) -> None:
            self._resize(value)

        @threadlet.handler("drain_host")
        def drain_host(value: int) -> None:
            self._drain(value)

        @threadlet.handler("undrain_host")
        def undrain_host(value: int) -> None:
            self.pool.draining.discard(value)

    def stop_all(self) -> None:
        """Let all groups leave for good."""
        for slot in _staying(self.slots):
            if slot.state is not SlotState.LEAVING:
                self.slots.remove(slot, "the job was told to stop")

    def respawn(self, replica: str, reason: str) -> None:
        """Move the group of a replica whose device has failed."""
        for slot in self.slots.training():
            if slot.replica == replica and slot.successor is None and slot.state is not SlotState.LEAVING:
                self.slots.move(slot, f"its device has failed: {reason}")

    def _resize(self, groups: int) -> None:
        if groups < 1:
            raise WrongArguments(f"a job has 1 group at least, not {groups}; `loom stop` ends it")
        staying = _staying(self.slots)
        for slot in reversed(staying[groups:]):
            self.slots.remove(slot, "the job is to be smaller")
        for _ in range(groups - len(staying)):
            slot = self.slots.add()
            self.events.record("group_added", slot.replica)

    def _drain(self, host: int) -> None:
        self._check_drain(host)
        why = f"host {host} is drained"
        self.pool.drain(host)
        for slot in self.slots.open():
            if slot.successor is not None and slot.successor.host == host:
                self.slots.replace_successor(slot, why)
            elif slot.group is not None and slot.group.host == host and slot.successor is None:
                self.slots.move(slot, why)

    def _check_drain(self, host: int) -> None:
        hosts = self.session.hosts()
        if host not in hosts:
            raise WrongArguments(f"there is no host {host}; there are {hosts}")
        if not set(self.pool.hosts()) - {host}:
            raise WrongArguments(f"host {host} is the last that groups can be on")
        training = self.slots.training()
        there = [slot for slot in training if slot.group is not None and slot.group.host == host]
        if self.job.checkpoints is None and there and len(training) == 1:
            raise WrongArguments(
                f"{there[0].replica} is the only group, and nobody could give its state to another: add a group "
                "first (groups=2), or give the job a folder for checkpoints"
            )


def _staying(slots: ReplicaSlots) -> list[ReplicaSlot]:
    """Return the slots that are not removed; a group that leaves to another host stays in the job."""
    return [
        slot for slot in slots.open() if slot.departure is None or slot.departure.reason is not LeaveReason.REMOVED
    ]
