"""The slots of a job whose groups are stand-ins."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from loom.train import FaultTolerantJob, TrainerActor, TrainerReport
from loom.train.controller.group import GroupState
from loom.train.controller.replica_slots import ReplicaSlots
from loom.train.settings import Ending
from loom.train.spec import Assignment


class Group:
    """Stands in for the processes of a group: it notes what it is told."""

    def __init__(self, host: int) -> None:
        self.host = host
        self.state = GroupState.PREPARING
        self.members, self.pids, self.store = [1], [100 + host], ("host", 1)
        self.procs = SimpleNamespace(name="procs")
        self.report = TrainerReport()
        self.ended: TrainerReport | None = None
        self.failure, self.silent = "", 0.0
        self.assignments: list[Assignment] = []
        self.told_to_leave = False
        self.moved: list[tuple[str, bool]] = []
        self.broken_off = 0
        self.stopped = ""

    def begin(self, assignment: Assignment) -> None:
        self.state = GroupState.TRAINING
        self.assignments.append(assignment)

    def rest(self) -> None:
        self.state, self.ended = GroupState.READY, None

    def leave(self) -> None:
        self.told_to_leave = True

    def move(self, lighthouse: str, behind: bool) -> None:
        self.moved.append((lighthouse, behind))

    def break_off(self) -> None:
        self.broken_off += 1

    def stop(self, reason: str) -> None:
        self.state, self.stopped = GroupState.OVER, reason


class Pool:
    """Starts groups on the hosts in turn."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self.session = SimpleNamespace(hosts=lambda: list(range(hosts)))
        self.started: list[Group] = []
        self.spares: list[Group] = []
        self.draining: set[int] = set()
        self.refused: dict[int, str] = {}  # why a group has to leave its GPU, by the group's id
        self.full = False  # whether there is no free GPU
        self.places = hosts

    def refusal(self, group: Group | None) -> str:
        return self.refused.get(id(group), "")

    def hosts(self) -> list[int]:
        return [host for host in range(self._hosts) if host not in self.draining]

    def drain(self, host: int) -> None:
        self.draining.add(host)

    def evict(self, host: int) -> None:
        self.draining.add(host)

    def start(self, name: str, rather_not: int | None = None) -> Group:
        hosts = self.hosts()
        self.started.append(Group(hosts[len(self.started) % len(hosts)]))
        return self.started[-1]

    find = start

    def find_elsewhere(self, name: str, left: int | None) -> Group | None:
        return None if self.full else self.start(name, left)

    def capacity(self) -> int:
        return self.places

    def has_place(self) -> bool:
        return not self.full

    def has_spare(self) -> bool:
        return bool(self.spares)

    def keep_spares(self, now: float) -> None: ...

    def drop_lost_spares(self) -> None: ...


class Job:
    """The slots of a job whose groups are stand-ins."""

    def __init__(self, count: int = 0, **settings: Any) -> None:
        spec = FaultTolerantJob(TrainerActor, **{"groups": 2, **settings})
        self.events: list[tuple[str, str | None, dict[str, Any]]] = []
        events: Any = SimpleNamespace(
            record=lambda kind, replica=None, **data: self.events.append((kind, replica, data))
        )
        pool: Any = Pool(2)
        self.pool = pool
        self.killed: list[Group] = []
        self.evicted: list[int] = []
        self.silent: set[int] = set()
        self.lighthouses_left: list[int] = []
        support: Any = SimpleNamespace(
            lighthouse="http://lighthouse",
            host=0,
            key="key",
            evict=self.evicted.append,
            leave_host=lambda: self.lighthouses_left.append(0),
        )
        agents: Any = SimpleNamespace(silent=lambda: self.silent, kill=self.killed.append)
        self.slots = ReplicaSlots(spec, pool, support, agents, events)
        for _ in range(count or spec.groups):
            self.slots.add()

    def find(self, group: Any, **found: Any) -> None:
        """Let the threads of a group find something."""
        for name, value in found.items():
            setattr(group, name, value)
        self.slots.look()

    def become_ready(self, group: Any) -> None:
        self.find(group, state=GroupState.READY)

    def end(self, group: Any, ending: Ending, **report: Any) -> None:
        self.find(group, ended=TrainerReport(ending=ending, **report))

    def tick(self) -> None:
        self.slots.tick(time.monotonic())

    def prepare(self) -> list[Group]:
        """Let the groups that were started become ready."""
        self.tick()
        waiting = [group for group in self.pool.started if group.state is GroupState.PREPARING]
        for group in waiting:
            self.become_ready(group)
        self.tick()
        return waiting

    def train(self) -> list[Group]:
        """Let all groups begin, and make a step."""
        groups = self.prepare()
        for group in groups:
            self.make_step(group, 1)
        return groups

    def make_step(self, group: Group, step: int) -> None:
        self.find(group, report=TrainerReport(step=step, first_step_at=1.0))

    def of(self, kind: str) -> list[tuple[str | None, dict[str, Any]]]:
        return [(replica, data) for found, replica, data in self.events if found == kind]
