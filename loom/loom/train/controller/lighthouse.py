"""`Support`: the lighthouse at which a job's groups meet, started again elsewhere when it or its host is lost."""

from __future__ import annotations

import asyncio
import importlib.machinery
import importlib.util
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from loom.actor import Actor, endpoint
from loom.control.address import own_address
from loom.driver_api import Session, SpawnedProcs
from loom.errors import LoomError, MissingDependency
from loom.process.listen import bracketed
from loom.threadlet import evictions
from loom.train.controller.job_events import JobEvents
from loom.train.settings import Timeouts
from loom.train.spec import JobSpec

QUORUM_TICK_MS = 20


class LighthouseActor(Actor):
    """An actor that runs a lighthouse in its process, which leaves groups out after ``timeouts``."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._server: Any = None
        evictions.add(self)

    def evict(self) -> None:
        """Go on: the groups whose host is about to end too need the lighthouse for their last step."""

    @endpoint
    async def open(self, port: int = 0) -> str:
        """Listen on a port, or on a free one if it is 0; return the URL for managers."""
        return await asyncio.to_thread(self._open, port)

    @endpoint
    async def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    def _open(self, port: int) -> str:
        address = own_address()
        self._server = _torchft().LighthouseServer(
            bind=f"{bracketed(address)}:{port}",
            min_replicas=1,
            join_timeout_ms=round(1000 * self._timeouts.join),
            quorum_tick_ms=QUORUM_TICK_MS,
            heartbeat_timeout_ms=round(1000 * self._timeouts.heartbeat),
        )
        listens = int(self._server.address().rpartition(":")[2])
        return f"http://{bracketed(address)}:{listens}"


def _torchft() -> Any:
    """Return torchft's native part without the rest, which imports torch and takes seconds."""
    package = importlib.util.find_spec("torchft")
    if package is None or not package.submodule_search_locations:
        raise MissingDependency("a job needs torchft: pip install 'monarch-loom[train]'")
    os.environ.setdefault("RUST_LOG", "warn")  # by default it logs several lines in each step
    spec = importlib.machinery.PathFinder.find_spec("_torchft", package.submodule_search_locations)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_log = logging.getLogger("loom")

OPEN_TIMEOUT = 60.0

OPEN_AGAIN_AFTER = 1.0
"""Seconds between two attempts to start a lighthouse while there is no host that can run it."""


class Support:
    """The lighthouse of one job, for the controller's thread, on which ``on_controller`` calls."""

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
                _log.warning("no lighthouse can be started on host %d: %s", host, error, exc_info=error)
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

    @property
    def host(self) -> int | None:
        """The number of the lighthouse's host; None while there is no lighthouse."""
        return None if self._procs is None else self._host

    def tick(self, hosts: Sequence[int]) -> None:
        """Start another lighthouse if it was lost, on one of some hosts."""
        if self._reopen_at is not None and time.monotonic() >= self._reopen_at and hosts:
            try:
                self.open(hosts)
            except LoomError as error:
                _log.warning("the job waits for a host: %s", error)
                self._reopen_at = time.monotonic() + OPEN_AGAIN_AFTER
            else:
                self._reopen_at = None
                self.moved()

    def leave_host(self) -> None:
        """Leave the lighthouse's host, which does not answer: the next `tick` starts another lighthouse."""
        if self._procs is not None:
            self._procs.stop("its host does not answer")
            self._lost(self._procs)

    def close(self) -> None:
        self._closed = True
        if self._procs is not None:
            self._procs.stop("the job is over")
