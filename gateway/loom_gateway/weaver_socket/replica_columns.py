"""The replicas of one user in columns, and their jobs at a glance, for pages.

The columns travel as binary frames. They are little-endian, and every section begins at a multiple of 4 bytes::

    u8  1 (columns)      u8 1 (version)      u16 number of sections     u32 position (its low 32 bits)
    section: u8 column   u8 type   u8 layout (0 sparse, 1 dense)   u8 0    u32 n
             sparse: u32[n] numbers; dense: the numbers are 0 … n-1
             n values, padded with zeros to a multiple of 4 bytes
"""

from __future__ import annotations

import math
import struct
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import compress
from statistics import median
from typing import Any

from loom.process.tasks import Turns
from loom.weaver.states import LIVING, ReplicaState
from loom.wire.plain import exact_json


class Column(IntEnum):
    """A value that each replica has, and its number in frames."""

    STATE = 0
    """The low 7 bits are the index of the state in `loom.weaver.states.ReplicaState`; see `AWAY` and `NOBODY`."""
    STEP = 1
    """The step; `NO_STEP` for none, or for one that has more than 32 bits."""
    LOSS = 2
    """The metric ``loss``, or the first one like it, which may be a NaN; `NO_NUMBER` for none."""
    PACE = 3
    """Seconds a step, smoothed; `NO_NUMBER` for none."""


NAMES = {column.name.lower(): column for column in Column}
"""The columns by the names that pages give them."""

AWAY = 0x80
"""The bit of a state that is set while the replica is not connected."""

NOBODY = 0x7F
"""The state of a number that no replica has."""

NO_STEP = 0xFFFFFFFF

NO_NUMBER: float = struct.unpack("<f", b"\xff\xff\xff\xff")[0]
"""The NaN that stands for no number. An `array` keeps its bits."""

NAN = float("nan")
"""The NaN that stands for every other NaN."""

TYPES = {Column.STATE: "B", Column.STEP: "I", Column.LOSS: "f", Column.PACE: "f"}
"""The type of each column's values, as `array` names it."""

_TYPE_NUMBERS = {"B": 0, "I": 1, "f": 2}
_HEAD = struct.Struct("<BBHI")
_SECTION = struct.Struct("<BBBxI")
_COLUMNS, _VERSION = 1, 1
_SPARSE, _DENSE = 0, 1


def encode_frame(position: int, sections: Sequence[bytes]) -> bytes:
    """Return a frame of sections, each made by `encode_all` or `encode_changed`."""
    return b"".join((_HEAD.pack(_COLUMNS, _VERSION, len(sections), position & 0xFFFFFFFF), *sections))


def encode_all(column: Column, values: array[Any]) -> bytes:
    """Return the section with the values of all numbers."""
    head = _SECTION.pack(column, _TYPE_NUMBERS[values.typecode], _DENSE, len(values))
    return head + _padded(values.tobytes())


def encode_changed(column: Column, values: array[Any], changed: Sequence[int]) -> bytes:
    """Return the section with the values of some numbers, or of all if that has fewer bytes."""
    if len(changed) * (4 + values.itemsize) > len(values) * values.itemsize:
        return encode_all(column, values)
    head = _SECTION.pack(column, _TYPE_NUMBERS[values.typecode], _SPARSE, len(changed))
    picked = array(values.typecode, map(values.__getitem__, changed))
    return head + array("I", changed).tobytes() + _padded(picked.tobytes())


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


STATES = [state.value for state in ReplicaState]
"""The states, in the order of their numbers in the column of states."""

SMOOTHING = 0.3
"""The weight of a replica's last steps in its pace."""

_CODES = {(state, True): code for code, state in enumerate(STATES)}
_CODES |= {(state, False): code | AWAY for code, state in enumerate(STATES)}

_MAX_TEXTS = 4096  # rows whose JSON is kept


def loss_of(metrics: Mapping[str, float]) -> float | None:
    """Return the metric ``loss``, or else the first one like it, such as ``train/loss``; None if there is none."""
    if "loss" in metrics:
        return metrics["loss"]
    return next((value for name, value in metrics.items() if "loss" in name.lower()), None)


class Roster:
    """Replicas by number. Each value has the position, of the feed, at which it changed last.

    A new replica gets the lowest number that was never given, or one whose replica was forgotten.
    """

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.columns: dict[Column, array[Any]] = {column: array(TYPES[column]) for column in Column}
        self.members: dict[str, dict[int, None]] = {}
        """The numbers of each job's replicas."""
        self.about: dict[str, tuple[str, str | None, str]] = {}
        """The group, the session and the user of each job."""
        self.dirty: set[str | None] = set()
        """Jobs whose replicas have changed, until they are taken out of this set."""
        self.steps: list[int | None] = []
        self.losses: list[float | None] = []
        self.max_steps: list[int | None] = []
        self._changed = {column: array("Q") for column in Column}
        self._row_changed = array("Q")
        self._jobs: list[str | None] = []
        self._instances: list[str | None] = []
        # Lists of plain values, and no dict for each replica: the garbage collector would look at all of them.
        self._epochs: list[int | None] = []
        self._metrics: list[Mapping[str, float]] = []
        self._phases: list[str] = []
        self._reported: list[float | None] = []
        self._free: deque[int] = deque()
        self._sections: dict[tuple[Column, int | None], bytes] = {}
        """The sections that were encoded since the last change, by column and the position after which it is."""
        self._texts: dict[int, tuple[int, str]] = {}
        """The JSON of rows, each with the position of its last change."""

    def __len__(self) -> int:
        """Return how many numbers were given, those of forgotten replicas included."""
        return len(self._jobs)

    def describe(self, info: Mapping[str, Any], at: int) -> int:
        """Take a replica's whole description, a `ReplicaInfo` as JSON; return its number."""
        number = self.numbers.get(info["id"])
        if number is None:
            number = self._add(info["id"])
        job = f"{info['group']}@{info['session']}" if info["session"] else info["group"]
        if self._jobs[number] != job:
            self._leave_job(number)
            self._jobs[number] = job
            self.members.setdefault(job, {})[number] = None
            self.about[job] = info["group"], info["session"], info["user"]
        if self._instances[number] != info["instance"]:
            self._instances[number] = info["instance"]
            self.steps[number] = self._reported[number] = None
            pace = info["step_time"]
            self.columns[Column.PACE][number] = NO_NUMBER if pace is None else pace
            self._changed[Column.PACE][number] = at
        self.take({info["id"]: info}, at)
        return number

    def take(self, changes: Mapping[str, Mapping[str, Any]], at: int) -> None:
        """Take replicas' changes, each with the fields of `loom.weaver.views.CHANGING_FIELDS`.

        A replica that was not described yet is left out: its description will have all of it.
        """
        self._sections.clear()
        state_values, step_values, loss_values, pace_values = self.columns.values()
        state_at, step_at, loss_at, pace_at = self._changed.values()
        steps, losses, reports = self.steps, self.losses, self._reported
        for id, one in changes.items():
            number = self.numbers.get(id)
            if number is None:
                continue
            self.dirty.add(self._jobs[number])
            self._row_changed[number] = at
            self.max_steps[number], self._epochs[number] = one["max_step"], one["epoch"]
            self._phases[number], self._metrics[number] = one["phase"], one["metrics"]
            state = _CODES[one["state"], one["connected"]]
            if state_values[number] != state:
                state_values[number] = state
                state_at[number] = at
            step, before = one["step"], steps[number]
            reported, reported_before = one["reported"], reports[number]
            reports[number] = reported
            if step != before:
                steps[number] = step
                step_values[number] = step if step is not None and step < NO_STEP else NO_STEP
                step_at[number] = at
                if step is not None and before is not None and step > before:
                    took = _between(reported_before, reported)
                    if took > 0.0:
                        pace, known = took / (step - before), pace_values[number]
                        pace_values[number] = pace if known != known else known + SMOOTHING * (pace - known)
                        pace_at[number] = at
            loss, loss_before = loss_of(one["metrics"]), losses[number]
            if loss != loss_before and (loss == loss or loss_before == loss_before):
                losses[number] = loss
                loss_values[number] = NO_NUMBER if loss is None else loss if loss == loss else NAN
                loss_at[number] = at

    def forget(self, ids: list[str]) -> None:
        """Forget replicas. Their numbers may be given again."""
        self._sections.clear()
        for id in ids:
            number = self.numbers.pop(id, None)
            if number is not None:
                self._leave_job(number)
                self._clear(number)
                self._free.append(number)

    def section(self, column: Column, since: int | None) -> bytes | None:
        """Return a column's section with what changed after a position, or all; None if nothing changed."""
        known = self._sections.get((column, since))
        if known is None:
            values, changed_at = self.columns[column], self._changed[column]
            if since is None:
                known = encode_all(column, values)
            else:
                changed = list(compress(range(len(values)), map(since.__lt__, changed_at)))
                known = encode_changed(column, values, changed) if changed else b""
            self._sections[column, since] = known
        return known or None

    def rows(self, sent: Mapping[str, int | None]) -> Iterator[tuple[str, str]]:
        """Yield the id and the JSON of each row that changed after a position, which each has; None for any."""
        for id, since in sent.items():
            number = self.numbers.get(id)
            if number is not None and (since is None or self._row_changed[number] > since):
                yield id, self._row_text(number)

    def _row_text(self, number: int) -> str:
        changed = self._row_changed[number]
        known = self._texts.get(number)
        if known is None or known[0] != changed:
            if len(self._texts) >= _MAX_TEXTS:
                self._texts.clear()
            known = self._texts[number] = changed, exact_json(self._row(number))
        return known[1]

    def _row(self, number: int) -> Mapping[str, object]:
        code = self.columns[Column.STATE][number]
        return {
            "state": STATES[code & ~AWAY],
            "step": self.steps[number],
            "epoch": self._epochs[number],
            "max_step": self.max_steps[number],
            "metrics": self._metrics[number],
            "phase": self._phases[number],
            "reported": self._reported[number],
            "connected": not code & AWAY,
        }

    def _add(self, id: str) -> int:
        if self._free:
            number = self._free.popleft()
        else:
            number = len(self)
            for column, values in self.columns.items():
                values.append(0)
                self._changed[column].append(0)
            self._row_changed.append(0)
            for kept in (self.steps, self.losses, self.max_steps, self._epochs, self._reported):
                kept.append(None)
            self._jobs.append(None)
            self._instances.append(None)
            self._phases.append("")
            self._metrics.append({})
            self._clear(number)
        self.numbers[id] = number
        return number

    def _clear(self, number: int) -> None:
        for column, none in zip(Column, (NOBODY, NO_STEP, NO_NUMBER, NO_NUMBER), strict=True):
            self.columns[column][number] = none
        self.steps[number] = self.losses[number] = self.max_steps[number] = None
        self._epochs[number] = self._reported[number] = None
        self._metrics[number] = {}
        self._instances[number], self._phases[number] = None, ""
        self._texts.pop(number, None)

    def _leave_job(self, number: int) -> None:
        job, self._jobs[number] = self._jobs[number], None
        if job is not None:
            self.dirty.add(job)
            del self.members[job][number]
            if not self.members[job]:
                del self.members[job], self.about[job]


def _between(before: float | None, after: float | None) -> float:
    """Return the seconds between two times; 0 if one is not known."""
    return 0.0 if before is None or after is None else after - before


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
        self._jobs: dict[str, tuple[int, Mapping[str, object] | None]] = {}
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

    async def _aggregate(self, job: str, turns: Turns) -> Mapping[str, object]:
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
        known = [pace for pace in running if pace == pace]  # the NaN of no pace differs from itself
        rate = median(known) if known else None
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

    def _text(self, job: str, aggregate: Mapping[str, object] | None) -> str:
        text = self._texts[job] = exact_json(aggregate)
        return text


def _states(counts: Counter[int]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for code, count in counts.items():
        found[STATES[code & ~AWAY]] += count
    return dict(found)


def _largest(values: list[int | None], members: list[int]) -> int | None:
    return max((value for value in map(values.__getitem__, members) if value is not None), default=None)
