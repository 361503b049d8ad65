"""Goodput: the share of the replicas' time that was spent on steps that count, and what took the rest.

A job is the replicas of a group, and of one session if Loom spawned them. Each replica has a slot in its job. The
slot is vacant from a process's death until another process takes it, under the same name or under a new one of the
same job. A second of a job is a second of one slot. A living process accounts for its own seconds
(`loom.control.reports`). They count once it has made its first step, the time before included, because some
processes never make one. The weaver itself measures the time around a death::

    … steps …│ last sign        │ failed            │ registered     │ first step
             │ <── detection ─> │ <─── respawn ───> │ <─ waiting ──> │ … steps …

The classes have no clock of their own; ``now`` is in seconds since the epoch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from loom.control.reports import TimeAccount
from loom.weaver.goodput.job_time import GoodputSlot, JobTime
from loom.weaver.storage.history import COMMITS
from loom.weaver.storage.store import Store
from loom.weaver.views import CoursePoint, FaultRecord, GoodputRecord

MAX_FAULTS = 1000  # the newest deaths that are kept for a job

MAX_JOBS = 200
"""Jobs that are kept. The oldest job without living replicas is forgotten first."""

MAX_SAMPLES = 600
"""Points in a job's timeline. Beyond that, every second point is dropped and new ones come half as often."""

ACCOUNTS_A_SECOND = 2000
"""Time accounts wanted each second, at most. Taking one costs about 10 µs."""

NEW_RUN_AFTER = 600.0
"""Seconds without living replicas after which a job counts as given up, and later replicas as a new run."""

SAVE_AFTER = 30.0
"""Seconds after which a living replica's account is written. They are cumulative, so losing one does no harm."""

LEAST_SAVED = 64
"""Rows that one commit writes in addition to the urgent ones if they are due, at least."""


class Goodput:
    """The goodput of every job, loaded from the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._jobs: dict[str, JobTime] = {}
        self._slots = 0
        """The number of slots in all jobs."""
        self._unsaved = _UnsavedRows()
        self._load()

    def registered(self, job: str, replica: str, now: float, last_sign: float, run: str = "") -> None:
        """Record that a new process is a replica.

        Args:
            last_sign: when the process before it was last heard of.
            run: the run that the process is in. It takes no slot that a process of another run left: the other run
                is over, and nothing was started again in it.
        """
        known = self._jobs.get(job)
        if known is None:
            self._forget_surplus()
            known = self._jobs[job] = JobTime(job, now)
        if not known.living and known.vacant and now > known.alive + NEW_RUN_AFTER:
            for id in list(known.vacant):
                self._drop(known, id)
        slot = known.slots.get(replica)
        if slot is not None and slot.vacant is None:  # the old process was not known to be dead yet
            at = min(now, max(last_sign, slot.heard))
            self.failed(job, replica, "another process has its slot", at, at)
        self._drop_other_runs(known, replica, run)
        of_run = (id for id in known.vacant if known.slots[id].run in ("", run))
        heir = replica if replica in known.vacant else next(of_run, None)
        fresh = GoodputSlot(replica, now, now, run=run)
        if heir is not None:
            old = known.slots[heir]
            later = now - (old.vacant if old.vacant is not None else now)
            fresh.respawn = old.settled + later
            fresh.before = old.before if heir == replica else None
            fresh.fault = old.fault
            known.add("respawn", later)
            known.update_fault(fresh, registered=now)
            self._drop(known, heir)
        known.slots[replica] = fresh
        self._slots += 1
        self._touch(known, fresh, now, soon=True)

    def back(self, job: str, replica: str, now: float) -> None:
        """Record that a replica's process has reconnected: it lives, even if it was taken for dead."""
        known, slot = self._find(job, replica)
        if slot is None or slot.vacant is None:
            return
        slot.vacant = None
        known.vacant.pop(replica, None)
        known.add("respawn", -slot.settled)
        slot.settled = 0.0
        assert slot.fault is not None  # it made the slot vacant
        known.add("detection", slot.fault.time - slot.fault.detected)
        known.update_fault(slot, registered=now)
        slot.fault = None
        # Its seconds were added for good when it was taken for dead. Its next account repeats them all, so take
        # them back.
        for reason, seconds in slot.counted.items():
            known.add(reason, -seconds)
        slot.counted, slot.before = {}, slot.reached
        self._touch(known, slot, now, soon=True)

    @property
    def account_pause(self) -> float:
        """Seconds from a replica's account to its next one, at least: a power of two, so that it changes seldom."""
        needed = self._slots / ACCOUNTS_A_SECOND
        return float(1 << math.ceil(needed - 1.0).bit_length()) if needed > 1.0 else 0.0

    def account(self, job: str, replica: str, account: TimeAccount, now: float) -> None:
        known, slot = self._find(job, replica)
        if slot is None:
            self.registered(job, replica, now - account.seconds, now)
            known, slot = self._find(job, replica)
        assert slot is not None
        if slot.vacant is not None:
            return
        if account.first_at is None and slot.fault is None and slot.before is None:
            slot.heard = now
            return
        spent = dict(account.by_reason)
        slot.open = account.open
        was_behind = slot.behind
        self._count_repeated(slot, account, spent)
        idle = account.seconds - account.open - sum(account.by_reason.values())
        spent["idle"] = idle if idle > 0.0 else 0.0
        if slot.overlap is None:
            slot.overlap = max(0.0, account.seconds - (now - slot.registered))
            # A process that lived while its slot counted as vacant did so without a weaver that knew of it.
            longer = min(slot.respawn, max(0.0, slot.overlap - spent.get("waiting", 0.0)))
            known.add("respawn", -longer)
        spent["waiting"] = max(0.0, spent.get("waiting", 0.0) - slot.overlap)
        self._count(known, slot, spent)
        slot.heard = now
        # The cost of repeated steps is written as soon as it is known. A restarted weaver would have to estimate it
        # from more steps, without knowing how long each took.
        changed = was_behind and not slot.behind
        if account.first_at is not None and slot.fault is not None:
            known.update_fault(slot, stepped=max(slot.registered, now - account.seconds + account.first_at))
            slot.fault = None
            changed = True
        self._touch(known, slot, now, soon=changed)

    def failed(
        self,
        job: str,
        replica: str,
        reason: str,
        now: float,
        last_sign: float,
        last_step: float = 0.0,
        step: int | None = None,
        respawns: bool = False,
    ) -> None:
        """Record the death of a process, last heard of at ``last_sign``, whose ``step`` came at ``last_step``.

        ``respawns``: whether something will start another process in its slot. The slot costs time meanwhile.
        Otherwise it costs time only once another process has taken it after all.
        """
        known, slot = self._find(job, replica)
        if slot is None or slot.vacant is not None:
            return
        last_sign = min(now, max(slot.heard, last_sign))
        if spent := dict(slot.counted):
            # The step in which it died is lost. After its last account only the steps are known that it reported.
            made = min(last_sign, last_step) - slot.heard
            if made > 0.0 and (slot.before is None or (slot.reached or 0) >= slot.before):
                spent["compute"] = spent.get("compute", 0.0) + made
                slot.heard += made
            else:
                spent["compute"] = spent.get("compute", 0.0) - slot.open
                spent["lost"] = spent.get("lost", 0.0) + slot.open
            spent["lost"] = spent.get("lost", 0.0) + last_sign - slot.heard
            self._count(known, slot, spent)
        self._end(known, slot)
        known.add("detection", now - last_sign)
        slot.vacant, slot.open, slot.awaited = now, 0.0, respawns
        slot.before = max((one for one in (slot.before, slot.reached, step) if one is not None), default=None)
        slot.fault = FaultRecord(replica, reason[:500], last_sign, now)
        known.vacant[replica] = None
        known.settle_vacant(now)
        known.faults = [*known.faults, slot.fault][-MAX_FAULTS:]
        self._touch(known, slot, now, soon=True)

    def finished(self, job: str, replica: str, now: float) -> None:
        known, slot = self._find(job, replica)
        if slot is not None and slot.vacant is None:
            self._end(known, slot)
            self._drop(known, replica)
            for id in known.settle_vacant(now):
                self._touch(known, known.slots[id], now, soon=True)
            self._touch(known, None, now, soon=True)

    def tick(self, now: float) -> None:
        """Add a point to the timeline of each living job, if one is due."""
        for job in self._jobs.values():
            if job.living:
                job.alive = now
                if not job.samples or now >= job.samples[-1][0] + job.sample_every:
                    self._sample(job, now)

    def jobs(self) -> list[str]:
        return list(self._jobs)

    def jobs_since(self, time: float) -> list[str]:
        """Return the jobs that live, or have changed since a time."""
        return [name for name, job in self._jobs.items() if job.living or job.until >= time]

    def record(self, job: str, now: float, course: bool = True, faults: int = MAX_FAULTS) -> GoodputRecord:
        """Return the goodput of a job, with so many of its newest faults; with ``course``, also its timeline."""
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
            faults=tuple(known.faults[max(0, len(known.faults) - faults) :]),
            course=tuple(CoursePoint(time, spent) for time, spent in samples),
        )

    def counters(self, job: str, now: float) -> dict[str, float]:
        """Return the seconds of a job by reason, of which none ever falls."""
        return self._jobs[job].counters(now)

    def save(self, now: float) -> None:
        """Put changed rows into the store for the next commit: deaths at once, accounts after `SAVE_AFTER` s."""
        for key in self._unsaved.due(now):
            job = self._jobs.get(key[0])
            kept: JobTime | GoodputSlot | None = job
            if job is not None and len(key) == 2:
                kept = job.slots.get(key[1])
            if kept is None:
                self._store.drop("goodput", json.dumps(key))
            else:
                self._store.put("goodput", json.dumps(key), kept.to_dict())

    @property
    def settled(self) -> bool:
        """True if no row waits to be stored."""
        return not self._unsaved

    def _load(self) -> None:
        rows = [(json.loads(key), row) for key, row in self._store.rows("goodput")]
        jobs = [JobTime.from_dict(row) for key, row in rows if len(key) == 1]
        self._jobs = {job.name: job for job in sorted(jobs, key=lambda job: job.since)}
        for key, row in rows:
            if len(key) == 2:
                self._jobs[key[0]].restore(GoodputSlot.from_dict(row))
                self._slots += 1

    def _find(self, job: str, replica: str) -> tuple[JobTime, GoodputSlot | None]:
        known = self._jobs.get(job)
        if known is None:
            return JobTime(job, 0.0), None
        return known, known.slots.get(replica)

    def _count_repeated(self, slot: GoodputSlot, account: TimeAccount, spent: dict[str, float]) -> None:
        """Count the steps as lost that an earlier process had made already.

        The durations of single steps are unknown: all steps between two accounts count as equally long.
        """
        compute = spent.get("compute", 0.0)
        done = slot.reached if slot.reached is not None else None if account.first is None else account.first - 1
        if slot.before is not None and done is not None and account.highest is not None:
            repeated = min(slot.before, account.highest) - done
            if account.highest > done and repeated > 0:
                slot.again += max(0.0, compute - slot.compute) * repeated / (account.highest - done)
            if account.highest < slot.before:
                slot.open, reported_open = 0.0, account.open
                spent["lost"] = spent.get("lost", 0.0) + reported_open
        slot.compute = compute
        slot.reached = account.highest if account.highest is not None else slot.reached
        spent["compute"] = max(0.0, compute - slot.again) + slot.open
        spent["lost"] = spent.get("lost", 0.0) + min(slot.again, compute)

    def _count(self, job: JobTime, slot: GoodputSlot, spent: dict[str, float]) -> None:
        """Set the seconds of a living process, and correct the job's sum by the difference."""
        total, counted = job.total, slot.counted
        for reason, seconds in spent.items():
            before = counted.get(reason, 0.0)
            if seconds != before:
                total[reason] = total.get(reason, 0.0) + seconds - before
        for reason in counted.keys() - spent.keys():
            total[reason] -= counted[reason]
        slot.counted = spent

    def _end(self, job: JobTime, slot: GoodputSlot) -> None:
        """Add a dead process's seconds to the job for good, and keep them in case it lives after all."""
        for reason, seconds in slot.counted.items():
            job.base[reason] = job.base.get(reason, 0.0) + seconds

    def _drop(self, job: JobTime, replica: str) -> None:
        del job.slots[replica]
        self._slots -= 1
        job.vacant.pop(replica, None)
        self._unsaved.add_now((job.name, replica))

    def _drop_other_runs(self, job: JobTime, replica: str, run: str) -> None:
        """Drop the vacant slots of other runs than a new process's, but those of a run that lives."""
        others = [id for id in job.vacant if job.slots[id].run not in ("", run)]
        if others:
            living = {slot.run for id, slot in job.slots.items() if id not in job.vacant}
            for id in others:
                if id == replica or job.slots[id].run not in living:
                    self._drop(job, id)

    def _touch(self, job: JobTime, slot: GoodputSlot | None, now: float, soon: bool = False) -> None:
        job.until = now
        if soon:
            job.alive = now
            self._unsaved.add_now((job.name,))
        if slot is not None:
            key = job.name, slot.replica
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
            for replica in list(self._jobs[name].slots):
                self._drop(self._jobs[name], replica)
            del self._jobs[name]
            self._unsaved.add_now((name,))


class _UnsavedRows:
    """Keys of unsaved rows: some are written at once, others a while after their first change."""

    def __init__(self) -> None:
        self._at_once: dict[tuple[str, ...], None] = {}
        self._later: dict[tuple[str, ...], float] = {}

    def __bool__(self) -> bool:
        return bool(self._at_once or self._later)

    def add(self, key: tuple[str, ...], now: float) -> None:
        self._later.setdefault(key, now)

    def add_now(self, key: tuple[str, ...]) -> None:
        self._at_once[key] = None

    def due(self, now: float) -> list[tuple[str, ...]]:
        """Return the keys of the rows that are due, and count them as written."""
        due, self._at_once = self._at_once, {}
        for key in due:
            self._later.pop(key, None)
        most = max(LEAST_SAVED, len(self._later) // COMMITS)
        while self._later and len(due) < most:
            key, since = next(iter(self._later.items()))
            if since > now - SAVE_AFTER:
                break
            del self._later[key]
            due[key] = None
        return list(due)
