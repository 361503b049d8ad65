"""The observation of the replicas during a run: their steps, and their events."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from loom.errors import GatewayUnreachable, LoomError, NotAGateway, WeaverUnavailable

if TYPE_CHECKING:
    from loom.control.commands import Acknowledgement
    from loom.weaver.views import GoodputRecord, MetricPoint, ReplicaInfo, WeaverEvent


class RunInjection(Protocol):
    """An injected fault."""

    id: str

    def done(self) -> bool:
        """Return whether every replica has answered, as far as is known; send no request."""

    def outcomes(self) -> Mapping[str, Acknowledgement]:
        """Return each replica's acknowledgement."""

    @property
    def evidence(self) -> Mapping[str, Mapping[str, Any]]:
        """The evidence that the fault is in place, by replica; for a process of Loom, under the empty name."""


class RunWeaver(Protocol):
    """The weaver of the user whose replicas a plan strikes. Its methods wait for the answer."""

    def status(self) -> Mapping[str, Any]:
        """Return the weaver's id, its time and its newest event."""

    def replicas(self) -> Mapping[str, ReplicaInfo]:
        """Return every known replica by its id."""

    def events(self, after: int) -> Iterable[WeaverEvent]:
        """Return the events after one, the oldest first."""

    def history(self, replica: str, metric: str, *, since: float, points: int) -> list[MetricPoint]:
        """Return the points of a metric since a time."""

    def goodput(self) -> Mapping[str, GoodputRecord]:
        """Return the time accounting of each job."""

    def inject(
        self,
        fault: str,
        target: str | list[str],
        duration: float | None,
        params: Mapping[str, Any],
        id: str | None = None,
    ) -> RunInjection:
        """Inject a fault, with an id of the caller's choice."""

    def remove_injection(self, id: str) -> object:
        """Remove a fault before its time is over."""


AWAY = (WeaverUnavailable, GatewayUnreachable, NotAGateway)
"""Errors that say that the weaver or the gateway is away."""

DETECTS = ("failed", "stalled", "recovering", "device_failed", "group_failed")
"""Kinds of events that report a problem with a replica."""


@dataclass
class Life:
    """A process that was a replica: the steps that it has made."""

    replica: str
    registered: float
    first: int | None = None
    """The first step that was observed."""
    last: int | None = None

    def saw(self, step: int | None) -> None:
        if step is not None:
            self.first = step if self.first is None else self.first
            self.last = step if self.last is None else max(self.last, step)


@dataclass
class Outage:
    """A time without a weaver or a gateway, by the clock of this machine."""

    since: float
    until: float | None = None
    why: str = ""


@dataclass
class Observer:
    """A repeated reader of a weaver's state. Times are seconds since the epoch, by the weaver's clock."""

    weaver: RunWeaver
    replicas: Mapping[str, ReplicaInfo] = field(default_factory=dict)
    events: list[WeaverEvent] = field(default_factory=list)
    lives: dict[str, list[Life]] = field(default_factory=dict)
    """The processes of each replica, the last one last."""
    away: list[Outage] = field(default_factory=list)
    weavers: list[str] = field(default_factory=list)
    offset: float = 0.0
    """Seconds by which the weaver's clock is ahead of this machine's, by the monotonic clock."""
    _last: int = 0

    def begin(self) -> None:
        """Look for the first time, and compare the clocks."""
        asked = time.monotonic()
        status = self.weaver.status()
        self._last = status["event"]
        # Assume that the request and the answer took equally long.
        self.offset = status["time"] - (asked + time.monotonic()) / 2
        self.weavers.append(status["weaver"])
        self._look()

    def now(self) -> float:
        """Return the time by the weaver's clock."""
        return time.monotonic() + self.offset

    def look(self) -> bool:
        """Read the weaver's state; return whether the weaver answered."""
        try:
            self._look()
        except AWAY as error:
            if not self.away or self.away[-1].until is not None:
                self.away.append(Outage(self.now(), why=str(error)))
            return False
        if self.away and self.away[-1].until is None:
            self.away[-1].until = self.now()
        return True

    def since(self, when: float, *kinds: str) -> list[WeaverEvent]:
        """Return the events of these kinds since a time."""
        return [event for event in self.events if event.time >= when and event.kind in kinds]

    def life(self, replica: str) -> Life | None:
        """Return the current or last process of a replica."""
        return self.lives[replica][-1] if self.lives.get(replica) else None

    def history(self, replica: str, metric: str, since: float) -> list[MetricPoint]:
        """Return the points of a metric; an unknown metric has none."""
        try:
            return self.weaver.history(replica, metric, since=since, points=20_000)
        except LoomError:
            return []

    def _look(self) -> None:
        for event in self.weaver.events(self._last):
            self._last = event.id
            self.events.append(event)
            if event.kind == "weaver_started":
                self.weavers.append(str(event.data.get("instance")))
        self.replicas = self.weaver.replicas()
        for replica in self.replicas.values():
            lives = self.lives.setdefault(replica.id, [])
            if not lives or lives[-1].registered != replica.registered:
                lives.append(Life(replica.id, replica.registered))
            if replica.reported is not None:
                lives[-1].saw(replica.step)
