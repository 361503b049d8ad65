"""`StepClock`: what the seconds of a training go into."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from loom.threadlet import Threadlet
from loom.train.loop.baseline import Baseline

__all__ = ["StepClock"]


@dataclass(frozen=True)
class Mark:
    """A moment, and what had been measured until then."""

    at: float
    seconds: dict[str, float]


class StepClock:
    """Adds up seconds by what they were spent on, for a step's metrics and for the weaver's goodput."""

    def __init__(self) -> None:
        self._seconds = {"compute_s": 0.0, "wait_s": 0.0, "lost_s": 0.0, "checkpoint_s": 0.0}
        self.threadlet: Threadlet | None = None
        """Takes the time that is no step; None before the training begins."""

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, by their metric."""
        seconds = {key: round(value, 6) for key, value in self._seconds.items()}
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return seconds

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Measure a computation."""
        with self._measured("compute_s"):
            yield

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Measure what the training waits for a checkpoint."""
        with self._measured("checkpoint_s"), self._spent("checkpoint"):
            yield

    @contextlib.contextmanager
    def waiting(self, baseline: Baseline) -> Iterator[None]:
        """Measure an exchange with others: up to the baseline it is a part of the step, beyond it a wait."""
        began = time.perf_counter()
        with self._measured("wait_s"), self._spent("waiting", baseline.seconds):
            yield
        baseline.add(time.perf_counter() - began)

    def mark(self) -> Mark:
        """Return this moment, for `lose`."""
        return Mark(time.perf_counter(), dict(self._seconds))

    def lose(self, since: Mark) -> None:
        """Count all seconds since a moment as lost: what was done in them is done again."""
        lost = time.perf_counter() - since.at
        self._seconds = {**since.seconds, "lost_s": since.seconds["lost_s"] + lost}

    @contextlib.contextmanager
    def _measured(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[what] += time.perf_counter() - began

    def _spent(self, reason: str, beyond: float = 0.0) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.threadlet is None else self.threadlet.spent(reason, beyond)
