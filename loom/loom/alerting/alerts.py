"""`Alerts`: the rules of a user, the incidents that are under way, and the alerts with what became of them.

An alert is put into the store by the commit that stores what caused it, with the incident that keeps the rule
from firing again. The methods take ``now``, in seconds since the epoch, and send nothing:
`loom.alerting.deliveries` asks for the deliveries that wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from loom.alerting.conditions import OF_RUNS, AlertCause, Looked, Observations
from loom.alerting.operator import AlertOperator
from loom.alerting.rules import MAIL, VERSION, WatchedRule, receivers
from loom.control import operations
from loom.control.operations import Operation
from loom.errors import LimitReached, NotFound, WrongArguments
from loom.weaver.alert_views import Alert, AlertDelivery, AlertKind, AlertRule, DeliveryState
from loom.weaver.persistent_state import Registry
from loom.weaver.runs.run import Run
from loom.weaver.states import DeviceState
from loom.weaver.storage.store import Commit
from loom.weaver.views import WeaverEvent, few

MAX_RULES = 100
"""Rules of one user."""

MAX_INCIDENTS = 5000
"""Incidents of one user; beyond them the oldest of ended runs are forgotten, or else no rule fires."""

KEPT = 500
"""Alerts of one user that are kept; further ones take the place of the oldest."""

MAX_WAITING = 200
"""Deliveries to one receiver that wait; those of further alerts are given up at once."""

EVERY = 1.0
"""Seconds between two looks at all living runs, at least."""

LOOKS_FOR = 0.002
"""Seconds for which one tick looks at living runs; it looks at one at least."""

BETWEEN = "\x1f"

_WHILE_STORED = (AlertKind.NOT_A_NUMBER,)
_AT_ENDS = (AlertKind.NOT_A_NUMBER, AlertKind.CRASHED, AlertKind.FINISHED)
"""The kinds that are judged by the commit that stores odd values, and the end of a run."""

_OBSERVING = (AlertKind.DIVERGED, AlertKind.GOODPUT)
_NOTHING_SEEN = Observations()

Handler = Callable[[Any, Any, float], Any]


@dataclass
class OpenIncident:
    """A condition that holds, or held a short time ago: its rule does not fire again about its subject."""

    since: float
    step: int | None
    clear: float | None = None
    """Since when the condition does not hold; None while it does, and after a restart of the weaver."""


@dataclass(eq=False)
class WaitingDelivery:
    """A delivery that was not answered yet."""

    alert: KeptAlert
    number: int
    """Its place among the alert's deliveries."""

    @property
    def to(self) -> str:
        """The receiver: a failed attempt makes all deliveries to it wait."""
        return MAIL if self.is_mail else self.alert.rule.target or ""

    @property
    def is_mail(self) -> bool:
        return self.view.to == MAIL

    @property
    def view(self) -> AlertDelivery:
        return self.alert.view.deliveries[self.number]


@dataclass(eq=False)
class KeptAlert:
    """An alert, as it is stored."""

    key: str
    view: Alert
    rule: WatchedRule
    """The rule, as it is while something waits."""
    done: asyncio.Event | None = None
    """Set when nothing of it waits any more; made by a caller that waits for it."""
    waiting: dict[int, WaitingDelivery] = field(default_factory=dict)

    def to_row(self) -> dict[str, Any]:
        body = {**self.view.to_body(), "rule": self.view.rule.value, "version": VERSION}
        body["deliveries"] = [{**one.to_body(), "state": one.state.value} for one in self.view.deliveries]
        return {**body, "as": self.rule.to_row() if self.waiting else None}


class Alerts:
    """The alerts of a user.

    Args:
        known: the weaver's persistent state, which has the store, the runs and the devices.
    """

    def __init__(self, known: Registry, started: float) -> None:
        self._known = known
        self._store = known.store
        self._started = started
        self.operator = AlertOperator()
        """What the gateway's operator allows."""
        self._rules: dict[str, WatchedRule] = {}
        self._incidents: dict[tuple[str, str], OpenIncident] = {}
        self._alerts: dict[str, KeptAlert] = {}
        """The alerts by id, the oldest first."""
        self._waiting: dict[WaitingDelivery, None] = {}
        self._fresh: list[WaitingDelivery] = []
        """Deliveries of alerts that are not stored yet."""
        self._forget: list[Callable[[], object]] = []
        """Calls for when what was put is stored."""
        self._seen: dict[tuple[str, str], Observations] = {}
        self._queue: deque[Run] = deque()
        self._looked = -math.inf
        self._devices: dict[str, None] = {}
        """Devices whose state or health has changed."""
        self._last = 0
        self.hurry: Callable[[], object] = lambda: None
        """Called when a commit is wanted soon."""
        self._load()

    # ----- What the weaver tells

    def take(self, event: WeaverEvent) -> None:
        """Take an event of the weaver."""
        if event.kind == "device_failed" and self._rules:
            self._devices[event.data["device"]["uuid"]] = None

    def device_changed(self, device: str) -> None:
        """Note that the health of a device is another one."""
        if self._rules:
            self._devices[device] = None

    def settle(self, now: float) -> None:
        """Judge what the next commit stores, before it is written: ended runs, odd values and devices."""
        news = self._known.runs.take_news()
        for run in news:
            self._look(run, now, _AT_ENDS if run.ended is not None else _WHILE_STORED)
        for device in self._devices:
            self._look_at_device(device, now)
        self._devices.clear()

    def tick(self, now: float) -> None:
        """Look at some of the living runs."""
        if not self._rules:
            return
        if not self._queue and now >= self._looked + EVERY:
            self._looked = now
            self._queue.extend(self.living_runs())
            self._forget_incidents(now)
        until = time.perf_counter() + LOOKS_FOR
        while self._queue:
            run = self._queue.popleft()
            if run.ended is None and self._known.runs.get(run.id) is run:
                self._look(run, now, OF_RUNS)
                if time.perf_counter() >= until:
                    break

    def write(self, commit: Commit) -> None:
        """Add to a commit what follows when it is stored."""
        fresh, self._fresh = self._fresh, []
        calls, self._forget = self._forget, []
        if fresh or calls:
            commit.when_stored(lambda: self._stored(fresh, calls))

    @property
    def pending(self) -> bool:
        return bool(self._fresh or self._forget)

    @property
    def settled(self) -> bool:
        """True if nothing happens here by itself."""
        looks = any(one.view.rule is AlertKind.DISK for one in self._rules.values())
        return not (looks or self._waiting or self.pending or self._devices)

    # ----- What is delivered

    def waiting(self) -> Iterator[WaitingDelivery]:
        """Yield the stored deliveries that wait, the oldest first."""
        return iter(list(self._waiting))

    def attempted(
        self, of: WaitingDelivery, status: int | None, error: str | None, final: bool, now: float,
        then: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        """Record an attempt; ``final`` if there is no further one. ``then`` is called when that is stored."""
        if of.alert.view.id not in self._alerts:  # further ones have taken its place
            self._forget.append(then)
            return
        state = DeliveryState.SENT if error is None else DeliveryState.GIVEN_UP if final else DeliveryState.WAITING
        before = of.view
        made = replace(before, state=state, attempts=before.attempts + 1, status=status, error=error, time=now)
        self._put_delivery(of, made)
        self._forget.append(then)
        self.hurry()

    def _put_delivery(self, of: WaitingDelivery, made: AlertDelivery) -> None:
        alert = of.alert
        deliveries = [*alert.view.deliveries]
        deliveries[of.number] = made
        alert.view = replace(alert.view, deliveries=tuple(deliveries))
        if made.state is not DeliveryState.WAITING:
            self._waiting.pop(of, None)
            self._fresh = [one for one in self._fresh if one is not of]
            alert.waiting.pop(of.number, None)
            if not alert.waiting and alert.done is not None:
                alert.done.set()
        self._store.put("alerts", alert.key, alert.to_row())

    def rules_of(self, kind: AlertKind) -> list[WatchedRule]:
        return [one for one in self._rules.values() if one.view.rule is kind]

    def living_runs(self) -> Iterator[Run]:
        return (run for run in self._known.runs if run.ended is None)

    def take_disk(self, path: str, run: Run | None, used: float, now: float) -> None:
        """Take the used part of a disk, from 0 to 1: of the store, or of the checkpoints of a run."""
        for rule in self.rules_of(AlertKind.DISK):
            if rule.means(run) if run is not None else rule.is_about_all:
                over = used >= (rule.view.above or 1.0)
                cause = AlertCause(f"the disk of {path} is {used:.0%} full", used) if over else None
                self._judge(rule, f"disk {path}", run, cause, now)

    # ----- The operations

    def handlers(self, user: str) -> dict[type[Operation], Handler]:
        """Return the operations on the alerts of a user, with that name."""
        return {
            operations.GetAlerts: lambda asked, asker, now: [one.for_user(user) for one in self._rules.values()],
            operations.GetAlertLog: lambda asked, asker, now: self._log_of(asked, user),
            operations.SetAlert: lambda asked, asker, now: self._set(asked, asker.by, user, now),
            operations.RemoveAlert: lambda asked, asker, now: self._remove(asked.alert, user),
            operations.TryAlert: lambda asked, asker, now: self._test(asked, user, now),
        }

    def _log_of(self, asked: operations.GetAlertLog, user: str) -> list[Alert]:
        found = [one.view for one in self._alerts.values() if asked.alert in (None, one.view.of)]
        if asked.run is not None:
            found = [one for one in found if asked.run in (one.run, one.run_name)]
        return [self._shown(one, user) for one in found[::-1][: asked.limit]]

    def _shown(self, alert: Alert, user: str) -> Alert:
        return replace(alert, user=user, url=self.operator.url_of(alert.run))

    def _set(self, asked: operations.SetAlert, by: str, user: str, now: float) -> AlertRule:
        before = self._rules.get(asked.id or "")
        if before is None and len(self._rules) >= MAX_RULES:
            raise LimitReached(f"there are {MAX_RULES} rules: remove one, or let one mean more runs by a glob")
        rule = WatchedRule.made(asked, asked.id or uuid.uuid4().hex[:12], by, user, now, before)
        if rule.view.email and not self.operator.mail:
            raise WrongArguments("email: this gateway sends none; its operator allows it by --alert-mail COMMAND")
        self._drop_incidents(rule.view.id)
        self._rules[rule.view.id] = rule
        self._redirect(rule.view.id, rule)
        self._store.put("alert_rules", rule.view.id, rule.to_row())
        if rule.view.rule is AlertKind.DEVICE:
            self._devices |= {device.uuid: None for device in self._known.devices}
        self.hurry()
        return rule.view

    def _remove(self, id: str, user: str) -> AlertRule:
        rule = self._find(id)
        del self._rules[rule.view.id]
        self._drop_incidents(rule.view.id)
        self._redirect(rule.view.id, None)
        self._store.drop("alert_rules", rule.view.id)
        self.hurry()
        return rule.for_user(user)

    def _redirect(self, id: str, rule: WatchedRule | None) -> None:
        """Send what waits as a rule says now; give it up if the rule has no such receiver any more."""
        for kept in [kept for kept in self._alerts.values() if kept.view.of == id and kept.waiting]:
            for one in list(kept.waiting.values()):
                if rule is None or not (rule.view.email if one.is_mail else rule.target):
                    gone = replace(one.view, state=DeliveryState.GIVEN_UP, error="the rule was removed")
                    self._put_delivery(one, gone)
            if rule is not None:
                kept.rule = rule
                self._store.put("alerts", kept.key, kept.to_row())

    def _find(self, id: str) -> WatchedRule:
        found = self._rules.get(id) or next((one for name, one in self._rules.items() if name.startswith(id)), None)
        if not id or found is None:
            raise NotFound(f"there is no alert {id!r:.80}; there are {few(self._rules)}", code="unknown_alert")
        return found

    async def _test(self, asked: operations.TryAlert, user: str, now: float) -> Alert:
        rule = self._find(asked.alert)
        alert = self._fire(rule, None, AlertCause("a test: this rule can reach you"), now, test=True)
        if alert.waiting and asked.wait > 0:
            alert.done = asyncio.Event()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(alert.done.wait(), asked.wait)
        return self._shown(alert.view, user)

    # ----- Rules, incidents and alerts

    def _look(self, run: Run, now: float, kinds: Collection[AlertKind]) -> None:
        """Judge the rules of some kinds that are about a run."""
        for rule in self._rules.values():
            kind, key = rule.view.rule, (rule.view.id, run.id)
            if run.ended is not None:
                self._seen.pop(key, None)
            if kind not in kinds or not rule.means(run):
                continue
            seen = self._seen.setdefault(key, Observations()) if kind in _OBSERVING else _NOTHING_SEEN
            looked = Looked(run, run.odd, self._known.goodput, seen, self._started, now)
            self._judge(rule, run.id, run, OF_RUNS[kind](rule, looked), now)
        run.odd = {}

    def _look_at_device(self, device: str, now: float) -> None:
        if device not in self._known.devices:
            return
        status = self._known.device_status.get(device, {})
        failed = self._known.devices.state(device) is DeviceState.FAILED
        bad = status.get("error") or (
            f"{status['ecc_uncorrected']} ECC errors that cannot be corrected"
            if status.get("ecc_uncorrected")
            else ""
        )
        on = [self._known.replicas[one] for one in self._known.devices.replicas_of(device)]
        runs = {one.id: self._known.runs.get(one.run or "") for one in on}
        for rule in self.rules_of(AlertKind.DEVICE):
            about = next(((id, run) for id, run in runs.items() if run is not None and rule.means(run)), None)
            if about is None and not rule.is_about_all:
                continue
            cause = None
            if failed or bad:
                why = self._known.devices.reason(device) if failed else bad
                text = f"device {device} {'has failed' if failed else 'is not healthy'}: {why}"
                cause = AlertCause(text, replica=about and about[0])
            self._judge(rule, f"device {device}", about and about[1], cause, now)

    def _judge(
        self, rule: WatchedRule, subject: str, run: Run | None, cause: AlertCause | None, now: float
    ) -> None:
        """Fire a rule, unless an incident of it about the same subject is under way."""
        key = rule.view.id, subject
        incident = self._incidents.get(key)
        if incident is None:
            if cause is not None and self._has_room():
                self._open(key, OpenIncident(now, cause.step))
                self._fire(rule, run, cause, now)
        elif cause is not None:
            incident.clear = None
        elif rule.view.rule is AlertKind.NO_PROGRESS and run is not None and self._stands(run, incident):
            pass  # it only reconnected, or the weaver was started again
        else:
            incident.clear = now if incident.clear is None else incident.clear
            if now >= incident.clear + rule.view.rearm:
                self._close(key)

    @staticmethod
    def _stands(run: Run, incident: OpenIncident) -> bool:
        return any(run.there[id].step == incident.step for _, id in run.leads.values() if id in run.there)

    def _fire(
        self, rule: WatchedRule, run: Run | None, cause: AlertCause, now: float, test: bool = False
    ) -> KeptAlert:
        """Make an alert, which the next commit stores, with an event for the page."""
        self._last += 1
        name = f"run {run.name!r} " if run is not None else ""
        value = cause.value
        alert = Alert(
            id=uuid.uuid4().hex,
            rule=rule.view.rule,
            message=f"{name}{f'({run.id}): ' if run is not None else ''}{cause.message}",
            time=now,
            of=rule.view.id,
            run=None if run is None else run.id,
            run_name=None if run is None else run.name,
            replica=cause.replica,
            metric=cause.metric,
            step=cause.step,
            value=value if value is None or math.isfinite(value) else _odd(value),
            test=test,
        )
        alert = replace(alert, deliveries=tuple(self._begun(rule, to) for to in receivers(rule)))
        kept = KeptAlert(f"{self._last:012}", alert, rule)
        self._enter(kept)
        self._fresh += kept.waiting.values()
        self._store.put("alerts", kept.key, kept.to_row())
        shown = alert.to_body()
        about = {one: shown[one] for one in ("message", "run", "run_name", "metric", "step", "value", "test")}
        there = alert.replica if alert.replica in self._known.replicas else None
        about |= {"alert": alert.id, "rule": alert.rule.value, "of": alert.of, "quiet": rule.view.quiet}
        self._known.events.append(now, "alerted", there, **about)
        self.hurry()
        return kept

    def _begun(self, rule: WatchedRule, shown: str) -> AlertDelivery:
        to = MAIL if shown == MAIL else rule.target
        if sum(one.to == to for one in (*self._waiting, *self._fresh)) < MAX_WAITING:
            return AlertDelivery(shown)
        return AlertDelivery(shown, DeliveryState.GIVEN_UP, error="too many alerts wait")

    def _enter(self, kept: KeptAlert) -> None:
        for number, delivery in enumerate(kept.view.deliveries):
            if delivery.state is DeliveryState.WAITING:
                kept.waiting[number] = WaitingDelivery(kept, number)
        self._alerts[kept.view.id] = kept
        while len(self._alerts) > KEPT:
            oldest = self._alerts.pop(next(iter(self._alerts)))
            for one in oldest.waiting.values():
                self._waiting.pop(one, None)
            self._fresh = [one for one in self._fresh if one.alert is not oldest]
            self._store.drop("alerts", oldest.key)

    def _stored(self, fresh: list[WaitingDelivery], calls: list[Callable[[], object]]) -> None:
        there = (one for one in fresh if one.alert.view.id in self._alerts and one.number in one.alert.waiting)
        self._waiting.update(dict.fromkeys(there))
        for call in calls:
            call()

    def _open(self, key: tuple[str, str], incident: OpenIncident) -> None:
        self._incidents[key] = incident
        row = {"version": VERSION, "since": incident.since, "step": incident.step}
        self._store.put("alert_incidents", BETWEEN.join(key), row)

    def _has_room(self) -> bool:
        """Return whether a further incident has room; one of an ended run makes it."""
        if len(self._incidents) < MAX_INCIDENTS:
            return True
        runs = ((key, self._known.runs.get(key[1])) for key in self._incidents)
        over = next((key for key, run in runs if run is not None and run.ended is not None), None)
        if over is not None:
            self._close(over)
        return over is not None

    def _close(self, key: tuple[str, str]) -> None:
        del self._incidents[key]
        self._store.drop("alert_incidents", BETWEEN.join(key))

    def _drop_incidents(self, rule: str) -> None:
        for key in [key for key in self._incidents if key[0] == rule]:
            self._close(key)
        self._seen = {key: one for key, one in self._seen.items() if key[0] != rule}

    def _forget_incidents(self, now: float) -> None:
        """Forget the incidents of runs that have ended, and look at the devices of incidents again."""
        runs = self._known.runs
        living = {run.id for run in self._queue}
        for key in list(self._incidents):
            rule, subject = self._rules[key[0]], key[1]
            if subject.startswith("device "):
                device = subject.removeprefix("device ")
                if device in self._known.devices:
                    self._look_at_device(device, now)
                else:
                    self._close(key)
            elif rule.view.rule in OF_RUNS and subject not in living:
                ends = rule.view.rule in (AlertKind.CRASHED, AlertKind.FINISHED)
                if not ends or runs.get(subject) is None:
                    self._close(key)

    def _load(self) -> None:
        for id, row in self._store.rows("alert_rules"):
            if row["version"] <= VERSION:
                self._rules[id] = WatchedRule.from_row(row)
        for text, row in self._store.rows("alert_incidents"):
            rule, _, subject = text.partition(BETWEEN)
            if row["version"] <= VERSION and rule in self._rules:
                self._incidents[rule, subject] = OpenIncident(row["since"], row["step"])
        for key, row in self._store.rows("alerts"):
            self._last = int(key)
            if row["version"] <= VERSION:
                rule_row = row["as"] or {**_ANY_RULE, "rule": row["rule"]}
                kept = KeptAlert(key, Alert.from_body(row), WatchedRule.from_row(rule_row))
                self._enter(kept)
                self._waiting.update(dict.fromkeys(kept.waiting.values()))
        for run in self._known.runs.take_news():
            run.odd = {}  # they were judged by the commit that stored them


_ANY_RULE: Mapping[str, Any] = {"id": "", "target": None}
"""The rule of an alert of which nothing waits any more."""


def _odd(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
