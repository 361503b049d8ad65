"""`register`: makes a torchft script of the user's own visible to the weaver, with one line.

::

    manager = Manager(pg=ProcessGroupGloo(), …, replica_id="train_0")
    threadlet = loom.train.register(manager)

    while manager.current_step() < steps and not threadlet.should_stop:
        optimizer.zero_grad()          # torchft's wrapper: it begins a step of the manager
        loss_of(batch).backward()
        optimizer.step()               # the wrapper asks the manager whether the step counts
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from torchft.manager import Manager

from loom.errors import Conflict, WrongArguments
from loom.threadlet import Threadlet

_log = logging.getLogger("loom")

_registered: weakref.WeakSet[Manager] = weakref.WeakSet()


def register(
    manager: Manager,
    *,
    group: str | None = None,
    weaver: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Threadlet:
    """Make a threadlet for a torchft manager, which reports each of its steps.

    The replica is named after the manager's replica id; if the manager is one of several of a replica group, with
    its rank behind that. After each ``manager.should_commit()`` the threadlet publishes the manager's step, and the
    metrics ``participants``, the groups in the step, ``commits``, the steps that counted since `register`,
    ``failed_commits``, those that did not, and ``batches_committed``. At the beginning of each step, in
    ``manager.start_quorum()``, commands are applied and a pause is waited for. ``manager.shutdown()`` closes the
    threadlet.

    When a device of the process fails, the replica leaves its quorum after its step: the process ends with exit
    code `LEFT_QUORUM`, the other groups go on, and a process that is started in its place, by its launcher or by a
    function of ``job.weaver.on_respawn``, joins them and gets their state. A script that does something else
    registers a function with the threadlet's ``on_device_failure``.

    Args:
        manager: the manager, before its first step.
        group: name of the job's replicas; the default is ``LOOM_GROUP``, or the manager's replica id without the
            number at its end, which tells the groups of a job apart.
        weaver: the weaver's address; see `loom.Threadlet`.
        config: values of the configuration that are known from the beginning.

    Returns:
        The threadlet, for handlers, and to ask whether to stop.

    Raises:
        WrongArguments: this is no manager, or it is registered already.
    """
    if not isinstance(manager, Manager):
        raise WrongArguments(f"register takes a torchft Manager, not {type(manager).__name__}")
    if manager in _registered:
        raise WrongArguments(f"the manager of {manager._replica_id!r} is registered already")
    replica, job = _names(manager)
    group = group or os.environ.get("LOOM_GROUP") or job
    threadlet = Threadlet(replica, group=group, weaver=weaver, config=config)
    _registered.add(manager)
    _report_steps(manager, threadlet, DeviceFailureExit(manager, threadlet))
    return threadlet


def _names(manager: Manager) -> tuple[str | None, str | None]:
    """Return the name of a manager's replica and of its job; None for both if the manager has no replica id."""
    group: str | None = manager._replica_id
    if not group:
        return None, None
    several = manager._group_world_size > 1
    return f"{group}_{manager._group_rank}" if several else group, group.rstrip("0123456789").rstrip("_-") or group


LEFT_QUORUM = 75
"""The exit code of a process that has left its quorum because its device failed: EX_TEMPFAIL, "try again"."""


EARLIER_WITHIN = 0.5
"""Seconds from the registration of a process in which the weaver tells it of failures from before."""


class DeviceFailureExit:
    """The end of a process whose device has failed, between two steps, so that its launcher starts another one.

    A process that was started on a device that had failed before stays there: its launcher has no better place.
    """

    def __init__(self, manager: Manager, threadlet: Threadlet) -> None:
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

    def begin_step(self, apply: Callable[[], None]) -> None:
        """Apply commands between two steps, and leave if they say that a device has failed.

        Raises:
            SystemExit: with `LEFT_QUORUM`.
        """
        if self._registered is None and self._threadlet.registered:
            self._registered = monotonic()
        apply()
        if self._failure is None:
            return
        step = self._manager.current_step()
        text = f"{self._failure}: {self._threadlet.replica_id} left its quorum after step {step}"
        _log.warning("%s; a process that is started in its place joins the others again", text)
        self._threadlet.close(RuntimeError(text))
        self._manager.shutdown(wait=False)
        raise SystemExit(LEFT_QUORUM)


def _report_steps(manager: Manager, threadlet: Threadlet, leaving: DeviceFailureExit) -> None:
    """Let a manager's own methods report to a threadlet: torchft's wrappers of optimizers call them, too."""
    start_quorum, should_commit, shutdown = manager.start_quorum, manager.should_commit, manager.shutdown
    counts = {"commits": 0, "failed_commits": 0}

    def apply() -> None:
        threadlet.check_and_apply_updates()
        threadlet.wait_while_paused()

    @functools.wraps(start_quorum)
    def start_step(*args: Any, **kwargs: Any) -> None:
        leaving.begin_step(apply)
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
        threadlet.publish_status(manager.current_step(), metrics=metrics)
        return commits

    @functools.wraps(shutdown)
    def end(*args: Any, **kwargs: Any) -> None:
        threadlet.close()
        shutdown(*args, **kwargs)

    manager.start_quorum, manager.should_commit, manager.shutdown = start_step, end_step, end
