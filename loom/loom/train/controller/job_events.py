"""`JobEvents`: what happens to a job, reported to the weaver by a thread of its own, as the weaver may be away."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loom.beside import Session
from loom.errors import WeaverUnavailable

__all__ = ["JobEvent", "JobEvents"]

_log = logging.getLogger("loom")

RETRY_EVERY = 0.5
"""Seconds between two attempts while the weaver is away."""

CLOSE_TIMEOUT = 2.0


@dataclass(frozen=True)
class JobEvent:
    """Something that happened to a job. The weaver has it with the same ``kind``."""

    time: float
    """Seconds since the epoch."""
    kind: str
    replica: str | None
    data: Mapping[str, Any]


class JobEvents:
    """The events of one job.

    Args:
        job: name of the job, which each event has.
        session: knows the weaver.
    """

    def __init__(self, job: str, session: Session) -> None:
        self.recorded: list[JobEvent] = []
        self._job = job
        self._session = session
        self._unreported: queue.SimpleQueue[JobEvent | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"events of {job}", daemon=True)
        self._thread.start()

    def record(self, kind: str, replica: str | None = None, **data: Any) -> None:
        """Record and log an event, and have it reported. Return at once."""
        event = JobEvent(time.time(), kind, replica, data)
        self.recorded.append(event)
        _log.info("%s %s %s %s", self._job, kind, replica or "", data)
        self._unreported.put(event)

    def close(self) -> None:
        """Report what is left, if the weaver is there."""
        self._closing.set()
        self._unreported.put(None)
        self._thread.join(CLOSE_TIMEOUT)

    def _run(self) -> None:
        while (event := self._unreported.get()) is not None:
            self._report(event)

    def _report(self, event: JobEvent) -> None:
        data = {"job": self._job, "at": event.time, **event.data}
        while True:
            try:
                self._session.ask_weaver("note", {"kind": event.kind, "replica": event.replica, "data": data})
            except WeaverUnavailable:
                if not self._closing.wait(RETRY_EVERY):
                    continue
            except Exception:  # noqa: BLE001 - logged; the job goes on without its log
                _log.exception("the weaver does not take %s", event)
            return
