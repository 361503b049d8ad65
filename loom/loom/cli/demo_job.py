"""The part of the demo that runs on the laptop: a training job that loses a process and recovers.

`DigitsJob` holds only proxies. It tells what happens as a series of events, which `loom.cli.demo_display` shows
and `loom.cli.demo_summary` adds up.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from loom.errors import ActorError, SupervisionError, WaitTimeout, WeaverUnavailable

LEARNING_RATES = (0.1, 0.02)
"""The learning rate of the first and of the second half of the steps."""

CALLS_PER_CHECKPOINT = 5

DEATH_SECONDS = 30.0
"""How long it may take until the weaver knows that a process was killed."""

STOP_SECONDS = 60.0
"""How long the rest of a broken mesh may take to end. Monarch gives a busy process about 4 seconds."""


@dataclass(frozen=True)
class Started:
    """All processes have joined the group; it took ``seconds``."""

    pids: list[int]
    seconds: float


@dataclass(frozen=True)
class Progress:
    """One call of ``train`` has returned.

    ``loss`` is the mean over all ranks, ``accuracy`` that on the test digits, ``call_ms`` the round trip of
    a call to one actor that does nothing.
    """

    step: int
    loss: float
    accuracy: float
    samples_per_second: float
    call_ms: float


@dataclass(frozen=True)
class LearningRateChanged:
    step: int
    before: float
    after: float


@dataclass(frozen=True)
class CheckpointSaved:
    step: int


@dataclass(frozen=True)
class ProcessKilled:
    """SIGKILL was injected into one of its processes, as ``loom inject sigkill`` does."""

    step: int
    rank: int
    pid: int


@dataclass(frozen=True)
class FailureSeen:
    """The call that was under way raised ``error``, ``seconds`` after the kill."""

    step: int
    error: ActorError | SupervisionError
    seconds: float


@dataclass(frozen=True)
class Recovered:
    """New processes go on from the checkpoint of ``step``, ``seconds`` after the failure was seen."""

    step: int
    lost_steps: int
    pids: list[int]
    seconds: float


Event = Started | Progress | LearningRateChanged | CheckpointSaved | ProcessKilled | FailureSeen | Recovered


@dataclass
class DigitsJob:
    """Train on ``hosts`` x ``procs`` processes for ``steps`` steps; with ``failure``, lose one and recover.

    ``host_mesh`` and ``weaver`` are those of a job, ``checkpoint`` is a path that every worker can reach.
    """

    host_mesh: Any
    weaver: Any
    checkpoint: Path
    hosts: int = 2
    procs: int = 2
    steps: int = 300
    failure: bool = True

    step: int = field(default=0, init=False)

    @property
    def steps_per_call(self) -> int:
        return max(1, min(10, self.steps // 5))

    def run(self) -> Iterator[Event]:
        """Do all of it; every event comes right after what it tells about."""
        started = perf_counter()
        pids = self._spawn()
        yield Started(pids, perf_counter() - started)
        yield self._save()
        first, second = LEARNING_RATES
        learning_rate, failure_to_come, calls = first, self.failure, 0
        while self.step < self.steps:
            yield self._train()
            calls += 1
            if learning_rate == first and self.step >= self.steps / 2:
                self.trainers.set_learning_rate.call(second).get()
                learning_rate = second
                yield LearningRateChanged(self.step, first, second)
            if calls % CALLS_PER_CHECKPOINT == 0:
                yield self._save()
            if failure_to_come and self.step >= self.steps * 3 / 4:
                failure_to_come = False
                yield from self._lose_a_process()
                yield self._recover(learning_rate)
        self.mesh.stop().get(timeout=STOP_SECONDS)

    def _spawn(self) -> list[int]:
        # Here and not above: it imports Monarch, for which no other command of ``loom`` should have to wait.
        from loom.cli.demo_trainer import DigitsTrainer

        self.mesh = self.host_mesh.spawn_procs(per_host={"gpus": self.procs}, name="trainers")
        self.trainers = self.mesh.spawn("digits", DigitsTrainer, LEARNING_RATES[0])
        self.first = self.trainers.slice(hosts=0, gpus=0)
        rendezvous = self.first.open_store.call_one().get()
        return list(self.trainers.setup.call(rendezvous).get().values())

    def _train(self) -> Progress:
        steps = min(self.steps_per_call, self.steps - self.step)
        results = list(self.trainers.train.call(steps).get().values())
        self.step += steps
        accuracy = self.first.evaluate.call_one().get()
        called = perf_counter()
        self.first.pid.call_one().get()
        call_ms = (perf_counter() - called) * 1000
        samples, seconds = sum(each.samples for each in results), max(each.seconds for each in results)
        return Progress(
            step=self.step,
            loss=statistics.fmean(each.loss for each in results),
            accuracy=accuracy,
            samples_per_second=samples / seconds,
            call_ms=call_ms,
        )

    def _save(self) -> CheckpointSaved:
        return CheckpointSaved(self.first.save.call_one(str(self.checkpoint)).get())

    def _lose_a_process(self) -> Iterator[Event]:
        victim = self.trainers.slice(hosts=self.hosts - 1, gpus=self.procs - 1)
        pid = victim.pid.call_one().get()
        replica = victim.be_watched.call_one(self.weaver.address()).get()
        if replica is None:
            raise WeaverUnavailable(f"process {pid} has not found the weaver: no failure can be injected into it")
        self.weaver.inject("sigkill", replica).get(DEATH_SECONDS)
        killed = perf_counter()
        yield ProcessKilled(self.step, self.hosts * self.procs - 1, pid)
        self._await_death(replica)
        # The others get stuck in this call: they wait for the gradients of a process that is no more.
        stuck = self.trainers.train.call(self.steps_per_call)
        try:
            stuck.get()
        except (ActorError, SupervisionError) as error:
            yield FailureSeen(self.step, error, perf_counter() - killed)
        else:
            raise AssertionError(f"process {pid} is dead, but a call to it was answered")

    def _await_death(self, replica: str) -> None:
        until = perf_counter() + DEATH_SECONDS
        while self.weaver.replicas()[replica].state != "failed":
            if perf_counter() > until:
                raise WaitTimeout(f"{replica} was killed, and the weaver has not noticed it in {DEATH_SECONDS:g} s")
            sleep(0.02)

    def _recover(self, learning_rate: float) -> Recovered:
        started = perf_counter()
        self.mesh.stop().get(timeout=STOP_SECONDS)
        pids = self._spawn()
        before = self.step
        self.step = next(iter(self.trainers.load.call(str(self.checkpoint)).get().values()))
        # The checkpoint may be older than the last change.
        self.trainers.set_learning_rate.call(learning_rate).get()
        return Recovered(self.step, before - self.step, pids, perf_counter() - started)
