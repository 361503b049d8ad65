"""The ledger of a run: every change of it, with steps an hour, loss and reward before and after."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from enum import Enum
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from loom.errors import WrongArguments
from loom.process.state_file import replace_file
from loom.rl.diagnosis.result import Analysis
from loom.rl.tuning.changes import ORCHESTRATOR

HOUR = 3600.0
PIECES = 4
"""Pieces into which steps are divided to see how much their length varies."""


@dataclass(frozen=True)
class Measurement:
    """Some steps of a run. None stands for a value that was not reported."""

    first: int
    """The first step."""
    last: int
    steps_per_hour: float
    step_seconds: float
    """The mean wall time of a step."""
    error: float
    """The standard error of ``step_seconds``, in seconds."""
    reward: float | None = None
    """The mean reward."""
    reward_error: float = 0.0
    """The standard error of ``reward``."""
    loss: float | None = None
    trunc_pct: float | None = None
    staleness: float | None = None
    mismatch: float | None = None
    """How far the policy that generates is from the one that is trained; the unit is that of the log."""

    @classmethod
    def of(cls, first: int, last: int, found: Analysis, rewards: list[float], losses: list[float]) -> Measurement:
        """Return the measurement of steps, from the analysis of their log and what the weaver has of them."""
        walls = found.metrics["step_s"]
        durations = found.measured.series["step_s"].points.values
        reward, reward_error = _mean(rewards)
        known = [name for name in ("trunc_pct", "staleness", "mismatch") if name in found.metrics]
        means = {name: found.metrics[name].mean for name in known}
        return cls(
            first=first,
            last=last,
            steps_per_hour=HOUR / walls.mean,
            step_seconds=walls.mean,
            error=_error(durations),
            reward=reward,
            reward_error=reward_error,
            loss=_mean(losses)[0],
            **means,
        )

    def faster_than(self, other: Measurement) -> float:
        """Return by what share these steps are faster: 0.1 for a tenth more steps an hour."""
        return self.steps_per_hour / other.steps_per_hour - 1

    def as_dict(self) -> Mapping[str, object]:
        """Return the object for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Measurement:
        """Return what `as_dict` gave, also that of a newer version."""
        return cls(**{field.name: told[field.name] for field in fields(cls) if field.name in told})


def _mean(values: list[float]) -> tuple[float | None, float]:
    """Return the mean and its standard error."""
    if not values:
        return None, 0.0
    mean = sum(values) / len(values)
    spread = sum((value - mean) ** 2 for value in values) / len(values)
    return mean, sqrt(spread / len(values))


def _error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of values in their order; neighbours may depend on each other."""
    size = max(1, len(values) // PIECES)
    means = [fmean(values[at : at + size]) for at in range(0, len(values) - size + 1, size)]
    return stdev(means) / sqrt(len(means)) if len(means) > 1 else 0.0


JSON, MARKDOWN = "ledger.json", "ledger.md"
VERSION = 1


class Decision(str, Enum):
    """The outcome of a change."""

    PROPOSED = "proposed"
    """It was not applied."""
    KEPT = "kept"
    TAKEN_BACK = "taken back"
    REFUSED = "refused"
    """The run did not take it."""
    GIVEN = "given"
    """Somebody else gave it, or it was replayed; it was not judged."""
    NONE = "none"
    """Nothing that can be changed in a running run answers the finding."""


@dataclass(frozen=True)
class LedgerEntry:
    """A line of the ledger."""

    time: float
    """Seconds since the epoch."""
    rule: str
    decision: Decision
    why: str
    option: str | None = None
    old: Any = None
    new: Any = None
    replica: str = ORCHESTRATOR
    expected: float | None = None
    """The gain that was expected, as a share of steps an hour."""
    step: int | None = None
    """The step with which the change was applied."""
    before: Measurement | None = None
    after: Measurement | None = None

    @property
    def gain(self) -> float | None:
        """The measured gain, as a share of steps an hour."""
        return None if self.before is None or self.after is None else self.after.faster_than(self.before)

    def as_dict(self) -> Mapping[str, object]:
        """Return the object for JSON."""
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        told["decision"] = self.decision.value
        for name in ("before", "after"):
            told[name] = told[name] and told[name].as_dict()
        return {**told, "gain": self.gain}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> LedgerEntry:
        """Return what `as_dict` gave."""
        read = {field.name: told[field.name] for field in fields(cls) if field.name in told}
        read["decision"] = Decision(read["decision"])
        for name in ("before", "after"):
            read[name] = read.get(name) and Measurement.from_dict(read[name])
        return cls(**read)


class Ledger:
    """The ledger of a run, as a file of JSON and as a table in Markdown, written anew with each line.

    Args:
        folder: where the files are; lines that are there already are kept.
        session: the name of the session; that of the training, if it is another framework's.

    Raises:
        WrongArguments: there is a file that is no ledger, or that of another run.
    """

    def __init__(self, folder: Path, session: str) -> None:
        self.folder = folder
        self.session = session
        path = folder / JSON
        self.entries: list[LedgerEntry] = []
        if path.exists():
            told, self.entries = read(path)
            if told != session:
                raise WrongArguments(f"{path} is the ledger of {told!r}, not of {session!r}: use --out")

    def write(self) -> None:
        """Write the files.

        Raises:
            WrongArguments: the folder cannot be written.
        """
        told = {"version": VERSION, "session": self.session, "entries": [one.as_dict() for one in self.entries]}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(self.folder / JSON, json.dumps(told, indent=1) + "\n")
            replace_file(self.folder / MARKDOWN, self.markdown())
        except OSError as error:
            raise WrongArguments(f"cannot write the ledger to {self.folder}: {error.strerror}; use --out") from None

    def add(self, entry: LedgerEntry) -> LedgerEntry:
        """Add a line, and write the files."""
        self.entries.append(entry)
        self.write()
        return entry

    def markdown(self) -> str:
        """Return the table."""
        head = [
            "time",
            "step",
            "rule",
            "change",
            "decision",
            "expected",
            "gain",
            "steps/h",
            "reward",
            "loss",
            "why",
        ]
        rows = [head, ["---"] * len(head), *map(_row, self.entries)]
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        return f"# Changes of the run {self.session}\n\n{table}\n"


def read(path: Path) -> tuple[str, list[LedgerEntry]]:
    """Read a ledger; return the session's name and the lines.

    Raises:
        WrongArguments: there is no such file, or it is no ledger.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return str(told["session"]), [LedgerEntry.from_dict(one) for one in told["entries"]]
    except OSError as error:
        raise WrongArguments(f"cannot read the ledger {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise WrongArguments(f"{path} is no ledger of loom tune: {error!r:.200}") from None


def _row(entry: LedgerEntry) -> list[str]:
    where = "" if entry.replica == ORCHESTRATOR else f"{entry.replica} "
    row = [
        datetime.fromtimestamp(entry.time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S"),
        "" if entry.step is None else str(entry.step),
        entry.rule,
        "" if entry.option is None else f"{where}{entry.option}: {entry.old} → {entry.new}",
        entry.decision.value,
        _share(entry.expected),
        _share(entry.gain),
        _both(entry, "steps_per_hour", ",.0f"),
        _both(entry, "reward", ".3f"),
        _both(entry, "loss", ".4f"),
        entry.why,
    ]
    return [cell.replace("|", "\\|").replace("\n", " ") for cell in row]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:+.0%}"


def _both(entry: LedgerEntry, name: str, form: str) -> str:
    """Return a value before and after, as far as it was measured."""
    values = [getattr(one, name) for one in (entry.before, entry.after) if one is not None]
    return " → ".join(format(value, form) for value in values if value is not None)
