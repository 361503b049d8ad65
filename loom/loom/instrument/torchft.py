"""torchft: the steps of a `Manager`, and its leave when a device of its process fails.

Under ``loom run`` each manager of a process is followed from its first step on; `loom.train.register` follows one
by hand. The number of a replica group is ``REPLICA_GROUP_ID``, or that at the end of its manager's replica id.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from loom.errors import Conflict
from loom.instrument.training import StepSource, guarded, set_replica_group, training

if TYPE_CHECKING:
    from loom.threadlet.threadlet import Threadlet

NAME = "torchft"

LEFT_QUORUM = 75
"""The exit code of a process that has left its quorum because its device failed: EX_TEMPFAIL, "try again"."""

EARLIER_WITHIN = 0.5
"""Seconds from the registration of a process in which the weaver tells it of failures from before."""

_log = logging.getLogger("loom")

followed: WeakSet[Any] = WeakSet()
"""The managers that are followed."""


class Publish(Protocol):
    """Publishes a step."""

    def __call__(self, step: int, *, metrics: Mapping[str, Any]) -> None:
        """Publish a step with its metrics."""


def hook(module: Any) -> None:
    """Hook ``torchft.manager``: a manager that nobody follows at its first step is followed."""
    begun = module.Manager.start_quorum

    @functools.wraps(begun)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        if self not in followed:
            _introduce(self)
            if self in followed:
                self.start_quorum(*args, **kwargs)  # the one that `follow` has put around this
                return
        begun(self, *args, **kwargs)

    module.Manager.start_quorum = begin


@guarded(NAME)
def _introduce(manager: Any) -> None:
    of_group = os.environ.get("REPLICA_GROUP_ID", "")
    digits = of_group if of_group.isdecimal() else re.findall(r"\d*$", manager._replica_id or "")[0]
    set_replica_group(int(digits or 0))
    here = training()

    def publish(step: int, *, metrics: Mapping[str, Any]) -> None:
        if here.owns(StepSource.TORCHFT):
            here.publish(step, metrics=metrics)

    here.owns(StepSource.TORCHFT)
    follow(manager, here.threadlet, publish, lambda: None)  # commands are applied when the optimizer has stepped


def follow(manager: Any, threadlet: Threadlet, publish: Publish, apply: Callable[[], None]) -> None:
    """Let a manager's own methods report its steps: torchft's wrappers of optimizers call them, too.

    Args:
        manager: the manager.
        threadlet: its process's threadlet.
        publish: publishes a step.
        apply: applies commands and waits during a pause, between two steps.
    """
    followed.add(manager)
    start_quorum, should_commit = manager.start_quorum, manager.should_commit
    counts = {"commits": 0, "failed_commits": 0}
    leave = DeviceFailureExit(manager, threadlet)

    @functools.wraps(start_quorum)
    def start_step(*args: Any, **kwargs: Any) -> None:
        leave.look()
        apply()
        leave.leave_if_failed()
        start_quorum(*args, **kwargs)

    @functools.wraps(should_commit)
    def end_step(*args: Any, **kwargs: Any) -> bool:
        commits = bool(should_commit(*args, **kwargs))
        counts["commits" if commits else "failed_commits"] += 1
        metrics = {
            "participants": manager.num_participants(),
            "batches_committed": manager.batches_committed(),
            **counts,
        }
        publish(manager.current_step(), metrics=metrics)
        return commits

    manager.start_quorum, manager.should_commit = start_step, end_step


class DeviceFailureExit:
    """The end of a process whose device has failed, between two steps, so that its launcher starts another one.

    A process that was started on a device that had failed before stays there: its launcher has no better place.
    """

    def __init__(self, manager: Any, threadlet: Threadlet) -> None:
        self._manager = manager
        self._threadlet = threadlet
        self._failure: str | None = None
        self._registered: float | None = None  # when this was first seen
        threadlet.on_device_failure(self.leave_quorum)

    def leave_quorum(self, device: str, reason: str) -> None:
        """Let the process end before its next step; raise `Conflict` if its device had failed before it started."""
        if len(self._threadlet.device_failure_functions) > 1:
            return  # the script's own function acts
        if self._registered is None or monotonic() < self._registered + EARLIER_WITHIN:
            raise Conflict(f"device {device} had failed before this process was started on it, and it stays there")
        self._failure = f"device {device} failed ({reason or 'no reason given'})"

    def look(self) -> None:
        """Note when the weaver has registered this process."""
        if self._registered is None and self._threadlet.registered:
            self._registered = monotonic()

    def leave_if_failed(self) -> None:
        """End the process if its device has failed.

        Raises:
            SystemExit: with `LEFT_QUORUM`.
        """
        if self._failure is None:
            return
        step = self._manager.current_step()
        text = f"{self._failure}: {self._threadlet.replica_id} left its quorum after step {step}"
        _log.warning("%s; a process that is started in its place joins the others again", text)
        self._threadlet.close(RuntimeError(text))
        self._manager.shutdown(wait=False)
        raise SystemExit(LEFT_QUORUM)
