"""`SessionLife`: until when a session lives, and because of what, as its driver decides it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class AliveBecause(str, Enum):
    """A reason for which a session lives."""

    CLIENT = "client"
    """A client is connected, in whatever mode."""
    RUN = "run"
    """A function of `Job.run`, or a cell in the cluster, goes on."""
    CALL = "call"
    """A call of an actor has not been answered, also one whose client is gone; or a broadcast goes on."""
    REPLICA = "replica"
    """A replica of the session makes steps. Heartbeats alone do not count."""
    PERSIST = "persist"
    """The session lives until it is ended: it was opened with ``persist=True``."""
    LINGER = "linger"
    """Nothing of these any more, for less than the linger time."""


_WORDS = {
    AliveBecause.CLIENT: "another client is connected",
    AliveBecause.RUN: "a run goes on",
    AliveBecause.CALL: "a call goes on",
    AliveBecause.REPLICA: "a replica makes steps",
}


@dataclass(frozen=True)
class SessionLife:
    """Until when a session lives; its text says it in a sentence."""

    because: Sequence[AliveBecause] = ()
    """The reasons for which it lives; empty if its driver has not told them."""
    until: float | None = None
    """When it ends unless a client comes or something begins, in seconds since the epoch. None if nobody knows that
    yet, because something goes on, or if it lives until it is ended."""
    linger: float = 0.0
    """Seconds for which it lives on when nothing keeps it alive any more."""

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> SessionLife:
        """Return the life that a driver tells; reasons that only a newer version knows are left out."""
        known = set(AliveBecause)
        because = tuple(AliveBecause(one) for one in told.get("because", ()) if one in known)
        return cls(because, told.get("until"), float(told.get("linger", 0.0)))

    def __str__(self) -> str:
        at = "" if self.until is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.until))
        if AliveBecause.PERSIST in self.because:
            return f"it lives until it is ended, at {at} at the latest" if at else "it lives until it is ended"
        going = [_WORDS[one] for one in self.because if one in _WORDS]
        if going:
            latest = f", or at {at} at the latest" if at else ""
            return f"it lives because {' and '.join(going)}; it ends {self.linger:g} s after that{latest}"
        return f"it lives until {at}, if no client comes" if at else "until when it lives is not known"
