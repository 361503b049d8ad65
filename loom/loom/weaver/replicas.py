"""Replicas: training processes, their states, and the weaver's record of each.

The states and everything that leads from one to another are in `TRANSITIONS`, and nowhere else::

    registering ─► running ◄─► paused        recovering: its connection is lost; it may come back
                    │  ▲                     failed: it is dead, or silent for too long
                    ▼  │                     stalled: it says that it lives, but takes no step
                  stalled                    draining: it finishes what it does and leaves
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from operator import attrgetter
from statistics import median
from typing import Any

from loom.control.handshake import EVERYTHING_OFFERED, CohortPlace, Leaving, Offers
from loom.weaver.states import LIVING, ReplicaEnding, ReplicaState
from loom.weaver.views import CHANGING_FIELDS, ReplicaInfo


class Cause(str, Enum):
    """The cause of a replica's change from one state to another."""

    REGISTERED = "registered"
    """A new process registered as this replica."""
    RESUMED = "resumed"
    """The replica reports that it runs: a resume was applied, or it has reconnected."""
    STEPPED = "stepped"
    PAUSED = "paused"
    DRAINED = "drained"
    """A drain was applied."""
    NO_STEP = "no step"
    """The replica took no step in many times its baseline step time, while its heartbeats went on."""
    LINK_LOST = "link lost"
    SILENT = "silent"
    """The replica was not connected for several heartbeats."""
    DIED = "died"
    """The driver or the weaver found that its process is dead."""
    SAID_FAILED = "said that it failed"
    SAID_FINISHED = "said that it finished"
    EXPLAINED = "explained"
    """Its session saw that the process which had said goodbye has failed."""


_R = ReplicaState

TRANSITIONS: dict[Cause, dict[ReplicaState, ReplicaState]] = {
    Cause.REGISTERED: dict.fromkeys(_R, _R.REGISTERING),
    Cause.RESUMED: dict.fromkeys(
        (_R.REGISTERING, _R.PAUSED, _R.DRAINING, _R.RECOVERING, _R.FAILED, _R.FINISHED), _R.RUNNING
    ),
    Cause.STEPPED: dict.fromkeys((_R.REGISTERING, _R.STALLED, _R.PAUSED), _R.RUNNING),
    Cause.PAUSED: dict.fromkeys(
        (_R.REGISTERING, _R.RUNNING, _R.STALLED, _R.RECOVERING, _R.FAILED, _R.FINISHED), _R.PAUSED
    ),
    Cause.DRAINED: dict.fromkeys(frozenset(_R) - {_R.DRAINING}, _R.DRAINING),
    Cause.NO_STEP: {_R.RUNNING: _R.STALLED},
    Cause.LINK_LOST: dict.fromkeys(LIVING - {_R.RECOVERING}, _R.RECOVERING),
    Cause.SILENT: dict.fromkeys(LIVING, _R.FAILED),
    Cause.DIED: dict.fromkeys(LIVING, _R.FAILED),
    Cause.SAID_FAILED: dict.fromkeys(LIVING, _R.FAILED),
    Cause.SAID_FINISHED: dict.fromkeys(LIVING, _R.FINISHED),
    Cause.EXPLAINED: {_R.FINISHED: _R.FAILED},
}
"""The next state for each cause and state. A pair that is not listed changes nothing.

A step that a paused replica reports was taken before the pause, unless it is a later one; see `Replica.move`.
"""

USUAL_STEPS = 4
"""Usual step times without a step in which a running replica does not count as idle."""


@dataclass(frozen=True)
class End:
    """The end of a replica; the fields are those of `loom.weaver.views.ReplicaInfo`."""

    ending: ReplicaEnding
    reason: str
    by: str | None = None
    exit: Mapping[str, Any] | None = None
    guessed: bool = False
    """True if the session of the process may know better."""
    closed: bool = False
    """True if the program closed its threadlet itself, and its process may have gone on."""

    def about(self) -> dict[str, object]:
        """Return what an event says of it."""
        return {"reason": self.reason, "ending": self.ending.value, "ended_by": self.by, "exit": self.exit}


@dataclass(frozen=True)
class KeptValues:
    """The values that commands had set in a process which its launcher has started again."""

    restarted: int
    """The number of ranks that were started again with it."""
    values: Mapping[str, Any]
    """In the order in which they were set last: one may take another's place."""
    heard: float
    """When the process before was last heard, by the weaver's clock."""


_FEW_STEPS = 4
_REMEMBERED_STEPS = 32
_REMEMBERED_COHORTS = 4


@dataclass(slots=True, eq=False)
class Replica:
    """The weaver's record of one training process; `ReplicaInfo` describes what others see of it."""

    id: str
    state: ReplicaState = ReplicaState.REGISTERING
    instance: str = ""
    group: str = ""
    host: str = ""
    pid: int = 0
    session: str | None = None
    procs: str | None = None
    mesh: str | None = None
    rank: int | None = None
    actors: str | None = None
    handlers: dict[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    injectable: bool = False
    seq: int = 0
    step: int | None = None
    epoch: int | None = None
    max_step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    reported: float | None = None
    phase: str = "between"
    status_type: str | None = None
    links: dict[str, str] = field(default_factory=dict)
    unlinked: bool = False
    """True once a link was taken away, so that those who show it are told."""
    registered: float = 0.0
    changed: float = 0.0
    died_of: str | None = None
    ending: ReplicaEnding | None = None
    ended_by: str | None = None
    end_reason: str | None = None
    exit: Mapping[str, Any] | None = None
    respawns: bool = False
    cohort: Mapping[str, Any] | None = None
    not_offered: Mapping[str, str] = field(default_factory=dict)
    run: str | None = None

    kept: KeptValues | None = None
    """Values of the process before, which this one gets; stored, and shown to nobody."""
    leaving: Leaving | None = None
    """Its goodbye, while its exit code is awaited; stored."""
    process: str | None = None
    """Its process by `loom.process.identity`, if that is on the weaver's machine; stored, and shown to nobody."""

    # The fields from here on are not stored.
    short_name: str = field(init=False)
    """The id without the session, which tells replicas of several sessions apart."""
    link: Any = None
    """The replica's connection; None while it has none."""
    journal_head: bytes = b""
    """The packed beginning of its entries in the journal; see `loom.weaver.storage.store.journal_head`."""
    account_pause: float = 0.0
    """The seconds that its threadlet leaves between two accounts of its time, as it was told."""
    unsaved: bool = False
    """True if its newest status is only in the journal."""
    unstored: int = 0
    """Its status reports since the last `loom.control.reports.Stored`."""
    patient: bool = False
    """True if its threadlet takes `loom.control.reports.AccountPause`, and waits long for a ``Stored``."""
    heard: float = 0.0
    progress: float = 0.0
    """When the replica was last seen to take a step or to begin to run, by the weaver's clock."""
    stepped_at: float = -math.inf
    """When this weaver last saw another step of the replica than before, by its clock."""
    link_lost: float = 0.0
    check_at: float = 0.0
    """When the weaver checks the replica's liveness next."""
    known_end: End | None = None
    """The end of the replica, and the event that logs it; None while it lives, and after the weaver's restart."""
    end_event: int | None = None
    _successor: tuple[str, float] = ("", 0.0)
    """The process that waits to be the replica, and since when."""
    announced: bool = False
    """True if its threadlet tells commands from what is only `Command.announced`."""
    hears: bool = False
    """True if its threadlet takes `loom.control.commands.AppliedByOthers`."""
    any_key: bool = True
    """True if its program may take configuration keys without handlers."""
    restored: KeptValues | None = None
    """The values of the process before that this one was given."""
    began_again: bool = False
    """True if its process has the place of an earlier one in its run."""
    tells_offers: bool = False
    """True once the replica has refused a command or a key beforehand, so that those who show it are told."""
    joined: float = -math.inf
    """When this weaver heard of its present place in a cohort."""
    left: dict[str, float] = field(default_factory=dict)
    """Ids of the cohorts that it was in last, also as an earlier process, and when it left them."""
    paused_at: int | None = None
    """The last step before the pause that it is in; None if that is not known."""
    _stepped: float = 0.0
    _step_times: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_STEPS))

    def __post_init__(self) -> None:
        self.short_name = self.id.partition("@")[0]

    @property
    def job(self) -> str:
        """The job in whose goodput the replica counts: its group, with the session if one spawned it."""
        return f"{self.group}@{self.session}" if self.session else self.group

    def move(self, cause: Cause, now: float) -> ReplicaState | None:
        """Apply a cause; return the state that the replica left, or None if nothing changed."""
        after = TRANSITIONS[cause].get(self.state)
        if after is None or after is self.state:
            return None
        if cause is Cause.STEPPED and self.state is ReplicaState.PAUSED and not self._goes_on:
            return None
        before, self.state, self.changed = self.state, after, now
        if after in LIVING:
            self.died_of = self.ending = self.ended_by = self.end_reason = self.exit = None
            self.known_end = self.end_event = None
        return before

    def end(self, end: End) -> None:
        """Record how the replica has ended, after `move`."""
        self.known_end, self.leaving = end, None
        self.ending, self.ended_by, self.end_reason, self.exit = end.ending, end.by, end.reason, end.exit
        if self.state is ReplicaState.FAILED:
            self.died_of = end.reason

    def join(self, place: CohortPlace | None, now: float) -> None:
        """Record the place of its process in a cohort."""
        joined = place is not None and place.world > 0
        before = self.cohort
        self.cohort = {name: getattr(place, name) for name in ("id", "rank", "world")} if joined else None
        if self.cohort != before:
            self.joined = now
            if before is not None:
                self.left = dict([*self.left.items(), (str(before["id"]), now)][-_REMEMBERED_COHORTS:])

    def offer(self, offers: Offers) -> None:
        """Record the commands and keys that its process takes."""
        self.not_offered, self.any_key = offers.refused, offers.any_key
        self.tells_offers = self.tells_offers or offers != EVERYTHING_OFFERED

    @property
    def made_its_steps(self) -> bool:
        """True if the replica has made its last step, or has named none. Steps count from 0 or from 1."""
        return self.max_step is None or (self.step is not None and self.step >= self.max_step - 1)

    @property
    def made_all_steps(self) -> bool:
        """True if no step is to come: its program evaluates, saves, or waits for whatever its user does next."""
        return None not in (self.step, self.max_step) and self.step >= self.max_step  # type: ignore[operator]

    @property
    def _goes_on(self) -> bool:
        """True if it has made a step since it was paused."""
        return self.paused_at is not None and self.step is not None and self.step > self.paused_at

    def take_step(self, step: int, time: float, now: float) -> bool:
        """Record the step that the replica has reached; return whether that is progress.

        A lower step than before follows a restart from a checkpoint. ``time`` is by the replica's clock, which
        measures its step times, ``now`` by the weaver's.
        """
        before = self.step
        if step == before:
            return False
        if before is not None and step > before and 0.0 < self._stepped < time:
            self._step_times.append((time - self._stepped) / (step - before))
        self.step = step
        self._stepped = time
        self.progress = self.stepped_at = now
        return True

    def baseline_step_time(self) -> float | None:
        """Return the median seconds of the last steps, which one slow step does not move; None before a few."""
        return median(self._step_times) if len(self._step_times) >= _FEW_STEPS else None

    def idle(self, now: float) -> float:
        """Return the seconds for which the replica has made no step; a running one may take a few usual ones."""
        usual = 0.0
        if self.state is ReplicaState.RUNNING:
            usual = self.baseline_step_time() or max(self._step_times, default=0.0)
        return max(0.0, now - self.stepped_at - USUAL_STEPS * usual)

    def await_successor(self, instance: str, now: float) -> None:
        """Note that a process waits for the one that is the replica now, which may hang."""
        if self._successor[0] != instance:
            self._successor = instance, now

    @property
    def successor_since(self) -> float | None:
        """When a process began to wait for this one's place; None if none does."""
        return self._successor[1] or None

    def begin_instance(self, instance: str, now: float) -> float:
        """Start over for a new process: the reports of the process before it no longer hold.

        Return since when the new process has waited for its place; infinity if it has not waited.
        """
        waited, since = self._successor
        self._successor = "", 0.0
        self.leaving = self.process = None
        self.registered = now
        self.instance = instance
        self.seq = 0
        self.step = self.epoch = self.max_step = self.reported = None
        self.status_type = self.paused_at = None
        self.join(None, now)
        self.metrics = {}
        self._stepped = 0.0
        self._step_times.clear()
        return since if waited == instance else math.inf

    def to_dict(self) -> dict[str, object]:
        stored: dict[str, object] = dict(zip(_STORED, _stored(self), strict=True)) | {"state": self.state.value}
        if self.leaving is not None:
            stored["leaving"] = self.leaving.to_body()
        if self.process is not None:
            stored["process"] = self.process
        return stored if self.kept is None else stored | {"kept": asdict(self.kept)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Replica:
        """Return a stored replica. Fields that only a newer version knows are ignored."""
        known = {name: stored[name] for name in _STORED if name in stored}
        if known.get("ending") is not None:
            known["ending"] = ReplicaEnding(known["ending"])
        kept = stored.get("kept")
        known["kept"] = None if kept is None else KeptValues(**kept)
        leaving = stored.get("leaving")
        known["leaving"] = None if leaving is None else Leaving.from_body(leaving)
        known["process"] = stored.get("process")
        return cls(**known, state=ReplicaState(stored["state"]))

    @property
    def connected(self) -> bool:
        return self.link is not None

    def info(self, user: str, devices: list[str]) -> dict[str, object]:
        """Return the fields of the `ReplicaInfo` that others see.

        Args:
            user: whom the replica belongs to.
            devices: uuids of its devices.
        """
        # A dict, because a snapshot has thousands.
        shown = {name: getattr(self, name) for name in _SHOWN}
        return {**shown, "user": user, "devices": devices, "step_time": self.baseline_step_time()}

    def described(self) -> dict[str, object]:
        """Return the fields that change seldom, as far as the replica has them."""
        found: dict[str, object] = {"handlers": self.handlers}
        if self.tells_offers:
            found["not_offered"] = self.not_offered
        if self.cohort is not None:
            found["cohort"] = self.cohort
        if self.links or self.unlinked:
            found["links"] = self.links
        return found

    def changing(self) -> dict[str, object]:
        """Return the fields that change often, for a `loom.weaver.views.Delta`."""
        changing = dict(zip(CHANGING_FIELDS, _changing(self), strict=True))
        if self.status_type is None:  # most trainings say nothing of it
            del changing["status_type"]
        return changing


_STORED = tuple(
    one.name
    for one in fields(ReplicaInfo)
    if one.name not in ("state", "devices", "connected", "step_time", "user")
)
_SHOWN = (*_STORED, "state", "connected")
_stored = attrgetter(*_STORED)
_changing = attrgetter(*CHANGING_FIELDS)
