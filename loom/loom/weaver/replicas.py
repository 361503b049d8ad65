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
from enum import Enum
from typing import Any

from loom.weaver.states import LIVING, ReplicaState
from loom.weaver.views import CHANGING_FIELDS, ReplicaInfo

__all__ = ["TRANSITIONS", "Cause", "Replica"]


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


class Replica:
    """What the weaver knows of one training process. Times are seconds since the epoch.

    Args:
        id: its name, unique in the weaver.
    """

    # fmt: off
    __slots__ = (
        "_step_times", "_stepped", "actors", "changed", "check_at", "config", "died_of", "epoch", "group",
        "handlers", "heard", "host", "id", "injectable", "instance", "link", "link_lost", "max_step", "metrics",
        "phase", "pid", "procs", "progress", "rank", "registered", "reported", "seq", "session", "short_name",
        "state", "step",
    )
    # fmt: on

    def __init__(self, id: str) -> None:
        self.id = id
        self.short_name = id.partition("@")[0]
        """Without the session, which tells replicas of several sessions apart."""
        self.instance = ""
        """Which process of those that have been this replica."""
        self.state = ReplicaState.REGISTERING
        self.group = ""
        self.host = ""
        self.pid = 0
        self.session: str | None = None
        self.procs: str | None = None
        self.rank: int | None = None
        self.actors: str | None = None
        self.handlers: dict[str, str] = {}
        """The configuration keys that it takes, and the names of their types."""
        self.config: dict[str, Any] = {}
        self.injectable = False
        """Whether failures may be injected into it."""
        self.seq = 0
        """Of the last status report of this instance."""
        self.step: int | None = None
        self.epoch: int | None = None
        self.max_step: int | None = None
        self.metrics: dict[str, float] = {}
        self.reported: float | None = None
        """When it made its last status report, by its own clock."""
        self.phase = "between"
        self.registered = 0.0
        self.changed = 0.0
        """When its state changed."""
        self.died_of: str | None = None
        """Why it has failed; None unless it has."""

        # What is not stored:
        self.link: Any = None
        """Its connection; None while it has none."""
        self.heard = 0.0
        self.progress = 0.0
        """When it was last seen to take a step, by the weaver's clock."""
        self.link_lost = 0.0
        self.check_at = 0.0
        """When the weaver looks after it next."""
        self._stepped = 0.0
        self._step_times: deque[float] = deque(maxlen=_REMEMBERED_STEPS)

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
        """Note where its training is.

        Args:
            step: that it has reached. One that is lower than before is one after a restart from a checkpoint.
            time: when, by its own clock, which measures its steps.
            now: by the weaver's clock.

        Returns:
            Whether that is progress.
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
        """As it is stored."""
        return {name: getattr(self, name) for name in _STORED} | {"state": self.state.value}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Replica:
        """A replica as it was stored."""
        replica = cls(stored["id"])
        for name in _STORED:
            if name in stored:  # not those of a newer version than the one that stored it
                setattr(replica, name, stored[name])
        replica.state = ReplicaState(stored["state"])
        return replica

    @property
    def connected(self) -> bool:
        """Whether it has a connection."""
        return self.link is not None

    def info(self, devices: list[str]) -> ReplicaInfo:
        """Return it as others see it, with the uuids of its devices."""
        shown = {name: getattr(self, name) for name in _STORED}
        return ReplicaInfo(
            **shown,
            state=self.state,
            devices=tuple(devices),
            connected=self.connected,
            step_time=self.baseline_step_time(),
        )

    def changing(self) -> dict[str, Any]:
        """Return what changes often, as a `loom.weaver.views.Delta` has it."""
        return {name: getattr(self, name) for name in CHANGING_FIELDS}


_STORED = (
    "id",
    "instance",
    "group",
    "host",
    "pid",
    "session",
    "procs",
    "rank",
    "actors",
    "handlers",
    "config",
    "injectable",
    "seq",
    "step",
    "epoch",
    "max_step",
    "metrics",
    "reported",
    "phase",
    "registered",
    "changed",
    "died_of",
)
