"""`GroupPool`: a job's replica groups on the hosts that it may use, and its spares."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from loom.driver_api import Session
from loom.errors import SupervisionError
from loom.train.controller.group import GroupState, ReplicaGroup
from loom.train.controller.host_agents import HostAgents
from loom.train.controller.job_events import JobEvents, UsableDevices
from loom.train.spec import JobSpec

_log = logging.getLogger("loom")

SPARE_RETRY = 1.0  # seconds between two attempts to start a spare

EVICTED_FOR = 60.0
"""Seconds for which no group is started on a host that was told to end: longer than its grace."""


@dataclass
class GroupPool:
    """The groups of one job on all hosts, for the controller's thread."""

    session: Session
    job: JobSpec
    events: JobEvents
    agents: HostAgents
    changed: Callable[[], object]  # called by other threads when a group has changed
    draining: set[int] = field(default_factory=set)  # numbers of the hosts on which no groups are started
    spares: list[ReplicaGroup] = field(default_factory=list)  # the groups that wait to replace a lost one
    usable: UsableDevices = field(default_factory=UsableDevices)  # the weaver's knowledge of the devices

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._groups: list[ReplicaGroup] = []
        self._spares_due = 0.0
        self._evicted: dict[
            int, float
        ] = {}  # until when no group is started on a host that still seems to be there

    def hosts(self) -> list[int]:
        """Return the numbers of the hosts on which groups may be started."""
        wanted, there, now = self.job.hosts, self.session.hosts(), time.monotonic()
        # A host that was lost and is there again has another worker.
        self._evicted = {host: until for host, until in self._evicted.items() if host in there and now < until}
        left_out = self.draining | self._evicted.keys() | self.agents.silent() | self.agents.ending()
        return [host for host in there if host not in left_out and (wanted is None or host in wanted)]

    def start(self, name: str, rather_not: int | None = None) -> ReplicaGroup | None:
        """Start a group on the host with the fewest groups, but on ``rather_not`` only if there is no other.

        GPUs of other jobs come last.
        """
        places = self._places()
        used = Counter(group.host for group in self._groups)

        def rank(host: int) -> tuple[bool, int, int, int]:
            return host == rather_not, len(self._shared(places[host])), used[host], host

        host = min(places, key=rank, default=None)
        if host is None:
            return None
        name = f"{name}-{next(self._numbers)}"
        try:
            group = ReplicaGroup(self.session, self.job, name, host, self.changed, places[host])
        except (SupervisionError, RuntimeError) as error:
            _log.warning("no group can be started on host %d: %s", host, error)
            return None
        self._groups.append(group)
        if shared := self._shared(group.devices):
            self.events.record("gpus_shared", host=host, procs=name, gpus=shared)
        return group

    def capacity(self) -> int:
        """Return how many groups have places: a host each or, on GPUs, as many as get some beside spares."""
        devices = [self.agents.devices(host) for host in self.hosts()]
        if not self.job.uses_gpus:
            return sum(not self.usable.refusal(slots) for slots in devices)
        free = ([gpu for gpu in gpus if gpu not in self.usable.refused] for gpus in devices)
        return sum(len(gpus) // self.job.members for gpus in free) - self.job.spares

    def has_place(self) -> bool:
        """Return whether there is a host on which another group could be started."""
        return bool(self._places())

    def _places(self) -> dict[int, tuple[str, ...]]:
        """Return the hosts on which another group could be started, with the GPUs that it would get."""
        self._groups = [group for group in self._groups if group.state is not GroupState.OVER]
        return {host: gpus for host in self.hosts() if (gpus := self._free_gpus(host)) is not None}

    def _free_gpus(self, host: int) -> tuple[str, ...] | None:
        """Return the GPUs for another group on a host, () if the job uses none; None if it has no place there."""
        devices, usable = self.agents.devices(host), self.usable
        if not self.job.uses_gpus:
            return None if usable.refusal(devices) else ()
        taken = {gpu for group in self._groups for gpu in group.devices}
        free = [gpu for gpu in devices if gpu not in taken and gpu not in usable.refused]
        free.sort(key=lambda gpu: gpu in usable.occupied)
        return tuple(free[: self.job.members]) if len(free) >= self.job.members else None

    def _shared(self, gpus: tuple[str, ...]) -> dict[str, str]:
        """Return the GPUs that replicas of other jobs use, with one replica of each."""
        return {gpu: self.usable.occupied[gpu] for gpu in gpus if gpu in self.usable.occupied}

    def refusal(self, group: ReplicaGroup) -> str:
        """Return why a group has to leave its devices; "" if it does not."""
        return self.usable.refusal(group.devices or self.agents.devices(group.host))

    def find(self, replica: str, shunned: int | None) -> ReplicaGroup | None:
        """Return a ready spare, or one that prepares on a host that is not shunned, or else start a group."""
        hosts = self.hosts()
        spares = [spare for spare in self.spares if spare.host in hosts and not self.refusal(spare)]
        ready = [spare for spare in spares if spare.state is GroupState.READY]
        preparing = [one for one in spares if one.state is GroupState.PREPARING and one.host != shunned]
        return self._take_spare(ready + preparing) or self.start(replica, rather_not=shunned)

    def find_elsewhere(self, replica: str, left: int | None) -> ReplicaGroup | None:
        """Return a ready spare on another host than ``left``, or else start a group there."""
        ready = [spare for spare in self.spares if spare.state is GroupState.READY and spare.host != left]
        ready = [spare for spare in ready if not self.refusal(spare)]
        return self._take_spare(ready) or self.start(replica, rather_not=left)

    def has_spare(self) -> bool:
        """Return whether a spare is ready, on a host that answers."""
        hosts = self.hosts()
        return any(spare.state is GroupState.READY and spare.host in hosts for spare in self.spares)

    def _take_spare(self, spares: list[ReplicaGroup]) -> ReplicaGroup | None:
        if not spares:
            return None
        self.spares.remove(spares[0])
        return spares[0]

    def keep_spares(self, now: float) -> None:
        """Start a spare if there are fewer than wanted."""
        if len(self.spares) >= self.job.spares or now < self._spares_due:
            return
        self._spares_due = now + SPARE_RETRY
        spare = self.start(f"{self.job.name}_spare")
        if spare is not None:
            self.spares.append(spare)

    def use(self, usable: UsableDevices) -> None:
        """Start no group on devices that are refused from now on, and stop the spares there."""
        before, self.usable = self.usable, usable
        if usable.refused == before.refused:
            return
        if self.job.uses_gpus:
            self.events.record("gpus_refused", gpus=dict(usable.refused))
        else:
            self.events.record("cpus_refused", cpus=dict(usable.refused))
        for spare in [spare for spare in self.spares if self.refusal(spare)]:
            self.spares.remove(spare)
            spare.stop(self.refusal(spare))

    def drop_lost_spares(self) -> None:
        """Stop the spares that have lost a process, or could not be prepared."""
        for spare in [spare for spare in self.spares if spare.failure]:
            self.spares.remove(spare)
            spare.stop("a spare was lost")
            self.events.record("spare_lost", host=spare.host, pids=spare.pids)

    def drain(self, host: int) -> None:
        """Stop starting groups on a host, and stop its spares."""
        self.draining.add(host)
        self._stop_spares(host, f"host {host} is drained")

    def evict(self, host: int) -> None:
        """Start no groups on a host that is about to end until another worker is there; stop its spares."""
        self._evicted[host] = time.monotonic() + EVICTED_FOR
        self._stop_spares(host, f"host {host} is about to end")

    def _stop_spares(self, host: int, why: str) -> None:
        for spare in [spare for spare in self.spares if spare.host == host]:
            self.spares.remove(spare)
            spare.stop(why)

    def close(self) -> None:
        for group in self._groups:
            if group.state is not GroupState.OVER:
                group.stop("the job is over")
