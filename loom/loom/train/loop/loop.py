"""`TrainingLoop`: the training loop of a process of a replica group, in a thread of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
import traceback
from collections.abc import Mapping

import torch

from loom.branches.branch import FOLDER_KEY, become
from loom.errors import WrongArguments
from loom.threadlet import Threadlet
from loom.train.checkpoints.store import CheckpointStore, PendingCheckpoint
from loom.train.loop.agreement import AgreedConfig
from loom.train.loop.averaging import LocalSteps, NoPeers, SharedSteps, StepClock, StepExchange, StepStrategy
from loom.train.loop.membership import Membership, process_ends
from loom.train.loop.training_state import ParameterMean, TrainingState, hash_of
from loom.train.model import TrainerModel
from loom.train.settings import Averaging, Ending, Restore, TrainerReport
from loom.train.spec import Assignment


class Checkpointing:
    """The checkpoints of one process. The first process of a group writes them; all take part."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        folder, keep = state.job.checkpoints, state.job.keep_checkpoints
        self._store = None if folder is None else CheckpointStore(folder, keep=keep)
        self._saved_step: int | None = None  # whether written yet or not; the same in the whole group
        self._pending: PendingCheckpoint | None = None

    def restore(self) -> None:
        """Continue from the newest whole checkpoint, if there is one."""
        found = None if self._store is None else self._store.newest()
        if found is None:
            return
        state = found.load(self._state.place)
        report = self._state.report
        if found.foreign:
            self._state.load_weights(state)
            report.restored = f"the weights of {found.path.name}, which another program has written"
            return
        self._state.load(state, of_whole=True)
        passed = "".join(f"; passed over {one.path.name}: {one.reason}" for one in found.skipped)
        report.restored = f"checkpoint {found.path.name}{passed}"
        report.restored_step = found.step

    def save(self) -> None:
        """Save the state, which is written in the background. All processes of the group have to call this."""
        self._take_note()
        if self._store is None:
            return
        self._saved_step = step = self._state.report.step
        if self._state.rank == 0 or self._state.is_shared:
            self._pending = self._store.save(self._state.save(torch.Tensor.detach), step)

    def save_and_wait(self) -> None:
        """Save the state unless this step was saved, and wait until it is written or has failed."""
        if self._saved_step != self._state.report.step:
            self.save()
        if self._pending is not None:
            with contextlib.suppress(OSError):  # the report has it
                self._pending.wait()
            self._take_note()

    def _take_note(self) -> None:
        """Report the outcome of the last checkpoint, if it is known."""
        if self._pending is None or not self._pending.done:
            return
        error, report = self._pending.error, self._state.report
        report.checkpoint_error = None if error is None else str(error)
        if error is None:
            report.checkpoint_step = self._pending.step
        self._pending = None


_log = logging.getLogger("loom")

KEPT_HASHES = 200  # the newest hashes of the parameters that a report keeps


class _Leave(BaseException):
    """Raised in the wait for other groups if the process has to end its training."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending)
        self.ending = ending


class TrainingLoop:
    """The training of a model together with other groups, by the process of a rank in its group."""

    def __init__(self, trainer: TrainerModel, assignment: Assignment, rank: int) -> None:
        self._trainer = trainer
        self._assignment = assignment
        self._rank = rank
        self._leaving = threading.Event()
        job = assignment.job
        self._config = AgreedConfig(job.config, job.averaging, trainer.optimizers)
        self._report = TrainerReport()
        self._checkpoints: Checkpointing | None = None
        self._membership: Membership | None = None
        self._threadlet: Threadlet | None = None

    # Any thread may call the following methods.

    def report(self) -> TrainerReport:
        # Copy the dicts, each in one atomic operation: the training thread goes on writing to the originals.
        report = self._report
        paused = self._threadlet is not None and self._threadlet.paused
        return dataclasses.replace(report, paused=paused, hashes=dict(report.hashes), metrics=dict(report.metrics))

    def leave(self) -> None:
        self._leaving.set()

    def move(self, lighthouse: str, behind: bool) -> None:
        if self._membership is not None:
            self._membership.move(lighthouse, behind)

    def break_off(self) -> None:
        if self._membership is not None:
            self._membership.break_off()

    # The following methods run in the training thread.

    def attend(self) -> None:
        """Apply commands in the middle of a step, while its loss waits, and end the training if it has to end."""
        threadlet, checkpoints, membership = self._threadlet, self._checkpoints, self._membership
        if threadlet is None or checkpoints is None or membership is None:
            return
        threadlet.check_and_apply_updates()
        # Only the first member of a group is told to stop: the others would go on to wait for it.
        if self._wanted_end() is Ending.STOPPED and self._assignment.job.members == 1:
            if membership.place[0] == 0:
                checkpoints.save_and_wait()
            raise _Leave(Ending.STOPPED)
        self._check_leave()

    def run(self) -> TrainerReport:
        """Train until the last step, or until told to end. The report has any exception that was raised."""
        report = self._report
        try:
            report.ending = self._train()
        except _Leave as leave:
            report.ending = leave.ending
        except NoPeers as error:
            report.ending, report.error = Ending.NO_PEERS, str(error)
        except (WrongArguments, torch.OutOfMemoryError) as error:
            # Once it has made a step, its arguments were good.
            report.ending = Ending.REFUSED if report.first_step_at is None else Ending.FAILED
            reason = f"{self._trainer.device} is too small: " if isinstance(error, torch.OutOfMemoryError) else ""
            report.error = f"{type(error).__name__}: {reason}{error}"
        except Exception:  # noqa: BLE001 - the job decides what follows
            report.ending, report.error = Ending.FAILED, traceback.format_exc(limit=-8)
            if not process_ends():
                _log.exception("%s failed", self._assignment.replica)
        finally:
            if self._membership is not None:
                self._membership.leave()
        return self.report()

    def _train(self) -> Ending:
        assignment, report, steps = self._assignment, self._report, self._assignment.job.steps
        state = TrainingState(self._trainer, assignment, self._rank, self._config, report)
        branch = assignment.job.branch
        if branch is not None:
            become(branch)
        self._checkpoints = checkpoints = Checkpointing(state)
        if assignment.restore is Restore.CHECKPOINT:
            checkpoints.restore()
            if branch is not None and report.restored_step < branch.step:
                raise WrongArguments(f"the branch begins with step {branch.step}, whose checkpoint is not whole")
        if branch is not None and (self._rank > 0 or report.restored_step != branch.step):
            become(branch.without_values())  # the first process of a group sets them, in the state that lacks them
        self._membership = membership = Membership(state, self._check_leave)
        with self._new_threadlet(membership) as threadlet:
            self._threadlet = threadlet
            clock = StepClock(threadlet)
            exchange = StepExchange(state, membership, clock, self._wanted_end)
            strategy = _strategy(state, exchange, clock)
            strategy.begin()
            while report.step < steps:
                with threadlet.step(report.step, max_step=steps) as step:
                    strategy.advance(step)
                    self._after_step(state, strategy)
                    if _is_due(report.step, assignment.job.checkpoint_every) and exchange.is_first:
                        with clock.saving():
                            checkpoints.save()
                    step.number = report.step
                    step.metrics.update(self._published(clock))
                if (end := exchange.agreed_end) is not None:
                    # Another group has the state, unless the job ends before its last step. On an eviction the
                    # other group may be evicted too.
                    if exchange.is_first and (end is not Ending.LEFT or report.participants == 1):
                        with clock.saving():
                            checkpoints.save_and_wait()
                    return end
            strategy.finish()
            report.metrics.update(state.evaluate())
            exchange.say_farewell()
            self._note_hash(state)
            if exchange.is_first:
                with clock.saving():
                    checkpoints.save_and_wait()
            threadlet.publish_status(report.step, metrics=self._published(clock))
        return Ending.FINISHED

    def _after_step(self, state: TrainingState, strategy: StepStrategy) -> None:
        job, report = state.job, self._report
        if report.first_step_at is None:
            report.first_step_at = time.time()
        report.metrics.pop("params_hash", None)
        report.metrics.update(self._trainer.stepped(state.model, report.step))
        if _is_due(report.step, job.hash_every) and strategy.groups_agree:
            self._note_hash(state)
        if _is_due(report.step, job.evaluate_every):
            report.metrics.update(state.evaluate())

    def _note_hash(self, state: TrainingState) -> None:
        hashes, found = self._report.hashes, hash_of(state.model)
        hashes[self._report.step] = found
        while len(hashes) > KEPT_HASHES:
            del hashes[next(iter(hashes))]
        self._report.metrics["params_hash"] = float(int(found[:12], 16))  # as many digits as a float holds

    def _published(self, clock: StepClock) -> dict[str, float]:
        report = self._report
        counts = {"participants": report.participants, "discarded": report.discarded, "skipped": report.skipped}
        return {**report.metrics, **clock.collect(), **counts}

    def _wanted_end(self) -> Ending | None:
        threadlet = self._threadlet
        if threadlet is not None and threadlet.evicted:
            return Ending.EVICTED
        if self._leaving.is_set():
            return Ending.LEFT
        return Ending.STOPPED if threadlet is not None and threadlet.should_stop else None

    def _check_leave(self) -> None:
        """Raise `_Leave` if there is no point in waiting for other groups."""
        end = self._wanted_end()
        if end is Ending.EVICTED and self._assignment.job.members == 1 and self._checkpoints is not None:
            # No other group may have this state. The members of a group save together, which they cannot here.
            self._checkpoints.save_and_wait()
        if end in (Ending.LEFT, Ending.EVICTED):
            raise _Leave(end)

    def _new_threadlet(self, membership: Membership) -> Threadlet:
        """Return the threadlet of this process; only the first process of a group takes changes."""
        replica, job = self._assignment.replica, self._assignment.job
        if self._rank > 0:
            name, group = f"{replica}.{self._rank}", f"{job.name}.members"
            threadlet = Threadlet(
                name,
                group=group,
                injectable=job.injectable,
                respawns=True,
                cohort=False,
                run=self._assignment.run,
                parent=job.parent,
            )
        else:
            config = dataclasses.asdict(job.config)
            if job.checkpoints is not None:
                config[FOLDER_KEY] = os.path.abspath(job.checkpoints)
            threadlet = Threadlet(
                replica,
                group=job.name,
                config=config,
                injectable=job.injectable,
                respawns=True,
                cohort=False,
                run=self._assignment.run,
                parent=job.parent,
            )
            self._config.register(threadlet)

        @threadlet.on_device_change
        def leave_to_the_job(device: str, usable: bool) -> None:
            """Accept the change: the job's controller moves the group."""

        @threadlet.on_device_failure
        def leave_the_group_to_the_job(device: str, reason: str) -> None:
            """Accept the news: the job's controller does what the policy of the group says."""

        @threadlet.on_fault("pg_abort")
        def abort_groups(params: Mapping[str, object]) -> None:
            membership.abort()

        return threadlet


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _strategy(state: TrainingState, exchange: StepExchange, clock: StepClock) -> StepStrategy:
    if state.job.averaging is Averaging.GRADIENTS:
        return SharedSteps(state, exchange, clock)
    return LocalSteps(state, exchange, clock, state.outer or ParameterMean(state.parameters))
