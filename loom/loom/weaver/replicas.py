"""Replicas: training processes, the states they go through, and what is known of each.

The states and everything that leads from one to another are in `TRANSITIONS`, and nowhere else::

    registering ─► running ◄─► paused        recovering: its connection is lost; it may come back
                    │  ▲                     failed: it is dead, or silent for too long
                    ▼  │                     stalled: it says that it lives, but takes no step
                  stalled                    draining: it finishes what it does and leaves
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from loom.weaver.states import LIVING, ReplicaState
from loom.weaver.views import CHANGING_FIELDS, ReplicaInfo


class Cause(str, Enum):
    """What makes a replica go from one state to another."""

    REGISTERED = "registered"
    """A new process says that it is this replica."""
    RESUMED = "resumed"
    """It says that it runs: a resume was applied, or it is connected again."""
    STEPPED = "stepped"
    PAUSED = "paused"
    DRAINED = "drained"
    """A drain was applied."""
    NO_STEP = "no step"
    """It took none in many times its usual step time, while its heartbeats went on."""
    LINK_LOST = "link lost"
    SILENT = "silent"
    """It was not connected for several heartbeats."""
    DIED = "died"
    """Whoever looks after its process says that it is dead."""
    SAID_FAILED = "said that it failed"
    SAID_FINISHED = "said that it finished"


_R = ReplicaState

TRANSITIONS: dict[Cause, dict[ReplicaState, ReplicaState]] = {
    Cause.REGISTERED: dict.fromkeys(_R, _R.REGISTERING),
    Cause.RESUMED: dict.fromkeys(
        (_R.REGISTERING, _R.PAUSED, _R.DRAINING, _R.RECOVERING, _R.FAILED, _R.FINISHED), _R.RUNNING
    ),
    Cause.STEPPED: dict.fromkeys((_R.REGISTERING, _R.STALLED), _R.RUNNING),
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
}
"""Where each cause leads from each state. Where it is not listed, the cause changes nothing: a step that a paused
replica reports was taken before it paused."""

_FEW_STEPS = 4
_REMEMBERED_STEPS = 32


@dataclass(slots=True, eq=False)
class Replica:
    """What the weaver knows of one training process. Times are seconds since the epoch.

    What others see of it is described in `ReplicaInfo`.
    """

    id: str
    state: ReplicaState = ReplicaState.REGISTERING
    instance: str = ""
    group: str = ""
    host: str = ""
    pid: int = 0
    session: str | None = None
    procs: str | None = None
    rank: int | None = None
    actors: str | None = None
    handlers: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    injectable: bool = False
    seq: int = 0
    step: int | None = None
    epoch: int | None = None
    max_step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    reported: float | None = None
    phase: str = "between"
    registered: float = 0.0
    changed: float = 0.0
    died_of: str | None = None

    # What is not stored:
    short_name: str = field(init=False)
    """Without the session, which tells replicas of several sessions apart."""
    link: Any = None
    """The replica's connection; None while it has none."""
    heard: float = 0.0
    progress: float = 0.0
    """When it was last seen to take a step, by the weaver's clock."""
    link_lost: float = 0.0
    check_at: float = 0.0
    """When the weaver looks after it next."""
    _stepped: float = 0.0
    _step_times: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_STEPS))

    def __post_init__(self) -> None:
        self.short_name = self.id.partition("@")[0]

    @property
    def job(self) -> str:
        """What its goodput is counted for: its group, of the session that spawned it if one did."""
        return f"{self.group}@{self.session}" if self.session else self.group

    def move(self, cause: Cause, now: float) -> ReplicaState | None:
        """Let something happen to it; return the state that it left, or None where nothing changed."""
        after = TRANSITIONS[cause].get(self.state)
        if after is None or after is self.state:
            return None
        before, self.state, self.changed = self.state, after, now
        if after is not ReplicaState.FAILED:
            self.died_of = None
        return before

    def take_step(self, step: int, time: float, now: float) -> bool:
        """Note the step that it has reached; return whether that is progress.

        A lower one than before is one after a restart from a checkpoint. ``time`` is by its own clock, which
        measures its steps, ``now`` by the weaver's.
        """
        before = self.step
        if step == before:
            return False
        if before is not None and step > before and 0.0 < self._stepped < time:
            self._step_times.append((time - self._stepped) / (step - before))
        self.step = step
        self._stepped = time
        self.progress = now
        return True

    def baseline_step_time(self) -> float | None:
        """Return the median seconds of the last steps, which one slow step does not move; None before a few."""
        if len(self._step_times) < _FEW_STEPS:
            return None
        return statistics.median(self._step_times)

    def begin_instance(self, instance: str) -> None:
        """Begin again for a new process: nothing that the one before reported holds for it."""
        self.instance = instance
        self.seq = 0
        self.step = self.epoch = self.max_step = self.reported = None
        self.metrics = {}
        self._stepped = 0.0
        self._step_times.clear()

    def to_dict(self) -> dict[str, Any]:
        """Return the replica as it is stored."""
        return {name: getattr(self, name) for name in _STORED} | {"state": self.state.value}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Replica:
        """A replica as it was stored; a newer version than that may have more fields."""
        known = {name: stored[name] for name in _STORED if name in stored}
        return cls(**known, state=ReplicaState(stored["state"]))

    @property
    def connected(self) -> bool:
        """Whether it has a connection."""
        return self.link is not None

    def info(self, devices: list[str]) -> ReplicaInfo:
        """Return it as others see it, with the uuids of its devices."""
        shown = {name: getattr(self, name) for name in (*_STORED, "state", "connected")}
        return ReplicaInfo(**shown, devices=tuple(devices), step_time=self.baseline_step_time())

    def changing(self) -> dict[str, Any]:
        """Return what changes often, as a `loom.weaver.views.Delta` has it."""
        return {name: getattr(self, name) for name in CHANGING_FIELDS}


_STORED = tuple(
    one.name for one in fields(ReplicaInfo) if one.name not in ("state", "devices", "connected", "step_time")
)
