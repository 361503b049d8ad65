"""`Deferred`: a handler's answer to a value that it accepts now and that the training applies at a later step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Settlement:
    """What became of a deferred value."""

    step: int | None
    """The first step that the value holds for; None if it was refused."""
    refused: str | None = None
    """Why it was refused; None if it was applied."""


class Deferred:
    """A value that was accepted and is not applied yet.

    A handler returns one when it cannot apply the value at this step boundary, such as a value that all replicas
    have to change at the same step. The command is acknowledged when `applied` or `refuse` was called for each of
    its values, with the latest of their steps; at the latest when the threadlet is closed, which refuses the rest.

    Any thread may call `applied` and `refuse`. The first call counts; later ones do nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._verdict: Settlement | None = None
        self._listener: Callable[[Settlement], None] | None = None

    @property
    def verdict(self) -> Settlement | None:
        """What became of the value; None while that is open."""
        return self._verdict

    def applied(self, step: int) -> None:
        """Say that the value holds from a step on."""
        self._decide(Settlement(step))

    def refuse(self, reason: str) -> None:
        """Say that the value will not be applied, and why."""
        self._decide(Settlement(None, reason))

    def when_decided(self, listener: Callable[[Settlement], None]) -> None:
        """Call the listener with the verdict, at once if there is one. The threadlet calls this, once."""
        with self._lock:
            self._listener = listener
            verdict = self._verdict
        if verdict is not None:
            listener(verdict)

    def _decide(self, verdict: Settlement) -> None:
        with self._lock:
            if self._verdict is not None:
                return
            self._verdict, listener = verdict, self._listener
        if listener is not None:
            listener(verdict)
