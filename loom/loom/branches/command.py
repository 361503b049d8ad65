"""`BranchStart`: the command of a run, made ready to start again from a checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loom.branches.branch import BEGINNING, BRANCH_VARIABLE, FOLDER_KEY, Branch
from loom.branches.checkpoints import CheckpointLayout, FoundOnDisk, checkpoints_in, choose
from loom.control.run_start import COMMAND_VARIABLE, MAX_COMMAND, PARENT_VARIABLE, START_VARIABLE, RunParent
from loom.errors import BranchRefused

HIDDEN = "***"
"""What stands in the facts of a start for a secret."""

_NAMES_FOLDER = re.compile(
    r"(?i)-*([\w.]*[._-])?(output|checkpoint|ckpt|save|dump|default_root|work)s?([._-]?\w+)?"
)
"""Names of options whose values may be folders with checkpoints."""

_OF_BRANCH = re.compile(r"-branch-[0-9a-f]{12}$")
"""The end of a folder's name that is a branch's already."""


@dataclass(frozen=True)
class BranchStart:
    """A branch that is ready to start."""

    command: tuple[str, ...]
    folder: str
    """The folder in which it starts."""
    name: str
    id: str
    branch: Branch
    layout: CheckpointLayout

    def with_name(self, name: str) -> BranchStart:
        """Return the same start, with a name for the run."""
        return replace(self, name=name)

    def with_values(self, kept: Mapping[str, Any], known: Mapping[str, Any]) -> BranchStart:
        """Return the same start, with the values that commands had set in the run, and all that are known of it."""
        return replace(self, branch=replace(self.branch, kept=kept, known=known))

    def prepare(self) -> BranchStart:
        """Make the branch's own folder, with links to the checkpoint's files: the run may remove its own meanwhile.

        The branch reads the links, and writes none of these files.

        Raises:
            BranchRefused: the folder cannot be made, into which the branch would write.
        """
        source, own = Path(self.branch.checkpoint), Path(self.branch.own)
        try:
            own.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BranchRefused(
                f"the branch's own folder {str(own)!r} cannot be made: {error.strerror}. It lies where the run's "
                "checkpoints do, which has to be writable here"
            ) from None
        to = own / BEGINNING / source.name
        try:
            _link(source, to)
        except OSError:  # a file system without links: the branch reads the run's own files
            return self
        if self.layout is CheckpointLayout.DISTRIBUTED:  # where a script that looks into its folder finds it
            with contextlib.suppress(FileExistsError):
                (own / source.name).symlink_to(to.relative_to(own))
        command = tuple(_named(one, str(source), str(to)) for one in self.command)
        return replace(self, command=command, branch=replace(self.branch, checkpoint=str(to)))

    def variables(self) -> dict[str, str]:
        """Return the environment variables by which its processes know what they are."""
        told = json.dumps(list(self.command))
        parent = RunParent(self.branch.run, self.branch.step, "branch")
        return {
            START_VARIABLE: self.id,
            PARENT_VARIABLE: str(parent),
            BRANCH_VARIABLE: self.branch.to_text(),
            **({COMMAND_VARIABLE: told} if len(told) <= MAX_COMMAND else {}),
        }


def branch_start(
    branch: Branch,
    command: Sequence[str],
    working: str,
    name: str,
    id: str,
    step: int | None,
    folders: Sequence[str],
) -> BranchStart:
    """Return the start of a branch, from the last checkpoint at or before a step.

    Args:
        branch: the branch without its checkpoint and folders.
        command: the run's command, complete.
        working: the folder in which it was started.
        folders: those that may have its checkpoints.

    Raises:
        NotFound: there is no such checkpoint.
    """
    found, folder = choose(folders, step, branch.run)
    own = own_folder(folder, id, working)
    rewritten, named = _rewritten(command, working, folder, own, found)
    made = replace(
        branch,
        step=found.step,
        checkpoint=found.path,
        folder=folder,
        own=own,
        given=branch.given or named,
    )
    return BranchStart(tuple(rewritten), working, name, id, made, found.layout)


def checkpoint_folders(config: Mapping[str, Any], command: Sequence[str], working: str) -> list[str]:
    """Return the folders that may have a run's checkpoints: the one that it has told, or those of its options."""
    told = config.get(FOLDER_KEY)
    if isinstance(told, str):
        return [told]
    values = [
        _absolute(value, working) for name, value in _options(command) if _NAMES_FOLDER.fullmatch(name or "save")
    ]
    return [one for one in dict.fromkeys(values) if os.path.isdir(one)]


def own_folder(folder: str, id: str, working: str) -> str:
    """Return the folder of a branch: beside that of the run, or in it if the command starts there."""
    if os.path.commonpath([folder, working]) == folder:
        return os.path.join(folder, f"branch-{id}")
    return f"{_OF_BRANCH.sub('', folder)}-branch-{id}"


def completed(command: Sequence[str], arguments: Iterable[str], environment: Mapping[str, str]) -> list[str]:
    """Return a command with arguments changed or added, and with its secrets.

    Args:
        command: the command, in which `HIDDEN` stands for each secret.
        arguments: such as ``--name=value``; they take the place of the option's value.
        environment: in which ``HF_TOKEN`` stands for the secret of ``--hf_token``.

    Raises:
        BranchRefused: a secret is not given.
    """
    made = list(command)
    for argument in arguments:
        _put(made, argument)
    for place, one in enumerate(made):
        if HIDDEN not in one:
            continue
        name, equals, value = one.partition("=")
        if not equals:
            name, value = made[place - 1] if place and made[place - 1].startswith("-") else "", one
        if not name or value != HIDDEN:
            raise BranchRefused(
                f"argument {place}, {one!r:.80}, has a secret, which is not kept: give the whole command, after --"
            )
        variable = re.sub(r"\W", "_", name.lstrip("-")).upper()
        if (secret := environment.get(variable)) is None:
            raise BranchRefused(
                f"the value of {name} is a secret, which is not kept: give it with --argument '{name}=…', or as "
                f"the variable {variable}"
            )
        made[place] = f"{name}={secret}" if equals else secret
    return made


def _put(command: list[str], argument: str) -> None:
    """Put an option in the place of the one of its name, or at the end."""
    name, equals, value = argument.partition("=")
    for place, one in enumerate(command):
        if equals and one.partition("=")[0] == name and "=" in one:
            command[place] = argument
            return
        if one == name and place:
            if equals and place + 1 < len(command) and not command[place + 1].startswith("--"):
                command[place + 1] = value
            elif equals:
                command[place] = argument
            return
    command.append(argument)


def _options(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    for before, one in zip(["", *command], command, strict=False):
        name, equals, value = one.partition("=")
        if equals:
            yield name, value
        elif not one.startswith("-"):
            yield before if before.startswith("-") else "", one


def _rewritten(
    command: Sequence[str], working: str, folder: str, own: str, found: FoundOnDisk
) -> tuple[list[str], bool]:
    """Return a command that names the branch's folder and checkpoint, and whether it names the checkpoint."""
    known = {os.path.realpath(one.path) for one in checkpoints_in(folder)}
    marks = {"{checkpoint}": found.path, "{step}": str(found.step), "{folder}": own}
    made, named = [], False
    for one in command:
        name, equals, value = one.rpartition("=")
        path = _absolute(value, working) if value else ""
        if path == folder:
            value = own
        elif os.path.realpath(path) in known:
            value, named = found.path, True
        named = named or "{checkpoint}" in value
        for mark, text in marks.items():
            value = value.replace(mark, text)
        made.append(f"{name}{equals}{value}")
    return made, named


def _named(argument: str, before: str, after: str) -> str:
    """Return an argument in which one path, if it is the whole value, is another one."""
    name, equals, value = argument.rpartition("=")
    return f"{name}{equals}{after}" if value == before else argument


def _absolute(path: str, working: str) -> str:
    return os.path.normpath(os.path.join(working, os.path.expanduser(path)))


def _link(source: Path, to: Path) -> None:
    """Link a file, or every file of a folder, at another place; what is there already is left."""
    if source.is_dir():
        to.mkdir(parents=True, exist_ok=True)
        for child in source.iterdir():
            _link(child, to / child.name)
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.link(source, to)
