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

from loom.control.time_account import TimeAccount
from loom.weaver.goodput.places import JobTime, Place
from loom.weaver.goodput.unsaved import UnsavedRows
from loom.weaver.storage.store import Store
from loom.weaver.views import CoursePoint, FaultRecord, GoodputRecord

MAX_FAULTS = 1000
"""Deaths that are remembered of a job: the newest."""

MAX_JOBS = 200
"""Jobs that are remembered. The oldest one without living replicas is forgotten first."""

MAX_SAMPLES = 600
"""Points of a job's course. When there are more, every second one is dropped, and they come half as often."""

ACCOUNTS_A_SECOND = 2000
"""Time accounts that are taken of a job, at most. One takes about 10 µs."""

NEW_RUN_AFTER = 600.0
"""A job whose replicas are all dead for as many seconds was given up: those that come then are a new run of it."""


class Goodput:
    """The goodput of every job. What the store has already is taken up."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._jobs: dict[str, JobTime] = {}
        self._unsaved = UnsavedRows()
        self._load()

    def registered(self, job: str, replica: str, now: float, last_sign: float) -> None:
        """Take note that a new process is a replica; the one before it was last heard of at ``last_sign``."""
        known = self._jobs.get(job)
        if known is None:
            self._forget_surplus()
            known = self._jobs[job] = JobTime(job, now)
        if not known.living and known.vacant and now > known.alive + NEW_RUN_AFTER:
            for id in list(known.vacant):
                self._drop(known, id)
        place = known.places.get(replica)
        if place is not None and place.vacant is None:  # there is another before anybody knew that it was dead
            at = min(now, max(last_sign, place.heard))
            self.failed(job, replica, "another process has its place", at, at)
        heir = replica if replica in known.vacant else next(iter(known.vacant), None)
        fresh = Place(replica, now, now)
        if heir is not None:
            old = known.places[heir]
            fresh.respawn = now - (old.vacant if old.vacant is not None else now)
            fresh.before = old.before if heir == replica else None
            fresh.fault = old.fault
            known.add("respawn", fresh.respawn)
            if fresh.fault is not None:
                known.update_fault(fresh, registered=now)
            self._drop(known, heir)
        known.places[replica] = fresh
        self._touch(known, fresh, now, soon=True)

    def back(self, job: str, replica: str, now: float) -> None:
        """Take note that the process of a replica is connected again: it lives, if it was taken for dead."""
        known, place = self._find(job, replica)
        if place is None or place.vacant is None:
            return
        place.vacant = None
        known.vacant.pop(replica, None)
        if place.fault is not None:
            known.add("detection", place.fault.time - place.fault.detected)
            known.update_fault(place, registered=now)
            place.fault = None
        # What it told was taken for over when it was taken for dead; it tells all of it again.
        for reason, seconds in place.counted.items():
            known.add(reason, -seconds)
        place.counted, place.before = {}, place.reached
        self._touch(known, place, now, soon=True)

    def wants(self, job: str, replica: str, now: float) -> bool:
        """Return whether to take an account of a replica: of thousands of replicas, not every account is taken."""
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
            known.update_fault(place, stepped=max(place.registered, now - told.seconds + told.first_at))
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

        It was last heard of at ``last_sign``, and last known to have made a step, ``step``, at ``last_step``.
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
        place.fault = FaultRecord(replica, reason[:500], last_sign, now)
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

    def jobs(self) -> list[str]:
        """Return the names of the jobs, the one that began last at the end."""
        return list(self._jobs)

    def record(self, job: str, now: float, course: bool = True) -> GoodputRecord:
        """Return the goodput of a job; with ``course``, also its faults, and its sums at times."""
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
            faults=tuple(known.faults) if course else (),
            course=tuple(CoursePoint(time, spent) for time, spent in samples),
        )

    def save(self, now: float) -> None:
        """Put what has changed into the store, for the next commit: deaths at once, and accounts now and then."""
        for key in self._unsaved.due(now):
            job = self._jobs.get(key[0])
            kept: JobTime | Place | None = job
            if job is not None and len(key) == 2:
                kept = job.places.get(key[1])
            if kept is None:
                self._store.drop("goodput", json.dumps(key))
            else:
                self._store.put("goodput", json.dumps(key), kept.to_dict())

    def _load(self) -> None:
        rows = [(json.loads(key), row) for key, row in self._store.rows("goodput")]
        jobs = [JobTime.from_dict(row) for key, row in rows if len(key) == 1]
        self._jobs = {job.name: job for job in sorted(jobs, key=lambda job: job.since)}
        for key, row in rows:
            if len(key) == 2:
                self._jobs[key[0]].restore(Place.from_dict(row))

    def _find(self, job: str, replica: str) -> tuple[JobTime, Place | None]:
        known = self._jobs.get(job)
        if known is None:
            return JobTime(job, 0.0), None
        return known, known.places.get(replica)

    def _tell_repeated(self, place: Place, told: TimeAccount, spent: dict[str, float]) -> None:
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

    def _count(self, job: JobTime, place: Place, spent: dict[str, float]) -> None:
        """Set the seconds of a living process, and correct the job's sum by the difference."""
        total, counted = job.total, place.counted
        for reason, seconds in spent.items():
            before = counted.get(reason, 0.0)
            if seconds != before:
                total[reason] = total.get(reason, 0.0) + seconds - before
        for reason in counted.keys() - spent.keys():
            total[reason] -= counted[reason]
        place.counted = spent

    def _end(self, job: JobTime, place: Place) -> None:
        """Add a process's seconds to those that are over. They stay in ``counted``, in case it lives after all."""
        for reason, seconds in place.counted.items():
            job.base[reason] = job.base.get(reason, 0.0) + seconds

    def _drop(self, job: JobTime, replica: str) -> None:
        del job.places[replica]
        job.vacant.pop(replica, None)
        self._unsaved.add_now((job.name, replica))

    def _touch(self, job: JobTime, place: Place | None, now: float, soon: bool = False) -> None:
        job.until = now
        if soon:
            job.alive = now
            self._unsaved.add_now((job.name,))
        if place is not None:
            key = job.name, place.replica
            self._unsaved.add_now(key) if soon else self._unsaved.add(key, now)

    def _sample(self, job: JobTime, now: float) -> None:
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
