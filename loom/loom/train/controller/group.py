"""`ReplicaGroup`: a proc mesh whose members form one process group and train one replica of a model."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any

from loom.driver_api import Session
from loom.errors import because
from loom.process.threads import start_thread
from loom.train.settings import Ending, Member, TrainerReport
from loom.train.spec import Assignment, JobSpec

_log = logging.getLogger("loom")

REPORT_EVERY = 0.25  # seconds between two reports of a training group

_numbers = itertools.count()


class GroupState(str, Enum):
    """The state of a group."""

    PREPARING = "preparing"  # the group starts and imports
    READY = "ready"  # the group can begin to train at once
    TRAINING = "training"
    OVER = "over"  # the group was stopped, or is lost


class ReplicaGroup:
    """The processes of one replica, on one host.

    The group's own threads wait for the processes, record their findings, and call ``changed``. The controller's
    thread decides.
    """

    def __init__(
        self,
        session: Session,
        job: JobSpec,
        name: str,
        host: int,
        changed: Callable[[], object],
        devices: tuple[str, ...] = (),
    ) -> None:
        self.number = next(_numbers)
        self.host = host
        self.devices = devices
        """The uuids of the group's own GPUs; empty if the job does not use GPUs."""
        self.members: list[Member] = []
        """The group's processes; empty until they have imported everything."""
        self.replica = ""
        """Name of the replica that the group trains; empty if it trains none."""
        self.report = TrainerReport()
        """The newest report of the first member."""
        self.ended: TrainerReport | None = None
        """The last report of a training that has ended: that of a failed member, or else of the first one."""
        self.failure = ""
        """Why the group is unusable; empty if it is usable."""
        self.silent = 0.0
        """Seconds in which the processes have not answered."""
        self._patience = job.silence
        self._changed = changed
        self._over = threading.Event()
        self._training_ended = threading.Event()
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}
        self.procs = session.spawn_procs(name, host, {"gpus": job.members}, self._process_gone, environment)
        self.trainers = self.procs.mesh.spawn("trainers", job.trainer, *job.args, **job.kwargs)
        """The Monarch actor mesh."""
        self._in_background(self._prepare)

    @property
    def state(self) -> GroupState:
        # The state is derived, so that a thread that finishes late cannot revive a stopped group.
        if self._over.is_set():
            return GroupState.OVER
        if self.replica:
            return GroupState.TRAINING
        return GroupState.READY if self.members else GroupState.PREPARING

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self.members]

    @property
    def store(self) -> tuple[str, int]:
        """The address on which the group's store listens."""
        return self.members[0].store

    def begin(self, assignment: Assignment) -> None:
        """Start to train. Only in `GroupState.READY`."""
        assert self.state is GroupState.READY, self.state
        self.replica = assignment.replica
        self.report, self.ended, self.silent = TrainerReport(), None, 0.0
        # Each training has an event of its own: a thread of the training before may still wait for the old one.
        self._training_ended = threading.Event()
        training = self.trainers.train.call(assignment)
        self._in_background(self._await_end, training, self._training_ended)
        self._in_background(self._ask_for_reports, self._training_ended)

    def rest(self) -> None:
        """Note that the training ended and another can begin."""
        self.replica, self.ended = "", None

    def leave(self) -> None:
        """End the training at the next step boundary."""
        self._in_background(self._call, self.trainers.leave)

    def move(self, lighthouse: str, behind: bool) -> None:
        """Move the group to another lighthouse; if ``behind``, it takes over the state of the groups there."""
        self._in_background(self._call, self.trainers.move, lighthouse, behind)

    def break_off(self) -> None:
        """Let the group wait no longer for the other groups in this step, one of which is lost."""
        self._in_background(self._call, self.trainers.break_off)

    def stop(self, reason: str) -> None:
        self._over.set()
        self._training_ended.set()
        self.procs.stop(reason)

    # The following methods run on other threads.

    def _in_background(self, work: Callable[..., None], *args: Any) -> None:
        # Each call has a thread of its own, because a call to processes that hang returns late or never.
        start_thread(f"group {self.number} {work.__name__}", work, *args)

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason  # the first failure is the cause
        self._changed()

    def _process_gone(self, rank: int) -> None:
        self._fail(f"process {self.pids[rank] if self.members else rank} is gone")

    def _prepare(self) -> None:
        try:
            self.members = list(self.trainers.prepare.call().get().values())
        except Exception as error:  # noqa: BLE001 - the job tries again elsewhere
            self._fail(because("it could not be prepared", error))
        else:
            self._changed()

    def _await_end(self, training: Any, training_ended: threading.Event) -> None:
        try:
            reports: list[TrainerReport] = list(training.get().values())
        except Exception as error:  # noqa: BLE001 - its processes are gone; another thread may report it first
            training_ended.set()
            self._fail(because("its processes do not answer", error))
            return
        training_ended.set()
        failed = [report for report in reports if report.ending in (Ending.FAILED, Ending.REFUSED, Ending.NO_PEERS)]
        self.ended = (failed or reports)[0]
        self._changed()

    def _ask_for_reports(self, training_ended: threading.Event) -> None:
        while not training_ended.wait(REPORT_EVERY):
            try:
                reports = list(self.trainers.report.call().get(timeout=self._patience).values())
            except TimeoutError:
                self.silent += self._patience
            except Exception as error:  # noqa: BLE001 - its processes are gone; another thread may report it first
                _log.debug("group %s does not answer: %s", self.number, error)
                return
            else:
                if training_ended.is_set():
                    return
                self.report, self.silent = reports[0], 0.0
            self._changed()

    def _call(self, endpoint: Any, *args: Any) -> None:
        try:
            endpoint.call(*args).get(timeout=self._patience)
        except Exception as error:  # noqa: BLE001 - if its processes are gone, another thread reports it
            _log.info("group %s did not take a message: %s", self.number, error)
