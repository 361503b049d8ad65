"""What happens in a session without being asked for."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from loom.errors import LoomError

__all__ = ["Event", "EventLog"]

KEEP = 10_000
"""Events that are kept; the oldest go first."""


@dataclass(frozen=True)
class Event:
    """Something that happened.

    ``failure``: Monarch reported a fault that nothing handled; ``details`` has ``mesh`` and ``report``.
    ``host_lost``: a worker host is gone; ``details`` has ``host`` (its index) and ``address``.
    ``operation_failed``: a spawn or a broadcast failed; ``error`` says how.
    ``ended``: the connection is over; ``error`` says why.
    """

    name: str
    details: Mapping[str, Any]
    error: LoomError | None = None
    time: float = field(default_factory=time.time)
    """Seconds since the epoch, when it arrived here."""


class EventLog:
    """The events of a session, to be read by any number of readers, each from the beginning."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=KEEP)
        self._dropped = 0
        self._closed = False
        self._changed = threading.Condition()

    def add(self, event: Event) -> None:
        """Add an event and wake whoever waits for one."""
        with self._changed:
            self._append(event)

    def close(self, last: Event) -> None:
        """Add the last event, after which readers stop."""
        with self._changed:
            if not self._closed:
                self._closed = True
                self._append(last)

    def _append(self, event: Event) -> None:
        if len(self._events) == KEEP:
            self._dropped += 1
        self._events.append(event)
        self._changed.notify_all()

    def _has(self, position: int) -> bool:
        return self._closed or self._dropped + len(self._events) > position

    def read(self, timeout: float | None = None) -> Iterator[Event]:
        """Each event, old ones first, then new ones as they come.

        Args:
            timeout: stop after this many seconds without an event; None waits until the session ends.
        """
        position = 0
        while True:
            with self._changed:
                ready = self._changed.wait_for(partial(self._has, position), timeout)
                position = max(position, self._dropped)
                if not ready or position - self._dropped >= len(self._events):
                    return
                event = self._events[position - self._dropped]
            position += 1
            yield event
