"""`TrainingLoop`: what a process of a replica group does step by step, in a thread of its own."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import traceback
from typing import Any

from loom.threadlet import Threadlet
from loom.train.loop.agreed_config import AgreedConfig
from loom.train.loop.averaging import LocalSteps, ParameterMean, SharedSteps, StepStrategy
from loom.train.loop.checkpointing import Checkpointing
from loom.train.loop.exchange import Exchange, NoPeers
from loom.train.loop.gradients import Gradients
from loom.train.loop.membership import Membership
from loom.train.loop.progress import Progress
from loom.train.loop.step_clock import StepClock
from loom.train.loop.training_state import TrainingState
from loom.train.model import TrainerModel
from loom.train.settings import Assignment, Averaging, Ending, Restore, TrainerReport

__all__ = ["TrainingLoop"]

_log = logging.getLogger("loom")


class _Leave(BaseException):
    """Raised in the wait for other groups if the job told the process to leave."""


class TrainingLoop:
    """Trains a model together with other groups.

    Args:
        trainer: has the model and the data.
        assignment: what to do.
        rank: of this process in its group.
    """

    def __init__(self, trainer: TrainerModel, assignment: Assignment, rank: int) -> None:
        self._trainer = trainer
        self._assignment = assignment
        self._rank = rank
        self._leaving = threading.Event()
        self._config = AgreedConfig(assignment.config, assignment.averaging, trainer.optimizers)
        self._progress = Progress()
        self._clock = StepClock()
        self._membership: Membership | None = None
        self._threadlet: Threadlet | None = None

    # Any thread may call these.

    def report(self) -> TrainerReport:
        """Return how far the training is."""
        return self._progress.report(paused=self._threadlet is not None and self._threadlet.paused)

    def leave(self) -> None:
        """End the training at the next step boundary."""
        self._leaving.set()

    def move(self, lighthouse: str) -> None:
        """Go to another lighthouse."""
        if self._membership is not None:
            self._membership.move(lighthouse)

    # The training thread.

    def run(self) -> TrainerReport:
        """Train until the last step, or until told to end. The report has whatever was raised."""
        progress = self._progress
        try:
            progress.ending = self._train()
        except _Leave:
            progress.ending = Ending.LEFT
        except NoPeers as error:
            progress.ending, progress.error = Ending.NO_PEERS, str(error)
        except Exception:  # noqa: BLE001 - the job decides what follows
            progress.ending, progress.error = Ending.FAILED, traceback.format_exc(limit=-8)
            _log.exception("%s failed", self._assignment.replica)
        finally:
            if self._membership is not None:
                self._membership.leave()
        return self.report()

    def _train(self) -> Ending:
        assignment, progress = self._assignment, self._progress
        state = TrainingState(self._trainer, assignment, self._config, progress)
        checkpoints = Checkpointing(assignment, self._rank, state, progress, self._clock)
        if assignment.restore is Restore.CHECKPOINT:
            checkpoints.restore()
        self._membership = membership = Membership(
            assignment, self._rank, state.for_peers, state.take_from_peer, self._check_leave
        )
        membership.step = progress.step
        exchange = Exchange(
            assignment, self._rank, membership, state, self._config, progress, self._clock, self._wanted_end
        )
        strategy = self._strategy(state, exchange)
        with self._new_threadlet(membership) as threadlet:
            self._threadlet = self._clock.threadlet = threadlet
            strategy.begin()
            while progress.step < assignment.steps:
                with threadlet.step(progress.step, max_step=assignment.steps) as step:
                    strategy.advance(step)
                    self._after_step(state, checkpoints, exchange, strategy)
                    step.number = progress.step
                    step.metrics.update(self._published())
                if (end := exchange.agreed_end) is not None:
                    # Somebody else may have the state, unless the job ends before its last step.
                    if exchange.is_first and (end is Ending.STOPPED or progress.participants == 1):
                        checkpoints.save_and_wait()
                    return end
            strategy.finish()
            progress.metrics.update(state.evaluate())
            exchange.say_farewell()
            self._note_hash(state)
            if exchange.is_first:
                checkpoints.save_and_wait()
            threadlet.publish_status(progress.step, metrics=self._published())
        return Ending.FINISHED

    def _strategy(self, state: TrainingState, exchange: Exchange) -> StepStrategy:
        gradients = Gradients(self._trainer, state, self._config, exchange, self._progress)
        if self._assignment.averaging is Averaging.GRADIENTS:
            return SharedSteps(self._assignment.steps, gradients, exchange, self._progress, self._clock)
        outer = state.outer or ParameterMean(state.parameters)
        return LocalSteps(outer, self._config, gradients, exchange, self._progress, self._clock)

    def _after_step(
        self, state: TrainingState, checkpoints: Checkpointing, exchange: Exchange, strategy: StepStrategy
    ) -> None:
        assignment, progress = self._assignment, self._progress
        if progress.first_step_at is None:
            progress.first_step_at = time.time()
        progress.metrics.pop("params_hash", None)
        if _is_due(progress.step, assignment.hash_every) and strategy.groups_agree:
            self._note_hash(state)
        if _is_due(progress.step, assignment.evaluate_every):
            progress.metrics.update(state.evaluate())
        if _is_due(progress.step, assignment.checkpoint_every) and exchange.is_first:
            checkpoints.save()

    def _note_hash(self, state: TrainingState) -> None:
        found = state.hash()
        self._progress.hashes.append((self._progress.step, found))
        self._progress.metrics["params_hash"] = float(int(found[:12], 16))  # as much of it as a number holds

    def _published(self) -> dict[str, float]:
        progress = self._progress
        counts = {name: getattr(progress, name) for name in ("participants", "discarded", "skipped")}
        return {**progress.metrics, **self._clock.take(), **counts}

    def _wanted_end(self) -> Ending | None:
        if self._leaving.is_set():
            return Ending.LEFT
        return Ending.STOPPED if self._threadlet is not None and self._threadlet.should_stop else None

    def _check_leave(self) -> None:
        if self._leaving.is_set():
            raise _Leave

    def _new_threadlet(self, membership: Membership) -> Threadlet:
        """Return the threadlet of this process; only the first of a group can be told of changes."""
        assignment = self._assignment
        if self._rank > 0:
            name, group = f"{assignment.replica}.{self._rank}", f"{assignment.job}.members"
            threadlet = Threadlet(name, group=group, injectable=assignment.injectable)
        else:
            threadlet = Threadlet(
                assignment.replica,
                group=assignment.job,
                config=dataclasses.asdict(assignment.config),
                injectable=assignment.injectable,
            )
            self._config.register(threadlet)

        @threadlet.on_fault("pg_abort")
        def abort_groups(params: dict[str, Any]) -> None:
            membership.abort()

        return threadlet


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
