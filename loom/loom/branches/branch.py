"""`Branch`: what the processes of a branch have to know, in an environment variable that all of them inherit."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

BRANCH_VARIABLE = "LOOM_BRANCH"
"""The environment variable with a `Branch`, as JSON."""

FOLDER_KEY = "checkpoint_folder"
"""The key of the configuration with the folder of a run's checkpoints, which the hooks of the libraries report."""

BEGINNING = "beginning"
"""The folder, in a branch's own, with links to the files of the checkpoint from which the branch begins."""

_log = logging.getLogger("loom")


@dataclass(frozen=True, eq=False)
class Branch:
    """A start of a run's command from one of its checkpoints."""

    run: str
    """Id of the run that it continues."""
    step: int
    """The step of the checkpoint."""
    checkpoint: str
    """The path of the checkpoint."""
    folder: str
    """The folder of the run's checkpoints, into which the branch writes nothing."""
    own: str
    """The folder that the branch has in its place."""
    given: bool = False
    """Whether the command itself names the checkpoint: nothing can tell whether it is loaded."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """The values that commands had set in the run up to the step."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """The values to change; ``"0.5x"`` is relative to the run's value at the step."""
    known: Mapping[str, Any] = field(default_factory=dict)
    """The run's values at the step, as far as they are known."""

    @property
    def config(self) -> dict[str, Any]:
        """The values with which it begins, as they were asked for."""
        return {**self.kept, **self.changes}

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Branch:
        """Return the branch that a text describes; raise ValueError, TypeError or KeyError if it describes none."""
        found = json.loads(text)
        return cls(**{name: found[name] for name in cls.__dataclass_fields__ if name in found})

    def redirected(self, path: str) -> str:
        """Return a path, or the one in the branch's own folder if it is in that of the run's checkpoints."""
        inside = os.path.relpath(os.path.abspath(path), self.folder)
        if inside == os.curdir:
            return self.own
        return path if inside.startswith(os.pardir) or self.owns(path) else os.path.join(self.own, inside)

    def owns(self, path: str) -> bool:
        """Return whether a path is in the branch's own folder, which may lie in that of the run's."""
        return os.path.abspath(path) == self.own or os.path.abspath(path).startswith(self.own + os.sep)

    def without_values(self) -> Branch:
        """Return the same branch for a process that begins with the values of others."""
        return replace(self, kept={}, changes={})


_loaded = False


def note_loaded() -> None:
    """Note that this process has loaded the checkpoint of its branch, or loads it now."""
    global _loaded
    _loaded = True


def is_loaded() -> bool:
    """Return whether this process has loaded the checkpoint of its branch."""
    return _loaded


@functools.cache
def resumed_from(branch: Branch) -> tuple[int, str]:
    """Return step and path of the checkpoint to load: the newest of the branch's own, if it was started again.

    The first call looks, before the process writes any.
    """
    from loom.branches.checkpoints import checkpoints_in  # which other processes do without

    own = [one for one in checkpoints_in(branch.own) if one.step >= branch.step]
    return (own[-1].step, own[-1].path) if own else (branch.step, branch.checkpoint)


@functools.cache
def own_branch() -> Branch | None:
    """Return the branch that this process is of; None for every other process."""
    text = os.environ.get(BRANCH_VARIABLE)
    if not text:
        return None
    try:
        return Branch.read(text)
    except (ValueError, TypeError, KeyError) as error:
        _log.error("%s describes no branch, and is ignored: %r", BRANCH_VARIABLE, error)
        return None


def become(branch: Branch) -> None:
    """Let this process be of a branch, as if it had been started so, before it makes a threadlet."""
    os.environ[BRANCH_VARIABLE] = branch.to_text()
    own_branch.cache_clear()
