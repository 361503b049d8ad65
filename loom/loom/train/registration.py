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
from collections.abc import Mapping
from typing import Any

from torchft.manager import Manager

from loom.errors import WrongArguments
from loom.instrument.torchft import LEFT_QUORUM, follow, followed
from loom.threadlet import Threadlet

__all__ = ["LEFT_QUORUM", "register"]


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
    if manager in followed:
        raise WrongArguments(f"the manager of {manager._replica_id!r} is registered already")
    replica, job = _names(manager)
    group = group or os.environ.get("LOOM_GROUP") or job
    threadlet = Threadlet(replica, group=group, weaver=weaver, config=config)
    _close_at_shutdown(manager, threadlet)

    def apply() -> None:
        threadlet.check_and_apply_updates()
        threadlet.wait_while_paused()

    follow(manager, threadlet, threadlet.publish_status, apply)
    return threadlet


def _names(manager: Manager) -> tuple[str | None, str | None]:
    """Return the name of a manager's replica and of its job; None for both if the manager has no replica id."""
    group: str | None = manager._replica_id
    if not group:
        return None, None
    several = manager._group_world_size > 1
    return f"{group}_{manager._group_rank}" if several else group, group.rstrip("0123456789").rstrip("_-") or group


def _close_at_shutdown(manager: Manager, threadlet: Threadlet) -> None:
    shutdown = manager.shutdown

    @functools.wraps(shutdown)
    def end(*args: Any, **kwargs: Any) -> None:
        threadlet.close()
        shutdown(*args, **kwargs)

    manager.shutdown = end
