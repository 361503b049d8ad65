"""The requests of the gateway: operations by name, with their arguments checked."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

import msgpack

from loom.control import operations
from loom.control.arguments import count, seconds, text, text_or_none
from loom.control.commands import USER_COMMANDS, Acknowledgement, CommandKind
from loom.control.faults import Place, fault_kind
from loom.control.frame import MAX_FRAME
from loom.control.introduction import Device
from loom.control.latencies import BOUNDS
from loom.control.operations import OPERATIONS, Operation
from loom.control.profiles import LEAST_SECONDS, MOST_SECONDS
from loom.errors import Denied, LoomError, Unavailable, WrongArguments
from loom.weaver.commands import GivenCommand, select
from loom.weaver.outbox import CommittedOutput
from loom.weaver.replicas import Replica
from loom.weaver.server.reach import Asker, Guest
from loom.weaver.states import LIVING, ReplicaState
from loom.weaver.views import CommandState, DeviceInfo, ProfileInfo, WeaverStatus
from loom.weaver.weaver import Weaver

LIVES_FOR = 15.0
"""Seconds after its last report for which a session counts as living: several times the pause between two."""

USES_FOR = 6.0
"""Seconds after its last report for which what a session uses counts: it is kept from the others no longer."""

MOST_USED = 1 << 53
"""The largest sum that is told."""

_MAX_SESSIONS = 1_000
_MAX_WORKERS = 10_000


@dataclass(frozen=True)
class _Report:
    time: float
    latencies: dict[str, Any]
    workers: frozenset[str]
    in_flight: int
    kept: int


class Sessions:
    """The last report of each session; sessions that reported last come last."""

    def __init__(self) -> None:
        self._reports: dict[str, _Report] = {}

    @property
    def latencies(self) -> dict[str, dict[str, Any]]:
        """The latencies of calls by session, as `loom.control.latencies.Latencies.to_dict`."""
        return {session: report.latencies for session, report in self._reports.items()}

    def workers(self, session: str | None) -> frozenset[str]:
        """Return the addresses of a session's workers."""
        report = self._reports.get(session or "")
        return frozenset() if report is None else report.workers

    def use(self, workers: Collection[str], now: float) -> bool:
        """Return whether a living session uses one of the workers."""
        living = (report for report in self._reports.values() if now < report.time + LIVES_FOR)
        return any(not report.workers.isdisjoint(workers) for report in living)

    def take(self, arguments: dict[str, Any], now: float) -> dict[str, int]:
        """Take a driver's report; return what the user's other sessions use of the limits that count by user.

        A report has ``session`` and ``workers``, ``counts`` and ``sum`` of the calls, and what the session uses:
        its unanswered operations ``in_flight``, and the bytes of results that it has ``kept``.
        """
        session, counts, workers = text(arguments, "session"), arguments.get("counts"), arguments.get("workers", [])
        if not isinstance(counts, list) or len(counts) != len(BOUNDS) + 1:
            raise WrongArguments(f"counts are {len(BOUNDS) + 1} numbers, not {counts!r:.80}")
        if type(workers) is not list or len(workers) > _MAX_WORKERS or not all(type(one) is str for one in workers):
            raise WrongArguments(f"workers are at most {_MAX_WORKERS} addresses, not {workers!r:.80}")
        counts = [count({"a count": one}, "a count", 0) for one in counts]
        latencies = {"bounds": list(BOUNDS), "counts": counts, "sum": seconds(arguments, "sum", 0.0)}
        latencies["tasks_died"] = count(arguments, "tasks_died", 0)
        self._reports.pop(session, None)  # reinsert it at the end: the first entry is dropped first
        used = count(arguments, "in_flight", 0), count(arguments, "kept", 0)
        self._reports[session] = _Report(now, latencies, frozenset(workers), *used)
        if len(self._reports) > _MAX_SESSIONS:
            del self._reports[next(iter(self._reports))]
        others = [one for name, one in self._reports.items() if name != session and now < one.time + USES_FOR]
        sums = {"in_flight": sum(one.in_flight for one in others), "kept": sum(one.kept for one in others)}
        return {name: min(value, MOST_USED) for name, value in sums.items()}


T = TypeVar("T")

MAX_TIMEOUT = 3600.0  # seconds that an operation may wait

KEPT_IN_METRICS = 600.0
"""Seconds for which a replica or a job that has ended stays among the numbers."""

_A_NUMBER, _A_REPLICA, _A_DEVICE, _A_JOB = 12, 60, 40, 800
"""Bytes that a number, a replica, a device and a job take in an answer, about, beside names and statuses."""

_STORES = frozenset(("note", *(name for name, operation in OPERATIONS.items() if not operation.reads())))
"""The operations whose answers promise that something is stored."""

_REPORTS = frozenset(("spawned", "supervision"))
"""The operations of drivers that are stored later while the disk takes nothing."""

_MAX_EVENTS = 10_000
_MAX_POINTS = 20_000


class RequestHandler:
    """The operations on one user's weaver.

    Those that wait are ``command_state``, ``replicas_in``, ``stacks`` and ``profile``.

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
            operations.GetStacks: self._stacks,
            operations.GetProfile: self._profile,
            operations.GetGoodput: self._goodput,
            operations.GetAddress: lambda asked, asker, now: self._address(self.user, asker.session),
            operations.GetPolicies: lambda asked, asker, now: self._policies(),
            operations.SetPolicy: self._set_policy,
            operations.GiveCommand: self._give,
            operations.GetCommand: self._command_state,
            operations.InjectFault: self._inject,
            operations.RemoveFault: self._remove_fault,
            operations.FailDevice: self._fail_device,
        }
        self._of_processes: dict[str, Callable[[dict[str, Any], float], Any]] = {
            "spawned": weaver.spawned,
            "supervision": weaver.supervision,
            "calls": self._calls,
            "note": self._note,
            "numbers": self._numbers,
            "replicas_in": self._replicas_in,
            "in_session": self._in_session,
        }
        """What Loom's own processes ask beside the operations of users."""

    def answer(self, operation: str, arguments: dict[str, Any]) -> Any:
        """Do an operation and return its result; the result of one that waits has to be awaited."""
        if operation in _STORES:
            self.check_stores(operation)
        if (found := OPERATIONS.get(operation)) is not None:
            return self.do(found.read(arguments), Asker.read(arguments))
        if (inner := self._of_processes.get(operation)) is not None:
            return inner(arguments, self._clock())
        known = ", ".join([*OPERATIONS, *self._of_processes])
        raise WrongArguments(f"the weaver knows no operation {operation!r:.80}; it knows {known}")

    def do(self, asked: Operation, asker: Asker = Asker()) -> Any:  # noqa: B008 - it is frozen
        """Do an operation of a user, as `answer` does."""
        return self._handlers[type(asked)](asked, asker, self._clock())

    @staticmethod
    def reads(operation: str) -> bool:
        """Return whether an operation changes nothing that its answer promises to be stored."""
        return operation not in _STORES | _REPORTS

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
        for command in output.acknowledged:
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

    def info_of_known(self, replica: Replica) -> dict[str, Any] | None:
        """Return the fields of a replica's `ReplicaInfo`; None if the replica was forgotten meanwhile."""
        return self.info(replica) if self._known.replicas.get(replica.id) is replica else None

    def device_of_known(self, device: Device) -> dict[str, Any] | None:
        """Return the fields of a device's `DeviceInfo`; None if the device was forgotten meanwhile."""
        return self.device(self._known.devices.device(device.uuid)) if device.uuid in self._known.devices else None

    def is_on(self, hosts: Collection[str], workers: Collection[str]) -> bool:
        """Return whether a replica lives on one of the hosts, or a session uses one of the workers."""
        living = (one for one in self._known.replicas.values() if one.state in LIVING)
        return self._sessions.use(workers, self._clock()) or any(one.host in hosts for one in living)

    def _calls(self, arguments: dict[str, Any], now: float) -> dict[str, float | None]:
        """Take a driver's report; return what other sessions use, and for how long no replica of it made a step."""
        others = self._sessions.take(arguments, now)
        session = arguments["session"]
        own = [one for one in self._known.replicas.values() if one.session == session]
        newest = max(own, key=attrgetter("stepped_at"), default=None)
        idle = math.inf if newest is None else newest.idle(now)
        if 0.0 < idle < math.inf:  # one with longer steps may go on
            idle = min(one.idle(now) for one in own)
        return {**others, "idle": idle if math.isfinite(idle) else None}

    def _in_session(self, arguments: dict[str, Any], now: float) -> Any:
        """Do an operation on the replicas of one session only."""
        guest = Guest(text(arguments, "session"), self._weaver, self.do)
        inner = dict(arguments.get("arguments") or {})
        if text(arguments, "do") in _STORES:
            self.check_stores(arguments["do"])
        return guest.answer(text(arguments, "do"), inner, Asker.read(inner))

    def _status(self, now: float) -> dict[str, Any]:
        return WeaverStatus(
            weaver=self._weaver.instance,
            started=self._weaver.started,
            time=now,
            replicas={state.value: count for state, count in self._known.states.items() if count},
            devices=len(self._known.devices),
            commands=sum(not command.done for command in self._known.commands),
            event=self._known.events.last,
            reports=self._weaver.reports.taken,
            undurable_since=None if self._weaver.undurable is None else self._weaver.undurable.since,
            undurable_reason="" if self._weaver.undurable is None else self._weaver.undurable.reason,
        ).to_body()

    def info(self, replica: Replica) -> dict[str, Any]:
        return replica.info(self.user, self._known.devices.devices_of(replica.id))

    def device(self, device: Device) -> dict[str, Any]:
        devices = self._known.devices
        return DeviceInfo(
            **device.to_body(),
            user=self.user,
            state=devices.state(device.uuid),
            reason=devices.reason(device.uuid),
            replicas=tuple(devices.replicas_of(device.uuid)),
            status=self._known.device_status.get(device.uuid),
        ).to_body()

    def _events(self, asked: operations.GetEvents, asker: Asker, now: float) -> list[dict[str, Any]]:
        newest, among, limit = asked.after is None, asked.replicas, min(asked.limit, _MAX_EVENTS)
        since, until = _span(asked.since, asked.until)
        events = self._known.events
        found = events.after(asked.after or 0, limit, asked.replica, asked.kind, newest, among, since, until)
        return [event.to_body() for event in found]

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

    def _goodput(self, asked: operations.GetGoodput, asker: Asker, now: float) -> list[dict[str, Any]]:
        kept = self._known.goodput
        records = (kept.record(job, now) for job in kept.jobs() if asked.job in (None, job))
        return [{**record.to_body(), "user": self.user} for record in records]

    def _give(self, asked: operations.GiveCommand, asker: Asker, now: float) -> dict[str, Any]:
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

    def _inject(self, asked: operations.InjectFault, asker: Asker, now: float) -> dict[str, Any]:
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

    def _remove_fault(self, asked: operations.RemoveFault, asker: Asker, now: float) -> dict[str, Any]:
        return _given(self._weaver.dispatcher.remove_fault(asked.injection, asker.by, now))

    def _fail_device(self, asked: operations.FailDevice, asker: Asker, now: float) -> dict[str, Any]:
        dispatcher = self._weaver.dispatcher
        return dispatcher.fail_device(asked.device, asked.reason, asker.by, now, asked.report).to_body()

    def _set_policy(self, asked: operations.SetPolicy, asker: Asker, now: float) -> dict[str, str]:
        self._weaver.set_policy(asked.group, asked.action, asker.by, now)
        return self._policies()

    def _policies(self) -> dict[str, str]:
        return {group: action.value for group, action in self._known.policy}

    def _note(self, arguments: dict[str, Any], now: float) -> int:
        data = arguments.get("data")
        if not isinstance(data, dict) or not {"id", "time", "kind", "replica"}.isdisjoint(data):
            raise WrongArguments(f"data is what an event says beside id, time, kind and replica, not {data!r:.80}")
        kind, replica = text(arguments, "kind"), text_or_none(arguments, "replica")
        return self._weaver.note(kind, replica, data, now).id

    def _numbers(self, arguments: dict[str, Any], now: float) -> dict[str, Any]:
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
        room = _Room(count(arguments, "bytes", MAX_FRAME // 2))
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
            **self._status(now),
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

    async def _command_state(self, asked: operations.GetCommand, asker: Asker, now: float) -> dict[str, Any]:
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
        return CommandState(id, tuple(known), command.done, known).to_body()

    async def _acknowledgements_after(self, command: GivenCommand, after: int, timeout: float) -> dict[str, Any]:
        if not command.done and len(command.acknowledgements) <= after:
            await _wait_for(self._acknowledged.setdefault(command.id, asyncio.Event()), timeout)
        new = dict(itertools.islice(command.acknowledgements.items(), after, None))
        return CommandState(command.id, tuple(new), command.done, new).to_body()

    def _why_waiting(self, command: GivenCommand, id: str) -> str:
        replica = self._known.replicas.get(id)
        state = "gone" if replica is None else replica.state.value
        since = self._clock() - command.time
        hint = "; it is told when it is connected again" if state == ReplicaState.RECOVERING else ""
        return f"replica {id!r} has not applied it in {since:.1f} s; it is {state}{hint}"

    async def _replicas_in(self, arguments: dict[str, Any], now: float) -> list[tuple[int | None, str]]:
        """Return rank and id of the replicas in a mesh, once each of its ``ranks`` has one or the time is over."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _checked(seconds(arguments, "timeout", 0.0))
        session, procs = text(arguments, "session"), str(count(arguments, "procs", 0))
        while True:
            # Ended replicas come first: a living replica of the same rank replaces them in the caller's dict.
            there = sorted(self._known.in_procs(session, procs), key=lambda one: one.state in LIVING)
            left = until - loop.time()
            if left <= 0 or {one.rank for one in there}.issuperset(arguments.get("ranks") or ()):
                return [(one.rank, one.id) for one in there]
            if self._next_event is None:
                self._next_event = loop.create_future()
            await asyncio.wait((self._next_event,), timeout=left)

    def _stacks(self, asked: operations.GetStacks, asker: Asker, now: float) -> Awaitable[str]:
        came: asyncio.Queue[str] = asyncio.Queue()
        self._weaver.stacks.want(self._known.replica(asked.replica), tell=came.put_nowait)
        return came.get()

    def _profile(self, asked: operations.GetProfile, asker: Asker, now: float) -> Awaitable[dict[str, Any]]:
        wanted = asked.seconds
        if not LEAST_SECONDS <= wanted <= MOST_SECONDS:
            raise WrongArguments(
                f"a profile takes from {LEAST_SECONDS:g} to {MOST_SECONDS:g} seconds, not {wanted:g}"
            )
        came: asyncio.Queue[ProfileInfo | LoomError] = asyncio.Queue()
        self._weaver.profiles.want(self._known.replica(asked.replica), wanted, came.put_nowait)
        return _told(came)


async def _told(came: asyncio.Queue[ProfileInfo | LoomError]) -> dict[str, Any]:
    answer = await came.get()
    if isinstance(answer, LoomError):
        raise answer
    return answer.to_body()


class _Room:
    """The bytes that an answer may have. What has no room is counted by what it is."""

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


def _given(command: GivenCommand) -> dict[str, Any]:
    return {"id": command.id, "replicas": command.replicas}
