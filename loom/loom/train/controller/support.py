"""What a job has beside its groups: the lighthouse, and on each host somebody who can end a process."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

from loom.actor import Actor, endpoint
from loom.beside import Session, SpawnedProcs
from loom.errors import LoomError
from loom.train.controller.group import ReplicaGroup
from loom.train.controller.job_events import JobEvents
from loom.train.controller.lighthouse import LighthouseActor
from loom.train.spec import JobSpec

__all__ = ["HostKeeper", "Support"]

_log = logging.getLogger("loom")

OPEN_TIMEOUT = 60.0


class HostKeeper(Actor):
    """Ends processes of its host that do not end by themselves."""

    @endpoint
    async def kill(self, pids: list[int]) -> None:
        """Send SIGKILL to processes, those of them that are there."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Support:
    """The lighthouse and the keepers of one job. For the controller's thread.

    Args:
        session: that starts processes.
        job: whose they are.
        on_controller: has a function called on the controller's thread.
        events: takes what happens.
    """

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
        self._keepers: dict[int, tuple[SpawnedProcs, Any]] = {}
        self._procs: SpawnedProcs | None = None
        """The lighthouse's."""
        self._host: int | None = None
        """The one that it is on, or was."""
        self._closed = False
        self.lighthouse = ""
        """Its URL."""
        self.moved: Callable[[], None] = lambda: None
        """Called when the lighthouse has another URL."""

    def open(self) -> None:
        """Start the lighthouse, on the first host that takes it.

        The one that had it before comes last: it may be lost, which nobody has noticed yet.

        Raises:
            LoomError: no host takes it.
        """
        reasons = []
        for host in sorted(self._session.hosts(), key=lambda host: host == self._host):
            try:
                self._open_on(host)
                return
            except Exception as error:  # noqa: BLE001 - Monarch raises several where a host is lost meanwhile
                _log.warning("no lighthouse can be started on host %d: %s", host, error)
                reasons.append(f"host {host}: {error}")
        raise LoomError(f"no host is there for the job's lighthouse{''.join(f'; {reason}' for reason in reasons)}")

    def _open_on(self, host: int) -> None:
        name = f"{self._job.name}_lighthouse"
        # What it calls runs on this thread, and so after the line below.
        procs = self._session.spawn_procs(
            name, host, {"gpus": 1}, lambda rank: self._on_controller(lambda: self._lost(procs))
        )
        try:
            actor = procs.mesh.spawn("lighthouse", LighthouseActor, self._job.timeouts)
            url = actor.open.call_one().get(timeout=OPEN_TIMEOUT)
            pid = actor.pid.call_one().get(timeout=10)
        except Exception:
            procs.stop("it was to have the lighthouse, and could not be started")
            raise
        self.lighthouse, self._procs, self._host = url, procs, host
        self._events.record("lighthouse", host=host, url=url, pid=pid)

    def _lost(self, procs: SpawnedProcs) -> None:
        if self._closed or procs is not self._procs:
            return
        self._events.record("lighthouse_lost", url=self.lighthouse)
        self.open()
        self.moved()

    def tick(self, hosts: Sequence[int]) -> None:
        """Have a keeper on each host."""
        for host in hosts:
            if host not in self._keepers:
                self._keep(host)

    def _keep(self, host: int) -> None:
        try:
            procs = self._session.spawn_procs(
                f"{self._job.name}_keeper_{host}", host, {"gpus": 1}, lambda rank: self._on_controller(lost)
            )
        except (LoomError, RuntimeError) as error:
            _log.info("no keeper on host %d: %s", host, error)
            return

        def lost() -> None:
            if not self._closed:
                self._keepers.pop(host, None)

        self._keepers[host] = procs, procs.mesh.spawn("keeper", HostKeeper)

    def kill(self, group: ReplicaGroup) -> None:
        """Have the processes of a group killed: one that is stopped or hangs ends in no other way."""
        keeper = self._keepers.get(group.host)
        if keeper is not None and group.pids:
            threading.Thread(target=self._kill, args=(keeper[1], group.pids), daemon=True).start()

    def _kill(self, keeper: Any, pids: list[int]) -> None:
        try:
            keeper.kill.call_one(pids).get(timeout=OPEN_TIMEOUT)
        except Exception as error:  # noqa: BLE001 - the host is lost with all that is on it
            _log.info("%s were not killed: %s", pids, error)

    def close(self) -> None:
        """End them."""
        self._closed = True
        for procs in [*(procs for procs, _ in self._keepers.values()), *([self._procs] if self._procs else [])]:
            procs.stop("the job is over")
