"""What a process of a replica group does step by step, in a thread of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import distributed

from loom.errors import WrongArguments
from loom.threadlet import Deferred, Step, Threadlet
from loom.train.checkpoints.store import CheckpointStore, PendingCheckpoint
from loom.train.loop.agreement import Agreement
from loom.train.loop.baseline import UsualTime
from loom.train.loop.membership import Membership
from loom.train.loop.outer import OuterOptimizer
from loom.train.loop.tensors import flatten, hash_of, load_model, load_optimizer, local, plain, unflatten, whole
from loom.train.model import TrainerModel
from loom.train.settings import Assignment, Averaging, Batch, Ending, LiveConfig, Restore, TrainerReport

__all__ = ["TrainingLoop"]

_log = logging.getLogger("loom")

KEPT_HASHES = 200
"""Hashes of the parameters that a process remembers."""

MOST_SKIPPED = 20
"""Steps in a row without a finite gradient, after which the training is given up."""


class _Leave(BaseException):
    """Raised where the job has told the process to leave."""


class NoPeers(Exception):
    """Nobody is there any more who has the state that was to be taken over."""


class NotFinite(Exception):
    """The gradient was not finite in so many steps that it will not become so by itself."""


class TrainingLoop:
    """Trains a model together with other groups.

    Args:
        trainer: has the model and the data.
        assignment: what to do.
        rank: of this process in its group.
        members: processes of the group.
    """

    def __init__(self, trainer: TrainerModel, assignment: Assignment, rank: int, members: int) -> None:
        self._trainer = trainer
        self._told = assignment
        self._rank, self._members = rank, members
        self._leaving = threading.Event()
        self._names = sorted(trainer.optimizers)
        self._agreement = Agreement(_numbers(assignment.config, self._names))
        self._restored = ""
        self._restored_step = 0
        self._first_step_at: float | None = None
        self._participants = 0
        self._applied = self._discarded = self._skipped = self._skipped_now = 0
        self._local_steps = 0
        self._gathered = False
        self._agreed_end: Ending | None = None
        self._hashes: deque[tuple[int, str]] = deque(maxlen=KEPT_HASHES)
        self._changes: list[tuple[int, str, Any]] = []
        self._metrics: dict[str, float] = {}
        self._usual_gathering, self._usual_averaging = UsualTime(), UsualTime()
        self._seconds = {"compute_s": 0.0, "wait_s": 0.0, "lost_s": 0.0, "checkpoint_s": 0.0}
        self._store = None
        if assignment.checkpoints is not None and rank == 0:
            self._store = CheckpointStore(assignment.checkpoints, keep=assignment.keep_checkpoints)
        self._pending: PendingCheckpoint | None = None
        self._checkpoint_step: int | None = None
        self._checkpoint_error: str | None = None
        self._ending: Ending | None = None
        self._error: str | None = None
        self._membership: Membership | None = None
        self._told_by: Threadlet | None = None
        self.step = 0
        """Steps that are applied."""

    # -- what others ask, by any thread -------------------------------------------------------------------------

    def report(self) -> TrainerReport:
        """How far it is."""
        return TrainerReport(
            step=self.step,
            restored=self._restored,
            restored_step=self._restored_step,
            first_step_at=self._first_step_at,
            participants=self._participants,
            discarded=self._discarded,
            skipped=self._skipped,
            applied=self._applied,
            paused=self._told_by is not None and self._told_by.paused,
            hashes=dict(self._hashes.copy()),
            changes=tuple(self._changes),
            metrics=dict(self._metrics),
            checkpoint_step=self._checkpoint_step,
            checkpoint_error=self._checkpoint_error,
            ending=self._ending,
            error=self._error,
        )

    def leave(self) -> None:
        """Have it end at the next step boundary."""
        self._leaving.set()

    def move(self, lighthouse: str) -> None:
        """Have it go to another lighthouse."""
        if self._membership is not None:
            self._membership.move(lighthouse)

    # -- the training -------------------------------------------------------------------------------------------

    def run(self) -> TrainerReport:
        """Train until the last step, or until told to end. Whatever is raised is in the report."""
        import traceback

        try:
            self._ending = self._train()
        except _Leave:
            self._ending = Ending.LEFT
        except NoPeers as error:
            self._ending, self._error = Ending.NO_PEERS, str(error)
        except Exception:  # noqa: BLE001 - the job decides what follows
            self._ending, self._error = Ending.FAILED, traceback.format_exc(limit=-8)
            _log.exception("%s failed", self._told.replica)
        finally:
            if self._membership is not None:
                self._membership.leave()
        return self.report()

    def _train(self) -> Ending:
        told = self._told
        self._build()
        if told.restore is Restore.CHECKPOINT:
            self._load_checkpoint()
        self._membership = Membership(
            told, self._rank, self._members, self._state_for_peers, self._take_from_peer, self._attend
        )
        self._membership.step = self.step
        with self._threadlet() as threadlet:
            self._told_by = threadlet
            if told.averaging is not Averaging.GRADIENTS:
                self._average_parameters()
            while self.step < told.steps:
                with threadlet.step(self.step, max_step=told.steps) as report:
                    self._advance(report)
                    self._after_step()
                    report.number = self.step
                    report.metrics.update(self._published())
                if self._members == 1:
                    self._agreed_end = self._wanted_end()
                if self._agreed_end is not None:
                    self._save_what_would_be_lost()
                    return self._agreed_end
            if self._local_steps:
                self._average_parameters()
            self._say_farewell()
            self._note_hash()
            self._save_checkpoint(wait=True)
            threadlet.publish_status(self.step, metrics=self._published())
        return Ending.FINISHED

    def _wanted_end(self) -> Ending | None:
        if self._leaving.is_set():
            return Ending.LEFT
        return Ending.STOPPED if self._told_by is not None and self._told_by.should_stop else None

    def _attend(self) -> None:
        """While nobody else can be found: leave, if told to."""
        if self._leaving.is_set():
            raise _Leave

    def _build(self) -> None:
        trainer, told = self._trainer, self._told
        torch.manual_seed(trainer.seed)
        model = trainer.build().to(trainer.device)
        if self._members > 1 and told.parallel == "fsdp":
            from torch.distributed.fsdp import fully_shard

            fully_shard(model)
        self._model = model
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        self._optimizer_name = told.config.optimizer
        self._optimizer = self._new_optimizer(told.config.optimizer)
        self._outer = OuterOptimizer(self._parameters) if told.averaging is Averaging.DILOCO else None

    def _new_optimizer(self, name: str) -> torch.optim.Optimizer:
        optimizer = self._trainer.optimizers[name](self._parameters, self._agreement["learning_rate"])
        assert isinstance(optimizer, torch.optim.Optimizer)
        return optimizer

    def _advance(self, report: Step) -> None:
        """Apply one step."""
        if self._told.averaging is Averaging.GRADIENTS:
            self._shared_step(report)
        else:
            self._local_step()

    def _shared_step(self, report: Step) -> None:
        membership = self._here
        while True:
            began, before = time.perf_counter(), dict(self._seconds)
            self._gather()
            if self.step >= self._told.steps:  # taken over from a group that says farewell
                self._gathered = True
                return
            with self._time("compute_s"):
                loss = self._gradient()
                flat = flatten((one.grad for one in self._parameters), [loss])
            with self._waiting(self._usual_averaging):
                self._average_in_group(flat)
                rows = membership.average(flat, self._agreement.row())
                committed = membership.commit()
            if committed:
                break
            self._discarded += 1
            self._seconds = {**before, "lost_s": before["lost_s"] + time.perf_counter() - began}
            report.discard()
        with self._time("compute_s"):
            self._settle(rows)
            self._metrics["loss"] = unflatten(flat, (one.grad for one in self._parameters))[0]
            self._apply()
        self.step += 1

    def _local_step(self) -> None:
        with self._time("compute_s"):
            loss = self._gradient()
            flat = flatten((one.grad for one in self._parameters), [loss])
            self._average_in_group(flat)
            self._metrics["loss"] = unflatten(flat, (one.grad for one in self._parameters))[0]
            self._apply()
        self.step += 1
        self._local_steps += 1
        if self._local_steps >= self._agreement["sync_every"]:
            self._average_parameters()

    def _average_parameters(self) -> None:
        membership = self._here
        while True:
            self._gather()
            with self._waiting(self._usual_averaging):
                flat = flatten(self._outer.progress() if self._outer else self._parameters)
                rows = membership.average(flat, self._agreement.row())
                committed = membership.commit()
            if committed:
                break
            self._discarded += 1
        self._settle(rows)
        self._local_steps = 0
        if self._outer is None:
            unflatten(flat, self._parameters)
        else:
            self._outer.follow(flat)

    @property
    def _here(self) -> Membership:
        assert self._membership is not None
        return self._membership

    def _gather(self) -> None:
        with self._waiting(self._usual_gathering):
            self._here.gather()
        _, self._participants = self._here.place
        if not self._restored:
            if self._told.restore is Restore.PEERS:
                raise NoPeers("no group is left that has the state: it has to come from a checkpoint")
            self._restored = "the beginning"

    def _gradient(self) -> float:
        place, of = self._here.place
        batch = Batch(
            self.step, int(self._agreement["batch_size"]), place * self._members + self._rank, of * self._members
        )
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._trainer.step(self._model, batch)
        loss.backward()
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return float(loss.detach())

    def _average_in_group(self, flat: torch.Tensor) -> None:
        # FSDP2 has averaged the gradients of its shards.
        if self._members > 1 and self._told.parallel == "ddp":
            distributed.all_reduce(flat)
            flat /= self._members

    def _apply(self) -> None:
        """Let the optimizer step, unless the gradient is not finite: all groups see the same one, and agree."""
        finite = torch.stack([local(one.grad).isfinite().all() for one in self._parameters]).all()
        if self._members > 1:
            flag = finite.to(torch.int32)
            distributed.all_reduce(flag, op=distributed.ReduceOp.MIN)
            finite = flag.bool()
        if not finite:
            self._skipped += 1
            self._skipped_now += 1
            if self._skipped_now >= MOST_SKIPPED:
                raise NotFinite(f"the gradient was not finite in {MOST_SKIPPED} steps in a row, up to {self.step}")
            return
        self._skipped_now = 0
        if clip := self._agreement["gradient_clipping"]:
            torch.nn.utils.clip_grad_norm_(self._parameters, clip)
        self._optimizer.step()
        self._applied += 1

    def _settle(self, rows: list[list[float]]) -> None:
        """Take the configuration that all groups take with this step."""
        if self._members > 1:  # only the first is told of changes, and of the end
            end = self._wanted_end()
            said = [0.0 if end is None else 1.0 + list(Ending).index(end)]
            shared = flatten([torch.tensor(rows, dtype=torch.float64)], said)
            distributed.broadcast(shared, src=0)
            *numbers, ending = shared.tolist()
            width = self._agreement.width
            rows = [numbers[start : start + width] for start in range(0, len(numbers), width)]
            self._agreed_end = None if ending == 0 else list(Ending)[int(ending) - 1]
        for key, value in self._agreement.settle(rows, self.step).items():
            self._changes.append((self.step, key, self._names[int(value)] if key == "optimizer" else value))
            if key == "optimizer":
                self._optimizer_name = self._names[int(value)]
                self._optimizer = self._new_optimizer(self._optimizer_name)
            elif key == "learning_rate":
                for group in self._optimizer.param_groups:
                    group["lr"] = value

    def _after_step(self) -> None:
        if self._first_step_at is None:
            self._first_step_at = time.time()
        told = self._told
        self._metrics.pop("params_hash", None)
        if told.hash_every and self.step % told.hash_every == 0 and self._local_steps == 0:
            self._note_hash()
        if told.evaluate_every and self.step % told.evaluate_every == 0:
            self._evaluate()
        if told.checkpoint_every and self.step % told.checkpoint_every == 0 and self._here.place[0] == 0:
            self._save_checkpoint()

    def _evaluate(self) -> None:
        self._model.eval()
        with torch.no_grad():
            self._metrics.update(self._trainer.evaluate(self._model))
        self._model.train()

    def _note_hash(self) -> None:
        found = hash_of(self._model)
        self._hashes.append((self.step, found))
        self._metrics["params_hash"] = float(int(found[:12], 16))  # as much of it as a number holds

    def _published(self) -> dict[str, float]:
        seconds = {key: round(value, 6) for key, value in self._seconds.items()}
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        counts = {"participants": self._participants, "discarded": self._discarded, "skipped": self._skipped}
        return {**self._metrics, **seconds, **counts}

    @contextlib.contextmanager
    def _time(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[what] += time.perf_counter() - began

    @contextlib.contextmanager
    def _waiting(self, usual: UsualTime) -> Iterator[None]:
        """Take time for a wait for the others; what is usual belongs to the step in the weaver's goodput."""
        began = time.perf_counter()
        with self._time("wait_s"), self._spent("waiting", usual.seconds):
            yield
        usual.add(time.perf_counter() - began)

    def _spent(self, reason: str, beyond: float = 0.0) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._told_by is None else self._told_by.spent(reason, beyond)

    def _say_farewell(self) -> None:
        """One more round, in which a group whose last step was discarded takes it over."""
        self._evaluate()
        if not self._gathered:
            self._gather()
        self._here.average(torch.zeros(1), self._agreement.row())
        self._here.commit()

    # -- state --------------------------------------------------------------------------------------------------

    def _state(self, convert: Any) -> dict[str, Any]:
        state = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "optimizer_name": self._optimizer_name,
            "outer": None if self._outer is None else self._outer.state(),
            "step": self.step,
            "config": self._agreement.state(),
            "trainer": self._trainer.save(),
        }
        found: dict[str, Any] = plain(state, convert)
        return found

    def _load_state(self, state: Mapping[str, Any], of_whole: bool) -> None:
        self._agreement.load(state["config"])
        self._optimizer_name = state["optimizer_name"]
        self._optimizer = self._new_optimizer(self._optimizer_name)
        load_model(self._model, state["model"], of_whole)
        load_optimizer(self._optimizer, state["optimizer"], of_whole)
        if self._outer is not None:
            self._outer.load(state["outer"])
        self._trainer.load(state["trainer"])
        self.step = state["step"]
        self._local_steps = 0

    def _state_for_peers(self) -> dict[str, Any]:
        return self._state(local)

    def _take_from_peer(self, state: Mapping[str, Any]) -> None:
        self._load_state(state, of_whole=False)
        if not self._restored:
            if self.step == 0:
                self._restored = "the beginning"
            else:
                self._restored, self._restored_step = f"peers, at step {self.step}", self.step

    def _load_checkpoint(self) -> None:
        assert self._told.checkpoints is not None
        found = CheckpointStore(self._told.checkpoints, keep=self._told.keep_checkpoints).newest()
        if found is None:
            return
        self._load_state(found.load(), of_whole=True)
        passed = "".join(f"; passed over {one.path.name}: {one.reason}" for one in found.skipped)
        self._restored, self._restored_step = f"checkpoint {found.path.name}{passed}", found.step

    def _save_checkpoint(self, wait: bool = False) -> None:
        with self._time("checkpoint_s"), self._spent("checkpoint"):
            self._look_at_checkpoint()
            if self._told.checkpoints is None or (wait and self._checkpoint_step == self.step):
                return
            if wait and self._here.place[0] != 0:
                return
            state = self._state(whole)  # which every member of the group takes part in
            if self._store is not None:
                self._pending = self._store.save(state, self.step)
                if wait:
                    with contextlib.suppress(OSError):
                        self._pending.wait()
                    self._look_at_checkpoint()

    def _save_what_would_be_lost(self) -> None:
        """Where the job ends before its last step, or nobody else has the state."""
        if self._agreed_end is Ending.STOPPED or self._participants == 1:
            self._save_checkpoint(wait=True)

    def _look_at_checkpoint(self) -> None:
        if self._pending is None or not self._pending.done:
            return
        error = self._pending.error
        self._checkpoint_error = None if error is None else str(error)
        if error is None:
            self._checkpoint_step = self._pending.step
        self._pending = None

    # -- the weaver ---------------------------------------------------------------------------------------------

    def _threadlet(self) -> Threadlet:
        told = self._told
        if self._rank > 0:
            name, group = f"{told.replica}.{self._rank}", f"{told.job}.members"
            return self._with_faults(Threadlet(name, group=group, injectable=told.injectable))
        config = dataclasses.asdict(told.config)
        threadlet = self._with_faults(
            Threadlet(told.replica, group=told.job, config=config, injectable=told.injectable)
        )

        @threadlet.handler("learning_rate")
        def set_learning_rate(value: float) -> Deferred:
            return self._propose("learning_rate", value, value > 0, "is larger than 0")

        @threadlet.handler("batch_size")
        def set_batch_size(value: int) -> Deferred:
            return self._propose("batch_size", value, value >= 1, "is 1 at least")

        @threadlet.handler("gradient_clipping")
        def set_gradient_clipping(value: float) -> Deferred:
            return self._propose("gradient_clipping", value, value >= 0, "is 0 (none) or larger")

        @threadlet.handler("sync_every")
        def set_sync_every(value: int) -> Deferred:
            if told.averaging is Averaging.GRADIENTS:
                return self._propose("sync_every", value, value == 1, "is 1: this job averages gradients")
            return self._propose("sync_every", value, value >= 1, "is 1 at least")

        @threadlet.handler("optimizer")
        def set_optimizer(value: str) -> Deferred:
            known = value in self._names
            number = self._names.index(value) if known else -1
            return self._propose("optimizer", number, known, f"is one of {', '.join(self._names)}, not {value}")

        return threadlet

    def _with_faults(self, threadlet: Threadlet) -> Threadlet:
        """Say how a fault is carried out that is about what only this knows."""

        @threadlet.on_fault("pg_abort")
        def abort_groups(params: dict[str, Any]) -> None:
            self._here.abort()

        return threadlet

    def _propose(self, key: str, value: float, allowed: bool, rule: str) -> Deferred:
        if not allowed:
            raise WrongArguments(f"{key} {rule}")
        return self._agreement.propose(key, float(value))


def _numbers(config: LiveConfig, optimizers: list[str]) -> dict[str, float]:
    values = dataclasses.asdict(config)
    values["optimizer"] = optimizers.index(config.optimizer)
    return {key: float(value) for key, value in values.items()}
