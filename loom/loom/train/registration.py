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
import os
import weakref
from collections.abc import Mapping
from typing import Any

from torchft.manager import Manager

from loom.errors import WrongArguments
from loom.threadlet import Threadlet

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
    threadlet. The news that a device has failed is refused unless the script registers a function that acts on it,
    with the threadlet's ``on_device_failure``: torchft itself does not move a replica.

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
    _report_steps(manager, threadlet)
    return threadlet


def _names(manager: Manager) -> tuple[str | None, str | None]:
    """Return the name of a manager's replica and of its job; None for both if the manager has no replica id."""
    group: str | None = manager._replica_id
    if not group:
        return None, None
    several = manager._group_world_size > 1
    return f"{group}_{manager._group_rank}" if several else group, group.rstrip("0123456789").rstrip("_-") or group


def _report_steps(manager: Manager, threadlet: Threadlet) -> None:
    """Let a manager's own methods report to a threadlet: torchft's wrappers of optimizers call them, too."""
    start_quorum, should_commit, shutdown = manager.start_quorum, manager.should_commit, manager.shutdown
    counts = {"commits": 0, "failed_commits": 0}

    @functools.wraps(start_quorum)
    def start_step(*args: Any, **kwargs: Any) -> None:
        threadlet.check_and_apply_updates()
        threadlet.wait_while_paused()
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
