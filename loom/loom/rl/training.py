"""`Training`: the trainers of a run, as a job of `loom.train` whose controller runs in a thread of this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from loom.driver_api import Session
from loom.errors import TrainingFailed
from loom.rl.generators.interruptible_calls import LOOK_EVERY, begin
from loom.rl.settings import TrainerRun, Trainers, Weights
from loom.train.checkpoints.files import numbered
from loom.train.checkpoints.store import CheckpointStore
from loom.train.controller.controller import Controller
from loom.train.controller.summaries import JobSummary
from loom.train.spec import JobSpec

CHECKPOINTS = "checkpoints"
NAME = "trainer"
"""The name of the job: ``trainer_0``, ``trainer_1``, … are its replicas."""
CLOSE_TIMEOUT = 30.0
"""Seconds in which the trainers' processes are told to end."""
ANSWER_TIMEOUT = 1.0
"""Seconds that a trainer waits for newer weights before it answers that there are none."""


def restored_step(folder: Path) -> int:
    """Return the step from which trainers would go on in a run's folder."""
    checkpoints = folder / CHECKPOINTS
    found = CheckpointStore(checkpoints).newest() if checkpoints.is_dir() else None
    return 0 if found is None else found.step


class Training:
    """The trainers of a run. Only one thread uses it."""

    def __init__(self, session: Session, spec: Trainers, run: TrainerRun) -> None:
        from loom.rl.trainer import Trainer

        self._run = run
        self._checkpoints = Path(run.folder) / CHECKPOINTS
        self._weights = Path(run.folder) / "weights"
        self._job = JobSpec(
            **{
                "name": NAME,
                "trainer": spec.actor or Trainer,
                "args": (spec.make_model, spec.tokenizer, run),
                "groups": spec.groups,
                "members": spec.members,
                "steps": run.steps,
                "config": spec.config,
                "checkpoints": str(self._checkpoints),
                "checkpoint_every": spec.checkpoint_every,
                "evaluate_every": 0,
                "hash_every": 0,
                **spec.job,
            }
        )
        self._controller = Controller(self._job, session)
        self._ended: Future[JobSummary] = begin(self._controller.run)

    def oldest_step(self) -> int:
        """Return the oldest step from which the trainers may go on if all of them are lost."""
        found = numbered(self._checkpoints) if self._checkpoints.is_dir() else []
        # The newest ones may turn out to be broken.
        return min(step for _, step, _ in found) if len(found) >= self._job.keep_checkpoints else 0

    def metrics(self) -> dict[str, float]:
        """Return the newest metrics of the trainer with the most steps."""
        reports = [group.report for group in self._controller.status().groups]
        newest = max(reports, key=lambda report: report.step, default=None)
        return {} if newest is None else dict(newest.metrics)

    def ranks(self) -> int:
        """Return the number of processes that are to train."""
        return self._controller.wanted * self._job.members

    def running(self) -> int:
        """Return the number of processes that train."""
        return len(self._controller.trainers()) * self._job.members

    def await_weights(self, step: int) -> int:
        """Wait until there are weights of a step at least; return their step.

        Raises:
            TrainingFailed: no trainer is left, or they have ended before that step.
        """
        while (found := self._look_for_weights(step)) is None:
            if self._ended.done():
                self._ended.result()
                if (found := self._look_for_weights(step)) is None:
                    raise TrainingFailed(f"the trainers have ended before step {step}: they were told to stop")
                return found
        return found

    def _look_for_weights(self, step: int) -> int | None:
        """Return the step of weights in the folder, or that a trainer has or gets within `ANSWER_TIMEOUT`."""
        from loom.rl.generation import weight_files

        if self._run.weights is Weights.FILES:
            if weight_files.path_of(self._weights, step).is_dir():
                return step
            newest = weight_files.latest(self._weights)
            if newest is not None and newest >= step:
                return newest
        began = time.monotonic()
        found: int | None = self._first(self._trainers(), lambda one: one.await_weights, step, ANSWER_TIMEOUT)
        if found is None:  # none of them writes weights now
            time.sleep(max(0.0, began + LOOK_EVERY - time.monotonic()))
        return found

    def rollouts_written(self) -> None:
        """Wake the trainers that wait for a step's rollouts. Without the message they look again soon."""
        for trainers in self._controller.trainers():
            begin(trainers.rollouts_written.call().get, timeout=ANSWER_TIMEOUT)

    def ask(self, endpoint: Callable[[Any], Any], *args: Any) -> Any:
        """Return the answer of the first trainer that gives one; None if none does."""
        found = (self._first([one], endpoint, *args) for one in self._trainers())
        return next((answer for answer in found if answer is not None), None)

    def _trainers(self) -> list[Any]:
        """Return the groups that train; if there are none, wait a little."""
        found = self._controller.trainers()
        time.sleep(0 if found else LOOK_EVERY)
        return found

    def _first(self, groups: list[Any], endpoint: Callable[[Any], Any], *args: Any) -> Any:
        """Ask each group's first trainer at once; return the first answer that is not None, or None."""
        waiting = {begin(endpoint(one.slice(gpus=0)).call_one(*args).get) for one in groups}
        while waiting and not self._ended.done():
            done, waiting = wait(waiting, LOOK_EVERY, FIRST_COMPLETED)
            for answer in done:
                if answer.exception() is None and answer.result() is not None:
                    return answer.result()
        return None

    def result(self) -> JobSummary:
        """Wait for the end of the trainers; return their summary.

        Raises:
            TrainingFailed: no trainer is left.
        """
        while not self._ended.done():
            _wait(self._ended)
        return self._ended.result()

    def stop(self) -> None:
        """Let the trainers end, and wait for that."""
        self._controller.stop()
        while not self._ended.done():
            _wait(self._ended)

    def close(self) -> None:
        """Stop the trainers at once unless they have ended."""
        if not self._ended.done():
            self._controller.abort()
            wait([self._ended], CLOSE_TIMEOUT)


def _wait(future: Future[Any]) -> None:
    wait([future], LOOK_EVERY)
