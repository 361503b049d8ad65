"""Related events: updates at the same time, the path of an update, and peaks beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from loom.rl.diagnosis.statistics import EvenSample, Sums

OPEN = 20_000
"""Updates whose ways are kept: the rest of one may come from this file or another."""
PAIRS = 20_000
"""Pairs of an update and a batch that are kept, evenly spread."""
STARTING, STEADY = 4, 8
"""Of so many steps or more, the first ones are start-up, as far as one takes twice as long as those after them."""
SLACK_MS = 5.0
"""Milliseconds by which clocks of two processes may disagree."""


class OverlappingEvents:
    """Events that last, such as updates of several generators: what they cost the one that waits for all of them.

    Events that overlap are a group, which costs what its longest one costs.

    Args:
        parts: how many numbers an event has; the first is its length.
    """

    def __init__(self, parts: int) -> None:
        self.parts = [Sums() for _ in range(parts)]
        """The numbers of the longest event of each group."""
        self._open = 0
        self._longest: tuple[float, ...] | None = None
        self._of_step: tuple[float, ...] | None = None
        """The sum of the groups since the last step ended."""
        self._closed: list[tuple[float, ...]] = []
        self._nothing = (0.0,) * parts

    def begin(self) -> None:
        """Note that an event began."""
        self._open += 1

    def end(self, numbers: tuple[float, ...]) -> None:
        """Note that an event ended. The beginning of one may be missing."""
        if self._longest is None or numbers[0] > self._longest[0]:
            self._longest = numbers
        self._open -= 1
        if self._open <= 0:
            self.close()

    def close(self) -> None:
        """Note that nothing goes on any more, whatever has begun."""
        if (longest := self._longest) is not None:
            self._closed.append(longest)
            of_step = self._of_step
            self._of_step = longest if of_step is None else tuple(map(add, of_step, longest))
            self._longest = None
        self._open = 0

    def end_step(self) -> tuple[float, ...]:
        """Close, and return the sum of the groups of the step."""
        self.close()
        found, self._of_step = self._of_step, None
        return self._nothing if found is None else found

    def flush(self) -> None:
        """Take account of the groups that are complete."""
        for part, numbers in zip(self.parts, zip(*self._closed, strict=True), strict=False):
            part.extend(numbers)
        self._closed.clear()

    def finish(self) -> None:
        """Take account of a group that never became complete."""
        self.close()
        self.flush()


class OrchestratorSteps:
    """Steps of the orchestrator, and milliseconds of their wall time, wait, delay, loading and generation."""

    def __init__(self) -> None:
        self.count = 0
        self._totals = [0.0] * 5
        self._first: list[tuple[float, ...]] = []

    def add(self, parts: tuple[float, float, float, float, float]) -> None:
        self.count += 1
        self._totals = list(map(add, self._totals, parts))
        if len(self._first) < STARTING:
            self._first.append(parts)

    def steady(self) -> tuple[int, list[float]]:
        """Return the number of steps, and the sum of each part, without steps at the beginning that took long."""
        count, totals = self.count, list(self._totals)
        if count < STEADY:
            return count, totals
        usual = (totals[0] - sum(parts[0] for parts in self._first)) / (count - len(self._first))
        for parts in self._first:
            if parts[0] > 2 * usual:
                count -= 1
                totals = [total - part for total, part in zip(totals, parts, strict=True)]
        return count, totals


@dataclass
class _Way:
    """The times of one update, in seconds."""

    send: float | None = None
    recv: float | None = None
    start: float | None = None
    done: float | None = None
    wall_ms: float | None = None
    pool_ms: float | None = None


class UpdatePaths:
    """The times of updates on each part of their way, as far as lines have them, of logs or of JSON."""

    def __init__(self) -> None:
        self.pool = Sums()
        """Milliseconds of the orders that say how long they waited for a connection of their client."""
        self.accept = Sums()
        """Milliseconds from the order to the server's first line: the client's pool, network, accept queue."""
        self.handle = Sums()
        """Milliseconds from there to the engine's beginning: the server's event loop and handlers."""
        self.back = Sums()
        """Milliseconds from the engine's end to the client: the server's event loop and the network."""
        self._ways: dict[object, _Way] = {}

    def note(self, what: str, traces: Sequence[object], times: Sequence[float | None]) -> None:
        """Note a time of several updates: ``send``, ``recv``, ``start``, ``done``, ``wall_ms`` or ``pool_ms``.

        If a server gives an order to another one, the last counts: that has it latest, and has done it first.
        """
        innermost = min if what == "done" else max
        for trace, time in zip(traces, times, strict=True):
            if time is None or trace is None:
                continue
            way = self._ways.get(trace)
            if way is None:
                if len(self._ways) >= OPEN:
                    continue
                way = self._ways[trace] = _Way()
            known = getattr(way, what)
            setattr(way, what, time if known is None else innermost(known, time))

    def finish(self) -> None:
        """Take account of the updates that are complete, and forget all."""
        legs, pools = [], []
        for way in self._ways.values():
            match way:
                case _Way(float(send), float(recv), float(start), float(done), float(wall), pool):
                    parts = (1000 * (recv - send), 1000 * (start - recv), 1000 * (send - done) + wall)
                    if min(parts) > -SLACK_MS and sum(parts) < wall + SLACK_MS:
                        legs.append([max(0.0, part) for part in parts])
                        pools += [] if pool is None else [pool]
        self._ways.clear()
        self.pool.extend(pools)
        for series, values in zip((self.accept, self.handle, self.back), zip(*legs, strict=True), strict=False):
            series.extend(values)


class UpdateBatchPairs:
    """The delay of each update, and the length of the batch that ended next."""

    def __init__(self) -> None:
        self.queue = EvenSample(PAIRS)
        self.batch = EvenSample(PAIRS)
        self._waits: float | None = None
        self._found: list[tuple[float, float]] = []

    def update(self, queue_ms: float) -> None:
        """Note an update; of several before the next batch, the longest delay counts."""
        self._waits = max(queue_ms, self._waits or 0.0)

    def ended(self, dur_ms: float) -> None:
        """Note the end of a batch."""
        if self._waits is not None:
            self._found.append((self._waits, dur_ms))
            self._waits = None

    def flush(self) -> None:
        """Take account of the pairs."""
        for sample, values in zip((self.queue, self.batch), zip(*self._found, strict=True), strict=False):
            sample.extend(values)
        self._found.clear()
