"""What follows when a device fails: for each group of replicas, what is done with those on the device.

Every replica on the device is told that it has failed, whatever the policy; the policy says what else.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from enum import Enum

from loom.errors import WrongArguments


class Action(str, Enum):
    """What is done with a replica whose device has failed."""

    NOTIFY = "notify"
    """No more than telling it."""
    PAUSE = "pause"
    STOP = "stop"
    RESPAWN = "respawn"
    """Log an event ``respawn_wanted``, for whoever can put the replica elsewhere."""


class Policy:
    """The action for each group. A group without one of its own has that of the newest glob that matches it."""

    def __init__(self) -> None:
        self._actions: dict[str, Action] = {}

    def __iter__(self) -> Iterator[tuple[str, Action]]:
        return iter(self._actions.items())

    def set(self, group: str, action: str) -> Action:
        """Choose the action for a group, or for all that a glob matches (``"*"``: all).

        Raises:
            WrongArguments: there is no such action.
        """
        if action not in tuple(Action):
            names = ", ".join(one.value for one in Action)
            raise WrongArguments(f"there is no action {action!r:.80}; choose one of {names}")
        self._actions.pop(group, None)
        self._actions[group] = Action(action)
        return self._actions[group]

    def action(self, group: str) -> Action:
        """The action for a group; `Action.NOTIFY` unless one was chosen."""
        if group in self._actions:
            return self._actions[group]
        for pattern, action in reversed(self._actions.items()):
            if fnmatch.fnmatchcase(group, pattern):
                return action
        return Action.NOTIFY
