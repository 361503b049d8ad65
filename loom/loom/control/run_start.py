"""`StartFacts`: what a process tells of the start of its run, once, if the weaver asks for it in its welcome."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loom.control.frame import MAX_NAME, Frame, pack_value

START_VARIABLE = "LOOM_RUN_ID"
"""The environment variable with the id of the start that the processes below belong to: that of their run."""

COMMAND_VARIABLE = "LOOM_RUN_COMMAND"
"""The environment variable with the command line of ``loom run``, as JSON."""

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
