"""`Aggregates`: the jobs of one user at a glance, for pages."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from loom.process.turns import Turns
from loom.weaver.states import LIVING, ReplicaState
from loom.wire.exact_json import exact_json
from loom_gateway.weaver_socket.columns import AWAY, Column
from loom_gateway.weaver_socket.roster import STATES, Roster

MAX_GONE = 1000
"""Jobs without replicas of which pages are told; of earlier ones only pages that read in time are."""

MAX_SHARE = 0.05
"""The share of the time that is spent on aggregates, of which there are as many as replicas if each is a job."""

_LIVES = bytes(code & ~AWAY < len(STATES) and STATES[code & ~AWAY] in LIVING for code in range(256))
"""By the code of a state, whether it is that of a living replica."""

_RUNNING = {STATES.index(ReplicaState.RUNNING.value) | away for away in (0, AWAY)}


class Aggregates:
    """The aggregates of a roster's jobs, each with the position at which it changed last."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._jobs: dict[str, tuple[int, dict[str, Any] | None]] = {}
        """The position and the aggregate of each job; None for a job that is gone."""
        self._gone: dict[str, None] = {}
        self._texts: dict[str, str] = {}
        self._not_before = 0.0

    async def refresh(self, at: int) -> bool:
        """Bring the jobs up to date whose replicas have changed; return False if it is too early for that."""
        roster, began = self._roster, time.perf_counter()
        if began < self._not_before:
            return not roster.dirty
        turns = Turns()
        while roster.dirty:
            job = roster.dirty.pop()
            if job is not None:
                await self._refresh(job, at, turns)
        took = time.perf_counter() - began
        self._not_before = began + took / MAX_SHARE
        return True

    def since(self, at: int | None) -> Iterator[tuple[str, str]]:
        """Yield the name and the JSON of each job that changed after a position; with None, of all."""
        for job, (changed, aggregate) in self._jobs.items():
            if (aggregate is not None) if at is None else changed > at:
                yield job, self._texts.get(job) or self._text(job, aggregate)

    async def _refresh(self, job: str, at: int, turns: Turns) -> None:
        aggregate = await self._aggregate(job, turns) if job in self._roster.members else None
        known = self._jobs.get(job)
        if known is None if aggregate is None else known is not None and known[1] == aggregate:
            return
        self._texts.pop(job, None)
        self._gone.pop(job, None)
        self._jobs.pop(job, None)
        self._jobs[job] = at, aggregate
        if aggregate is None:
            self._gone[job] = None
            if len(self._gone) > MAX_GONE:
                first = next(iter(self._gone))
                del self._gone[first], self._jobs[first]

    async def _aggregate(self, job: str, turns: Turns) -> dict[str, Any]:
        """Return a job's aggregate, from columns rather than one replica after another."""
        roster = self._roster
        members = list(roster.members[job])
        codes = roster.columns[Column.STATE]
        counts: Counter[int] = Counter(map(codes.__getitem__, members))
        living = [number for number in members if _LIVES[codes[number]]]
        await turns.rest()
        losses = [loss for loss in map(roster.losses.__getitem__, living) if loss is not None]
        finite = list(filter(math.isfinite, losses))
        await turns.rest()
        paces = roster.columns[Column.PACE]
        running = (paces[number] for number in living if codes[number] in _RUNNING)
        rate = _median(sorted(pace for pace in running if pace == pace))  # the NaN of no pace differs from itself
        await turns.rest()
        group, session, user = roster.about[job]
        return {
            "group": group,
            "session": session,
            "user": user,
            "replicas": len(members),
            "living": len(living),
            "states": _states(counts),
            "step": _largest(roster.steps, members),
            "max_step": _largest(roster.max_steps, members),
            "rate": 1 / rate if rate else None,
            "loss": math.fsum(finite) / len(finite) if finite else None,
            "not_finite": len(losses) - len(finite),
        }

    def _text(self, job: str, aggregate: dict[str, Any] | None) -> str:
        text = self._texts[job] = exact_json(aggregate)
        return text


def _states(counts: Counter[int]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for code, count in counts.items():
        found[STATES[code & ~AWAY]] += count
    return dict(found)


def _median(ordered: list[float]) -> float | None:
    if not ordered:
        return None
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _largest(values: list[int | None], members: list[int]) -> int | None:
    return max((value for value in map(values.__getitem__, members) if value is not None), default=None)
