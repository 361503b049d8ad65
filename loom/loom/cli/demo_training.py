"""`DemoTraining`: the demo's use of a `loom.train` job, and its summary.

The laptop watches the job, lowers the learning rate and kills a process. The job does everything else on its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loom.errors import WrongArguments
from loom.train.controller.job_events import JobEvent

if TYPE_CHECKING:
    from loom.train import FaultTolerantJob, JobStatus, JobSummary

LEARNING_RATES = (0.1, 0.02)  # the learning rate of the first and of the second half of the steps
TARGET_ACCURACY = 0.95  # the share of the test digits that the network has to read correctly

NAME = "digits"
BATCH = 32
POLL = 0.1  # seconds between two requests for the job's status
KILL_AFTER = 0.55  # the share of the steps after which a process is killed

SECONDS, SECONDS_WITH_FAILURE = 3.0, 18.0
"""Seconds that the steps take at least: the network is tiny, and a lost process should return before the end."""

ANSWER_SECONDS = 30.0  # seconds that a command may take


@dataclass(frozen=True)
class DemoProgress:
    """The progress of the training; ``call_ms`` is the round trip of a request to the job."""

    step: int
    loss: float
    accuracy: float
    samples_per_second: float
    call_ms: float


@dataclass(frozen=True)
class LearningRateChanged:
    """A change of the replicas' learning rate, from a step on."""

    step: int
    before: float
    after: float


@dataclass(frozen=True)
class ProcessKilled:
    """The injection of SIGKILL into a process, as ``loom inject sigkill`` does it."""

    time: float
    """Seconds since the epoch."""
    step: int
    rank: int
    pid: int


Event = DemoProgress | LearningRateChanged | ProcessKilled | JobEvent

SHOWN = ("group_trains", "checkpoint_written", "group_failed", "group_restored")
"""Kinds of the job's own events that are shown."""


class DemoTraining:
    """A job that loses a process, unless ``failure`` is False, and recovers.

    Every worker has to reach the folder of the checkpoints; each group is one training process.
    """

    def __init__(self, job: Any, checkpoints: Path, groups: int, steps: int = 300, failure: bool = True) -> None:
        self._job = job
        self._weaver = job.weaver
        self._checkpoints = checkpoints
        self._groups, self._steps = groups, steps
        self._kill_pending = failure
        self._rate_pending = True
        self._paused = False
        self._reported = 0  # events of the job that were yielded
        self._row = 0, time.perf_counter()  # step and time of the last `Progress`
        self._call_ms = 0.0

    def run(self) -> Iterator[Event]:
        """Train, and yield each event as soon as it is known."""
        rows_every = max(1, min(10, self._steps // 5))
        run = self._training(rows_every).start(self._job)
        while not run.done():
            time.sleep(POLL)
            asked = time.perf_counter()
            if (status := self._status()) is None:
                continue
            self._call_ms = 1000 * (time.perf_counter() - asked)
            yield from self._new_events(status.events)
            if status.step == 0:
                self._row = 0, time.perf_counter()
            if status.groups and status.step >= self._row[0] + rows_every:
                newest = max((group.report for group in status.groups), key=lambda report: report.step)
                yield from self._progress(status.step, newest.metrics)
            if self._rate_pending and status.step >= self._steps / 2:
                yield from self._lower_the_learning_rate()
            elif self._kill_pending and status.step >= self._steps * KILL_AFTER:
                yield from self._lose_a_process(status)
        summary: JobSummary = run.result()
        yield from self._new_events(summary.events)
        yield from self._progress(summary.steps, summary.metrics)

    def _training(self, rows_every: int) -> FaultTolerantJob:
        from loom.train import LiveConfig, digits  # imports Monarch, which no other command should wait for

        seconds = SECONDS_WITH_FAILURE if self._kill_pending else SECONDS
        return digits.digits_job(
            self._groups,
            self._steps,
            name=NAME,
            pace=max(0.005, seconds / self._steps),
            config=LiveConfig(learning_rate=LEARNING_RATES[0], batch_size=BATCH),
            spares=int(self._kill_pending),
            checkpoints=str(self._checkpoints),
            checkpoint_every=5 * rows_every,
            evaluate_every=rows_every,
            injectable=True,
        )

    def _status(self) -> JobStatus | None:
        from loom.train import status

        try:
            found: JobStatus = self._job.run(status, NAME)
            return found
        except WrongArguments:  # the job has not begun, or is over
            return None

    def _new_events(self, events: Sequence[JobEvent]) -> Iterator[Event]:
        new, self._reported = events[self._reported :], len(events)
        yield from (event for event in new if event.kind in SHOWN)

    def _progress(self, step: int, metrics: Mapping[str, float]) -> Iterator[Event]:
        (before, at), now = self._row, time.perf_counter()
        # A group that has just taken over its state has an accuracy, and no loss yet.
        if step > before and {"loss", "accuracy"} <= metrics.keys():
            self._row = step, now
            speed = (step - before) * BATCH * self._groups / (now - at)
            yield DemoProgress(step, metrics["loss"], metrics["accuracy"], speed, self._call_ms)

    def _lower_the_learning_rate(self) -> Iterator[Event]:
        self._rate_pending = False
        before, after = LEARNING_RATES
        answers = self._weaver.update_config(NAME, learning_rate=after).get(ANSWER_SECONDS).values()
        steps = [answer.step for answer in answers if answer.ok]
        if steps:  # without acknowledgements the training has ended meanwhile
            yield LearningRateChanged(max(steps), before, after)

    def _lose_a_process(self, status: JobStatus) -> Iterator[Event]:
        if not any(spare.state == "ready" for spare in status.spares):
            if not self._paused:
                self._paused = True
                self._weaver.pause(NAME).get(ANSWER_SECONDS)
            return
        if self._paused:
            self._weaver.resume(NAME).get(ANSWER_SECONDS)
        self._kill_pending = False
        victim = status.groups[-1]
        self._weaver.inject("sigkill", victim.replica).get(ANSWER_SECONDS)
        yield ProcessKilled(time.time(), status.step, len(status.groups) - 1, victim.pids[0])


@dataclass(frozen=True)
class FailureSummary:
    """The cost of the lost process; a duration is None if the others finished before its recovery."""

    step: int
    rank: int
    pid: int
    error: str
    message: str
    noticed_seconds: float
    resumed_from_step: int | None
    lost_steps: int
    recovery_seconds: float | None


@dataclass(frozen=True)
class DemoSummary:
    """The result, as ``--json`` prints it; ``samples_per_second`` and ``call_ms`` are medians."""

    hosts: int
    procs: int
    steps: int
    accuracy: float
    loss: float
    learning_rates: list[float]
    samples_per_second: float
    call_ms: float
    connected_seconds: float
    seconds: float
    failure: FailureSummary | None
    target_accuracy: float = TARGET_ACCURACY


def summarize(
    events: Sequence[Event], hosts: int, procs: int, connected_seconds: float, seconds: float
) -> DemoSummary:
    """Return the summary of all events of a finished training.

    It took ``seconds`` in all, of which ``connected_seconds`` until the cluster was started and connected to.
    """
    progress = [event for event in events if isinstance(event, DemoProgress)]
    changes = [event.after for event in events if isinstance(event, LearningRateChanged)]
    return DemoSummary(
        hosts=hosts,
        procs=procs,
        steps=progress[-1].step,
        accuracy=progress[-1].accuracy,
        loss=progress[-1].loss,
        learning_rates=[LEARNING_RATES[0], *changes],
        samples_per_second=statistics.median(each.samples_per_second for each in progress),
        call_ms=statistics.median(each.call_ms for each in progress),
        connected_seconds=connected_seconds,
        seconds=seconds,
        failure=_summarize_failure(events),
    )


def _summarize_failure(events: Sequence[Event]) -> FailureSummary | None:
    killed = next((event for event in events if isinstance(event, ProcessKilled)), None)
    happened = {event.kind: event for event in events if isinstance(event, JobEvent)}
    if killed is None or (failed := happened.get("group_failed")) is None:
        return None
    restored = happened.get("group_restored")
    resumed = None if restored is None else restored.data["step"]
    return FailureSummary(
        step=killed.step,
        rank=killed.rank,
        pid=killed.pid,
        error=failed.kind,
        message=failed.data["reason"],
        noticed_seconds=failed.time - killed.time,
        resumed_from_step=resumed,
        lost_steps=0 if resumed is None else max(0, killed.step - resumed),
        recovery_seconds=None if restored is None else restored.data["seconds"],
    )


def exit_code(summary: DemoSummary) -> int:
    """Return 0 if enough of the test digits are read correctly, else 1."""
    return 0 if summary.accuracy >= summary.target_accuracy else 1


def describe(summary: DemoSummary) -> str:
    """Return the summary as text: the accuracy, the speed, and the cost of the lost process."""
    rates = " → ".join(f"{rate:g}" for rate in summary.learning_rates)
    lines = [
        f"{summary.accuracy:.1%} of the test digits are read correctly after {summary.steps} steps, "
        f"{summary.seconds:.0f} s from start to end.",
        f"Hosts x processes: {summary.hosts} x {summary.procs}; {summary.samples_per_second:,.0f} samples/s, "
        f"{summary.call_ms:.1f} ms a call, learning rate {rates}.",
    ]
    if lost := summary.failure:
        noticed = f"{lost.noticed_seconds:.2f} s"
        lines.append(f"Rank {lost.rank} was killed at step {lost.step}, which was noticed after {noticed}.")
        if lost.recovery_seconds is not None:
            back = f"{lost.recovery_seconds:.1f} s later"
            lines.append(f"Another process took its place {back}, from step {lost.resumed_from_step}.")
    if exit_code(summary):
        lines.append(f"That is less than {summary.target_accuracy:.0%}: give it more --steps.")
    return "\n".join(lines)
