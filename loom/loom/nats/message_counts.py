"""The messages that a bridge takes in a second, their counts, and one line of the log for each kind of trouble."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from enum import Enum

_log = logging.getLogger(__name__)

LOG_EVERY = 60.0
"""Seconds between two lines about the same trouble on the same subject."""

SUBJECT_RATE = 2000.0
"""Messages that a bridge takes on one subject in a second."""

REPLICA_RATE = 50.0
"""Messages that it takes of one replica in a second."""


class MessageTrouble(str, Enum):
    """The reason why a message was not taken."""

    TOO_LARGE = "too_large"
    TOO_MANY = "too_many"
    """More messages came on the subject, or from the replica, than the bridge takes in a second."""
    BEHIND = "behind"
    """The bridge was too slow for the subject, and messages were dropped before it read them."""
    MALFORMED = "malformed"
    UNKNOWN = "unknown"
    """The message is about a replica or a device that nobody has registered."""
    FULL = "full"
    """The bridge has as many replicas as it takes, or the replica as many names or devices."""
    REFUSED = "refused"
    """The weaver refused it."""
    AWAY = "away"
    """The weaver could not be reached."""


class Bucket:
    """A limit of ``rate`` messages in a second, with bursts of two seconds' worth."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._left = 2 * rate
        self._filled = clock()

    def take(self) -> bool:
        """Return whether one more message may be taken now."""
        now = self._clock()
        self._left = min(2 * self._rate, self._left + (now - self._filled) * self._rate)
        self._filled = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Tally:
    """The counts since the bridge started."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged: dict[tuple[str, MessageTrouble], tuple[float, int]] = {}
        """When a line about each trouble was written, and how often the trouble had been counted then."""
        self.taken: Counter[str] = Counter()
        """Messages that were taken, by subject."""
        self.refused: Counter[tuple[str, MessageTrouble]] = Counter()
        """Messages that were not taken, by subject and trouble."""
        self.commands = 0
        """Commands that were published for replicas without a threadlet."""
        self.done = 0
        """Stored requests that were done."""
        self.repeated = 0
        """Stored requests that had been done before."""

    def refuse(self, subject: str, trouble: MessageTrouble, why: object) -> None:
        """Count a message that is not taken; log it unless the same was logged lately."""
        key = subject, trouble
        self.refused[key] += 1
        now = self._clock()
        last, counted = self._logged.get(key, (None, 0))
        if last is None or now >= last + LOG_EVERY:
            more = self.refused[key] - counted
            _log.warning(
                "not taken on %s (%s): %.300s%s",
                subject,
                trouble.value,
                why,
                f"; {more} since the last such line" if last is not None else "",
            )
            self._logged[key] = now, self.refused[key]

    def to_body(self) -> dict[str, object]:
        """Return the counts as fields of ``BridgeMetrics``."""
        refused = {f"{subject} {trouble.value}": count for (subject, trouble), count in self.refused.items()}
        counts = {name: getattr(self, name) for name in ("commands", "done", "repeated")}
        return {"taken": dict(self.taken), "refused": refused, **counts}
