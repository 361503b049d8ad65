"""`ReplicaGroup`: a proc mesh whose members form one process group and train one replica of a model."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from loom.beside import Session
from loom.train.settings import Assignment, Ending, Member, TrainerReport
from loom.train.trainer import TrainerActor

__all__ = ["GroupState", "ReplicaGroup"]

_log = logging.getLogger("loom")

REPORT_EVERY = 0.25
"""Seconds between two questions to a group that trains."""

_numbers = itertools.count()


class GroupState(str, Enum):
    """What a group does."""

    PREPARING = "preparing"
    """It starts and imports."""
    READY = "ready"
    """It can begin to train at once."""
    TRAINING = "training"
    OVER = "over"
    """It has been stopped, or is lost."""


class ReplicaGroup:
    """The processes of one replica, on one host.

    What happens to it is told to ``happened``, by other threads: ``prepared``, ``lost`` (and the rank),
    ``reported`` (and a `TrainerReport`), ``silent`` (and for how many seconds), ``ended`` (and the last report),
    ``failed`` (and why).

    Args:
        session: that starts the processes.
        trainer: class of the actors, and their arguments.
        name: of the proc mesh.
        host: number of the host.
        members: how many processes.
        patience: seconds that they have to answer a question.
        happened: told what happens.
    """

    def __init__(
        self,
        session: Session,
        trainer: tuple[type[TrainerActor], tuple[Any, ...], Mapping[str, Any]],
        name: str,
        host: int,
        members: int,
        patience: float,
        happened: Callable[[ReplicaGroup, str, Any], None],
    ) -> None:
        self.number = next(_numbers)
        self.host = host
        self.state = GroupState.PREPARING
        self.members: list[Member] = []
        self.report = TrainerReport()
        """Of the first member, the last one."""
        self.replica = ""
        """What it trains as; empty for a spare."""
        self._patience = patience
        self._happened = happened
        self._over = threading.Event()
        self._told = threading.Event()
        self.procs = session.spawn_procs(name, host, {"gpus": members}, self._gone)
        cls, args, kwargs = trainer
        self.trainers = self.procs.mesh.spawn("trainers", cls, *args, **kwargs)
        """The Monarch actor mesh."""
        self._in_background(self._prepare)

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self.members]

    def begin(self, assignment: Assignment) -> None:
        """Have it train. Only in `GroupState.READY`."""
        assert self.state is GroupState.READY, self.state
        self.state = GroupState.TRAINING
        self.replica = assignment.replica
        self.report = TrainerReport()
        self._told = threading.Event()
        training = self.trainers.train.call(assignment)
        self._in_background(self._await_end, training, self._told)
        self._in_background(self._ask, self._told)

    def rest(self) -> None:
        """Note that its training has ended, and that it can begin another."""
        self.state, self.replica = GroupState.READY, ""

    def leave(self) -> None:
        """Have it end its training at the next step boundary."""
        self._in_background(self._call, self.trainers.leave)

    def move(self, lighthouse: str) -> None:
        """Have it go to another lighthouse."""
        self._in_background(self._call, self.trainers.move, lighthouse)

    def stop(self, reason: str) -> None:
        """End its processes."""
        self.state = GroupState.OVER
        self._over.set()
        self._told.set()
        self.procs.stop(reason)

    @property
    def store(self) -> tuple[str, int]:
        """Where the group's store listens."""
        return self.members[0].store

    # -- by other threads ---------------------------------------------------------------------------------------

    def _in_background(self, work: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=work, args=args, name=f"group {self.number} {work.__name__}", daemon=True).start()

    def _tell(self, what: str, of: Any = None) -> None:
        if not self._over.is_set():
            self._happened(self, what, of)

    def _gone(self, rank: int) -> None:
        self._tell("lost", rank)

    def _prepare(self) -> None:
        try:
            self.members = list(self.trainers.prepare.call().get().values())
        except Exception as error:  # noqa: BLE001 - the job tries again elsewhere
            self._tell("failed", f"it could not be prepared: {error}")
        else:
            self._tell("prepared")

    def _await_end(self, training: Any, told: threading.Event) -> None:
        try:
            reports: list[TrainerReport] = list(training.get().values())
        except Exception as error:  # noqa: BLE001 - its processes are gone, which is told by who notices first
            told.set()
            self._tell("failed", f"its processes do not answer: {error}")
            return
        told.set()
        failed = [report for report in reports if report.ending is Ending.FAILED]
        self._tell("ended", failed[0] if failed else reports[0])

    def _ask(self, told: threading.Event) -> None:
        silent = 0.0
        while not told.wait(REPORT_EVERY):
            try:
                reports = list(self.trainers.report.call().get(timeout=self._patience).values())
            except TimeoutError:
                silent += self._patience
                self._tell("silent", silent)
            except Exception as error:  # noqa: BLE001 - its processes are gone, which is told by who notices first
                _log.debug("group %s does not answer: %s", self.number, error)
                return
            else:
                silent = 0.0
                self._tell("reported", reports[0])

    def _call(self, endpoint: Any, *args: Any) -> None:
        try:
            endpoint.call(*args).get(timeout=self._patience)
        except Exception as error:  # noqa: BLE001 - if it is gone, that is told otherwise
            _log.info("group %s did not take a message: %s", self.number, error)
