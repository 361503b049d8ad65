"""The rollouts of each step, as files that are whole or not there.

``rollouts/step_N/rank_R.pt`` has the part of a trainer process. A process of a smaller job than planned trains on
several parts (`parts_of`), so that every rollout of a step is in exactly one gradient.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

FOLDER = "rollouts"

_ASIDE = ".writing-"


@dataclass(frozen=True)
class Rollout:
    """A completion with its reward."""

    id: str
    """``STEP.PROMPT.SAMPLE``: unique in a run."""
    prompt_tokens: list[int]
    tokens: list[int]
    logprobs: list[float]
    """Of the sampler, for each token."""
    reward: float
    advantage: float
    weights_step: int
    """The step of the policy that sampled it; of several turns the oldest."""
    mask: list[bool] = field(default_factory=list)
    """For each token whether it was sampled, and is trained on; empty if all were."""

    @property
    def sampled(self) -> int:
        """The number of tokens that are trained on."""
        return sum(self.mask) if self.mask else len(self.tokens)


@dataclass(frozen=True)
class RolloutPart:
    """The rollouts of a step for one trainer process."""

    step: int
    rank: int
    ranks: int
    count: int
    """Rollouts of the step, in all parts."""
    tokens: int
    """Tokens of all completions of the step; the loss is their mean."""
    rollouts: list[Rollout]


def fresh(rollouts: Iterable[Rollout], step: int, bound: int) -> list[Rollout]:
    """Return the rollouts whose policy is at most ``bound`` steps older than the step that trains on them."""
    return [one for one in rollouts if step - one.weights_step <= bound]


def split(rollouts: Sequence[Rollout], step: int, ranks: int, shares: Sequence[float] = ()) -> list[RolloutPart]:
    """Return the rollouts of a step in as many parts as there are trainer processes.

    Args:
        shares: how much of the step each process gets, in any unit; alike if their number is another one.
    """
    shares = shares if len(shares) == ranks else [1.0] * ranks
    whole = sum(shares)
    parts: list[list[Rollout]] = [[] for _ in range(ranks)]
    for count, one in enumerate(rollouts, 1):  # to the process that is owed most
        owed = [share / whole * count - len(part) for share, part in zip(shares, parts, strict=True)]
        parts[owed.index(max(owed))].append(one)
    tokens = sum(one.sampled for one in rollouts)
    return [RolloutPart(step, rank, ranks, len(rollouts), tokens, part) for rank, part in enumerate(parts)]


def parts_of(shard: int, shards: int, ranks: int) -> range:
    """Return the parts of a step that a process trains on, the number ``shard`` of ``shards`` in that step."""
    return range(shard, ranks, shards)


class RolloutStore:
    """The rollouts of a run, in ``FOLDER/rollouts``."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder) / FOLDER

    def write(self, parts: Sequence[RolloutPart]) -> Path:
        """Write all parts of a step; return their folder, which appears when it is whole.

        Raises:
            FileExistsError: the step is there.
        """
        step = parts[0].step
        path = self.path(step)
        if path.exists():
            raise FileExistsError(f"{path} is there already: the rollouts of a step are written once")
        aside = self._folder / f"{_ASIDE}{path.name}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for part in parts:
            with (aside / _file(part.rank)).open("wb") as file:
                torch.save(asdict(part), file)
                file.flush()
                os.fsync(file.fileno())
        _sync(aside)
        aside.rename(path)
        _sync(self._folder)
        return path

    def path(self, step: int) -> Path:
        """Return the folder of a step, which need not be there."""
        return self._folder / f"step_{step}"

    def has(self, step: int) -> bool:
        """Return whether the rollouts of a step are there."""
        return self.path(step).is_dir()

    def check_not_passed(self, step: int) -> None:
        """Raise `LookupError` if the rollouts of a step were removed, because nobody was to need them any more."""
        steps = self.steps()
        if steps and min(steps) > step and not self.has(step):
            raise LookupError(f"the rollouts of step {step} were removed; the oldest are of step {min(steps)}")

    def read(self, step: int, rank: int) -> RolloutPart:
        """Return a part of a step.

        Raises:
            FileNotFoundError: the part is not there.
        """
        state = torch.load(self.path(step) / _file(rank), weights_only=True)
        rollouts = [Rollout(**one) for one in state.pop("rollouts")]
        return RolloutPart(rollouts=rollouts, **state)

    def read_all(self, step: int) -> list[Rollout]:
        """Return all rollouts of a step."""
        first = self.read(step, 0)
        rest = [self.read(step, rank) for rank in range(1, first.ranks)]
        return [one for part in (first, *rest) for one in part.rollouts]

    def steps(self) -> list[int]:
        """Return the steps whose rollouts are there, in order."""
        names = [path.name for path in self._folder.glob("step_*")]
        return sorted(int(name.removeprefix("step_")) for name in names)

    def remove_before(self, step: int) -> None:
        """Remove the rollouts of earlier steps."""
        for old in self.steps():
            if old < step:
                self.remove(old)

    def remove(self, step: int) -> None:
        """Remove the rollouts of a step, which disappear at once."""
        aside = self._folder / f".removing-step_{step}"
        shutil.rmtree(aside, ignore_errors=True)
        self.path(step).rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _file(rank: int) -> str:
    return f"rank_{rank}.pt"


def _sync(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
