"""The policy for device failures: for each group of replicas, the action for those on a failed device.

Every replica on the device is notified, whatever the policy.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from enum import Enum

from loom.control.arguments import check_name
from loom.errors import LimitReached, WrongArguments


class Action(str, Enum):
    """The action for a replica whose device has failed."""

    NOTIFY = "notify"
    """Only notify the replica."""
    PAUSE = "pause"
    STOP = "stop"
    RESPAWN = "respawn"
    """Log an event ``respawn_wanted``, for a program that can respawn the replica elsewhere."""


MAX_POLICIES = 1000
"""Groups, and globs, of one user with an action of their own."""


class Policy:
    """The action for each group: its own, or that of the newest glob that matches it."""

    def __init__(self) -> None:
        self._actions: dict[str, Action] = {}

    def __iter__(self) -> Iterator[tuple[str, Action]]:
        return iter(self._actions.items())

    def set(self, group: str, action: str) -> Action:
        """Set the action of a group, or of all groups that a glob matches (``"*"`` matches all)."""
        if action not in tuple(Action):
            names = ", ".join(one.value for one in Action)
            raise WrongArguments(f"there is no action {action!r:.80}; choose one of {names}")
        check_name("a group", group)
        if group not in self._actions and len(self._actions) >= MAX_POLICIES:
            raise LimitReached(f"there are policies for {MAX_POLICIES} groups: set one of those, or use a glob")
        self._actions.pop(group, None)  # reinsert at the end: the newest glob wins
        self._actions[group] = Action(action)
        return self._actions[group]

    def action(self, group: str) -> Action:
        """Return the action of a group; the default is `Action.NOTIFY`."""
        if group in self._actions:
            return self._actions[group]
        for pattern, action in reversed(self._actions.items()):
            if fnmatch.fnmatchcase(group, pattern):
                return action
        return Action.NOTIFY
