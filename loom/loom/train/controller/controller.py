"""`Controller`: the control of a job's groups, in one thread that gets every change as a message."""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from loom.branches.branch import become, own_branch
from loom.control.commands import CommandKind
from loom.control.run_start import CONTROLLERS
from loom.driver_api import Session
from loom.errors import Conflict, OperationCancelled, TrainingFailed, WrongArguments
from loom.process.threads import get_within
from loom.threadlet import Threadlet
from loom.train.controller.group_pool import GroupPool
from loom.train.controller.host_agents import HostAgents
from loom.train.controller.job_events import JobEvents, UsableDevices
from loom.train.controller.lighthouse import Support
from loom.train.controller.replica_slots import ReplicaSlots
from loom.train.controller.summaries import GroupStatus, JobStatus, JobSummary
from loom.train.settings import Ending
from loom.train.spec import JobSpec, run_of

_log = logging.getLogger("loom")

TICK = 0.05  # seconds without a message after which the controller does its periodic work

COMMAND_TIMEOUT = 10.0  # seconds that the weaver has to take a command for the groups

_controllers: dict[str, Controller] = {}


def status(name: str = "train") -> JobStatus:
    """Return the status of a job that runs in this driver: ``job.run(loom.train.status)``.

    Raises:
        WrongArguments: no job of the name runs here.
    """
    found = _controllers.get(name)
    if found is None:
        raise WrongArguments(f"no job {name!r} runs in this driver; running: {', '.join(_controllers) or 'none'}")
    return found.status()


class Controller:
    """The controller of one job in a session."""

    def __init__(self, job: JobSpec, session: Session) -> None:
        self._job = job
        self._session = session
        self._paused = False
        self._published: tuple[int, int, int] | None = None
        self._messages: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """Calls from other threads: the controller's alone changes slots and groups, so they need no lock."""
        self._events = JobEvents(job.name, session, self._respawn, self._use_devices, job.uses_gpus)
        self._agents = HostAgents(session, job, self._messages.put)
        self._pool = GroupPool(
            session, job, self._events, self._agents, lambda: self._messages.put(self._slots.look)
        )
        self._support = Support(session, job, self._messages.put, self._events)
        self._slots = ReplicaSlots(job, self._pool, self._support, self._agents, self._events)
        self._support.moved = self._slots.lighthouse_moved

    def run(self, begun: Future[None] | None = None) -> JobSummary:
        """Run the job. ``begun`` gets its result when the weaver knows the job."""
        job = self._job
        if (branch := own_branch()) is not None:  # this driver's: the groups begin with its values
            become(branch.without_values())
        if job.name in _controllers:
            raise WrongArguments(f"a job {job.name!r} runs in this driver already: give another name")
        _controllers[job.name] = self
        began = time.monotonic()
        try:
            with Threadlet(
                f"{job.name}_job",
                group=f"{job.name}{CONTROLLERS}",
                weaver=self._session.weaver_address(),
                devices=(),
                run=job.start_id or run_of(self._support.key),
                parent=job.parent,
            ) as threadlet:
                self._claim_name(threadlet)
                if begun is not None:
                    begun.set_result(None)
                threadlet.on_branch(self._begin_branch)
                threadlet.handler("groups")(self._slots.resize)
                threadlet.handler("drain_host")(self._slots.drain)
                threadlet.handler("undrain_host")(self._slots.undrain)
                self._support.open()
                for _ in range(max(1, self._pool.capacity()) if job.groups == "auto" else job.groups):
                    self._slots.add()
                self._events.record("job_started", groups=job.groups, steps=job.steps, spares=job.spares)
                self._handle_messages(threadlet)
            return self._summary(time.monotonic() - began)
        finally:
            del _controllers[job.name]
            self._pool.close()
            self._agents.close()
            self._support.close()
            self._events.close()

    def _begin_branch(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a branch of this job beside it, in this session, and wait until the weaver knows it."""
        job = self._job.branched(asked)
        begun: Future[None] = Future()

        def run() -> None:
            try:
                Controller(job, self._session).run(begun)
            except Exception as error:  # noqa: BLE001 - it is said, here or to whoever asked
                if begun.done():
                    _log.exception("job %s failed", job.name)
                else:
                    begun.set_exception(error)

        threading.Thread(target=run, name=f"loom-{job.name}", daemon=True).start()
        begun.result()
        assert job.branch is not None
        return {"name": job.name, "step": job.branch.step}

    def _claim_name(self, threadlet: Threadlet) -> None:
        """Raise `ReplicaTaken` if the user has a living job of this name in another session: they would mix."""
        try:
            threadlet.claim()
        except Conflict as error:
            raise Conflict(
                f"a job {self._job.name!r} of yours runs already: give this one another name, "
                f"or end that one, as with stop({threadlet.replica_id!r}) ({error})",
                code=error.code,
            ) from None

    def status(self) -> JobStatus:
        """Return the job's status. Any thread may call."""
        groups = [slot.group for slot in self._slots.all()]
        return JobStatus(
            name=self._job.name,
            step=self._slots.step,
            groups=tuple(GroupStatus.of(group) for group in groups if group is not None),
            spares=tuple(GroupStatus.of(spare) for spare in list(self._pool.spares)),
            lighthouse=self._support.lighthouse,
            hosts=tuple(self._pool.hosts()),
            events=tuple(self._events.recorded),
        )

    @property
    def wanted(self) -> int:
        """The number of groups that are to train. Any thread may ask."""
        return max(1, len(self._slots.staying()))

    def trainers(self) -> list[Any]:
        """Return the actor meshes of the groups that train, by their replicas. Any thread may call."""
        return [slot.group.trainers for slot in self._slots.training() if slot.group is not None]

    def stop(self) -> None:
        """Let all groups leave at their next step boundary, which ends the job. Any thread may call."""
        self._messages.put(self._slots.stop_all)

    def abort(self) -> None:
        """Stop all processes at once; `run` then raises `OperationCancelled`. Any thread may call."""
        self._messages.put(self._raise_cancelled)

    def _raise_cancelled(self) -> None:
        raise OperationCancelled(f"job {self._job.name!r} was cancelled")

    def _handle_messages(self, threadlet: Threadlet) -> None:
        """Handle the messages of other threads and the periodic work, until the job is over."""
        while not self._slots.are_over:
            try:
                get_within(self._messages, TICK)()  # all messages come before the periodic work
                continue
            except queue.Empty:
                pass
            threadlet.check_and_apply_updates()
            self._pause_groups(threadlet.paused)
            if threadlet.should_stop:
                self._slots.stop_all()
            now = time.monotonic()
            self._slots.tick(now)
            self._support.tick(self._pool.hosts())
            self._slots.follow_drains(self._agents.draining())
            self._slots.fit()
            self._agents.tick([*self._pool.hosts(), *([] if self._support.host is None else [self._support.host])])
            if not threadlet.paused:
                self._publish_progress(threadlet)
        self._publish_progress(threadlet)  # the last steps may have been made since the last periodic work
        self._check_ending()

    def _publish_progress(self, threadlet: Threadlet) -> None:
        """Publish the job's step, groups and spares if they have changed."""
        progress = self._slots.step, len(self._slots.training()), len(self._pool.spares)
        if progress != self._published:
            self._published = progress
            step, groups, spares = progress
            metrics = {"groups": groups, "spares": spares, "failures": self._slots.failures}
            threadlet.publish_status(step, max_step=self._job.steps, metrics=metrics)

    def _pause_groups(self, paused: bool) -> None:
        """Give the groups the pause that the job itself was given, or the end of it: the job makes no steps."""
        if paused != self._paused:
            self._paused = paused
            kind = CommandKind.PAUSE if paused else CommandKind.RESUME
            asked: dict[str, object] = {"kind": kind.value, "target": self._job.name, "params": {}}
            self._session.begin("command", asked, COMMAND_TIMEOUT).add_done_callback(_log_failure)

    def _check_ending(self) -> None:
        slots = self._slots.all()
        if any(slot.ending in (Ending.FINISHED, Ending.STOPPED, Ending.LEFT) for slot in slots):
            return
        self._events.record("job_failed", reason="no group is left, and none may be tried again")
        refused = next((slot.last for slot in slots if slot.last.ending is Ending.REFUSED), None)
        if refused is not None:
            raise TrainingFailed(f"job {self._job.name!r} cannot train, in any attempt: {refused.error}")
        raise TrainingFailed(
            f"job {self._job.name!r} has lost all its groups, each {self._job.retries.attempts} times more "
            f"than it had made steps between, at step {self._slots.step}. "
            f"The last error: {(slots[0].last.error or '').strip() or 'none was reported'}"
        )

    def _summary(self, seconds: float) -> JobSummary:
        slots = self._slots.all()
        finished = [slot for slot in slots if slot.ending is Ending.FINISHED]
        last = (finished or slots)[0].last
        ending = "finished" if finished else "stopped"
        self._events.record("job_finished", ending=ending, step=last.step, seconds=round(seconds, 3))
        return JobSummary(
            name=self._job.name,
            ending=ending,
            steps=last.step,
            seconds=seconds,
            metrics=dict(last.metrics),
            hashes={slot.replica: list(slot.last.hashes.values())[-1] for slot in finished if slot.last.hashes},
            reports={slot.replica: slot.last for slot in slots},
            failures=self._slots.failures,
            events=tuple(self._events.recorded),
        )

    def _use_devices(self, usable: UsableDevices) -> None:
        self._messages.put(lambda: self._pool.use(usable))  # the pool comes after the events

    def _respawn(self, replica: str, reason: str) -> None:
        self._messages.put(functools.partial(self._slots.respawn, replica, reason))


def _log_failure(given: Future[Any]) -> None:
    if not given.cancelled() and (error := given.exception()) is not None:
        _log.warning("the groups were not told to wait, or to go on: %s", error)
