"""`StartFacts`: what a process tells of the start of its run, once, if the weaver asks for it in its welcome."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from loom.control.frame import MAX_COUNT, MAX_NAME, Frame, pack_value

START_VARIABLE = "LOOM_RUN_ID"
"""The environment variable with the id of the start that the processes below belong to: that of their run."""

COMMAND_VARIABLE = "LOOM_RUN_COMMAND"
"""The environment variable with the command line of ``loom run``, as JSON."""

PARENT_VARIABLE = "LOOM_RUN_PARENT"
"""The environment variable that names the run that a start continues, and where: ``KIND:RUN:STEP``."""

LAUNCHER_VARIABLE = "LOOM_RUN_LAUNCHER"
"""The environment variable with the id of the process that ``loom run`` became, and its folder: ``PID FOLDER``."""

PLACE_VARIABLE = "LOOM_PLACE"
"""The environment variable with the place in its session where a process began that is none of a proc mesh."""

PARENT_KINDS = ("branch", "restart", "requeue")

MAX_COMMAND = 16 << 10
"""Characters of a command line that is told to the weaver: Linux bounds a variable to 128 KiB."""

CONTROLLERS = "_jobs"
"""The end of the name of the group of a job's controller, which starts branches of the job."""

CODE_VARIABLE = "LOOM_RUN_CODE"
"""The environment variable with the facts of the code that ``loom run --on`` has brought, as JSON."""

MAX_START = 64
"""Characters of the id of a start."""

START = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_START}}}")
"""The form of the id of a start."""

MAX_FACTS = 32 << 10
"""Bytes of all facts."""

MAX_ARGUMENTS = 1000
"""Arguments of a command line; further ones are left out."""

MAX_FACT = 4096
"""Characters of a text among the facts."""


class RunParent(NamedTuple):
    """The run that another one continues."""

    run: str
    """Its id."""
    step: int
    """The step of the checkpoint with which the other one begins."""
    kind: str
    """``branch``, ``restart`` or ``requeue``."""

    @classmethod
    def read(cls, text: str) -> RunParent | None:
        """Return what `PARENT_VARIABLE` says; None if it says nothing that makes sense."""
        kind, _, rest = text.partition(":")
        run, _, step = rest.rpartition(":")
        if kind not in PARENT_KINDS or not START.fullmatch(run) or not step.isdecimal() or int(step) >= MAX_COUNT:
            return None
        return cls(run, int(step), kind)

    def __str__(self) -> str:
        return f"{self.kind}:{self.run}:{self.step}"


@dataclass(frozen=True, slots=True)
class StartFacts(Frame, kind="start"):
    """``["start", {fact: value}]``, from a threadlet whose welcome has ``start``; unknown facts are left out.

    Texts: ``folder``, ``user``, ``host``, ``platform``, ``commit``, ``branch``, ``tree`` (the hash of a synced
    folder) and ``cluster_job``. Lists of texts: ``command`` and ``gpus``. ``clean`` is a boolean, and ``versions``
    has texts by the name of a package. A weaver drops facts that only a newer threadlet knows.
    """

    facts: Mapping[str, Any]

    @classmethod
    def from_body(cls, body: Sequence[Any]) -> StartFacts:
        match body:
            case [_, dict(told)] if len(pack_value(told)) <= MAX_FACTS:
                facts = {name: told[name] for name in _CHECKS if told.get(name) is not None}
                if all(_CHECKS[name](value) for name, value in facts.items()):
                    return cls(facts)
        raise cls.mismatch(body)


def _is_text(value: Any) -> bool:
    return type(value) is str and len(value) <= MAX_FACT


def _is_list(value: Any) -> bool:
    return type(value) is list and len(value) <= MAX_ARGUMENTS and all(map(_is_text, value))


def _are_versions(value: Any) -> bool:
    if type(value) is not dict or len(value) > MAX_ARGUMENTS:
        return False
    return all(_is_text(name) and len(name) <= MAX_NAME and _is_text(one) for name, one in value.items())


_TEXTS = ("folder", "user", "host", "platform", "commit", "branch", "tree", "cluster_job")
_CHECKS = {
    **dict.fromkeys(_TEXTS, _is_text),
    "command": _is_list,
    "gpus": _is_list,
    "clean": lambda value: type(value) is bool,
    "versions": _are_versions,
}


def branch_command(start: str) -> str:
    """Return the id of the command by which the processes of a branch apply its values before their first step."""
    return f"branch-{start}"


def _find_no_place() -> None:
    return None


_find_place: Callable[[], str | None] = _find_no_place


def find_place_by(find: Callable[[], str | None]) -> None:
    """Set the function that returns the place of what runs now in a session's driver, or in a fork of it."""
    global _find_place
    _find_place = find


def own_place() -> str | None:
    """Return the place in its session where this process began, or None.

    It is that of a function of `Job.run` in the driver, as `function_place` names it, or the id of a proc mesh.
    """
    return _find_place() or os.environ.get(PLACE_VARIABLE)


def function_place(session: str, function: int) -> str:
    """Return the name of the place of a function's threads and processes in the driver of its session."""
    return f"{function}@{session}"


def start_of_slurm(given: Mapping[str, str]) -> str | None:
    """Return the id of the step of Slurm that these variables are of, the same on all nodes and after a requeue.

    A terminal in a step, and a batch script, start what they like, and as often: they give no id.
    """
    job, step = given.get("SLURM_JOB_ID"), given.get("SLURM_STEP_ID", "")
    if not job or not step.isdecimal() or int(step) >= _SPECIAL_STEPS or "SLURM_PTY_PORT" in given:
        return None
    return read_start(f"slurm-{job}-{step}")


_SPECIAL_STEPS = 0xFFFFFFF0  # Slurm's numbers of steps that are a terminal, a batch script, or none


def read_start(text: str) -> str | None:
    """Return the id of a start that a user or a scheduler has chosen, fit to be one; None for an empty text."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text)[:MAX_START] or None
