"""The change of a running run that a finding asks for, with the gain that the measured times promise."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from loom.rl.diagnosis.attribution import HALF
from loom.rl.diagnosis.diagnosis import Finding
from loom.rl.diagnosis.result import Analysis
from loom.rl.diagnosis.rules import RuleName

ORCHESTRATOR, TRAINER_JOB = "orchestrator", "trainer_job"
"""The replicas that take the changes."""
LEAST = 0.05
"""The gain from which on a change is proposed, and kept."""
HIGHEST_LEVEL = 4
MOST_GENERATORS = 64
MOST_TOKENS = 65_536
_STORAGE = "weights='messages', or with faster storage for its folder"


class Goal(str, Enum):
    """The quantity that a change should improve."""

    SPEED = "speed"
    """Steps an hour."""
    TRUNCATION = "trunc_pct"
    STALENESS = "staleness"
    MISMATCH = "mismatch"


@dataclass(frozen=True)
class OptionChange:
    """A new value of an option of a running run."""

    option: str
    old: Any
    new: Any
    rule: str
    """The rule whose finding it is for; ``given`` if it was given by hand."""
    why: str
    expected: float | None = None
    """The share by which steps an hour should grow; None if that is not what it is for, or unknown."""
    replica: str = ORCHESTRATOR
    goal: Goal = Goal.SPEED

    @property
    def key(self) -> tuple[str, str]:
        """The identity of the change."""
        return self.option, repr(self.new)

    def __str__(self) -> str:
        where = "" if self.replica == ORCHESTRATOR else f" of {self.replica}"
        return f"{self.option}{where}: {self.old} → {self.new}"


@dataclass(frozen=True)
class NoChange:
    """Why nothing that can be changed in a running run answers a finding."""

    rule: str
    why: str


Config = Mapping[str, Any]
"""The configuration of the orchestrator, with ``groups``, the number of trainer groups."""


def change_for(
    finding: Finding, found: Analysis, config: Config, tried: Container[tuple[str, str]] = ()
) -> OptionChange | NoChange:
    """Return the change that answers a finding, or why there is none.

    Args:
        finding: of the analysis.
        found: the analysis.
        config: what the run has now.
        tried: the keys of changes that were taken back.
    """
    change = _change_for(finding, found, config)
    if isinstance(change, OptionChange) and change.key in tried:
        return NoChange(change.rule, f"{change} was tried and taken back.")
    return change


def _change_for(finding: Finding, found: Analysis, config: Config) -> OptionChange | NoChange:
    propose = _PROPOSALS[finding.name]
    try:
        option, new, expected, why = propose(finding, found, config)
    except _NoneError as none:
        return NoChange(finding.name.value, str(none))
    if expected is not None and expected < LEAST:
        return NoChange(
            finding.name.value,
            f"{option}={new} would give {expected:.0%} more steps an hour by the measured times: too few.",
        )
    goal = _GOALS.get(finding.name, Goal.SPEED)
    replica = TRAINER_JOB if option == "groups" else ORCHESTRATOR
    return OptionChange(option, config.get(option), new, finding.name.value, why, expected, replica, goal)


class _NoneError(Exception):
    """There is no change; the text says why."""


_Proposed = tuple[str, Any, float | None, str]
"""Option, new value, expected gain, reason."""


def _another_way(finding: Finding, found: Analysis, config: Config) -> _Proposed:
    if config.get("weights") == "messages":
        raise _NoneError("The trainers send the weights themselves, as messages: there is no other way to choose.")
    now = config["weights_via"]
    if now == "lane":
        raise _NoneError("Orders go by the control lane already, which waits behind no request.")
    # Completions go on while an order waits, so that not all of its wait is lost.
    why = "The control lane has no pool, accept queue or event loop in common with HTTP, for completions either."
    return "weights_via", "lane", _gain(HALF * finding.share), why


def _loading(finding: Finding, found: Analysis, config: Config) -> _Proposed:
    instead = "a smaller model, or faster links" if config.get("weights") == "messages" else _STORAGE
    raise _NoneError(f"No option of a running run makes loading faster. Start the run with {instead}.")


def _overlap(found: Analysis, config: Config, instead: str) -> _Proposed:
    """Let generators and trainers work at the same time."""
    loop, training = found.attribution.loop, found.attribution.training
    level = config["async_level"]
    if level >= HIGHEST_LEVEL:
        raise _NoneError(f"async_level is {level} already. {instead}")
    after = max(loop.busy_ms, training.busy_ms)
    expected = loop.wall_ms / after - 1 if after else 0.0
    if level and expected < LEAST:
        raise _NoneError(
            f"A step of the trainers, {training.busy_ms:,.0f} ms with writing, takes as long as one of the run: "
            f"a higher async_level hides nothing of it. {instead}"
        )
    return "async_level", level + 1, expected, "Generators go on while weights are computed and written."


def _checkpoint(finding: Finding, found: Analysis, config: Config) -> _Proposed:
    return _overlap(found, config, f"Start the run with {_STORAGE}.")


def _trainer(finding: Finding, found: Analysis, config: Config) -> _Proposed:
    try:
        proposed = _overlap(found, config, "")
        if proposed[2] is not None and proposed[2] >= LEAST:
            return proposed
    except _NoneError:
        pass
    loop, training = found.attribution.loop, found.attribution.training
    groups = config["groups"]
    if not groups:
        raise _NoneError("The number of trainer groups is unknown: no trainer_job reports.")
    left = training.compute_ms * groups / (groups + 1) + training.lead_ms + training.write_ms
    expected = loop.wall_ms / max(loop.busy_ms, left) - 1
    return "groups", groups + 1, expected, "Another group of trainers takes its part of each batch."


def _generator(finding: Finding, found: Analysis, config: Config) -> _Proposed:
    loop, training = found.attribution.loop, found.attribution.training
    count = config["generators"]
    if count >= MOST_GENERATORS:
        raise _NoneError(f"There are {count} generators already.")
    new = min(2 * count, count + 4)
    left = loop.busy_ms - loop.batch_ms * (1 - count / new)
    wall = max(loop.wall_ms, loop.busy_ms)
    expected = wall / max(left, training.busy_ms) - 1 if left > 0 else None
    return "generators", new, expected, "More generators divide the batch among them."


def _straggler(finding: Finding, found: Analysis, config: Config) -> _Proposed:
    ranks = found.measured.ranks
    means = {rank: one.steps.series.steady_mean for rank, one in ranks.items() if one.steps.series.count}
    if sorted(means) != list(range(len(means))) or not all(means.values()):
        raise _NoneError("Not all trainer processes are in the log.")
    now = list(config.get("split") or ())
    now = now if len(now) == len(means) else [1.0] * len(means)
    speeds = [share / means[rank] for rank, share in enumerate(now)]
    new = [round(speed / max(speeds), 2) for speed in speeds]
    loop, training = found.attribution.loop, found.attribution.training
    wall = loop.wall_ms or training.wall_ms
    even = sum(now) / sum(speeds)  # milliseconds of a step, if all processes take equally long
    saved = max(means.values()) - even
    expected = wall / max(wall - saved, even + training.write_ms, loop.busy_ms) - 1
    if new == now:
        raise _NoneError("The batch is split by the speed of the processes already.")
    why = "The slow process gets a smaller part of the batch. Spares (spares=) replace a host that stays slow."
    return "split", new, expected, why


def _truncation(finding: Finding, found: Analysis, config: Config) -> _Proposed:
    tokens = config["max_tokens"]
    if 2 * tokens > MOST_TOKENS:
        raise _NoneError(f"max_tokens is {tokens} already.")
    return "max_tokens", 2 * tokens, None, "Completions may be longer; steps may take longer, too."


def _staleness(finding: Finding, found: Analysis, config: Config) -> _Proposed:
    level = config["async_level"]
    if not level:
        raise _NoneError("async_level is 0 already.")
    return "async_level", level - 1, None, "Generators wait for newer weights."


def _gain(share: float) -> float:
    """Return the gain if a share of the wall time goes."""
    return 1 / (1 - min(share, 0.99)) - 1


_PROPOSALS: dict[RuleName, Callable[[Finding, Analysis, Config], _Proposed]] = {
    RuleName.QUEUE: _another_way,
    RuleName.CONTENTION: _another_way,
    RuleName.LOADING: _loading,
    RuleName.CHECKPOINT: _checkpoint,
    RuleName.TRAINER: _trainer,
    RuleName.GENERATOR: _generator,
    RuleName.STRAGGLER: _straggler,
    RuleName.TRUNCATION: _truncation,
    RuleName.STALENESS: _staleness,
}
_GOALS = {RuleName.TRUNCATION: Goal.TRUNCATION, RuleName.STALENESS: Goal.STALENESS}
