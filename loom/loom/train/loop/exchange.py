"""`Exchange`: what a group does together with the other groups of a job, and its members with each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import distributed

from loom.train.loop.agreed_config import AgreedConfig
from loom.train.loop.baseline import Baseline
from loom.train.loop.membership import Membership
from loom.train.loop.progress import Progress
from loom.train.loop.step_clock import StepClock
from loom.train.loop.tensors import flatten
from loom.train.loop.training_state import FROM_THE_BEGINNING, TrainingState
from loom.train.settings import Assignment, Batch, Ending, Restore

__all__ = ["Exchange", "NoPeers"]


class NoPeers(Exception):
    """No group is left that has the state which was to be taken over."""


class Exchange:
    """Gathers the groups for a step, averages tensors over them, and has them agree on the configuration.

    Args:
        assignment: of the process.
        rank: of the process in its group.
        members: processes of the group.
        membership: the process's place among all groups.
        state: takes what changes of the configuration.
        config: what the groups have agreed on.
        progress: told of the groups that take part.
        clock: takes the time.
        wanted_end: returns how the training was told to end; None if it was not.
    """

    def __init__(
        self,
        assignment: Assignment,
        rank: int,
        members: int,
        membership: Membership,
        state: TrainingState,
        config: AgreedConfig,
        progress: Progress,
        clock: StepClock,
        wanted_end: Callable[[], Ending | None],
    ) -> None:
        self._assignment = assignment
        self._rank, self._members = rank, members
        self._membership = membership
        self._state = state
        self._config = config
        self._progress = progress
        self._clock = clock
        self._wanted_end = wanted_end
        self._gathering, self._averaging = Baseline(), Baseline()
        self._rows: list[list[float]] = []
        """What all groups said of the configuration in the last exchange that counts."""
        self._agreed_end: Ending | None = None
        self._gathered = False
        """Whether the groups are gathered for an exchange that has not begun."""

    @property
    def is_first(self) -> bool:
        """Whether this group is the first of those that take part."""
        return self._membership.place[0] == 0

    @property
    def agreed_end(self) -> Ending | None:
        """How all members of the group end the training now; None if they go on."""
        return self._wanted_end() if self._members == 1 else self._agreed_end

    def gather(self) -> None:
        """Wait for the other groups; a group that is behind takes over their state.

        Raises:
            NoPeers: no group is there that has the state.
        """
        if not self._gathered:
            with self._clock.waiting(self._gathering):
                self._membership.gather()
        self._gathered = True
        _, self._progress.participants = self._membership.place
        if not self._progress.restored:
            if self._assignment.restore is Restore.PEERS:
                raise NoPeers("no group is left that has the state: it has to come from a checkpoint")
            self._progress.restored = FROM_THE_BEGINNING

    def batch(self) -> Batch:
        """Return what this process trains on in the step for which the groups are gathered."""
        place, groups = self._membership.place
        number, processes = place * self._members + self._rank, groups * self._members
        return Batch(self._progress.step, self._config.batch_size, number, processes)

    def average_gradients(self, flat: torch.Tensor) -> bool:
        """Replace gradients by their mean over all processes of all groups; return whether it counts."""
        with self._clock.waiting(self._averaging):
            self.average_in_group(flat)
            return self._exchange(flat)

    def average(self, flat: torch.Tensor) -> bool:
        """Replace a tensor by its mean over the groups; return whether it counts."""
        with self._clock.waiting(self._averaging):
            return self._exchange(flat)

    def _exchange(self, flat: torch.Tensor) -> bool:
        self._gathered = False
        rows = self._membership.average(flat, self._config.row())
        if not self._membership.commit():
            self._progress.discarded += 1
            return False
        self._rows = rows
        return True

    def average_in_group(self, flat: torch.Tensor) -> None:
        """Replace a tensor of gradients by its mean over the members of this group."""
        # FSDP2 has averaged the gradients of its shards.
        if self._members > 1 and self._assignment.parallel == "ddp":
            distributed.all_reduce(flat)
            flat /= self._members

    def all_members(self, flags: Iterable[torch.Tensor]) -> bool:
        """Return whether flags hold, in all members of this group."""
        flag = torch.stack(list(flags)).all()
        if self._members > 1:
            number = flag.to(torch.int32)
            distributed.all_reduce(number, op=distributed.ReduceOp.MIN)
            flag = number.bool()
        return bool(flag)

    def settle(self) -> None:
        """Adopt the configuration that all groups adopt with the exchange that was the last to count."""
        rows = self._rows if self._members == 1 else self._shared_in_group()
        changed = self._config.settle(rows, self._progress.step)
        self._progress.changes += [(self._progress.step, key, value) for key, value in changed.items()]
        self._state.adopt(changed)

    def _shared_in_group(self) -> list[list[float]]:
        """Return the first member's rows: only that one is told of changes, and of the end."""
        end, endings = self._wanted_end(), list(Ending)
        code = 0.0 if end is None else 1.0 + endings.index(end)
        shared = flatten([torch.tensor(self._rows, dtype=torch.float64)], [code])
        distributed.broadcast(shared, src=0)
        *numbers, code = shared.tolist()
        self._agreed_end = None if code == 0 else endings[int(code) - 1]
        width = self._config.width
        return [numbers[start : start + width] for start in range(0, len(numbers), width)]

    def say_farewell(self) -> None:
        """Take part in one more exchange, in which a group whose last step was discarded takes it over."""
        self.gather()
        self._membership.average(torch.zeros(1), self._config.row())
        self._membership.commit()
