"""Commands that a library can carry out only later than at the step boundary at which they come.

A boundary lies inside the library's own step. A checkpoint of that moment would have a new model and an old
schedule, and a count of gradients to accumulate may change only where a whole number of them has been accumulated.
"""

from __future__ import annotations

from collections.abc import Callable

from loom.threadlet.handlers import Deferred

_OVER = "the training ended before that"


class Postponed:
    """The commands of one training that are not carried out yet. Only the training thread calls the methods."""

    def __init__(self) -> None:
        self._asked: dict[str, Deferred] = {}
        self._done: set[str] = set()
        self._values: dict[str, tuple[Callable[[], bool], Callable[[], None], Deferred]] = {}

    def ask(self, action: str) -> Deferred:
        """Note that an action is wanted; return its verdict, which commands that ask before it is done share."""
        return self._asked.setdefault(action, Deferred())

    def wanted(self, action: str) -> bool:
        """Return whether an action is wanted and not done."""
        return action in self._asked and action not in self._done

    def done(self, action: str) -> None:
        """Note that the library has done an action, because of a command or by itself."""
        if action in self._asked:
            self._done.add(action)

    def settle(self, step: int, missing: str = "") -> None:
        """Acknowledge the actions that were done, and refuse the others, because the library has gone on."""
        for action, verdict in self._asked.items():
            verdict.applied(step) if action in self._done else verdict.refuse(missing or _OVER)
        self._asked, self._done = {}, set()

    def refuse(self, action: str, reason: str) -> None:
        """Refuse an action that is wanted."""
        if (verdict := self._asked.pop(action, None)) is not None:
            verdict.refuse(reason)

    def change(self, key: str, fits: Callable[[], bool], apply: Callable[[], None]) -> Deferred:
        """Apply a value at the first `look` at which it fits; return its verdict."""
        if (before := self._values.pop(key, None)) is not None:
            before[2].refuse("a later value took its place")
        self._values[key] = fits, apply, (verdict := Deferred())
        return verdict

    def look(self, step: int) -> None:
        """Apply the values that fit now, after a step."""
        for key, (fits, apply, verdict) in list(self._values.items()):
            if fits():
                del self._values[key]
                apply()
                verdict.applied(step)

    def close(self, step: int) -> None:
        """Settle everything: the training is over."""
        self.settle(step)
        for _, _, verdict in self._values.values():
            verdict.refuse(_OVER)
        self._values = {}
