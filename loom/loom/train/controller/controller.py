"""What looks after a job's groups: one thread, to which everything that happens comes as a message."""

from __future__ import annotations

import functools
import itertools
import logging
import queue
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from loom.beside import Session
from loom.errors import SupervisionError, TrainingFailed, WrongArguments
from loom.threadlet import Threadlet
from loom.train.controller.group import GroupState, ReplicaGroup
from loom.train.controller.job_events import JobEvents
from loom.train.controller.replica_slot import Seat
from loom.train.controller.respawns import RespawnOrders
from loom.train.controller.summaries import GroupStatus, JobStatus, JobSummary
from loom.train.controller.support import Support
from loom.train.retries import Retries
from loom.train.settings import Assignment, Ending, Restore, TrainerReport
from loom.train.spec import JobSpec

__all__ = ["Controller", "controller_of"]

_log = logging.getLogger("loom")

TICK = 0.05
"""Seconds between two looks at what is due."""

_controllers: dict[str, Controller] = {}


def controller_of(name: str) -> Controller:
    """The controller of a job that runs in this process."""
    found = _controllers.get(name)
    if found is None:
        raise WrongArguments(f"no job {name!r} runs in this driver; running: {', '.join(_controllers) or 'none'}")
    return found


class Controller:
    """Runs a job.

    Args:
        job: what to do.
        session: where.
    """

    def __init__(self, job: JobSpec, session: Session) -> None:
        self._job = job
        self._session = session
        self._events = JobEvents(job.name, session)
        self._happenings: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._procs_numbers = itertools.count()
        self._seats: dict[int, Seat] = {}
        self._spares: list[ReplicaGroup] = []
        self._spares_due = 0.0
        self._draining: set[int] = set()
        self._began = False
        self._failures = 0
        self._moved_at: dict[ReplicaGroup, tuple[int, float]] = {}
        self._support = Support(session, job, self._on_this_thread, self._events)
        self._support.moved = self._lighthouse_moved

    # -- from the beginning to the end --------------------------------------------------------------------------

    def run(self) -> JobSummary:
        """Run it.

        Raises:
            TrainingFailed: no group is left.
        """
        job = self._job
        if job.name in _controllers:
            raise WrongArguments(f"a job {job.name!r} runs in this driver already: give another name")
        _controllers[job.name] = self
        started = time.monotonic()
        orders = None
        try:
            with Threadlet(
                f"{job.name}_job", group=f"{job.name}_jobs", weaver=self._session.weaver_address(), devices=()
            ) as threadlet:
                self._register(threadlet)
                self._support.open()
                orders = RespawnOrders(self._session, self._respawn_wanted)
                for number in range(job.groups):
                    self._add_seat(number)
                self._events.record("job_started", groups=job.groups, steps=job.steps, spares=job.spares)
                self._attend(threadlet)
            return self._summary(time.monotonic() - started)
        finally:
            del _controllers[job.name]
            if orders is not None:
                orders.close()
            for group in self._all_groups():
                group.stop("the job is over")
            self._support.close()
            self._events.close()

    def _attend(self, threadlet: Threadlet) -> None:
        told = None
        while not self._is_over():
            try:
                self._happenings.get(timeout=TICK)()
                continue
            except queue.Empty:
                pass
            threadlet.check_and_apply_updates()
            if threadlet.should_stop:
                self._stop_all()
            now = time.monotonic()
            self._tick(now)
            said = (self._step, len(self._training()), len(self._spares))
            if said != told:
                told = said
                metrics = {"groups": said[1], "spares": said[2], "failures": self._failures}
                threadlet.publish_status(said[0], max_step=self._job.steps, metrics=metrics)

    def _stop_all(self) -> None:
        for seat in list(self._seats.values()):
            if not seat.over and not seat.told_to_leave:
                self._tell_to_leave(seat, "removed: the job was told to stop")

    def _is_over(self) -> bool:
        """Whether all seats are, or nobody is left who could be waited for."""
        seats = list(self._seats.values())
        if all(seat.over for seat in seats):
            if not any(seat.ending in (Ending.FINISHED, Ending.STOPPED, Ending.LEFT) for seat in seats):
                failed = next(iter(seats)).last.error or ""
                self._events.record("job_failed", reason="no group is left, and none may be tried again")
                raise TrainingFailed(
                    f"job {self._job.name!r} has lost all its groups, each {self._job.retries.attempts} times more "
                    f"than it had made steps between, at step {self._step}. The last error: {failed.strip()}"
                )
            return True
        # Who is being restored when the others are done would only do again what is done.
        return any(seat.ending is Ending.FINISHED for seat in seats) and not any(
            seat.group is not None and seat.group.state is GroupState.TRAINING for seat in seats if not seat.over
        )

    def _summary(self, seconds: float) -> JobSummary:
        seats = sorted(self._seats.values(), key=lambda seat: seat.number)
        finished = [seat for seat in seats if seat.ending is Ending.FINISHED]
        shown = (finished or seats)[0].last
        ending = "finished" if finished else "stopped"
        self._events.record("job_finished", ending=ending, step=shown.step, seconds=round(seconds, 3))
        return JobSummary(
            name=self._job.name,
            ending=ending,
            steps=shown.step,
            seconds=seconds,
            metrics=dict(shown.metrics),
            hashes={seat.replica: list(seat.last.hashes.values())[-1] for seat in finished if seat.last.hashes},
            reports={seat.replica: seat.last for seat in seats},
            failures=self._failures,
            events=tuple(self._events.recorded),
        )

    def status(self) -> JobStatus:
        """How it is. By any thread."""
        seats = sorted(self._seats.copy().values(), key=lambda seat: seat.number)
        return JobStatus(
            name=self._job.name,
            step=self._step,
            groups=tuple(GroupStatus.of(seat.group) for seat in seats if seat.group is not None),
            spares=tuple(GroupStatus.of(spare) for spare in list(self._spares)),
            lighthouse=self._support.lighthouse,
            hosts=tuple(self._hosts()),
            events=tuple(self._events.recorded),
        )

    # -- looking ------------------------------------------------------------------------------------------------

    @property
    def _step(self) -> int:
        return max((seat.last.step for seat in list(self._seats.values())), default=0)

    def _training(self) -> list[Seat]:
        return [
            seat
            for seat in self._seats.values()
            if seat.group is not None and seat.group.state is GroupState.TRAINING and not seat.over
        ]

    def _all_groups(self) -> list[ReplicaGroup]:
        pairs = [(seat.group, seat.successor) for seat in self._seats.values()]
        return [*(group for pair in pairs for group in pair if group is not None), *self._spares]

    def _hosts(self) -> list[int]:
        """Hosts on which groups may be started."""
        wanted = self._job.hosts
        return [
            host
            for host in self._session.hosts()
            if host not in self._draining and (wanted is None or host in wanted)
        ]

    def _best_host(self, rather_not: int | None) -> int | None:
        """The host with the fewest groups."""
        used = Counter(group.host for group in self._all_groups())
        return min(self._hosts(), key=lambda host: (host == rather_not, used[host], host), default=None)

    # -- what is due --------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        for seat in list(self._seats.values()):
            if seat.over:
                continue
            if seat.group is None and seat.due is not None and now >= seat.due:
                self._fill(seat)
            self._look_for_stuck(seat, now)
            self._move_on(seat)
        self._keep_spares(now)
        self._support.tick(self._hosts())

    def _fill(self, seat: Seat) -> None:
        """Find a group for a seat: a spare, or a new one."""
        if seat.successor is not None:
            seat.group, seat.successor, seat.due = seat.successor, None, None
            if seat.group.state is GroupState.READY:
                self._ready(seat)
            return
        hosts = self._hosts()
        ready = [spare for spare in self._spares if spare.state is GroupState.READY and spare.host in hosts]
        preparing = [
            spare
            for spare in self._spares
            if spare.state is GroupState.PREPARING and spare.host in hosts and spare.host != seat.shunned
        ]
        if ready or preparing:
            group = (ready or preparing)[0]
            self._spares.remove(group)
        else:
            made = self._spawn(seat.replica, rather_not=seat.shunned)
            if made is None:
                return  # until a host is there
            group = made
        seat.group, seat.due = group, None
        if group.state is GroupState.READY:
            self._ready(seat)

    def _spawn(self, name: str, rather_not: int | None = None) -> ReplicaGroup | None:
        host = self._best_host(rather_not)
        if host is None:
            return None
        job = self._job
        trainer = job.trainer, job.args, job.kwargs
        name = f"{name}-{next(self._procs_numbers)}"
        try:
            return ReplicaGroup(self._session, trainer, name, host, job.members, job.silence, self._happened)
        except (SupervisionError, RuntimeError) as error:
            _log.warning("no group can be started on host %d: %s", host, error)
            return None

    def _keep_spares(self, now: float) -> None:
        """Have as many spares as wanted, but not while a group that was lost is being restored."""
        busy = any(not seat.over and (seat.group is None or not seat.has_state) for seat in self._seats.values())
        if busy or len(self._spares) >= self._job.spares or now < self._spares_due:
            return
        self._spares_due = now + 1.0
        spare = self._spawn(f"{self._job.name}_spare")
        if spare is not None:
            self._spares.append(spare)

    def _look_for_stuck(self, seat: Seat, now: float) -> None:
        """Give up a group that makes no step while others go on."""
        group = seat.group
        if group is None or group.state is not GroupState.TRAINING or group.report.paused:
            return
        step, since = self._moved_at.get(group, (-1, now))
        if group.report.step != step:
            self._moved_at[group] = group.report.step, now
        elif now - since > self._job.stuck and any(
            other is not group and moved > since for other, (_, moved) in self._moved_at.items()
        ):
            self._lose(seat, f"it has made no step for {now - since:.1f} s, while others did")

    # -- seats --------------------------------------------------------------------------------------------------

    def _add_seat(self, number: int) -> Seat:
        replica = f"{self._job.name}_{number}"
        seat = self._seats[number] = Seat(number, replica, Retries(self._job.retries), due=time.monotonic())
        return seat

    def _ready(self, seat: Seat) -> None:
        """Have a group that is ready begin: at first when all are, so that they begin together."""
        if not self._began:
            waiting = [one for one in self._seats.values() if not one.over]
            if any(one.group is None or one.group.state is not GroupState.READY for one in waiting):
                return
            self._began = True
            for one in waiting:
                self._begin(one, self._restore_without_peers())
            return
        peers = any(one.has_state for one in self._seats.values() if one is not seat and not one.over)
        self._begin(seat, Restore.PEERS if peers else self._restore_without_peers())

    def _restore_without_peers(self) -> Restore:
        return Restore.NOTHING if self._job.checkpoints is None else Restore.CHECKPOINT

    def _begin(self, seat: Seat, restore: Restore) -> None:
        group, job = seat.group, self._job
        assert group is not None
        group.begin(
            Assignment(
                job=job.name,
                replica=seat.replica,
                lighthouse=self._support.lighthouse,
                store=group.store,
                steps=job.steps,
                config=job.config,
                averaging=job.averaging,
                restore=restore,
                parallel=job.parallel,
                backend=job.backend,
                checkpoints=job.checkpoints,
                checkpoint_every=job.checkpoint_every,
                keep_checkpoints=job.keep_checkpoints,
                evaluate_every=job.evaluate_every,
                hash_every=job.hash_every,
                timeouts=job.timeouts,
                weaver=None,
                injectable=job.injectable,
            )
        )
        self._events.record(
            "group_started",
            seat.replica,
            host=group.host,
            pids=group.pids,
            procs=group.procs.name,
            restore=restore.value,
        )

    def _lose(self, seat: Seat, reason: str, *, hung: bool = False) -> None:
        """Note that the group of a seat is lost, and have it replaced: on another host, if its own may hang."""
        group = seat.group
        assert group is not None
        self._failures += 1
        self._moved_at.pop(group, None)
        group.stop(reason)
        self._support.kill(group)
        seat.group, seat.lost_at = None, time.time()
        seat.shunned = group.host if hung or not group.members else None
        self._events.record(
            "group_failed", seat.replica, host=group.host, pids=group.pids, step=group.report.step, reason=reason
        )
        if seat.told_to_leave:
            self._has_left(seat)
            return
        wait = seat.retries.fail()
        if wait is None:
            seat.ending = Ending.FAILED
            left = [one.replica for one in self._seats.values() if not one.over]
            self._events.record(
                "job_smaller",
                seat.replica,
                groups=len(left),
                left=left,
                failures=seat.retries.failures,
                reason=reason,
            )
        else:
            seat.due = time.monotonic() + wait
            self._events.record("group_retried", seat.replica, attempt=seat.retries.failures, wait=wait)
        if not self._began:
            self._begin_if_all_are_ready()

    def _begin_if_all_are_ready(self) -> None:
        for seat in self._seats.values():
            if seat.group is not None and seat.group.state is GroupState.READY:
                self._ready(seat)
                return

    # -- what happens -------------------------------------------------------------------------------------------

    def _on_this_thread(self, work: Callable[[], None]) -> None:
        self._happenings.put(work)

    def _happened(self, group: ReplicaGroup, what: str, of: Any) -> None:
        self._happenings.put(functools.partial(self._take, group, what, of))

    def _take(self, group: ReplicaGroup, what: str, of: Any) -> None:
        if group.state is GroupState.OVER:
            return
        seat = next((one for one in self._seats.values() if group in (one.group, one.successor)), None)
        if what == "prepared":
            group.state = GroupState.READY
        if seat is None:
            self._take_of_spare(group, what, of)
        elif group is seat.successor:
            self._take_of_successor(seat, group, what, of)
        elif what == "prepared":
            self._ready(seat)
        elif what == "reported":
            self._take_report(seat, group, of)
        elif what == "ended":
            self._take_end(seat, group, of)
        elif what == "silent":
            if of >= self._job.silence:
                self._lose(seat, f"its processes have not answered for {of:.1f} s", hung=True)
        else:
            reason = f"process {group.pids[of] if group.pids else of} is gone" if what == "lost" else of
            self._lose(seat, reason)

    def _take_of_spare(self, group: ReplicaGroup, what: str, of: Any) -> None:
        if what in ("lost", "failed"):
            self._spares.remove(group)
            group.stop("a spare was lost")
            self._events.record("spare_lost", host=group.host, pids=group.pids)

    def _take_report(self, seat: Seat, group: ReplicaGroup, report: TrainerReport) -> None:
        before, group.report, seat.last = group.report, report, report
        if report.checkpoint_error is not None and report.checkpoint_error != before.checkpoint_error:
            self._events.record("checkpoint_failed", seat.replica, step=report.step, reason=report.checkpoint_error)
        if report.checkpoint_step is not None and report.checkpoint_step != before.checkpoint_step:
            self._events.record("checkpoint_written", seat.replica, step=report.checkpoint_step)
        if before.first_step_at is None and report.first_step_at is not None:
            self._has_begun(seat, group, report)
        if report.first_step_at is not None:
            seat.retries.well(report.step - report.restored_step)

    def _has_begun(self, seat: Seat, group: ReplicaGroup, report: TrainerReport) -> None:
        seconds = None if seat.lost_at is None else round((report.first_step_at or 0.0) - seat.lost_at, 3)
        seat.lost_at = None
        self._events.record(
            "group_restored" if seconds is not None else "group_trains",
            seat.replica,
            host=group.host,
            pids=group.pids,
            restored=report.restored,
            step=report.restored_step,
            seconds=seconds,
        )

    def _take_end(self, seat: Seat, group: ReplicaGroup, report: TrainerReport) -> None:
        if report.ending is Ending.FAILED:
            if "NoPeers" in (report.error or ""):
                # They were lost since it was told to begin. Its own processes are well.
                group.rest()
                self._ready(seat)
                return
            seat.last = report
            self._lose(seat, (report.error or "").strip().rpartition("\n")[2])
            return
        self._take_report(seat, group, report)
        self._moved_at.pop(group, None)
        group.stop("its training has ended")
        seat.group = None
        if report.ending is Ending.LEFT:
            self._has_left(seat)
        else:
            seat.ending = report.ending
            if report.ending is Ending.STOPPED:
                self._events.record("group_stopped", seat.replica, step=report.step)

    def _lighthouse_moved(self) -> None:
        for seat in self._training():
            if seat.group is not None:
                seat.group.move(self._support.lighthouse)

    def _respawn_wanted(self, replica: str, reason: str) -> None:
        self._on_this_thread(functools.partial(self._respawn, replica, reason))

    def _respawn(self, replica: str, reason: str) -> None:
        """Move a group whose device has failed."""
        for seat in self._training():
            if seat.replica == replica and seat.successor is None and not seat.told_to_leave:
                self._move(seat, f"moved: its device has failed: {reason}")

    # -- changes ------------------------------------------------------------------------------------------------

    def _register(self, threadlet: Threadlet) -> None:
        @threadlet.handler("groups")
        def set_groups(value: int) -> None:
            self._resize(value)

        @threadlet.handler("drain_host")
        def drain_host(value: int) -> None:
            self._drain(value)

        @threadlet.handler("undrain_host")
        def undrain_host(value: int) -> None:
            self._draining.discard(value)

    def _resize(self, groups: int) -> None:
        if groups < 1:
            raise WrongArguments(f"a job has 1 group at least, not {groups}; `loom stop` ends it")
        seats = sorted((seat for seat in self._seats.values() if not seat.over), key=lambda seat: seat.number)
        staying = [seat for seat in seats if not seat.told_to_leave]
        for seat in reversed(staying[groups:]):
            self._tell_to_leave(seat, "removed: the job is to be smaller")
        for _ in range(groups - len(staying)):
            number = next(one for one in itertools.count() if one not in self._seats or self._seats[one].over)
            seat = self._add_seat(number)
            self._events.record("group_added", seat.replica)

    def _tell_to_leave(self, seat: Seat, why: str) -> None:
        seat.told_to_leave = why
        if seat.group is not None and seat.group.state is GroupState.TRAINING:
            seat.group.leave()
        else:
            if seat.group is not None:
                seat.group.stop(why)
                seat.group = None
            self._has_left(seat)

    def _has_left(self, seat: Seat) -> None:
        why, seat.told_to_leave = seat.told_to_leave, ""
        if not why.startswith("moved"):
            seat.ending = Ending.LEFT
            self._events.record("group_removed", seat.replica, step=seat.last.step, reason=why)
            return
        seat.group, seat.successor = seat.successor, None
        self._events.record("group_moved", seat.replica, reason=why, host=seat.group.host if seat.group else None)
        if seat.group is None:
            seat.due = time.monotonic()
        elif seat.group.state is GroupState.READY:
            self._ready(seat)

    def _drain(self, host: int) -> None:
        if host not in self._session.hosts():
            raise WrongArguments(f"there is no host {host}; there are {self._session.hosts()}")
        self._draining.add(host)
        if not self._hosts():
            self._draining.discard(host)
            raise WrongArguments(f"host {host} is the last that groups can be on")
        there = [seat for seat in self._training() if seat.group is not None and seat.group.host == host]
        if self._job.checkpoints is None and there and len(self._training()) == 1:
            self._draining.discard(host)
            raise WrongArguments(
                f"{there[0].replica} is the only group, and nobody could give its state to another: add a group "
                "first (groups=2), or give the job a folder for checkpoints"
            )
        for spare in [spare for spare in self._spares if spare.host == host]:
            self._spares.remove(spare)
            spare.stop(f"host {host} is drained")
        for seat in list(self._seats.values()):
            if seat.successor is not None and seat.successor.host == host:
                seat.successor.stop(f"host {host} is drained")
                seat.successor = self._spawn(seat.replica)
            elif not (seat.over or seat.group is None or seat.group.host != host or seat.successor):
                self._move(seat, f"moved: host {host} is drained")

    def _move(self, seat: Seat, why: str) -> None:
        """Have a group elsewhere take the seat; the one that has it trains until that is ready."""
        left = None if seat.group is None else seat.group.host
        ready = [spare for spare in self._spares if spare.state is GroupState.READY and spare.host != left]
        if ready:
            self._spares.remove(ready[0])
        seat.successor = ready[0] if ready else self._spawn(seat.replica, rather_not=left)
        seat.moving = why

    def _move_on(self, seat: Seat) -> None:
        """Have a group leave whose successor is ready, if its state does not leave with it."""
        successor = seat.successor
        if successor is None or successor.state is not GroupState.READY or seat.told_to_leave:
            return
        others = [
            one for one in self._seats.values() if one is not seat and one.has_state and not one.told_to_leave
        ]
        if others or (self._job.checkpoints is not None and len(self._training()) == 1):
            self._tell_to_leave(seat, seat.moving)

    def _take_of_successor(self, seat: Seat, group: ReplicaGroup, what: str, of: Any) -> None:
        if what in ("lost", "failed"):
            group.stop("it was lost before it began")
            seat.successor = self._spawn(seat.replica, rather_not=group.host)
