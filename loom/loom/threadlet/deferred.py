"""`Deferred`: a handler's result for a value that it accepts now and that the training applies at a later step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass


@dataclass(frozen=True)
class Settlement:
    """The outcome of a deferred value."""

    step: int | None
    """The first step at which the value takes effect; None if the value was refused."""
    refused: str | None = None
    """Why the value was refused; None if it was applied."""


class Deferred:
    """A value that was accepted and is not applied yet.

    A handler returns a `Deferred` when it cannot apply the value at this step boundary, such as a value that all
    replicas have to change at the same step. The command is acknowledged when `applied` or `refuse` was called for
    each of its values, with the latest of their steps. Closing the threadlet refuses the values that are left.

    Any thread may call `applied` and `refuse`. The first call counts; later ones do nothing.
    """

    def __init__(self) -> None:
        self._decided: Future[Settlement] = Future()

    @property
    def verdict(self) -> Settlement | None:
        """The outcome of the value; None while it is open."""
        return self._decided.result() if self._decided.done() else None

    def applied(self, step: int) -> None:
        """Settle the value: it takes effect at this step."""
        self._decide(Settlement(step))

    def refuse(self, reason: str) -> None:
        """Settle the value: it will not be applied, for this reason."""
        self._decide(Settlement(None, reason))

    def when_decided(self, listener: Callable[[Settlement], None]) -> None:
        """Call the listener with the verdict, at once if there is one. Only the threadlet calls this."""
        self._decided.add_done_callback(lambda decided: listener(decided.result()))

    def _decide(self, verdict: Settlement) -> None:
        with contextlib.suppress(InvalidStateError):
            self._decided.set_result(verdict)
