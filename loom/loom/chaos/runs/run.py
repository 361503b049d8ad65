"""The execution of a plan: it waits for each fault's moment, injects the fault, and follows its effects."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loom.chaos.plans import RECOVERED, Plan, PlannedFault
from loom.chaos.runs.observer import AWAY, Observer
from loom.chaos.runs.tracker import Struck, Tracker, Victim
from loom.chaos.targets import ENDED, Target, check_target, chosen, living, matching
from loom.control.fault_kinds import FaultKind, Place
from loom.errors import LoomError, because, describe_error

if TYPE_CHECKING:
    from loom.chaos.runs.observer import RunInjection, RunWeaver
    from loom.weaver.views import ReplicaInfo


logger = logging.getLogger("loom")

LOOK_EVERY = 0.1  # seconds between two looks at the weaver's state

_PAUSE = 4.0
"""The wait before the next look, in times that the last one took: to read thousands of replicas is work."""

ACKNOWLEDGED_WITHIN = 10.0
"""Seconds to wait for acknowledgements. A training between steps takes a fault only at its next step."""


@dataclass
class _Pending:
    """A planned fault that was not injected yet."""

    planned: PlannedFault
    index: int
    times: list[float]
    """Seconds after the beginning of the run, if the plan gives times."""
    since: float = 0.0
    due: float | None = None
    """The time of the event for which the fault waits."""


class PlanExecution:
    """One run of a plan.

    Args:
        report: called with a line of text for each thing that happens.
        looked: called after each look at the weaver's state.
    """

    def __init__(
        self,
        plan: Plan,
        weaver: RunWeaver,
        report: Callable[[str], None] = lambda line: None,
        looked: Callable[[], object] = lambda: None,
    ) -> None:
        self.plan = plan
        self.observer = Observer(weaver)
        self._tracker = Tracker(self.observer, plan.recovery, report)
        self.struck: list[Struck] = []
        self.began = self.ended = 0.0  # by the weaver's clock
        self.cut_short: str | None = None
        """Why the run ended early."""
        self.goodput: dict[str, float] = {}
        """Seconds of the watched replicas during the run, by reason; none if the weaver has no goodput of them."""
        self._spent_until: list[dict[str, float]] = []  # at each fault, and at the end
        self._weaver = weaver
        self._report = report
        self._looked = looked
        self._cancelled = threading.Event()
        self._why_cancelled = ""
        self._spent_before: dict[str, float] = {}
        self._random = [random.Random(f"{plan.seed}/{index}") for index in range(len(plan.faults))]
        self._pending = [self._plan(index, one) for index, one in enumerate(plan.faults)]
        self._settled: float | None = None  # when the settling time at the end began

    def check(self) -> None:
        """Raise `BadPlan` if a fault has no target, or its target is not marked as injectable; change nothing."""
        replicas = self._weaver.replicas()
        for fault in self.plan.faults:
            try:
                if _is_about_replicas(fault.kind):
                    check_target(fault.target, replicas)
            except LoomError as error:
                raise self.plan.problem(fault, error) from error

    def cancel(self, reason: str) -> None:
        """Have the run remove its faults and end soon. Any thread may call."""
        self._why_cancelled = self._why_cancelled or reason
        self._cancelled.set()

    def pending(self) -> list[tuple[PlannedFault, int]]:
        """Return the planned faults that were not injected as often as planned, with how often they still are."""
        return [(one.planned, max(1, len(one.times))) for one in self._pending]

    def run(self) -> None:
        """Carry the plan out to its end. Its faults are removed also if an exception ends it, such as Ctrl-C."""
        self.check()
        self.observer.begin()
        self.began = self.observer.now()
        self._spent_before = self._spent()
        try:
            while not self._is_over():
                began = time.monotonic()
                if self.observer.look():
                    self._inject_due()
                for struck in self.struck:
                    self._tracker.follow(struck)
                self._looked()
                if self._cancelled.wait(max(LOOK_EVERY, _PAUSE * (time.monotonic() - began))):
                    self.cut_short = self._why_cancelled
                    break
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            self.cut_short = "it was interrupted" if interrupted else describe_error(error)
            raise
        finally:
            self._remove_all()
            self._finish()

    def _finish(self) -> None:
        """Look for the last time, and account for the time since each fault."""
        self.observer.look()
        self.ended = self.observer.now()
        self._spent_until.append(self.account())
        # An exception may have come between a fault and its account.
        for struck, times in zip(self.struck, itertools.pairwise(self._spent_until), strict=False):
            struck.spent = _between(*times)

    def account(self) -> dict[str, float]:
        """Update ``goodput`` to the present; return the seconds of the watched replicas' jobs, by reason."""
        spent = self._spent()
        self.goodput = {reason: spent[reason] - self._spent_before.get(reason, 0.0) for reason in spent}
        return spent

    def _plan(self, index: int, fault: PlannedFault) -> _Pending:
        times: list[float] = []
        if fault.when.time is not None:
            times = [fault.when.time]
        elif fault.when.rate is not None:
            at = 0.0
            for _ in range(fault.when.times):
                at += self._random[index].expovariate(fault.when.rate)
                times.append(at)
        return _Pending(fault, index, times)

    def _inject_due(self) -> None:
        for pending in list(self._pending):
            if self._cancelled.is_set() or not self._is_due(pending):
                continue
            found = living(matching(pending.planned.target, self.observer.replicas.values()))
            found = [one for one in found if one.injectable]
            if not found and _is_about_replicas(pending.planned.kind):
                continue  # the replicas are being restarted; the fault strikes once they are back
            if pending.times:
                pending.times.pop(0)
            if not pending.times:
                self._pending.remove(pending)
            self._inject(pending, chosen(pending.planned.target, found, self._random[pending.index]))

    def _is_due(self, pending: _Pending) -> bool:
        when, now = pending.planned.when, self.observer.now()
        if pending.times:
            return now >= self.began + pending.times[0]
        if when.step is not None:
            replicas = matching(pending.planned.target, self.observer.replicas.values())
            return any(one.step is not None and one.step >= when.step for one in replicas)
        if pending.due is None:
            pending.due = self._event_of(pending)
        return pending.due is not None and now >= pending.due + when.after

    def _event_of(self, pending: _Pending) -> float | None:
        """Return when the event of a fault happened, or None."""
        if any(one.index < pending.index for one in self._pending):
            return None
        earlier = [one for one in self.struck if one.planned is not pending.planned]
        if pending.planned.when.event == RECOVERED:
            return self.observer.now() if earlier and all(one.done for one in earlier) else None
        since = earlier[-1].at if earlier else self.began
        events = self.observer.since(since, str(pending.planned.when.event))
        return events[0].time if events else None

    def _inject(self, pending: _Pending, found: list[ReplicaInfo]) -> None:
        fault, kind = pending.planned, pending.planned.kind
        if kind.of == "host":
            found = found[:1] if fault.fault == "lost_host" else list({one.host: one for one in found}.values())
        victims, targets = [], ["*"]
        if kind.place is not Place.GATEWAY:
            victims = [Victim(one.id, one.group, one.registered, one.step) for one in found]
            targets = [one.id for one in found]
        elif kind.of == "session":
            targets = [fault.target.session or next((one.session for one in found if one.session), "*")]
        groups = frozenset(one.group for one in found)
        # The id is chosen here, so that a fault is removed also if the answer to its injection never comes.
        id = uuid.uuid4().hex if victims else ""
        struck = Struck(fault, self.observer.now(), targets, victims, groups, id=id)
        self.struck.append(struck)
        self._spent_until.append(self._spent())
        self._report(f"{fault.fault} strikes {', '.join(targets)}")
        try:
            target: Any = targets if victims else targets[0]
            injection = self._weaver.inject(fault.fault, target, fault.duration, dict(fault.params), id or None)
            struck.id = injection.id
            self._acknowledged(struck, injection)
        except AWAY as error:
            struck.failed = because("there was nobody to ask", error)
        except LoomError as error:
            struck.id, struck.failed = "", str(error)
        if struck.failed is not None:
            self._report(f"{fault.fault} was not injected: {struck.failed}")

    def _acknowledged(self, struck: Struck, injection: RunInjection) -> None:
        """Wait for the acknowledgements. Replicas that the fault killed at once send none."""
        until = time.monotonic() + ACKNOWLEDGED_WITHIN
        while not injection.done() and time.monotonic() < until and not self._cancelled.is_set():
            injection.outcomes()
            self.observer.look()
            time.sleep(LOOK_EVERY / 4)
        struck.evidence = {id: dict(one) for id, one in injection.evidence.items()}
        alive = [id for id, one in self.observer.replicas.items() if one.state not in ENDED]
        refused = {id: one.reason for id, one in injection.outcomes().items() if not one.ok and id in alive}
        if refused and not struck.evidence:
            struck.failed = "; ".join(because(id, reason) for id, reason in refused.items())
        self.observer.look()
        applied = self.observer.since(0.0, "applied")
        struck.at = next((event.time for event in applied if event.data.get("command") == struck.id), struck.at)

    def _is_over(self) -> bool:
        now = self.observer.now()
        if now > self.began + self.plan.within:
            self.cut_short = f"it did not end within {self.plan.within:g} s"
            return True
        watched = self.watched()
        if watched and all(one.state in ENDED for one in watched) and all(one.done for one in self.struck):
            if self._settled is None:
                self._settled = now
            if now < self._settled + self.plan.settle:  # a failed replica may be restarted
                return False
            if self._pending or self.plan.until != "finished":
                self.cut_short = "the training ended before it" if self._pending else None
            return True
        if self._pending or not all(one.done for one in self.struck) or self.plan.until == "finished":
            self._settled = None
            return False
        if self._settled is None:
            self._settled = now
        return now >= self._settled + self.plan.settle

    def watched(self) -> list[ReplicaInfo]:
        """Return the replicas that the plan watches, unless they had ended before the run."""
        found = matching(Target(replica=self.plan.watch), self.observer.replicas.values()) or matching(
            Target(mesh=self.plan.watch), self.observer.replicas.values()
        )
        return [one for one in found if one.state not in ENDED or one.changed >= self.began]

    def _remove_all(self) -> None:
        for struck in self.struck:
            if struck.over is None and struck.id and struck.planned.kind.place is not Place.GATEWAY:
                try:
                    self._weaver.remove_injection(struck.id)
                except LoomError as error:
                    if error.code != "unknown_injection":  # the run ended before the weaver knew of it
                        logger.warning("%s was not removed: %s", struck.planned.fault, error)

    def _spent(self) -> dict[str, float]:
        """Return the seconds of the watched replicas' jobs, by reason."""
        jobs = {one.job for one in self.watched()}
        spent: dict[str, float] = {}
        try:
            kept = self._weaver.goodput()
        except LoomError:
            return {}
        for job in jobs & set(kept):
            for reason, seconds in kept[job].seconds.items():
                spent[reason] = spent.get(reason, 0.0) + seconds
        return spent


def _between(begin: dict[str, float], end: dict[str, float]) -> dict[str, float]:
    """Return the seconds spent between two times, by reason; nothing if one of them is unknown."""
    if not begin or not end:
        return {}
    return {reason: seconds - begin.get(reason, 0.0) for reason, seconds in end.items()}


def _is_about_replicas(kind: FaultKind) -> bool:
    """Return whether a kind strikes replicas, their hosts or their driver."""
    return kind.place is not Place.GATEWAY or kind.of == "session"
