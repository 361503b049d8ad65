"""`StepExchange`: exchanges among groups and within one, and the strategies of a step that average by them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import TypeAlias

import torch
from torch import distributed

from loom.threadlet import Step, Threadlet
from loom.train.loop.agreement import OF_BATCHES
from loom.train.loop.membership import Membership
from loom.train.loop.training_state import (
    FROM_THE_BEGINNING,
    OuterOptimizer,
    ParameterMean,
    TrainingState,
    flatten,
    local,
    unflatten,
)
from loom.train.settings import Batch, Ending, Restore

REMEMBERED = 200  # the newest waits, from which a baseline is computed
LEAST = 5  # waits before which there is no baseline
TIMES = 2.0  # the baseline is this many times the median
_AGAIN = 10  # waits after which the median is computed again
Mark: TypeAlias = tuple[float, dict[str, float]]  # a moment, and the seconds measured until then


class Baseline:
    """The usual time of an exchange: a much longer one is a wait for a slow, stopped, gone or new group."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=REMEMBERED)
        self._until_again = LEAST
        self.seconds = 0.0  # the longest usual time; 0 until enough times are known

    def add(self, seconds: float) -> None:
        self._times.append(seconds)
        self._until_again -= 1
        if self._until_again == 0:
            self._until_again = _AGAIN
            self.seconds = TIMES * median(self._times)


class StepClock:
    """A sum of seconds by their use, for a step's metrics and, by the threadlet, for the weaver's goodput."""

    def __init__(self, threadlet: Threadlet) -> None:
        self._threadlet = threadlet
        self._seconds = {"compute_s": 0.0, "wait_s": 0.0, "lost_s": 0.0, "checkpoint_s": 0.0}

    def collect(self) -> dict[str, float]:
        """Return the seconds since the last call, by metric."""
        seconds = {key: round(value, 6) for key, value in self._seconds.items()}
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return seconds

    @contextlib.contextmanager
    def measured(self, metric: str) -> Iterator[None]:
        """Measure a part of a step, such as ``compute_s``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[metric] += time.perf_counter() - began

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Measure the time that the training waits for a checkpoint."""
        with self.measured("checkpoint_s"), self._threadlet.spent("checkpoint"):
            yield

    @contextlib.contextmanager
    def waiting(self, baseline: Baseline) -> Iterator[None]:
        """Measure an exchange: its time up to the baseline is part of the step, the time beyond is a wait."""
        began = time.perf_counter()
        with self.measured("wait_s"), self._threadlet.spent("waiting", baseline.seconds):
            yield
        baseline.add(time.perf_counter() - began)

    def mark(self) -> Mark:
        """Return the current moment, for `lose`."""
        return time.perf_counter(), dict(self._seconds)

    def lose(self, since: Mark) -> None:
        """Count all seconds since a moment as lost, because their work is repeated."""
        at, seconds = since
        self._seconds = {**seconds, "lost_s": seconds["lost_s"] + time.perf_counter() - at}


class NoPeers(Exception):
    """No group is left that has the state to take over."""


@dataclass
class StepExchange:
    """The exchanges for a step: they gather the groups, average tensors and agree on the configuration."""

    state: TrainingState
    membership: Membership
    clock: StepClock
    wanted_end: Callable[[], Ending | None]  # returns the requested end of the training; None without one

    def __post_init__(self) -> None:
        self._members = self.state.job.members
        self._gathering, self._averaging = Baseline(), Baseline()
        self._rows: list[list[float]] = []  # the rows of all groups in the last exchange that counted
        self._agreed_end: Ending | None = None  # the first member's request to end, for a group of several members
        self._gathered = False  # whether the groups are gathered for an exchange that has not begun

    @property
    def is_first(self) -> bool:
        return self.membership.place[0] == 0

    @property
    def agreed_end(self) -> Ending | None:
        """The end on which all members of the group agree; None if they go on."""
        return self.wanted_end() if self._members == 1 else self._agreed_end

    def gather(self) -> None:
        """Wait for the other groups; a group that is behind takes over their state, or raises `NoPeers`."""
        if not self._gathered:
            with self.clock.waiting(self._gathering):
                self.membership.gather()
        self._gathered = True
        report = self.state.report
        _, report.participants = self.membership.place
        if not report.restored:
            if self.state.assignment.restore is Restore.PEERS:
                raise NoPeers("no group is left that has the state: it has to come from a checkpoint")
            report.restored = FROM_THE_BEGINNING

    def batches(self) -> Iterator[Batch]:
        """Give this process's batches in the step for which the groups are gathered."""
        place, groups = self.membership.place
        number, processes = place * self._members + self.state.rank, groups * self._members
        config, step, feed = self.state.config.current, self.state.report.step, self.state.feed
        for part in range(config.accumulation):
            items = None if feed is None else feed.item(step, part)
            yield Batch(step, config.batch_size, number, processes, part, config.accumulation, items)

    def average_gradients(self, flat: torch.Tensor) -> bool:
        """Replace gradients by their mean over all processes of all groups; return whether the step counts."""
        with self.clock.waiting(self._averaging):
            self.average_in_group(flat)
            return self._exchange(flat)

    def average(self, flat: torch.Tensor) -> bool:
        """Replace a tensor by its mean over the groups; return whether the exchange counts."""
        with self.clock.waiting(self._averaging):
            return self._exchange(flat)

    def _exchange(self, flat: torch.Tensor) -> bool:
        self._gathered = False
        rows = self.membership.average(flat, self.state.config.row())
        if not self.membership.commit():
            self.state.report.discarded += 1
            return False
        self._rows = rows
        return True

    def average_in_group(self, flat: torch.Tensor) -> None:
        """Replace gradients, and the loss behind them, by their mean over the members of this group."""
        if self._members > 1:
            # FSDP2 has already averaged the gradients of its shards.
            own = flat if self.state.job.parallel == "ddp" else flat[-1:]
            distributed.all_reduce(own)
            own /= self._members

    def all_members(self, flags: Iterable[torch.Tensor]) -> bool:
        """Return whether all flags hold in all members of this group."""
        flag = torch.stack(list(flags)).all()
        if self._members > 1:
            number = flag.to(torch.int32)
            distributed.all_reduce(number, op=distributed.ReduceOp.MIN)
            flag = number.bool()
        return bool(flag)

    def settle(self, after: Collection[str] = ()) -> None:
        """Adopt the configuration on which all groups agreed in the last exchange that counted.

        Args:
            after: settings that change only the next step: this one's gradient was computed already.
        """
        rows = self._rows if self._members == 1 else self._shared_in_group()
        report, config = self.state.report, self.state.config
        changed = config.settle(rows, report.step, after)
        report.changes += tuple((config.since(key), key, getattr(config.current, key)) for key in changed)
        self.state.adopt(changed)

    def _shared_in_group(self) -> list[list[float]]:
        """Return the first member's rows: only that member gets changes, and the request to end."""
        end, endings = self.wanted_end(), list(Ending)
        code = 0.0 if end is None else 1.0 + endings.index(end)
        shared = flatten([torch.tensor(self._rows, dtype=torch.float64)], [code])
        distributed.broadcast(shared, src=0)
        *numbers, code = shared.tolist()
        self._agreed_end = None if code == 0 else endings[int(code) - 1]
        width = len(self._rows[0])
        return [numbers[start : start + width] for start in range(0, len(numbers), width)]

    def say_farewell(self) -> None:
        """Take part in one more exchange, in which a group whose last step was discarded can take it over."""
        self.gather()
        self.membership.average(torch.zeros(1), self.state.config.row())
        self.membership.commit()


MOST_SKIPPED = 20  # steps in a row without a finite gradient after which the training fails


class NotFinite(Exception):
    """The gradient was not finite in so many steps that it will not recover."""


@dataclass
class StepStrategy:
    """A kind of `loom.train.Averaging`, with the parts that all kinds share: gradients and the optimizer's step."""

    state: TrainingState
    exchange: StepExchange
    clock: StepClock
    _skipped_now: int = field(default=0, init=False)  # steps in a row without a finite gradient

    def begin(self) -> None:
        """Prepare for the first step."""

    def advance(self, step: Step) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Complete the work after the last step."""

    @property
    def groups_agree(self) -> bool:
        """True if all groups have the same parameters now."""
        return True

    def _compute(self) -> torch.Tensor:
        """Return the mean gradient of this process's batches, followed by the loss, as one flat tensor."""
        state, mean = self.state, 0.0
        state.optimizer.zero_grad(set_to_none=True)
        for batch in self.exchange.batches():
            loss = state.trainer.step(state.model, batch) / batch.parts
            loss.backward()
            mean += float(loss.detach())
        for parameter in state.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return flatten((one.grad for one in state.parameters), [mean])

    def _apply(self, flat: torch.Tensor) -> None:
        """Let the optimizer step by the mean gradient, the same in all groups, unless it is not finite."""
        state, report = self.state, self.state.report
        report.metrics["loss"] = unflatten(flat, (one.grad for one in state.parameters))[0]
        if self.exchange.all_members(local(one.grad).isfinite().all() for one in state.parameters):
            self._skipped_now = 0
            if clip := state.config.current.gradient_clipping:
                torch.nn.utils.clip_grad_norm_(state.parameters, clip)
            report.metrics["learning_rate"] = state.tune_optimizer()
            state.optimizer.step()
            report.applied += 1
        else:
            report.skipped += 1
            self._skipped_now += 1
            if self._skipped_now >= MOST_SKIPPED:
                raise NotFinite(
                    f"the gradient was not finite in {MOST_SKIPPED} steps in a row, up to {report.step}"
                )
        report.step += 1


class SharedSteps(StepStrategy):
    """`Averaging.GRADIENTS`: all groups apply the same mean gradient in each step."""

    def advance(self, step: Step) -> None:
        """Make one step; repeat it until no group is lost in it."""
        while True:
            mark = self.clock.mark()
            self.exchange.gather()
            if self.state.report.step >= self.state.job.steps:  # the state came from a group that says farewell
                return
            with self.clock.measured("compute_s"):
                flat = self._compute()
            if self.exchange.average_gradients(flat):
                break
            self.clock.lose(mark)
            step.discard()
        with self.clock.measured("compute_s"):
            self.exchange.settle(after=OF_BATCHES)
            self._apply(flat)


@dataclass
class LocalSteps(StepStrategy):
    """`Averaging.LOCAL_SGD` and ``DILOCO``: each group steps alone, and all step together after several steps."""

    outer: OuterOptimizer | ParameterMean
    _local_steps: int = field(default=0, init=False)  # steps since the last outer step

    @property
    def groups_agree(self) -> bool:
        """True if no group has made a step of its own since the last outer step."""
        return self._local_steps == 0

    def begin(self) -> None:
        """Take over the state of the other groups if the group joins them."""
        self._step_outside()

    def advance(self, step: Step) -> None:
        """Make one local step, and an outer one if it is due."""
        with self.clock.measured("compute_s"):
            flat = self._compute()
            self.exchange.average_in_group(flat)
            self._apply(flat)
        self._local_steps += 1
        if self._local_steps >= self.state.config.current.sync_every:
            self._step_outside()

    def finish(self) -> None:
        """Make the last outer step, if there are local steps since the one before."""
        if self._local_steps:
            self._step_outside()

    def _step_outside(self) -> None:
        while True:
            self.exchange.gather()
            flat = flatten(self.outer.progress())
            if self.exchange.average(flat):
                break
        self.exchange.settle()
        self._local_steps = 0
        self.outer.follow(flat)
