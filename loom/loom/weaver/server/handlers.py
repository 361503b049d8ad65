"""The handlers of a user's operations, of Loom's own processes too, and what drivers report of their sessions."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, TypeVar

import msgpack

from loom.control import operations
from loom.control.commands import USER_COMMANDS, Acknowledgement, CommandKind
from loom.control.fault_kinds import Place, fault_kind
from loom.control.frame import MAX_FRAME, MAX_NAME
from loom.control.handshake import Device
from loom.control.latencies import BOUNDS, LatencyCounts
from loom.control.operations import Operation, Storing
from loom.control.profiles import LEAST_SECONDS, MOST_SECONDS
from loom.errors import Denied, LimitReached, LoomError, Unavailable, WrongArguments
from loom.weaver.commands import GivenCommand, select
from loom.weaver.commit_output import CommittedOutput
from loom.weaver.replicas import Replica
from loom.weaver.runs.catalog import Catalog
from loom.weaver.server.branches import RunBranches
from loom.weaver.server.guests_and_admins import Asker, Guest
from loom.weaver.states import LIVING, ReplicaState
from loom.weaver.storage.query import run_query
from loom.weaver.views import (
    CommandState,
    DeviceInfo,
    GoodputRecord,
    MetricPoint,
    NewPoints,
    ProfileInfo,
    QueryResult,
    WeaverEvent,
    WeaverStatus,
)
from loom.weaver.weaver import Weaver

LIVES_FOR = 15.0
"""Seconds after its last report for which a session counts as living: several times the pause between two."""

USES_FOR = 6.0
"""Seconds after its last report for which what a session uses counts: it is kept from the others no longer."""

MOST_USED = 1 << 53
"""The largest sum that is told."""

_MAX_SESSIONS = 1_000


class CallCounts(LatencyCounts):
    """The latencies of a session's calls, and how many of its driver's background tasks have died."""

    tasks_died: int


@dataclass(frozen=True)
class _Report:
    time: float
    calls: operations.ReportCalls


class Sessions:
    """The last report of each session; sessions that reported last come last."""

    def __init__(self) -> None:
        self._reports: dict[str, _Report] = {}

    @property
    def latencies(self) -> dict[str, CallCounts]:
        """The latencies of calls by session."""
        calls = {session: report.calls for session, report in self._reports.items()}
        return {
            session: {"bounds": list(BOUNDS), "counts": one.counts, "sum": one.sum, "tasks_died": one.tasks_died}
            for session, one in calls.items()
        }

    def workers(self, session: str | None) -> frozenset[str]:
        """Return the addresses of a session's workers."""
        report = self._reports.get(session or "")
        return frozenset() if report is None else frozenset(report.calls.workers)

    def use(self, workers: Collection[str], now: float) -> bool:
        """Return whether a living session uses one of the workers."""
        living = (report for report in self._reports.values() if now < report.time + LIVES_FOR)
        return any(one in workers for report in living for one in report.calls.workers)

    def take(self, calls: operations.ReportCalls, now: float) -> dict[str, int]:
        """Take a driver's report; return what the user's other sessions use of the limits that count by user."""
        self._reports.pop(calls.session, None)  # reinsert it at the end: the first entry is dropped first
        self._reports[calls.session] = _Report(now, calls)
        if len(self._reports) > _MAX_SESSIONS:
            del self._reports[next(iter(self._reports))]
        others = [
            one.calls for name, one in self._reports.items() if name != calls.session and now < one.time + USES_FOR
        ]
        sums = {"in_flight": sum(one.in_flight for one in others), "kept": sum(one.kept for one in others)}
        return {name: min(value, MOST_USED) for name, value in sums.items()}


T = TypeVar("T")

MAX_TIMEOUT = 3600.0  # seconds that an operation may wait

KEPT_IN_METRICS = 600.0
"""Seconds for which a replica or a job that has ended stays among the numbers."""

_A_NUMBER, _A_REPLICA, _A_DEVICE, _A_JOB = 12, 60, 40, 800
"""Bytes that a number, a replica, a device and a job take in an answer, about, beside names and statuses."""

MAX_LINKS = 16
"""Links of one replica."""

_ADDRESS = re.compile(r"(https?|file)://[!-~]{1,2000}")
_MAX_EVENTS = 10_000
_MAX_POINTS = 20_000


class RequestHandler:
    """The operations on one user's weaver.

    Args:
        address: returns the address for threadlets of a user, or of one of their sessions.
        others_on: whether another user than the given one has processes on some hosts, or sessions on some workers.
    """

    def __init__(
        self,
        user: str,
        weaver: Weaver,
        clock: Callable[[], float],
        address: Callable[[str, str | None], str],
        others_on: Callable[[str, Collection[str], Collection[str]], bool],
    ) -> None:
        self.user = user
        self._weaver = weaver
        self._clock = clock
        self._address = address
        self._others_on = others_on
        self._known = weaver.known
        self._sessions = Sessions()
        self._querying = asyncio.Lock()
        """Held by the one query of the user that runs."""
        self._next_event: asyncio.Future[None] | None = None
        """Done at the next event; made by a request that waits for one."""
        self._acknowledged: dict[str, asyncio.Event] = {}
        """An event for each command that callers wait for, set at its next acknowledgement."""
        self._commands_done: dict[str, asyncio.Event] = {}
        """An event for each command that callers wait for, set when every replica has acknowledged it."""
        self._handlers: dict[type[Operation], Callable[[Any, Asker, float], Any]] = {
            operations.GetStatus: lambda asked, asker, now: self._status(now),
            operations.GetReplicas: lambda asked, asker, now: [self.info(replica) for replica in self.replicas],
            operations.GetReplica: lambda asked, asker, now: self.info(self._known.replica(asked.id)),
            operations.GetDevices: lambda asked, asker, now: [
                self.device(device) for device in self._known.devices
            ],
            operations.GetEvents: self._events,
            operations.GetMetrics: self._metrics,
            operations.GetHistory: self._history,
            operations.GetPoints: self._points,
            operations.QueryHistory: self._query,
            operations.GetStacks: self._stacks,
            operations.GetProfile: self._profile,
            operations.GetGoodput: self._goodput,
            operations.GetAddress: lambda asked, asker, now: self._address(self.user, asker.session),
            operations.GetPolicies: lambda asked, asker, now: self._policies(),
            operations.SetPolicy: self._set_policy,
            operations.GiveCommand: self._give,
            operations.GetCommand: self._command_state,
            operations.InjectFault: self._inject,
            operations.LinkReplica: self._link,
            operations.RemoveFault: self._remove_fault,
            operations.FailDevice: self._fail_device,
            operations.ReportSpawned: lambda asked, asker, now: weaver.spawned(asked, now),
            operations.ReportEnded: lambda asked, asker, now: weaver.supervision(asked, now),
            operations.ReportCalls: self._calls,
            operations.AddEvent: self._note,
            operations.GetNumbers: self._numbers,
            operations.GetReplicasIn: self._replicas_in,
            operations.GetRunsBegun: lambda asked, asker, now: self._known.runs.begun_in(
                asked.session, asked.places
            ),
            operations.DoInSession: self._in_session,
        }
        self.catalog = Catalog(user, self._known.runs, self._known.history, weaver.outbox.hurry)
        self._handlers |= self.catalog.handlers
        self._handlers |= self._known.alerts.handlers(user)
        self._branches = RunBranches(weaver, self.catalog.shown, clock, self._await_event)
        self._handlers[operations.BranchRun] = lambda asked, asker, now: self._branches.begin(asked, asker.by, now)

    def do(self, asked: Operation, asker: Asker = Asker()) -> Any:  # noqa: B008 - it is frozen
        """Do an operation and return its result; the result of one that waits has to be awaited."""
        if asked.storing is Storing.STORED:
            self.check_stores(asked.name)
        return self._handlers[type(asked)](asked, asker, self._clock())

    def check_stores(self, operation: str) -> None:
        """Raise `Unavailable` while the disk takes nothing."""
        undurable = self._weaver.undurable
        if undurable is not None:
            seconds = self._clock() - undurable.since
            raise Unavailable(
                f"{operation!r} was not done: the weaver could store nothing for {seconds:.0f} s "
                f"({undurable.reason}). Replicas go on as they are; try again when its disk has room"
            )

    def notify(self, output: CommittedOutput) -> None:
        """Wake the operations that wait for what the weaver has committed."""
        for command in output.acknowledged.values():
            if (new := self._acknowledged.pop(command.id, None)) is not None:
                new.set()
            if command.done and (done := self._commands_done.pop(command.id, None)) is not None:
                done.set()
        if output.events and self._next_event is not None:
            self._next_event.set_result(None)
            self._next_event = None

    @property
    def replicas(self) -> list[Replica]:
        return list(self._known.replicas.values())

    @property
    def devices(self) -> list[Device]:
        return list(self._known.devices)

    def info_of_known(self, replica: Replica) -> Mapping[str, object] | None:
        """Return the fields of a replica's `ReplicaInfo`; None if the replica was forgotten meanwhile."""
        return self.info(replica) if self._known.replicas.get(replica.id) is replica else None

    def device_of_known(self, device: Device) -> Mapping[str, object] | None:
        """Return the fields of a device's `DeviceInfo`; None if the device was forgotten meanwhile."""
        known = self._known.devices
        return self.device(known.device(device.uuid)).to_body() if device.uuid in known else None

    def is_on(self, hosts: Collection[str], workers: Collection[str]) -> bool:
        """Return whether a replica lives on one of the hosts, or a session uses one of the workers."""
        living = (one for one in self._known.replicas.values() if one.state in LIVING)
        return self._sessions.use(workers, self._clock()) or any(one.host in hosts for one in living)

    def _calls(self, asked: operations.ReportCalls, asker: Asker, now: float) -> dict[str, float | None]:
        """Take a driver's report; return what other sessions use, and for how long no replica of it made a step."""
        others = self._sessions.take(asked, now)
        own = [one for one in self._known.replicas.values() if one.session == asked.session]
        newest = max(own, key=attrgetter("stepped_at"), default=None)
        idle = math.inf if newest is None else newest.idle(now)
        if 0.0 < idle < math.inf:  # one with longer steps may go on
            idle = min(one.idle(now) for one in own)
        return {**others, "idle": idle if math.isfinite(idle) else None}

    def _in_session(self, asked: operations.DoInSession, asker: Asker, now: float) -> Any:
        """Do an operation on the replicas of one session only."""
        return Guest(asked.session, self._weaver, self.do).answer(asked.do, asked.arguments)

    def _status(self, now: float) -> WeaverStatus:
        undurable = self._weaver.undurable
        return WeaverStatus(
            weaver=self._weaver.instance,
            started=self._weaver.started,
            time=now,
            replicas={state.value: count for state, count in self._known.states.items() if count},
            devices=len(self._known.devices),
            commands=sum(not command.done for command in self._known.commands),
            event=self._known.events.last,
            reports=self._weaver.reports.taken,
            undurable_since=None if undurable is None else undurable.since,
            undurable_reason="" if undurable is None else undurable.reason,
        )

    def info(self, replica: Replica) -> Mapping[str, object]:
        return replica.info(self.user, self._known.devices.devices_of(replica.id))

    def device(self, device: Device) -> DeviceInfo:
        devices = self._known.devices
        return DeviceInfo(
            **device.to_body(),
            user=self.user,
            state=devices.state(device.uuid),
            reason=devices.reason(device.uuid),
            replicas=tuple(devices.replicas_of(device.uuid)),
            status=self._known.device_status.get(device.uuid),
        )

    def _events(self, asked: operations.GetEvents, asker: Asker, now: float) -> list[WeaverEvent]:
        newest, among, limit = asked.after is None, asked.replicas, min(asked.limit, _MAX_EVENTS)
        since, until = _span(asked.since, asked.until)
        events = self._known.events
        return events.after(asked.after or 0, limit, asked.replica, asked.kind, newest, among, since, until)

    def _metrics(self, asked: operations.GetMetrics, asker: Asker, now: float) -> list[str]:
        return self._known.history.metrics(self._known.replica(asked.replica).id)

    def _history(
        self, asked: operations.GetHistory, asker: Asker, now: float
    ) -> list[tuple[float, int | None, float]]:
        replica, metric = self._known.replica(asked.replica).id, asked.metric
        known = self._known.history.metrics(replica)
        if metric not in known:
            raise WrongArguments(
                f"replica {replica!r} reports no metric {metric!r:.80}; it reports {', '.join(known)}"
            )
        points = min(max(1, asked.points), _MAX_POINTS)
        return self._known.history.between(replica, metric, *_span(asked.since, asked.until), points)

    def _points(self, asked: operations.GetPoints, asker: Asker, now: float) -> NewPoints:
        self.check_stores(asked.name)  # a point that is not stored may come again as another one
        self._weaver.outbox.urgent = True  # the answer follows the commit
        since, limit = _span(asked.since, None)[0], min(max(1, asked.limit), _MAX_POINTS)
        replica = self._known.replica(asked.replica).id
        history = self._known.history
        metrics, cursor, more = history.after(replica, asked.cursor, since, limit)
        points = {name: tuple(MetricPoint(*one) for one in found) for name, found in metrics.items()}
        return NewPoints(points, cursor, more, history.is_coarse_after(replica, asked.cursor))

    async def _query(self, asked: operations.QueryHistory, asker: Asker, now: float) -> QueryResult:
        async with self._querying:
            return QueryResult(**await run_query(self._known.store.path, asked.sql))

    def _goodput(self, asked: operations.GetGoodput, asker: Asker, now: float) -> list[GoodputRecord]:
        kept = self._known.goodput
        records = (kept.record(job, now) for job in kept.jobs() if asked.job in (None, job))
        return [replace(record, user=self.user) for record in records]

    def _give(self, asked: operations.GiveCommand, asker: Asker, now: float) -> Mapping[str, object]:
        kind = CommandKind.read(asked.kind)
        if kind not in USER_COMMANDS:
            raise WrongArguments(
                f"{kind} is not given as a command; choose one of {', '.join(sorted(USER_COMMANDS))}"
            )
        if asked.announced and kind is not CommandKind.UPDATE_CONFIG:
            raise WrongArguments(f"only update_config is announced, not {kind}")
        give = self._weaver.dispatcher.give
        params, announced = asked.params or {}, asked.announced
        return _given(give(kind, params, asked.target, asker.by, now, id=asked.id, announced=announced))

    def _inject(self, asked: operations.InjectFault, asker: Asker, now: float) -> Mapping[str, object]:
        params = {"fault": asked.fault, "params": asked.params, "duration": asked.duration}
        params = {name: value for name, value in params.items() if value not in (None, {})}
        if fault_kind(asked.fault).place is Place.GATEWAY:
            raise Denied(f"{asked.fault} is injected by the gateway: a program asks it with job.weaver.inject")
        if not asker.admin:
            self._check_hosts(asked.fault, asked.target)
        dispatcher = self._weaver.dispatcher
        return _given(dispatcher.give(CommandKind.INJECT, params, asked.target, asker.by, now, id=asked.id))

    def _check_hosts(self, fault: Any, target: Any) -> None:
        """Refuse a fault of hosts on which another user's processes may be."""
        if fault_kind(fault).of != "host":
            return
        there = [one for one in select(target, self._known.replicas)[0] if one.state in LIVING]
        workers = {worker for one in there for worker in self._sessions.workers(one.session)}
        if self._others_on(self.user, {one.host for one in there}, workers):
            raise Denied(
                f"{fault} strikes every process on a host, and another user has processes there: it needs a token "
                "of scope admin"
            )

    def _remove_fault(self, asked: operations.RemoveFault, asker: Asker, now: float) -> Mapping[str, object]:
        return _given(self._weaver.dispatcher.remove_fault(asked.injection, asker.by, now))

    def _link(self, asked: operations.LinkReplica, asker: Asker, now: float) -> Mapping[str, str]:
        replica = self._known.replica(asked.replica)
        links = {name: url for name, url in replica.links.items() if name != asked.tracker}
        if asked.url:
            if not _ADDRESS.fullmatch(asked.url) or len(asked.tracker) > MAX_NAME:
                raise WrongArguments(f"url is one of http, https or file, without blanks, not {asked.url!r:.80}")
            links[asked.tracker] = asked.url
        if len(links) > MAX_LINKS:
            raise LimitReached(f"replica {replica.id!r} has {MAX_LINKS} links, the most that one has")
        replica.links, replica.unlinked = links, replica.unlinked or not asked.url
        self._known.save(replica)
        self._weaver.outbox.output.described.append(replica)
        self._weaver.outbox.urgent = True
        return links

    def _fail_device(self, asked: operations.FailDevice, asker: Asker, now: float) -> WeaverEvent:
        dispatcher = self._weaver.dispatcher
        return dispatcher.fail_device(asked.device, asked.reason, asker.by, now, asked.report)

    def _set_policy(self, asked: operations.SetPolicy, asker: Asker, now: float) -> dict[str, str]:
        self._weaver.set_policy(asked.group, asked.action, asker.by, now)
        return self._policies()

    def _policies(self) -> dict[str, str]:
        return {group: action.value for group, action in self._known.policy}

    def _note(self, asked: operations.AddEvent, asker: Asker, now: float) -> int:
        if not isinstance(asked.data, Mapping) or not {"id", "time", "kind", "replica"}.isdisjoint(asked.data):
            raise WrongArguments(
                f"data is what an event says beside id, time, kind and replica, not {asked.data!r:.80}"
            )
        return self._weaver.note(asked.kind, asked.replica, asked.data, now).id

    def _numbers(self, asked: operations.GetNumbers, asker: Asker, now: float) -> Mapping[str, object]:
        kept = self._known.goodput
        records = (kept.record(job, now, course=False, faults=0) for job in kept.jobs())
        jobs = [job for job in records if job.replicas or now < job.until + KEPT_IN_METRICS]
        shown = [
            one
            for one in self._known.replicas.values()
            if one.state in LIVING or now < one.changed + KEPT_IN_METRICS
        ]
        shown.sort(key=lambda one: one.state not in LIVING)
        devices = self._known.devices
        room = _Room(MAX_FRAME // 2 if asked.bytes is None else asked.bytes)
        uuids = room.of(
            "devices",
            (device.uuid for device in devices),
            lambda uuid: 2 * len(uuid) + len(msgpack.packb(self._known.device_status.get(uuid))) + _A_DEVICE,
        )
        jobs = room.of("jobs", jobs, lambda job: len(job.job) + _A_JOB)
        found = room.of("replicas", shown, lambda one: len(one.id) + len(one.group) + _A_REPLICA)
        metrics = {
            one: room.of("metrics", one.metrics.items(), lambda metric: len(metric[0].encode()) + _A_NUMBER)
            for one in found
        }
        return {
            **self._status(now).to_body(),
            "command_latency": self._weaver.dispatcher.latencies.to_dict(),
            "call_latency": self._sessions.latencies,
            "history_bytes": self._known.history.size,
            "of_replicas": {
                one.id: {"step": one.step, "metrics": dict(metrics[one]), "group": one.group} for one in found
            },
            "of_devices": {
                uuid: self._known.device_status[uuid] for uuid in uuids if uuid in self._known.device_status
            },
            "device_states": {uuid: devices.state(uuid).value for uuid in uuids},
            "of_jobs": [{**job.to_body(), "counters": kept.counters(job.job, now)} for job in jobs],
            "left_out": room.left_out,
        }

    async def _command_state(self, asked: operations.GetCommand, asker: Asker, now: float) -> CommandState:
        """Return the acknowledgements of a command, once all have come or the time is over."""
        id, timeout = asked.id, _checked(asked.timeout)
        command = self._known.commands.find(id)
        if asked.after is not None:
            return await self._acknowledgements_after(command, asked.after, timeout)
        if not command.done:
            await _wait_for(self._commands_done.setdefault(id, asyncio.Event()), timeout)
        known = command.acknowledgements | {
            name: Acknowledgement.failed(self._why_waiting(command, name), waiting=True) for name in command.waiting
        }
        return CommandState(id, tuple(known), command.done, known)

    async def _acknowledgements_after(self, command: GivenCommand, after: int, timeout: float) -> CommandState:
        if not command.done and len(command.acknowledgements) <= after:
            await _wait_for(self._acknowledged.setdefault(command.id, asyncio.Event()), timeout)
        new = dict(itertools.islice(command.acknowledgements.items(), after, None))
        return CommandState(command.id, tuple(new), command.done, new)

    def _why_waiting(self, command: GivenCommand, id: str) -> str:
        replica = self._known.replicas.get(id)
        state = "gone" if replica is None else replica.state.value
        since = self._clock() - command.time
        hint = "; it is told when it is connected again" if state == ReplicaState.RECOVERING else ""
        return f"replica {id!r} has not applied it in {since:.1f} s; it is {state}{hint}"

    async def _replicas_in(
        self, asked: operations.GetReplicasIn, asker: Asker, now: float
    ) -> list[tuple[int | None, str]]:
        """Return rank and id of the replicas in a mesh, once each of its ``ranks`` has one or the time is over."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _checked(asked.timeout)
        while True:
            # Ended replicas come first: a living replica of the same rank replaces them in the caller's dict.
            there = sorted(
                self._known.in_procs(asked.session, str(asked.procs)), key=lambda one: one.state in LIVING
            )
            left = until - loop.time()
            if left <= 0 or {one.rank for one in there}.issuperset(asked.ranks):
                return [(one.rank, one.id) for one in there]
            await self._await_event(left)

    async def _await_event(self, timeout: float) -> None:
        """Wait until the weaver has committed further events, or the time is over."""
        if self._next_event is None:
            self._next_event = asyncio.get_running_loop().create_future()
        await asyncio.wait((self._next_event,), timeout=timeout)

    def _stacks(self, asked: operations.GetStacks, asker: Asker, now: float) -> Awaitable[str]:
        came: asyncio.Queue[str] = asyncio.Queue()
        self._weaver.stacks.want(self._known.replica(asked.replica), tell=came.put_nowait)
        return came.get()

    def _profile(self, asked: operations.GetProfile, asker: Asker, now: float) -> Awaitable[ProfileInfo]:
        wanted = asked.seconds
        if not LEAST_SECONDS <= wanted <= MOST_SECONDS:
            raise WrongArguments(
                f"a profile takes from {LEAST_SECONDS:g} to {MOST_SECONDS:g} seconds, not {wanted:g}"
            )
        came: asyncio.Queue[ProfileInfo | LoomError] = asyncio.Queue()
        self._weaver.profiles.want(self._known.replica(asked.replica), wanted, came.put_nowait)
        return _told(came)


async def _told(came: asyncio.Queue[ProfileInfo | LoomError]) -> ProfileInfo:
    answer = await came.get()
    if isinstance(answer, LoomError):
        raise answer
    return answer


class _Room:
    """The bytes that an answer may have. Entries without room are counted by their kinds."""

    def __init__(self, size: int) -> None:
        self._left = size
        self.left_out: dict[str, int] = {}

    def of(self, what: str, items: Iterable[T], size: Callable[[T], int]) -> list[T]:
        """Return the first items, as many as there is room for."""
        taken = []
        for item in items:
            needed = size(item)
            if needed <= self._left:
                self._left -= needed
                taken.append(item)
            else:
                self.left_out[what] = self.left_out.get(what, 0) + 1
        return taken


async def _wait_for(event: asyncio.Event, timeout: float) -> None:
    """Wait until an event is set or the time is over."""
    if timeout > 0:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(event.wait(), timeout)


def _checked(timeout: float) -> float:
    """Return the checked ``timeout`` of an operation that waits, in seconds."""
    if not 0 <= timeout <= MAX_TIMEOUT:
        raise WrongArguments(f"timeout is from 0 to {MAX_TIMEOUT:g} seconds, not {timeout!r:.80}")
    return timeout


def _span(since: float | None, until: float | None) -> tuple[float, float]:
    return -math.inf if since is None else since, math.inf if until is None else until


def _given(command: GivenCommand) -> Mapping[str, object]:
    return {"id": command.id, "replicas": command.replicas}
