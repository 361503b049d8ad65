"""`StepClock`: the time accounting of a training."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from statistics import median
from typing import TypeAlias

from loom.threadlet import Threadlet

REMEMBERED = 200  # the newest waits, from which a baseline is computed
LEAST = 5  # waits before which there is no baseline
TIMES = 2.0  # the baseline is this many times the median
_AGAIN = 10  # waits after which the median is computed again
Mark: TypeAlias = tuple[float, dict[str, float]]  # a moment, and the seconds measured until then


class Baseline:
    """The usual time of an exchange: a much longer one is a wait for a slow, stopped, gone or new group."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=REMEMBERED)
        self._until_again = LEAST
        self.seconds = 0.0  # the longest usual time; 0 until enough times are known

    def add(self, seconds: float) -> None:
        self._times.append(seconds)
        self._until_again -= 1
        if self._until_again == 0:
            self._until_again = _AGAIN
            self.seconds = TIMES * median(self._times)


class StepClock:
    """A sum of seconds by their use, for a step's metrics and, by the threadlet, for the weaver's goodput."""

    def __init__(self, threadlet: Threadlet) -> None:
        self._threadlet = threadlet
        self._seconds = {"compute_s": 0.0, "wait_s": 0.0, "lost_s": 0.0, "checkpoint_s": 0.0}

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, by metric."""
        seconds = {key: round(value, 6) for key, value in self._seconds.items()}
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return seconds

    @contextlib.contextmanager
    def measured(self, metric: str) -> Iterator[None]:
        """Measure a part of a step, such as ``compute_s``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[metric] += time.perf_counter() - began

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Measure the time that the training waits for a checkpoint."""
        with self.measured("checkpoint_s"), self._threadlet.spent("checkpoint"):
            yield

    @contextlib.contextmanager
    def waiting(self, baseline: Baseline) -> Iterator[None]:
        """Measure an exchange: its time up to the baseline is part of the step, the time beyond is a wait."""
        began = time.perf_counter()
        with self.measured("wait_s"), self._threadlet.spent("waiting", baseline.seconds):
            yield
        baseline.add(time.perf_counter() - began)

    def mark(self) -> Mark:
        """Return the current moment, for `lose`."""
        return time.perf_counter(), dict(self._seconds)

    def lose(self, since: Mark) -> None:
        """Count all seconds since a moment as lost, because their work is repeated."""
        at, seconds = since
        self._seconds = {**seconds, "lost_s": seconds["lost_s"] + time.perf_counter() - at}
