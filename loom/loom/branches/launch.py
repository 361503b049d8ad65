"""The start of a branch in the background, by a user's program or by the process of a run that lives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loom.branches.branch import Branch
from loom.branches.command import BranchStart, branch_start, checkpoint_folders
from loom.branches.values import kept_at
from loom.control.run_start import COMMAND_VARIABLE, LAUNCHER_VARIABLE, START_VARIABLE
from loom.errors import BranchRefused

LOG = "loom-branch.log"
"""The file, in a branch's own folder, with the output of a branch that runs in the background."""

ENDS_WITHIN = 900
"""Seconds that a run may take to end whose place a branch takes."""

NAME_VARIABLE = "LOOM_RUN"

_BECOMES = f"""
import os, select, sys
folder, before, *command = sys.argv[1:]
if before != "0":
    try:
        ended = select.select([os.pidfd_open(int(before))], [], [], {ENDS_WITHIN})[0]
    except ProcessLookupError:
        ended = True
    if not ended:
        sys.exit(f"loom branch: process {{before}}, in whose place it would start, has not ended")
os.chdir(folder)
os.environ["{LAUNCHER_VARIABLE}"] = f"{{os.getpid()}} {{folder}}"
os.execvp(command[0], command)
"""
"""A program that waits for the end of a process, and becomes a command in a folder."""


class Launcher(NamedTuple):
    """The process that ``loom run`` has become, above this one."""

    pid: int
    folder: str
    """The folder in which it was started."""
    environment: dict[str, str]
    """The environment with which it was started."""

    @classmethod
    def of_this_process(cls) -> Launcher:
        """Return the launcher of this process.

        Raises:
            BranchRefused: there is none, or it cannot be asked.
        """
        pid, _, folder = os.environ.get(LAUNCHER_VARIABLE, "").partition(" ")
        if not pid or COMMAND_VARIABLE not in os.environ:
            raise BranchRefused("the run was not started by `loom run`, which knows its command")
        if os.environ.get("WORLD_SIZE", "1") != os.environ.get(
            "LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")
        ):
            raise BranchRefused("the run is on several hosts, on each of which its command has to be started")
        try:
            told = Path("/proc", pid, "environ").read_bytes()
        except OSError as error:
            raise BranchRefused(f"its launcher, process {pid}, is gone from here: {error.strerror}") from None
        pairs = (one.partition("=") for one in os.fsdecode(told).split("\0") if "=" in one)
        found = {name: value for name, _, value in pairs}
        if found.get(START_VARIABLE) != os.environ.get(START_VARIABLE):
            raise BranchRefused(f"its launcher, process {pid}, is gone from here: another one has its number")
        return cls(int(pid), folder, found)


def start_detached(
    start: BranchStart, environment: Mapping[str, str], after: int | None = None
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a branch in the background; return its process and the file with its output.

    Args:
        environment: the whole environment, to which `BranchStart.variables` are added.
        after: id of a process whose end it waits for.
    """
    own = Path(start.branch.own)
    own.mkdir(parents=True, exist_ok=True)
    with open(own / LOG, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _BECOMES, start.folder, str(after or 0), *start.command],
            env={**environment, NAME_VARIABLE: start.name, **start.variables()},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process, own / LOG


def why_ended(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the exit code of a branch that has ended, with the last line of its output."""
    lines = log.read_text(errors="replace").strip().splitlines()[-1:]
    return f"it ended with exit code {process.returncode}: {''.join(lines)[:500]} (see {log})"


def branch_name(parent: str, step: int, taken: Collection[str]) -> str:
    """Return a name for a branch that no run has."""
    wanted = f"{parent}-at-{step}"
    further = (f"{wanted}-{number}" for number in range(2, len(taken) + 3))
    return next(one for one in [wanted, *further] if one not in taken)


def launch(
    params: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[BranchStart, subprocess.Popen[bytes], Path]:
    """Start a branch of the run that this process is of, as the parameters of the weaver's command say.

    Args:
        params: ``run`` and ``name`` of this run, ``id`` of the new one, ``step``, ``set``, ``replace``, the
            ``timeline`` of changed values, ``known`` values, and the names that are ``taken``.
        config: the configuration of this process.

    Raises:
        LoomError: it cannot be started here.
    """
    above = Launcher.of_this_process()
    command = json.loads(os.environ[COMMAND_VARIABLE])
    start = start_of(params, command, above.folder, checkpoint_folders(config, command, above.folder)).prepare()
    process, log = start_detached(start, above.environment, above.pid if params.get("replace") is True else None)
    return start, process, log


def start_of(
    params: Mapping[str, Any], command: Sequence[str], working: str, folders: Sequence[str]
) -> BranchStart:
    """Return the start of a branch that the weaver's command asks for, with its name and its values.

    Args:
        params: those of `launch`.
        command: the run's command.
        working: the folder in which it was started.
        folders: those that may have its checkpoints.

    Raises:
        NotFound: there is no such checkpoint.
    """
    unplaced = Branch(params["run"], 0, "", "", "", changes=params["set"])
    id, step = params.get("id") or uuid.uuid4().hex[:12], params.get("step")
    start = branch_start(unplaced, command, working, "", id, step, folders)
    kept = kept_at(params["timeline"], start.branch.step)
    replaces = params.get("replace") is True
    name = params["name"] if replaces else branch_name(params["name"], start.branch.step, params["taken"])
    return start.with_values(kept, {**params["known"], **kept}).with_name(name)
