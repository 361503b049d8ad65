"""`AllocationSpec`: what is asked of Slurm, and of Loom in the allocation."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from loom.errors import WrongArguments
from loom.slurm.queue import read_duration

NOTICE = 120.0
"""Default seconds before the time limit at which training processes are told to save their state."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""The form of the name of an allocation."""

_UNNAMED = re.compile(r"loom-\d+")
"""The form of the names of allocations that were given none."""

_OURS = {
    "--job-name": "--name",
    "-J": "--name",
    "--output": "",
    "-o": "",
    "--error": "",
    "-e": "",
    "--signal": "--notice",
    "--parsable": "",
    "--wrap": "",
    "--array": "",
    "-a": "",
    "--ntasks-per-node": "",
    "--ntasks": "--nodes",
    "-n": "--nodes",
}
"""Options of ``sbatch`` that Loom gives itself, and Loom's options in their place."""


@dataclass(frozen=True)
class AllocationSpec:
    """An allocation to ask for.

    Raises:
        WrongArguments: something makes no sense, whatever the cluster.
    """

    nodes: int = 1
    name: str | None = None
    """The allocation's name; by default ``loom-JOBID``."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gpus_per_node: str | None = None
    """As ``sbatch`` takes it: a number, or ``TYPE:NUMBER``."""
    time_limit: str | None = None
    """As ``sbatch`` takes it: minutes, ``HOURS:MINUTES:SECONDS`` or ``DAYS-HOURS:MINUTES:SECONDS``."""
    notice: float = NOTICE
    """Seconds before the time limit at which training processes are told to save their state."""
    chain: int = 1
    """Allocations in all, each of which submits its successor, which starts when it ends."""
    gateway_only: bool = False
    """True for a gateway without workers."""
    venv: str | None = None
    """A virtual environment with Loom on the nodes; by default the one that submits."""
    container: str | None = None
    """An image with Loom: a file ``.sif`` or an address that Apptainer takes; any other is for pyxis."""
    options: tuple[str, ...] = ()
    """Further options of ``sbatch``, as they are."""

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise WrongArguments(f"an allocation has 1 node at least, not {self.nodes}")
        if self.gateway_only and self.nodes > 1:
            raise WrongArguments("a gateway alone has one node: leave --nodes out")
        if self.chain < 1:
            raise WrongArguments(f"a chain has 1 allocation at least, not {self.chain}")
        if self.name is not None:
            check_name(self.name)
        if self.venv is not None and self.container is not None:
            raise WrongArguments("Loom comes from --venv or from --container: give one")
        limit = None if self.time_limit is None else read_duration(self.time_limit)
        if self.time_limit is not None and limit is None:
            raise WrongArguments(
                f"{self.time_limit!r} is no time limit: write minutes, HOURS:MINUTES:SECONDS or "
                "DAYS-HOURS:MINUTES:SECONDS"
            )
        if not 0 <= self.notice < 65536:
            raise WrongArguments(f"a notice is between 0 and 65535 s, not {self.notice:g}")
        if limit is not None and self.notice >= limit:
            raise WrongArguments(
                f"the notice of {self.notice:g} s comes before a time limit of {limit:g} s has begun: give a "
                "longer --time or a shorter --notice"
            )
        for option in self.options:
            word = option.partition("=")[0]
            if word in _OURS:
                instead = f"use {_OURS[word]} of Loom's" if _OURS[word] else "Loom gives it itself"
                raise WrongArguments(f"{word} is no option for an allocation of Loom's: {instead}")

    def to_json(self) -> str:
        """Return it as JSON, for the allocation's folder."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> AllocationSpec:
        """Return what `to_json` wrote; what only a newer Loom knows is left out."""
        known = {field.name for field in fields(cls)}
        given = {name: value for name, value in json.loads(text).items() if name in known}
        return cls(**{**given, "options": tuple(given.get("options", ()))})


def check_name(name: str) -> None:
    """Raise `WrongArguments` if a user may not give an allocation this name."""
    if not NAME.fullmatch(name):
        raise WrongArguments(
            f"{name!r} is no name for an allocation: write at most 64 letters, digits, '-', '_' and '.', the first "
            "of them a letter or a digit"
        )
    if _UNNAMED.fullmatch(name):
        raise WrongArguments(f"{name!r} is a name that Loom gives itself, by the job's id: choose another")


def is_for_apptainer(container: str) -> bool:
    """Return whether Apptainer runs an image, and not pyxis."""
    schemes = ("docker", "oras", "library", "shub")
    return container.endswith(".sif") or container.partition("://")[0] in schemes


def sbatch_lines(spec: AllocationSpec, name: str, output: str) -> Sequence[str]:
    """Return the options of ``sbatch`` for an allocation, of which no one holds a secret."""
    given = {
        "job-name": name,
        "nodes": str(spec.nodes),
        "ntasks-per-node": "1",
        "partition": spec.partition,
        "account": spec.account,
        "qos": spec.qos,
        "gpus-per-node": spec.gpus_per_node,
        "time": spec.time_limit,
        "output": output,
        "open-mode": "append",
        "signal": f"B:USR1@{spec.notice:.0f}" if spec.notice else None,
    }
    return [f"--{word}={value}" for word, value in given.items() if value is not None] + [
        "--requeue",
        "--no-kill",
        *spec.options,
    ]
