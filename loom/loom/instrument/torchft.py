"""torchft: the steps of a `Manager`, its quorums, and its leave when a device of its process fails.

Under ``loom run`` each manager of a process is followed from its first step on; `loom.train.register` follows one
by hand. The number of a replica group is ``REPLICA_GROUP_ID``, or that at the end of its manager's replica id.

The ranks of all replica groups of a quorum are one cohort: they change at one step of the manager. They meet in the
store in which the process groups of the quorum's first replica group have met. A new quorum is a new cohort, and
begins with the values that commands have set before: those of the groups whose state is the newest. So a replica
that gets its state from another one gets its values, too, before its next step.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from loom.errors import Conflict
from loom.instrument.torch import before_steps
from loom.instrument.training import StepSource, guarded, set_replica_group, training
from loom.threadlet.cohort_member import JobStore, bound_below

if TYPE_CHECKING:
    from loom.threadlet.threadlet import Threadlet

NAME = "torchft"

LEFT_QUORUM = 75
"""The exit code of a process that has left its quorum because its device failed: EX_TEMPFAIL, "try again"."""

EARLIER_WITHIN = 0.5
"""Seconds from the registration of a process in which the weaver tells it of failures from before."""

MOST_HELD_BACK = 2
"""Steps in a row that do not count for a replica that waits for the others' values: they may be without Loom."""

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
    # Commands are applied when the optimizer has stepped.
    follow(manager, here.threadlet, publish, lambda: None, before_steps)


def follow(
    manager: Any,
    threadlet: Threadlet,
    publish: Publish,
    apply: Callable[[], None],
    before_steps: Callable[[Callable[[], bool]], None] | None = None,
) -> None:
    """Let a manager's own methods report its steps: torchft's wrappers of optimizers call them, too.

    Args:
        manager: the manager.
        threadlet: its process's threadlet.
        publish: publishes a step.
        apply: applies commands and waits during a pause, between two steps.
        before_steps: calls a function before each step of an optimizer, until it returns True; None if the
            program offers all keys before its first step.
    """
    followed.add(manager)
    start_quorum, should_commit = manager.start_quorum, manager.should_commit
    counts = {"commits": 0, "failed_commits": 0}
    leave = DeviceFailureExit(manager, threadlet)
    # A process is one rank, that of its first manager.
    quorums = None if threadlet._cohort.follows else Quorums(manager, threadlet, before_steps)

    @functools.wraps(start_quorum)
    def start_step(*args: Any, **kwargs: Any) -> None:
        leave.look()
        apply()
        leave.leave_if_failed()
        start_quorum(*args, **kwargs)

    @functools.wraps(should_commit)
    def end_step(*args: Any, **kwargs: Any) -> bool:
        if quorums is not None:
            quorums.hold_back()
        commits = bool(should_commit(*args, **kwargs))
        counts["commits" if commits else "failed_commits"] += 1
        if quorums is not None:
            quorums.end_step(commits)
        metrics = {
            "participants": manager.num_participants(),
            "batches_committed": manager.batches_committed(),
            **counts,
        }
        publish(manager.current_step(), metrics=metrics)
        return commits

    manager.start_quorum, manager.should_commit = start_step, end_step


class Quorums:
    """The quorums of a manager: the ranks of all its replica groups form a cohort in each."""

    def __init__(
        self, manager: Any, threadlet: Threadlet, before_steps: Callable[[Callable[[], bool]], None] | None
    ) -> None:
        self._manager = manager
        self._threadlet = threadlet
        self._before_steps = before_steps
        self._hooked = False  # whether values wait for an optimizer's keys
        self._held_back = 0  # the steps in a row that did not count
        self._cohort = threadlet._cohort
        self._last: tuple[Any, ...] = ()  # the number and the replica groups of the last quorum
        client = manager._client = QuorumResults(manager._client)
        async_quorum = manager._async_quorum

        @functools.wraps(async_quorum)
        def await_quorum(*args: Any, **kwargs: Any) -> None:
            async_quorum(*args, **kwargs)
            self._enter(client.result)

        manager._async_quorum = await_quorum
        self._cohort.follow(manager.current_step)

    @guarded(NAME)
    def hold_back(self) -> None:
        """Let a step not count for a replica which lacks values that others may have: it gets their state again."""
        manager = self._manager
        with suppress(Exception):  # should_commit raises it, too
            manager.wait_quorum()
        retries = inf if manager._max_retries is None else manager._max_retries
        if not self._cohort.behind:
            self._held_back = 0
        elif self._held_back < MOST_HELD_BACK and manager._commit_failures < retries:
            self._held_back += 1
            manager.report_error(RuntimeError("the replica does not know yet which values commands have set"))
        elif self._held_back <= MOST_HELD_BACK:
            self._held_back = MOST_HELD_BACK + 1
            _log.warning("this process goes on with its own values: the other replicas may have others")

    @guarded(NAME)
    def end_step(self, commits: bool) -> None:
        """Take over the values that the other ranks of a new quorum have, before the optimizer steps."""
        if not commits:
            self._cohort.abandon("its step was not committed")
        if self._cohort.wanted and not self._take_over() and self._before_steps is not None and not self._hooked:
            self._hooked = True  # an optimizer that has not stepped yet has offered no keys
            self._before_steps(self._take_over)

    def _take_over(self) -> bool:
        self._threadlet.take_over()
        self._hooked = self._hooked and bool(self._cohort.wanted)
        return not self._cohort.wanted

    @guarded(NAME)
    def _enter(self, quorum: Any) -> None:
        """Enter the cohort of a quorum if it is another one than the last."""
        now = quorum.quorum_id, *quorum.replica_ids
        if now == self._last:
            return
        self._last = now
        manager, ranks = self._manager, self._manager._group_world_size
        timeout = min(manager._timeout, manager._quorum_timeout).total_seconds()
        # A lighthouse that is started again counts its quorums anew.
        name = hashlib.sha256(repr((now, quorum.max_step)).encode()).hexdigest()
        store, world = None, quorum.replica_world_size * ranks
        if world > 1:
            try:
                store = self._store_of(quorum, name, bound_below(timeout))
            except Exception as error:  # noqa: BLE001 - such as of a replica group that has died meanwhile
                _log.warning("this process takes commands by itself until its quorum changes: %s", error)
        rank = quorum.replica_rank * ranks + manager._group_rank
        self._cohort.enter(store, f"torchft/{name}", rank, world, timeout, quorum.heal)

    def _store_of(self, quorum: Any, name: str, seconds: float) -> Any:
        """Return a store that all ranks of a quorum share: the one where the first ranks of its groups meet."""
        process_groups = sys.modules["torchft.process_group"]
        own, key = self._manager._store, f"loom/{name}"
        if self._manager._group_rank == 0:
            try:
                address = json.loads(quorum.reconfigure_handles[0])["store"]
            except (LookupError, ValueError, TypeError):  # of a process group that is not torchft's
                address = quorum.store_address
            if self._manager._group_world_size > 1:
                own.set(key, address)
        else:
            address = JobStore(own).await_value(key, seconds)
        return process_groups.create_store_client(f"{address}/loom", timedelta(seconds=max(1.0, seconds)))


class QuorumResults:
    """The client of a manager's server, which keeps the last quorum that it has returned."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.result: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def _quorum(self, *args: Any, **kwargs: Any) -> Any:
        self.result = self._client._quorum(*args, **kwargs)
        return self.result


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
