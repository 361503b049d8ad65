"""The outcome of a fault: its detection, its end, the training's recovery, and the cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from loom.chaos.plans import PlannedFault
from loom.chaos.runs.observer import DETECTS, Observer
from loom.chaos.targets import ENDED

MAIN_METRIC = "loss"  # the metric from whose history the steps of a replica are read, if the replica reports it
REMOVAL_GRACE = 2.0  # seconds after its duration at which a fault counts as removed if no event reports it


@dataclass
class Victim:
    """A replica that a fault has struck."""

    replica: str
    group: str
    registered: float
    """The time at which the struck process registered."""
    step: int | None
    detected: float | None = None
    """Seconds from the fault to the first event that reports a problem."""
    detected_as: str | None = None
    over_step: int | None = None
    """The replica's step when the fault was over, if it survived."""
    recovered: float | None = None
    """Seconds to the next step: from the fault, or from its end if the fault lasts."""
    steps_lost: int | None = None
    """Steps that have to be repeated."""


@dataclass
class Struck:
    """A fault that was injected."""

    planned: PlannedFault
    at: float
    """The time of the injection, in seconds since the epoch, by the weaver's clock."""
    targets: list[str]
    victims: list[Victim]
    groups: frozenset[str]
    """The groups of the targeted replicas."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    removal: dict[str, object] = field(default_factory=dict)
    """Evidence that the fault is gone, by replica."""
    id: str = ""
    failed: str | None = None
    """Why the fault was not injected."""
    over: float | None = None
    detected: float | None = None
    """Seconds from the fault until the first victim, or the killed component of Loom, was noticed."""
    recovered: float | None = None
    """Seconds until the last victim had recovered."""
    given_up: bool = False
    spent: dict[str, float] = field(default_factory=dict)
    """Seconds of the watched replicas until the next fault or the end, by reason."""

    @property
    def steps_lost(self) -> int | None:
        """Steps that all victims lost; None if unknown."""
        lost = [victim.steps_lost for victim in self.victims if victim.steps_lost is not None]
        return sum(lost) if lost else None

    @property
    def done(self) -> bool:
        """True if the outcome of the fault is final."""
        return self.failed is not None or self.recovered is not None or self.given_up


class Tracker:
    """A tracker of the outcomes of faults. It stops waiting for a recovery after ``patience`` seconds."""

    def __init__(self, observer: Observer, patience: float, report: Callable[[str], None]) -> None:
        self.observer = observer
        self._patience = patience
        self._report = report

    def follow(self, struck: Struck) -> None:
        """Update the outcome of a fault from the observations."""
        if struck.done:
            return
        self._see_end(struck)
        if struck.victims:
            for victim in struck.victims:
                self._see_victim(struck, victim)
            detected = [one.detected for one in struck.victims if one.detected is not None]
            struck.detected = min(detected, default=None)
            recovered = [one.recovered for one in struck.victims if one.recovered is not None]
            if len(recovered) == len(struck.victims):
                struck.recovered = max(recovered)
        else:
            self._see_component(struck)
        if struck.recovered is not None:
            self._report(f"{struck.planned.fault} was recovered from within {struck.recovered:.2f} s")
        elif struck.over is not None and self.observer.now() > struck.over + self._patience:
            struck.given_up = True
            self._report(f"{struck.planned.fault} was not recovered from within {self._patience:g} s")

    def _see_end(self, struck: Struck) -> None:
        """Find out when a fault was over."""
        for event in self.observer.since(struck.at, "fault_removed"):
            if event.data.get("injection") == struck.id and event.replica not in struck.removal:
                struck.removal[str(event.replica)] = event.data.get("evidence")
                struck.over = event.time
        if struck.over is not None:
            return
        duration = struck.planned.duration
        if duration is None or struck.planned.kind.ends:
            struck.over = struck.at
        elif self.observer.now() > struck.at + duration + REMOVAL_GRACE:
            struck.over = struck.at + duration

    def _see_victim(self, struck: Struck, victim: Victim) -> None:
        if victim.detected is None:
            for event in self.observer.since(struck.at, *DETECTS):
                if event.replica == victim.replica or victim.replica in event.data.get("replicas", ()):
                    victim.detected, victim.detected_as = event.time - struck.at, event.kind
                    break
        replica, life = self.observer.replicas.get(victim.replica), self.observer.life(victim.replica)
        if replica is None or life is None or victim.recovered is not None:
            return
        if life.registered != victim.registered:
            if replica.reported is not None and replica.state not in ENDED:
                self._is_back(struck, victim)
        elif struck.over is not None and not struck.planned.kind.ends:
            if victim.over_step is None:
                victim.over_step = life.last or 0
            elif (life.last or 0) > victim.over_step and replica.state == "running":
                victim.recovered = self.observer.now() - struck.over
                victim.steps_lost = 0

    def _is_back(self, struck: Struck, victim: Victim) -> None:
        """Find the first step of the process that replaced a victim, which is the recovery.

        The metric's history has the time of the step. The replica's ``step`` may be from before it has its state.
        """
        observer = self.observer
        life = observer.life(victim.replica)
        assert life is not None
        before = next(one for one in observer.lives[victim.replica] if one.registered == victim.registered)
        metrics = observer.replicas[victim.replica].metrics
        metric = next((one for one in (MAIN_METRIC, *metrics) if one in metrics), None)
        if metric is None:
            return
        points = [
            one for one in observer.history(victim.replica, metric, before.registered) if one.step is not None
        ]
        made = [one for one in points if one.time >= life.registered]
        if not made:
            return
        victim.recovered = max(0.0, made[0].time - struck.at)
        life.first = made[0].step
        if done := [one.step or 0 for one in points if one.time < life.registered]:
            before.last = max(done)
        if before.last is not None:  # the step that was seen, if it died before its first point came
            victim.steps_lost = max(0, before.last - (made[0].step or 0) + 1)

    def _see_component(self, struck: Struck) -> None:
        observer = self.observer
        absences = [one for one in observer.away if (one.until or observer.now()) >= struck.at]
        if absences and struck.detected is None:
            struck.detected = max(0.0, absences[0].since - struck.at)
        if absences and absences[-1].until is None:
            return
        match struck.planned.kind.of:
            case "weaver":
                started = observer.since(struck.at, "weaver_started")
                if started:
                    struck.recovered = started[0].time - struck.at
            case "gateway":
                if absences and absences[-1].until is not None:
                    struck.recovered = absences[-1].until - struck.at
            case _:
                died = observer.since(struck.at, *DETECTS)
                if died and struck.detected is None:
                    struck.detected = died[0].time - struck.at
                back = [one for one in observer.replicas.values() if one.registered > struck.at]
                running = [one for one in back if one.state == "running" and one.group in struck.groups]
                # Ignore the replica of a job's controller: it is back long before any replica trains again.
                if any(one.step is not None for one in running):
                    struck.recovered = observer.now() - struck.at
