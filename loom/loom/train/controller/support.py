"""`Support`: a job's lighthouse, and its agents, which kill processes on each host."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from loom.actor import Actor, endpoint
from loom.beside import Session, SpawnedProcs
from loom.errors import LoomError
from loom.train.controller.group import ReplicaGroup
from loom.train.controller.job_events import JobEvents
from loom.train.controller.lighthouse import LighthouseActor
from loom.train.spec import JobSpec

_log = logging.getLogger("loom")

OPEN_TIMEOUT = 60.0

OPEN_AGAIN_AFTER = 1.0
"""Seconds between two attempts to start a lighthouse while there is no host that can run it."""


class HostAgent(Actor):
    """An actor that kills processes of its host that do not end on their own."""

    @endpoint
    async def kill(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Support:
    """The lighthouse and the agents of one job, for the controller's thread, on which ``on_controller`` calls."""

    def __init__(
        self,
        session: Session,
        job: JobSpec,
        on_controller: Callable[[Callable[[], None]], None],
        events: JobEvents,
    ) -> None:
        self._session = session
        self._job = job
        self._on_controller = on_controller
        self._events = events
        self._agents: dict[int, tuple[SpawnedProcs, Any]] = {}
        self._procs: SpawnedProcs | None = None  # the lighthouse's
        self._host: int | None = None  # number of the host that runs the lighthouse, or ran the last one
        self._closed = False
        self._reopen_at: float | None = None  # when to try to start another lighthouse; None while there is one
        self.lighthouse = ""  # its URL
        self.key = secrets.token_hex(32)  # by which the job's processes know each other
        self.moved: Callable[[], None] = lambda: None  # called when the lighthouse has a new URL

    def open(self, hosts: Sequence[int] | None = None) -> None:
        """Start the lighthouse on a host that can run it; the last one's host, which may be lost, is tried last.

        Args:
            hosts: numbers of the hosts that may run it; None: of all.
        """
        reasons = []
        for host in sorted(self._session.hosts() if hosts is None else hosts, key=lambda host: host == self._host):
            try:
                self._open_on(host)
                return
            except Exception as error:  # noqa: BLE001 - Monarch raises several kinds if a host is lost meanwhile
                _log.warning("no lighthouse can be started on host %d: %s", host, error)
                reasons.append(f"host {host}: {error}")
        raise LoomError(f"no host is there for the job's lighthouse{''.join(f'; {reason}' for reason in reasons)}")

    def _open_on(self, host: int) -> None:
        name = f"{self._job.name}_lighthouse"
        # `_lost` runs on this thread, and so after `procs` is assigned.
        procs = self._session.spawn_procs(
            name, host, {"gpus": 1}, lambda rank: self._on_controller(lambda: self._lost(procs))
        )
        try:
            actor = procs.mesh.spawn("lighthouse", LighthouseActor, self._job.timeouts)
            url = actor.open.call_one().get(timeout=OPEN_TIMEOUT)
            pid = actor.pid.call_one().get(timeout=10)
        except Exception:
            procs.stop("the lighthouse could not be started here")
            raise
        self.lighthouse, self._procs, self._host = url, procs, host
        self._events.record("lighthouse", host=host, url=url, pid=pid)

    def _lost(self, procs: SpawnedProcs) -> None:
        if self._closed or procs is not self._procs:
            return
        self._events.record("lighthouse_lost", url=self.lighthouse)
        self._procs, self._reopen_at = None, 0.0

    def evict(self, host: int) -> None:
        """End the lighthouse if it is on a host that is about to end, where no group needs it any more."""
        if self._procs is not None and host == self._host:
            self._procs.stop("its host is about to end")

    def tick(self, hosts: Sequence[int]) -> None:
        """Start another lighthouse if it was lost, and an agent on each host that has none."""
        if self._reopen_at is not None and time.monotonic() >= self._reopen_at and hosts:
            try:
                self.open(hosts)
            except LoomError as error:
                _log.warning("the job waits for a host: %s", error)
                self._reopen_at = time.monotonic() + OPEN_AGAIN_AFTER
            else:
                self._reopen_at = None
                self.moved()
        for host in hosts:
            if host not in self._agents:
                self._start_agent(host)

    def _start_agent(self, host: int) -> None:
        try:
            procs = self._session.spawn_procs(
                f"{self._job.name}_agent_{host}", host, {"gpus": 1}, lambda rank: self._on_controller(lost)
            )
        except (LoomError, RuntimeError) as error:
            _log.info("no agent on host %d: %s", host, error)
            return

        def lost() -> None:
            if not self._closed:
                self._agents.pop(host, None)

        self._agents[host] = procs, procs.mesh.spawn("agent", HostAgent)

    def kill(self, group: ReplicaGroup) -> None:
        """Kill the processes of a group: stopped or hanging processes end in no other way."""
        agent = self._agents.get(group.host)
        if agent is not None and group.pids:
            threading.Thread(target=self._kill, args=(agent[1], group.pids), daemon=True).start()

    def _kill(self, agent: Any, pids: list[int]) -> None:
        try:
            agent.kill.call_one(pids).get(timeout=OPEN_TIMEOUT)
        except Exception as error:  # noqa: BLE001 - the host is lost with all that is on it
            _log.info("%s were not killed: %s", pids, error)

    def close(self) -> None:
        self._closed = True
        for procs in [*(procs for procs, _ in self._agents.values()), *([self._procs] if self._procs else [])]:
            procs.stop("the job is over")
