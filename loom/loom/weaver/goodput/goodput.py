"""Goodput: how much of the time that replicas had was spent on steps that count, and what on everything else.

A job is the replicas of a group, in one session where Loom spawned them. Each of its replicas has a place in it,
which is vacant from a process's death until another takes it: under the same name, or under a new one of the same
job. A second of a job is a second of one place. What a living process does in its seconds it says itself
(`loom.control.time_account`), and counts from its first step on, with what came before: there are processes that
take none. What the weaver sees better is the time around a death::

    … steps …│ last sign        │ failed            │ registered     │ first step
             │ <── detection ─> │ <─── respawn ───> │ <─ waiting ──> │ … steps …

Nothing here has a clock of its own; ``now`` is in seconds since the epoch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from loom.control.time_account import MAX_REASONS, OTHER, REASONS, TimeAccount
from loom.weaver.storage.store import Store
from loom.weaver.views import CoursePoint, FaultRecord, GoodputRecord

__all__ = ["Death", "Goodput"]

MAX_FAULTS = 1000
"""That are remembered of a job, the newest."""

MAX_JOBS = 200
"""That are remembered; of those without living replicas the first go first."""

MAX_SAMPLES = 600
"""Points of a job's course. When there are more, every second one is dropped, and they come half as often."""

SAMPLE_EVERY = 1.0
"""Seconds between two of the first points."""

ACCOUNTS_A_SECOND = 2000
"""That are taken of a job, at most; of more replicas each is heard less often. One takes about 10 µs."""

SAVE_AFTER = 30.0
"""Seconds after which what a living replica has told is written; it would tell it again."""

MAX_SAVED = 200
"""Rows that are written by one commit, besides those that cannot wait: it must not take long."""

NEW_RUN_AFTER = 600.0
"""A job whose replicas are all dead for as many seconds was given up: those that come then are a new run of it."""


@dataclass(slots=True)
class Death:
    """The death of a process. Times are seconds since the epoch, None where it has not come to that."""

    replica: str
    reason: str
    time: float
    """When the process was last heard of."""
    detected: float
    """When the weaver knew."""
    registered: float | None = None
    """When the process came that has its place now."""
    stepped: float | None = None
    """When that began its first step."""

    def to_dict(self) -> dict[str, Any]:
        """As others see it."""
        return _fields(self)


@dataclass(slots=True)
class _Place:
    """What is known of a replica in a job."""

    replica: str
    registered: float
    heard: float
    """When its last account came, or else when it registered."""
    counted: dict[str, float] = field(default_factory=dict)
    """Seconds of the living process, by reason, as they are in the job's sum."""
    open: float = 0.0
    """Of these, what is in a step that it has not finished."""
    compute: float = 0.0
    """What it has told of steps, and which of that it had done before."""
    again: float = 0.0
    before: int | None = None
    """The highest step that a process had made in this place before the living one."""
    reached: int | None = None
    """The highest step that the living one has made."""
    overlap: float | None = None
    """Seconds that the process lived before it registered; None before its first account."""
    respawn: float = 0.0
    """Seconds for which the place was vacant before this process."""
    vacant: float | None = None
    """Since when nobody has the place; None while somebody has."""
    fault: Death | None = None
    """The last one, until the process after it has made a step."""

    @property
    def behind(self) -> bool:
        """Whether the process makes steps that one before it had made."""
        return self.before is not None and (self.reached is None or self.reached < self.before)

    def to_dict(self) -> dict[str, Any]:
        """As it is stored."""
        return {**_fields(self), "fault": None if self.fault is None else self.fault.to_dict()}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> _Place:
        """A place as it was stored."""
        fault = stored["fault"]
        return cls(**{**stored, "fault": None if fault is None else Death(**fault)})


@dataclass(slots=True)
class _Job:
    name: str
    since: float
    base: dict[str, float] = field(default_factory=dict)
    """Seconds of what is over, by reason."""
    total: dict[str, float] = field(default_factory=dict)
    """With those of living processes, which is the sum of ``counted``."""
    until: float = 0.0
    """When something last happened to it."""
    alive: float = 0.0
    """When it last had a living process."""
    places: dict[str, _Place] = field(default_factory=dict)
    faults: list[Death] = field(default_factory=list)
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    sample_every: float = SAMPLE_EVERY
    vacant: dict[str, None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As it is stored: without its places."""
        left_out = ("places", "vacant", "total")
        stored = {name: value for name, value in _fields(self).items() if name not in left_out}
        return {**stored, "faults": [fault.to_dict() for fault in self.faults]}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> _Job:
        """A job as it was stored."""
        faults = [Death(**fault) for fault in stored["faults"]]
        samples = [(time, spent) for time, spent in stored["samples"]]
        return cls(**{**stored, "faults": faults, "samples": samples}, total=dict(stored["base"]))

    def restore(self, place: _Place) -> None:
        """Take up a place as it was stored."""
        self.places[place.replica] = place
        if place.vacant is not None:
            self.vacant[place.replica] = None
        else:
            for reason, seconds in place.counted.items():
                self.total[reason] = self.total.get(reason, 0.0) + seconds
        if place.fault is not None:  # the job has it too, and both are to be one
            place.fault = next((one for one in reversed(self.faults) if one == place.fault), place.fault)

    @property
    def living(self) -> int:
        return len(self.places) - len(self.vacant)

    def add(self, reason: str, seconds: float) -> None:
        """Count seconds that are over."""
        self.base[reason] = self.base.get(reason, 0.0) + seconds
        self.total[reason] = self.total.get(reason, 0.0) + seconds

    def seconds(self, now: float) -> dict[str, float]:
        """By reason, with the time for which places are vacant by now."""
        spent = dict.fromkeys(REASONS, 0.0)
        for reason, seconds in self.total.items():
            # A sum of many differences may be a little less than nothing.
            known = reason if reason in spent or len(spent) < len(REASONS) + MAX_REASONS else OTHER
            spent[known] = spent.get(known, 0.0) + max(0.0, seconds)
        if self.living:
            spent["respawn"] += sum(max(0.0, now - (self.places[id].vacant or now)) for id in self.vacant)
        return spent


class Goodput:
    """The goodput of every job.

    Args:
        store: where it is kept; what is there already is taken up.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._jobs: dict[str, _Job] = {}
        self._unsaved = _Unsaved()
        self._load()

    # -- what happens -----------------------------------------------------------------------------------------

    def registered(self, job: str, replica: str, now: float, last_sign: float) -> None:
        """Take note that a new process is a replica.

        Args:
            job: of the replica.
            replica: its id.
            now: the time.
            last_sign: when the process that was the replica before was last heard of, if there was one.
        """
        known = self._jobs.get(job)
        if known is None:
            self._forget_surplus()
            known = self._jobs[job] = _Job(job, now)
        if not known.living and known.vacant and now > known.alive + NEW_RUN_AFTER:
            for id in list(known.vacant):
                self._drop(known, id)
        place = known.places.get(replica)
        if place is not None and place.vacant is None:  # there is another before anybody knew that it was dead
            at = min(now, max(last_sign, place.heard))
            self.failed(job, replica, "another process has its place", at, at)
        heir = replica if replica in known.vacant else next(iter(known.vacant), None)
        fresh = _Place(replica, now, now)
        if heir is not None:
            old = known.places[heir]
            fresh.respawn = now - (old.vacant if old.vacant is not None else now)
            fresh.before = old.before if heir == replica else None
            fresh.fault = old.fault
            known.add("respawn", fresh.respawn)
            if fresh.fault is not None:
                fresh.fault.registered = now
            self._drop(known, heir)
        known.places[replica] = fresh
        self._touch(known, fresh, now, soon=True)

    def back(self, job: str, replica: str, now: float) -> None:
        """Take note that the process of a replica is connected again: it lives, if it was taken for dead."""
        known, place = self._find(job, replica)
        if place is None or place.vacant is None:
            return
        fault, place.fault, place.vacant = place.fault, None, None
        known.vacant.pop(replica, None)
        if fault is not None:
            known.add("detection", fault.time - fault.detected)
            fault.registered = now
        # What it told was taken for over when it was taken for dead; it tells all of it again.
        for reason, seconds in place.counted.items():
            known.add(reason, -seconds)
        place.counted, place.before = {}, place.reached
        self._touch(known, place, now, soon=True)

    def wants(self, job: str, replica: str, now: float) -> bool:
        """Whether an account of a replica is to be taken: where there are thousands, not every one is."""
        known, place = self._find(job, replica)
        return place is None or now >= place.heard + len(known.places) / ACCOUNTS_A_SECOND - 0.5

    def account(self, job: str, replica: str, told: TimeAccount, now: float) -> None:
        """Take what a process tells of its time."""
        known, place = self._find(job, replica)
        if place is None:
            self.registered(job, replica, now - told.seconds, now)
            known, place = self._find(job, replica)
        assert place is not None
        if place.vacant is not None:
            return
        if told.first_at is None and place.fault is None and place.before is None:
            place.heard = now
            return
        spent = dict(told.by_reason)
        place.open = told.open
        was_behind = place.behind
        self._tell_repeated(place, told, spent)
        idle = told.seconds - told.open - sum(told.by_reason.values())
        spent["idle"] = idle if idle > 0.0 else 0.0
        if place.overlap is None:
            place.overlap = max(0.0, told.seconds - (now - place.registered))
            # It cannot have lived long while its place was vacant, but without a weaver that knew.
            longer = min(place.respawn, max(0.0, place.overlap - spent.get("waiting", 0.0)))
            known.add("respawn", -longer)
        spent["waiting"] = max(0.0, spent.get("waiting", 0.0) - place.overlap)
        self._count(known, place, spent)
        place.heard = now
        # What it took to make up for what was lost is written once it is known: a weaver that begins again would
        # have to find it from more steps, of which it does not know how long each took.
        changed = was_behind and not place.behind
        if told.first_at is not None and place.fault is not None:
            place.fault.stepped = max(place.registered, now - told.seconds + told.first_at)
            place.fault = None
            changed = True
        self._touch(known, place, now, soon=changed)

    def failed(
        self,
        job: str,
        replica: str,
        reason: str,
        now: float,
        last_sign: float,
        last_step: float = 0.0,
        step: int | None = None,
    ) -> None:
        """Take note that a replica's process is known to be dead.

        Args:
            job: of the replica.
            replica: its id.
            reason: why it has failed.
            now: the time.
            last_sign: when it was last heard of.
            last_step: when it was last known to have made a step.
            step: which that was.
        """
        known, place = self._find(job, replica)
        if place is None or place.vacant is not None:
            return
        last_sign = min(now, max(place.heard, last_sign))
        if spent := dict(place.counted):
            # The step that it died in is lost. Of its last second only the steps are known that it reported.
            made = min(last_sign, last_step) - place.heard
            if made > 0.0 and (place.before is None or (place.reached or 0) >= place.before):
                spent["compute"] = spent.get("compute", 0.0) + made
                place.heard += made
            else:
                spent["compute"] = spent.get("compute", 0.0) - place.open
                spent["lost"] = spent.get("lost", 0.0) + place.open
            spent["lost"] = spent.get("lost", 0.0) + last_sign - place.heard
            self._count(known, place, spent)
        self._end(known, place)
        known.add("detection", now - last_sign)
        place.vacant, place.open = now, 0.0
        place.before = max((one for one in (place.before, place.reached, step) if one is not None), default=None)
        place.fault = Death(replica, reason[:500], last_sign, now)
        known.vacant[replica] = None
        known.faults = [*known.faults, place.fault][-MAX_FAULTS:]
        self._touch(known, place, now, soon=True)

    def finished(self, job: str, replica: str, now: float) -> None:
        """Take note that a replica came to its end, as it was meant to."""
        known, place = self._find(job, replica)
        if place is not None and place.vacant is None:
            self._end(known, place)
            self._drop(known, replica)
            self._touch(known, None, now, soon=True)

    def tick(self, now: float) -> None:
        """Note the course of the jobs that go on."""
        for job in self._jobs.values():
            if job.living:
                job.alive = now
                if not job.samples or now >= job.samples[-1][0] + job.sample_every:
                    self._sample(job, now)

    # -- what is told -----------------------------------------------------------------------------------------

    def jobs(self) -> list[str]:
        """Their names, the one that began last at the end."""
        return list(self._jobs)

    def record(self, job: str, now: float, course: bool = True) -> GoodputRecord:
        """Return the goodput of a job.

        Args:
            job: its name.
            now: the time.
            course: whether with its faults, and what its sums were at times since its beginning.
        """
        known = self._jobs[job]
        seconds = known.seconds(now)
        whole = sum(seconds.values())
        until = now if known.living else known.until
        samples = [*known.samples, (until, seconds)] if course else []
        return GoodputRecord(
            job=job,
            since=known.since,
            until=until,
            replicas=known.living,
            ratio=seconds["compute"] / whole if whole > 0 else None,
            seconds=seconds,
            faults=tuple(FaultRecord(**fault.to_dict()) for fault in known.faults) if course else (),
            course=tuple(CoursePoint(time, spent) for time, spent in samples),
        )

    # -- the store --------------------------------------------------------------------------------------------

    def save(self, now: float) -> None:
        """Put what has changed into the store, for the next commit: deaths at once, and accounts now and then."""
        for key in self._unsaved.due(now):
            job = self._jobs.get(key[0])
            kept: _Job | _Place | None = job
            if job is not None and len(key) == 2:
                kept = job.places.get(key[1])
            if kept is None:
                self._store.drop("goodput", json.dumps(key))
            else:
                self._store.put("goodput", json.dumps(key), kept.to_dict())

    def _load(self) -> None:
        rows = [(json.loads(key), row) for key, row in self._store.rows("goodput")]
        jobs = [_Job.from_dict(row) for key, row in rows if len(key) == 1]
        self._jobs = {job.name: job for job in sorted(jobs, key=lambda job: job.since)}
        for key, row in rows:
            if len(key) == 2:
                self._jobs[key[0]].restore(_Place.from_dict(row))

    # -- bookkeeping ------------------------------------------------------------------------------------------

    def _find(self, job: str, replica: str) -> tuple[_Job, _Place | None]:
        known = self._jobs.get(job)
        if known is None:
            return _Job(job, 0.0), None
        return known, known.places.get(replica)

    def _tell_repeated(self, place: _Place, told: TimeAccount, spent: dict[str, float]) -> None:
        """Take those steps for lost that a process before this one had made.

        It is not told how long each step took: those between two accounts are taken for equally long.
        """
        compute = spent.get("compute", 0.0)
        done = place.reached if place.reached is not None else None if told.first is None else told.first - 1
        if place.before is not None and done is not None and told.highest is not None:
            repeated = min(place.before, told.highest) - done
            if told.highest > done and repeated > 0:
                place.again += max(0.0, compute - place.compute) * repeated / (told.highest - done)
            if told.highest < place.before:
                place.open, told_open = 0.0, told.open
                spent["lost"] = spent.get("lost", 0.0) + told_open
        place.compute = compute
        place.reached = told.highest if told.highest is not None else place.reached
        spent["compute"] = max(0.0, compute - place.again) + place.open
        spent["lost"] = spent.get("lost", 0.0) + min(place.again, compute)

    def _count(self, job: _Job, place: _Place, spent: dict[str, float]) -> None:
        """Have a living process's seconds be these, in the job's sum too."""
        total, counted = job.total, place.counted
        for reason, seconds in spent.items():
            before = counted.get(reason, 0.0)
            if seconds != before:
                total[reason] = total.get(reason, 0.0) + seconds - before
        for reason in counted.keys() - spent.keys():
            total[reason] -= counted[reason]
        place.counted = spent

    def _end(self, job: _Job, place: _Place) -> None:
        """Have a process's seconds be over. They stay in ``counted``, in case that it lives after all."""
        for reason, seconds in place.counted.items():
            job.base[reason] = job.base.get(reason, 0.0) + seconds

    def _drop(self, job: _Job, replica: str) -> None:
        del job.places[replica]
        job.vacant.pop(replica, None)
        self._unsaved.add_now((job.name, replica))

    def _touch(self, job: _Job, place: _Place | None, now: float, soon: bool = False) -> None:
        job.until = now
        if soon:
            job.alive = now
            self._unsaved.add_now((job.name,))
        if place is not None:
            key = job.name, place.replica
            self._unsaved.add_now(key) if soon else self._unsaved.add(key, now)

    def _sample(self, job: _Job, now: float) -> None:
        job.samples.append((now, job.seconds(now)))
        if len(job.samples) > MAX_SAMPLES:
            del job.samples[1::2]
            job.sample_every *= 2
        self._unsaved.add((job.name,), now)

    def _forget_surplus(self) -> None:
        ended: Iterator[str] = (name for name, job in self._jobs.items() if not job.living)
        if len(self._jobs) >= MAX_JOBS and (name := next(ended, None)) is not None:
            for replica in list(self._jobs[name].places):
                self._drop(self._jobs[name], replica)
            del self._jobs[name]
            self._unsaved.add_now((name,))


def _fields(kept: Any) -> dict[str, Any]:
    return {name: getattr(kept, name) for name in kept.__slots__}


class _Unsaved:
    """Keys of rows that are to be written: some at once, others a while after they have changed first."""

    def __init__(self) -> None:
        self._at_once: dict[tuple[str, ...], None] = {}
        self._later: dict[tuple[str, ...], float] = {}

    def add(self, key: tuple[str, ...], now: float) -> None:
        self._later.setdefault(key, now)

    def add_now(self, key: tuple[str, ...]) -> None:
        self._at_once[key] = None

    def due(self, now: float) -> list[tuple[str, ...]]:
        """Those that are to be written by now; they are then taken for written."""
        due, self._at_once = self._at_once, {}
        for key in due:
            self._later.pop(key, None)
        while self._later and len(due) < MAX_SAVED:
            key, since = next(iter(self._later.items()))
            if since > now - SAVE_AFTER:
                break
            del self._later[key]
            due[key] = None
        return list(due)
