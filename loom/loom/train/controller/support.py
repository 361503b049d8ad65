"""`Support`: a job's lighthouse, which is started again elsewhere when it is lost, or its host is silent."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence

from loom.driver_api import Session, SpawnedProcs
from loom.errors import LoomError
from loom.train.controller.job_events import JobEvents
from loom.train.controller.lighthouse import LighthouseActor
from loom.train.spec import JobSpec

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
