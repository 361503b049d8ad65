"""`StepExchange`: the exchanges of a group with the other groups of a job, and of its members with each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import distributed

from loom.train.loop.membership import Membership
from loom.train.loop.step_clock import Baseline, StepClock
from loom.train.loop.tensors import flatten
from loom.train.loop.training_state import FROM_THE_BEGINNING, TrainingState
from loom.train.settings import Batch, Ending, Restore


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

    def batch(self) -> Batch:
        """Return this process's batch in the step for which the groups are gathered."""
        place, groups = self.membership.place
        number, processes = place * self._members + self.state.rank, groups * self._members
        return Batch(self.state.report.step, self.state.config.current.batch_size, number, processes)

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
        """Replace a tensor of gradients by its mean over the members of this group."""
        # FSDP2 has already averaged the gradients of its shards.
        if self._members > 1 and self.state.job.parallel == "ddp":
            distributed.all_reduce(flat)
            flat /= self._members

    def all_members(self, flags: Iterable[torch.Tensor]) -> bool:
        """Return whether all flags hold in all members of this group."""
        flag = torch.stack(list(flags)).all()
        if self._members > 1:
            number = flag.to(torch.int32)
            distributed.all_reduce(number, op=distributed.ReduceOp.MIN)
            flag = number.bool()
        return bool(flag)

    def settle(self) -> None:
        """Adopt the configuration on which all groups agreed in the last exchange that counted."""
        rows = self._rows if self._members == 1 else self._shared_in_group()
        report, config = self.state.report, self.state.config
        changed = config.settle(rows, report.step)
        report.changes += tuple((report.step, key, getattr(config.current, key)) for key in changed)
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
