"""The actor that collects the spans of one process. It is apart because each process of a session imports it."""

from __future__ import annotations

from loom.actor import Actor, endpoint
from loom.tracing import clock
from loom.tracing.collecting import MAX_RECORDS, Collection, Kernels, ProcessSpans
from loom_gateway.driver.monarch.traced_calls import heed_traces


class SpanActor(Actor):
    """Collects beside the process's other actors, in a thread of its own, as its endpoints are plain functions."""

    def __init__(self) -> None:
        self._most = MAX_RECORDS
        self._collection: Collection | None = None
        self._kernels: Kernels | None = None

    @endpoint
    def clock(self) -> float:
        """Return this host's clock, uncorrected."""
        return clock.monotonic()

    @endpoint
    def prepare(self) -> None:
        """Start torch's profiler once, which for a GPU takes ten seconds, so that `begin` takes none."""
        self._drop()
        Kernels().end(0)

    @endpoint
    def begin(self, seconds: float, error: float | None, kernels: bool, most: int) -> None:
        """Begin to collect; correct this process's clock by what the driver measured, if that is more exact.

        At most so many spans are kept, and as many operators.
        """
        known = clock.offset().error
        if error is not None and (known is None or error < known):
            clock.adopt(clock.Offset(seconds, error))
        self._drop()
        heed_traces()
        self._most = min(most, MAX_RECORDS)
        self._collection = Collection(self._most)
        self._kernels = Kernels() if kernels else None

    @endpoint
    def end(self, name: str) -> ProcessSpans:
        """Stop, and return what was recorded."""
        assert self._collection is not None
        found = [] if self._kernels is None else self._kernels.end(self._most)
        problem, left_out = (None, 0) if self._kernels is None else (self._kernels.problem, self._kernels.left_out)
        spans = self._collection.end(name, problem)
        self._collection = self._kernels = None
        spans["records"] += found
        spans["left_out"] += left_out
        return spans

    def _drop(self) -> None:
        """End a collection whose driver did not."""
        if self._collection is not None:
            self._collection.end("")
        if self._kernels is not None:
            self._kernels.end(0)
        self._collection = self._kernels = None
