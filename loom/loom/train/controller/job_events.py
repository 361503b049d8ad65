"""What happens to a job, told to the weaver by a thread of its own: it may be away."""

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

__all__ = ["EventLog", "JobEvent"]

_log = logging.getLogger("loom")

ASK_AGAIN = 0.5
"""Seconds, while the weaver is away."""

CLOSE_TIMEOUT = 2.0


@dataclass(frozen=True)
class JobEvent:
    """Something that happened to a job. The weaver has it with the same ``kind``."""

    time: float
    """Seconds since the epoch."""
    kind: str
    replica: str | None
    data: Mapping[str, Any]


class EventLog:
    """The events of one job.

    Args:
        job: its name, which each event has.
        session: that knows the weaver.
    """

    def __init__(self, job: str, session: Session) -> None:
        self.told: list[JobEvent] = []
        self._job = job
        self._session = session
        self._waiting: queue.SimpleQueue[JobEvent | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"events of {job}", daemon=True)
        self._thread.start()

    def tell(self, kind: str, replica: str | None = None, **data: Any) -> None:
        """Log an event; returns at once."""
        event = JobEvent(time.time(), kind, replica, data)
        self.told.append(event)
        _log.info("%s %s %s %s", self._job, kind, replica or "", data)
        self._waiting.put(event)

    def close(self) -> None:
        """Tell what is left, if the weaver is there."""
        self._closing.set()
        self._waiting.put(None)
        self._thread.join(CLOSE_TIMEOUT)

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None:
            data = {"job": self._job, "at": event.time, **event.data}
            while True:
                try:
                    self._session.ask_weaver("note", {"kind": event.kind, "replica": event.replica, "data": data})
                except WeaverUnavailable:
                    if self._closing.wait(ASK_AGAIN):
                        break
                except Exception:  # noqa: BLE001 - logged; the job goes on without its log
                    _log.exception("the weaver does not take %s", event)
                    break
                else:
                    break
