"""`HostAgents`: a job's agent on each host, which kills processes, and tells a silent host from a hung process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from loom.actor import Actor, endpoint
from loom.devices.use import cpu_slots, local_devices
from loom.driver_api import Session, SpawnedProcs
from loom.errors import LoomError
from loom.process.host_notices import draining_reason
from loom.process.threads import start_thread
from loom.train.controller.group import ReplicaGroup
from loom.train.spec import JobSpec

_log = logging.getLogger("loom")

KILL_TIMEOUT = 60.0
DEVICES_TIMEOUT = 60.0  # seconds within which a host's agent tells its devices: NVML may take long to start

FIRST_ANSWER = 30.0  # seconds for the start of an agent: on a worker that ends meanwhile it may never be over

RETRY = 1.0  # seconds between two attempts to start the agent of a host on which one was lost


class HostAgent(Actor):
    """An actor that answers for its host, and kills processes there that do not end on their own."""

    @endpoint
    async def answer(self) -> str:
        """Return at once, and why the host is drained by whoever runs it; empty if it is not."""
        return await asyncio.to_thread(draining_reason)

    @endpoint
    async def gpus(self) -> list[str]:
        """Return the uuids of the host's GPUs."""
        return [device.uuid for device in await asyncio.to_thread(local_devices) if device.kind == "gpu"]

    @endpoint
    async def cpus(self, members: int) -> list[str]:
        """Return the uuids of the CPU slots on which a group of so many members is."""
        return cpu_slots(members)

    @endpoint
    async def kill(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class _Agent:
    """The agent of one host, which a thread asks every ``pause`` seconds."""

    def __init__(self, procs: SpawnedProcs, pause: float, job: JobSpec) -> None:
        self.procs = procs
        self.actor = procs.mesh.spawn("agent", HostAgent)
        self.gone = threading.Event()
        self.answered = False  # whether it has ever answered
        self.draining = ""  # why its host is drained, by its last answer
        self.began = time.monotonic()
        self.devices: list[str] = []  # uuids that `HostAgents.devices` returns; none before it has told them
        self._job = job
        self._pause = pause
        self._asked: float | None = None  # when the question was asked that has no answer yet
        start_thread(procs.name, self._ask)

    @property
    def silent(self) -> float:
        """Seconds for which an answer has been awaited."""
        asked = self._asked
        return 0.0 if asked is None else time.monotonic() - asked

    def _ask(self) -> None:
        with contextlib.suppress(Exception):  # the agent is gone
            self._await_answer()
            self.answered = True
            told = (
                self.actor.gpus.call_one() if self._job.uses_gpus else self.actor.cpus.call_one(self._job.members)
            )
            self.devices = told.get(timeout=DEVICES_TIMEOUT)
            while not self.gone.wait(self._pause):
                self._asked = time.monotonic()
                self._await_answer()
                self._asked = None
        self._asked = None

    def _await_answer(self) -> None:
        answer = self.actor.answer.call_one()
        while not self.gone.is_set():
            with contextlib.suppress(TimeoutError):
                self.draining = answer.get(timeout=self._pause)
                return


class HostAgents:
    """The agents of one job, for the controller's thread, on which ``on_controller`` calls."""

    def __init__(self, session: Session, job: JobSpec, on_controller: Callable[[Callable[[], None]], None]) -> None:
        self._session = session
        self._job = job
        self._on_controller = on_controller
        self._agents: dict[int, _Agent] = {}
        self._lost: dict[int, float] = {}  # when the next agent is started on a host that has lost one

    def tick(self, hosts: Sequence[int]) -> None:
        """Start an agent on each host that has none, or one whose start does not come to an end."""
        now, there = time.monotonic(), self._session.hosts()
        for host, agent in [*self._agents.items()]:
            if not agent.answered and now - agent.began > FIRST_ANSWER:
                self._lose(host, agent)
                agent.procs.stop("it did not start in time")
        for host in {*hosts, *self._lost}.intersection(there):
            if host not in self._agents and now >= self._lost.get(host, now):
                self._start(host)

    def _start(self, host: int) -> None:
        name = f"{self._job.name}_agent_{host}"
        try:
            # `_lose` runs on this thread, and so after `agent` is assigned.
            procs = self._session.spawn_procs(
                name, host, {"gpus": 1}, lambda rank: self._on_controller(lambda: self._lose(host, agent))
            )
        except (LoomError, RuntimeError) as error:
            _log.info("no agent on host %d: %s", host, error)
            return
        agent = self._agents[host] = _Agent(procs, self._job.silence / 4, self._job)

    def _lose(self, host: int, agent: _Agent) -> None:
        agent.gone.set()
        if self._agents.get(host) is agent:
            del self._agents[host]
            self._lost[host] = time.monotonic() + RETRY

    def silent(self) -> set[int]:
        """Return the numbers of the hosts that do not answer. Any thread may call.

        A host counts as silent sooner than a process that hangs there is replaced.
        """
        return {host for host, agent in self._agents.copy().items() if agent.silent >= self._job.silence / 2}

    def ending(self) -> set[int]:
        """Return the numbers of the hosts on which an agent has ended and none has answered since.

        The worker of such a host may be about to end too, as when it is evicted: it ends new processes.
        """
        agents = self._agents
        return {host for host in self._lost if host not in agents or not agents[host].answered}

    def draining(self) -> dict[int, str]:
        """Return of each host whose agent has answered why whoever runs it drains it; empty if nobody does."""
        return {host: agent.draining for host, agent in self._agents.items() if agent.answered}

    def devices(self, host: int) -> list[str]:
        """Return the uuids of a host's GPUs or, for a job on CPUs, of the slots that a group there has.

        There are none before the host's agent has told them.
        """
        agent = self._agents.get(host)
        return [] if agent is None else agent.devices

    def kill(self, group: ReplicaGroup) -> None:
        """Kill the processes of a group: stopped or hanging processes end in no other way."""
        agent = self._agents.get(group.host)
        if agent is not None and group.pids:
            start_thread(f"kill {group.number}", _kill, agent.actor, group.pids)

    def close(self) -> None:
        for agent in self._agents.values():
            agent.gone.set()
            agent.procs.stop("the job is over")


def _kill(agent: Any, pids: list[int]) -> None:
    try:
        agent.kill.call_one(pids).get(timeout=KILL_TIMEOUT)
    except Exception as error:  # noqa: BLE001 - the host is lost with all that is on it
        _log.info("%s were not killed: %s", pids, error)
