"""`Step`: the block around one step of a training loop."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any

from loom.control.reports import Phase
from loom.threadlet.cohort import Way
from loom.threadlet.command_applier import CommandApplier
from loom.threadlet.status_rows import now_of_system

_STEP, _BETWEEN, _END = Phase.STEP, Phase.BETWEEN, Way.STEP  # one name lookup less in each step


class Step:
    """One step of a training loop; made by `Threadlet.step`."""

    # The code of a step is short, also in the number of functions: a training step evicts all of it from the
    # processor's cache.

    __slots__ = ("_rest", "_threadlet", "metrics", "number")

    def __init__(
        self,
        threadlet: CommandApplier,
        number: int,
        metrics: dict[str, Any],
        rest: tuple[int | None, int | None, Mapping[str, Any] | None],
    ) -> None:
        self._threadlet = threadlet
        self.number = number
        self.metrics = metrics
        """The metrics that are published with the step; the block fills them in."""
        self._rest = rest

    def __enter__(self) -> Step:
        threadlet = self._threadlet
        threadlet._in_steps = True
        threadlet._step = self.number
        if (
            threadlet._pending
            or threadlet._paused
            or threadlet._drain_published is not None
            or threadlet._unsettled
        ):
            if threadlet._gate.way is None:
                threadlet._gate.way = _END  # a command before the first step makes no boundary
            threadlet._apply_and_wait()
        threadlet._phase = _STEP
        threadlet._accounting.began = monotonic()
        if threadlet._each_step:
            threadlet._run_each_step()
        return self

    def discard(self) -> None:
        """Count the step's time so far as lost, because its work did not count and is repeated."""
        self._threadlet._accounting.discard()

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        threadlet = self._threadlet
        accounting = threadlet._accounting
        took = monotonic() - accounting.began
        threadlet._phase = _BETWEEN
        number = self.number
        if kind is None and type(number) is int and number > accounting.highest:
            accounting.highest = number
            accounting.compute += took
        else:
            accounting.odd_step(number, took, kind is None)
        if kind is None:
            threadlet._step = number  # the block may have changed it
            epoch, max_step, config = self._rest
            threadlet._epoch = epoch
            if config is not None:
                config = dict(config)
                threadlet._config.update(config)
            metrics = None if self.metrics is None else {**self.metrics}
            # This repeats `publish_status` to save a call.
            threadlet._published = published = next(threadlet._numbers)
            threadlet._given.append((published, now_of_system(), number, epoch, max_step, metrics, config))
            if threadlet._asleep:
                threadlet._asleep = False
                threadlet._wakes.put(None)
            gate = threadlet._gate
            gate.way = _END
            gate.come()
            if gate.meeting is not None:
                threadlet._meet()
            if threadlet._pending or threadlet._paused or threadlet._drain_published is not None:
                threadlet._apply_and_wait()
