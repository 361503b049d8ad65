"""What a threadlet costs the training thread: one call, and a training that publishes every step.

The calls are measured one by one in a process of its own, ``python -m tests.benchmarks.threadlet ADDRESS``, in a
thread that computes between them, with a real weaver. The training is a small one, in actors that Loom
has spawned, twice: one publishes every step, with the calls by themselves or with the block that stands for them,
and the other has no threadlet.
They train in turns, one at a time, so that what else the machine does meets both alike; after some turns they
change places. What the threadlet's own thread does while the other trains slows nobody down here: that is less than
what the ratio of CPU times, which contains it, is larger by.
The processes of a training are spread over the cores and stay there, which is as launchers bind them; left to the
system, four on two cores take nearly twice as long for a step. Single steps differ by more than half all the same,
because processes wait for each other's gradients: a per cent shows in tens of thousands of steps only.
The budget is that of both ways, in four processes, which exchange gradients. One process
alone makes its steps so fast that microseconds are per cents: what they make of it is shown beside.
"""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import contextlib
import os
import select
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import loom
from loom import endpoint
from loom_proxy.local import LocalCluster
from tests.benchmarks.budgets import BudgetReport, Figure
from tests.benchmarks.caller import serve
from tests.benchmarks.caller_process import CallerProcess
from tests.benchmarks.digits_actor import DigitsActor
from tests.benchmarks.machine import describe_machine
from tests.benchmarks.report import Ratio, budgeted, percentile
from tests.unit.loom.weaver.raw_threadlet import running_weaver

__all__ = [
    "CallTimes",
    "ThreadletPlan",
    "Training",
    "measure",
    "measure_calls",
    "measure_training",
    "threadlet_report",
]

BETWEEN = 200e-6
"""Seconds that the thread computes between two calls."""

LEARNING_RATE = 0.05

WAYS = ("calls", "block")
"""What publishes every step: ``publish_status`` and ``check_and_apply_updates``, or ``with t.step``."""

CORES = sorted(os.sched_getaffinity(0))
"""Those that this process may use."""

WARM_UP = 3
"""Turns that do not count, after a threadlet was made."""

TURN_WITHIN = 60.0
"""Seconds that a training waits for its turn."""


@dataclass(frozen=True)
class ThreadletPlan:
    """How much is measured."""

    rounds: int = 3
    calls: int = 5000
    """Calls of each kind, in each round."""
    procs: int = 4
    """Processes of a training."""
    pairs: int = 15
    """Times that a training is measured beside another, by each of the ways, and again with places changed."""
    pairs_alone: int = 20
    """The same, of a training in one process."""
    turns: int = 75
    """Turns that each of the two has in such a time."""
    steps: int = 20
    """Steps of a turn."""


@dataclass(frozen=True)
class CallTimes:
    """Seconds of each call in one round."""

    publish: Sequence[float]
    check: Sequence[float]


@dataclass(frozen=True)
class Training:
    """Seconds of a step, without a threadlet and with one, measured in turns."""

    way: str
    """In which it publishes."""
    plain: float
    watched: float
    plain_cpu: float = 1.0
    """Seconds of CPU time of the first process, all its threads."""
    watched_cpu: float = 1.0
    procs: int = 1
    """Processes of each of the two."""


def measure(plan: ThreadletPlan, command: str, say: Callable[[str], object] = lambda text: None) -> BudgetReport:
    """Measure the calls and the training.

    Raises:
        CallerError: a process failed.
    """
    say("calls")
    calls = measure_calls(plan)
    with LocalCluster(1) as cluster, loom.connect(cluster.url, cluster.token) as job:
        training = [
            *measure_training(job, plan.procs, plan.pairs, plan, say),
            *measure_training(job, 1, plan.pairs_alone, plan, say),
        ]
        return threadlet_report(plan, command, calls, training)


def measure_calls(plan: ThreadletPlan) -> list[CallTimes]:
    """Measure single calls in each round."""
    with running_weaver() as weaver:
        with CallerProcess("training thread", "tests.benchmarks.threadlet", (weaver.address,)) as caller:
            caller.await_ready()
            caller.ask("publish", count=plan.calls // 4)  # to warm up
            return [
                CallTimes(caller.ask("publish", count=plan.calls), caller.ask("check", count=plan.calls))
                for _ in range(plan.rounds)
            ]


def threadlet_report(
    plan: ThreadletPlan, command: str, calls: Sequence[CallTimes], training: Sequence[Training]
) -> BudgetReport:
    """Set what was measured beside its budgets."""

    def microseconds(percent: int, which: str) -> tuple[float, ...]:
        return tuple(percentile(getattr(one, which), percent) * 1e6 for one in calls)

    def slower(way: str, procs: int) -> tuple[float, ...]:
        # One of the two processes is faster than the other; they have changed places in every second one.
        ratios = [one.watched / one.plain for one in training if (one.way, one.procs) == (way, procs)]
        return tuple(statistics.geometric_mean(both) for both in zip(ratios[::2], ratios[1::2], strict=True))

    here = "µs in the training thread"
    within = "with a threadlet / without"
    ratios = {(way, procs): slower(way, procs) for procs in (plan.procs, 1) for way in WAYS}
    budgets = (
        budgeted("status report", "publish_status, p50", here, microseconds(50, "publish")),
        budgeted("check for updates", "check_and_apply_updates, p50", here, microseconds(50, "check")),
        Ratio("digits training", within, "at most", 1.01, ratios["calls", plan.procs]),
        Ratio("digits training, with t.step", within, "at most", 1.01, ratios["block", plan.procs]),
    )
    figures = (
        Figure("publish_status, p99", here, microseconds(99, "publish")),
        Figure("check_and_apply_updates, p99", here, microseconds(99, "check")),
        *(
            figure
            for procs in (plan.procs, 1)
            for figure in _of_training([one for one in training if one.procs == procs], procs)
        ),
        *(Figure(f"one process alone, {way}", within, ratios[way, 1]) for way in WAYS if ratios[way, 1]),
    )
    notes = (
        "the time of a call has that of reading the clock twice",
        *(f"{way}, processes: {procs}: {_spread(found)}" for (way, procs), found in ratios.items() if found),
    )
    return BudgetReport("threadlet", command, describe_machine(), asdict(plan), budgets, figures, notes)


def _of_training(training: Sequence[Training], procs: int) -> Iterator[Figure]:
    if not training:
        return
    yield Figure(f"step without a threadlet, processes: {procs}", "µs", tuple(1e6 * one.plain for one in training))
    for way in WAYS:
        cpu = tuple(one.watched_cpu / one.plain_cpu for one in training if one.way == way)
        yield Figure(f"CPU of digits training, {way}, processes: {procs}", "with a threadlet / without", cpu)


def _spread(ratios: Sequence[float]) -> str:
    """Between which half of them are, and what that leaves open about the median."""
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    error = 1.57 * (high - low) / len(ratios) ** 0.5  # of a median, at 95 %
    return f"{median:.4f} ± {error:.4f}; half of {len(ratios)} are between {low:.4f} and {high:.4f}"


class TrainingThread:
    """Makes the calls of a training thread, and times each."""

    def __init__(self, address: str) -> None:
        self._threadlet = loom.Threadlet("timed", weaver=address)
        while not self._threadlet.connected:
            time.sleep(0.01)
        self._step = 0

    def publish(self, count: int) -> list[float]:
        """Seconds of each ``publish_status``."""
        publish, clock, times = self._threadlet.publish_status, time.perf_counter, []
        for _ in range(count):
            _compute()
            self._step += 1
            metrics = {"loss": 1.0 / self._step, "learning_rate": LEARNING_RATE}
            start = clock()
            publish(step=self._step, metrics=metrics)
            times.append(clock() - start)
        return times

    def check(self, count: int) -> list[float]:
        """Seconds of each ``check_and_apply_updates`` where there is none, as nearly always."""
        check, clock, times = self._threadlet.check_and_apply_updates, time.perf_counter, []
        for _ in range(count):
            _compute()
            start = clock()
            check()
            times.append(clock() - start)
        return times

    def close(self) -> None:
        self._threadlet.close()


def _compute() -> None:
    until = time.perf_counter() + BETWEEN
    while time.perf_counter() < until:
        pass


def _stay_on_core(rank: int) -> None:
    """Bind all threads of this process, and those that they will start, to the core of a rank."""
    core = CORES[rank % len(CORES)]
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), {core})


class WatchedTrainer(DigitsActor):
    """The digits training, with a threadlet and without."""

    @endpoint
    def alternate(self, turns: int, steps: int, way: str, mine: str, other: str) -> tuple[float, float]:
        """Train in turns with another; seconds of a step, and its CPU seconds.

        Args:
            turns: that count, of ``steps`` steps each.
            way: in which every step is published; nothing is, if it is empty.
            mine: a named pipe that has a byte when it is this one's turn.
            other: that of the other.
        """
        _stay_on_core(self.rank)
        threadlet = loom.Threadlet(config={"learning_rate": LEARNING_RATE}) if way else None
        while threadlet is not None and not threadlet.connected:
            time.sleep(0.001)
        turn = _Turns(mine, other) if self.rank == 0 else None  # the others of a training wait for its gradients
        seconds, cpu = 0.0, 0.0
        try:
            for number in range(WARM_UP + turns):
                if turn is not None:
                    turn.await_mine()
                if number == WARM_UP:
                    seconds, cpu = 0.0, time.process_time()
                seconds += self._stretch(steps, threadlet, way == "block")
                if turn is not None:
                    turn.pass_on()
            return seconds / (turns * steps), (time.process_time() - cpu) / (turns * steps)
        finally:
            if turn is not None:
                turn.close()
            if threadlet is not None:
                threadlet.close()

    def _stretch(self, steps: int, threadlet: loom.Threadlet | None, block: bool) -> float:
        import torch

        generator = torch.Generator().manual_seed(self.step)
        total_loss = 0.0
        start = time.perf_counter()
        if threadlet is None:
            for _ in range(steps):
                total_loss += self.one_step(generator)
        elif not block:
            for number in range(self.step, self.step + steps):
                loss = self.one_step(generator)
                total_loss += loss
                threadlet.publish_status(step=number, metrics={"loss": loss})
                threadlet.check_and_apply_updates()
        else:
            for number in range(self.step, self.step + steps):
                with threadlet.step(number) as step:
                    step.metrics["loss"] = loss = self.one_step(generator)
                    total_loss += loss
        self.step += steps
        return time.perf_counter() - start


class _Turns:
    """Whose turn it is, of two processes: a byte goes to and fro between two named pipes."""

    def __init__(self, mine: str, other: str) -> None:
        # Both for reading too, so that opening one does not wait for the other process.
        self._mine, self._other = os.open(mine, os.O_RDWR), os.open(other, os.O_RDWR)

    def await_mine(self) -> None:
        if not select.select([self._mine], [], [], TURN_WITHIN)[0]:
            raise TimeoutError(f"the other training did not end its turn within {TURN_WITHIN:g} s")
        os.read(self._mine, 1)

    def pass_on(self) -> None:
        os.write(self._other, b"x")

    def close(self) -> None:
        os.close(self._mine)
        os.close(self._other)


def measure_training(
    job: loom.Job,
    procs: int,
    pairs: int,
    plan: ThreadletPlan,
    say: Callable[[str], object] = lambda text: None,
) -> list[Training]:
    """Measure the training of a job in each of `WAYS`, in turns with another that has no threadlet."""
    host = job.hosts.slice(hosts=0)
    meshes = [host.spawn_procs(per_host={"gpus": procs}, name=name) for name in ("one", "another")]
    both = [each.spawn("trainers", WatchedTrainer, LEARNING_RATE) for each in meshes]
    for trainers in both:
        trainers.setup.call(trainers.slice(gpus=0).open_store.call_one().get()).get()

    found = []
    with tempfile.TemporaryDirectory(prefix="loom-benchmark-") as folder:
        times = pairs * 2 * len(WAYS)
        for number in range(times):
            say(f"training, processes: {procs}: {number + 1} of {times}")
            way = WAYS[number % len(WAYS)]
            # Each of the two is watched as often as the other, and begins as often.
            watched, plain = both if number // len(WAYS) % 2 else both[::-1]
            ways = (way, "") if number // len(WAYS) // 2 % 2 else ("", way)
            trainers = (watched, plain) if ways[0] else (plain, watched)
            one, another = (str(Path(folder, f"{number}-{which}")) for which in ("first", "second"))
            os.mkfifo(one)
            os.mkfifo(another)
            begins = os.open(one, os.O_RDWR)
            try:
                os.write(begins, b"x")
                pending = [
                    trainers[0].alternate.call(plan.turns, plan.steps, ways[0], one, another),
                    trainers[1].alternate.call(plan.turns, plan.steps, ways[1], another, one),
                ]
                # Of the first process: in that of others is the wait for their turn, which it waits for.
                took = [next(iter(each.get().values())) for each in pending]
            finally:
                os.close(begins)
            (plain_s, plain_cpu), (watched_s, watched_cpu) = took if ways[1] else took[::-1]
            found.append(Training(way, plain_s, watched_s, plain_cpu, watched_cpu, procs))
    for each in meshes:
        each.stop().get()
    return found


if __name__ == "__main__":
    serve(lambda: TrainingThread(sys.argv[1]))  # type: ignore[arg-type, return-value]
