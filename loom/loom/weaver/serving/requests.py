"""The requests of the gateway: operations by name, with their arguments checked."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from typing import Any

from loom.control.commands import USER_COMMANDS, Acknowledgement, CommandKind
from loom.control.introduction import Device
from loom.errors import NotFound, WrongArguments
from loom.latencies import BOUNDS
from loom.weaver.commands import GivenCommand
from loom.weaver.outbox import Output
from loom.weaver.replicas import Replica
from loom.weaver.states import LIVING, ReplicaState
from loom.weaver.views import CommandState, DeviceInfo, WeaverStatus
from loom.weaver.weaver import Weaver

MAX_TIMEOUT = 3600.0  # seconds that an operation may wait

_MAX_EVENTS = 10_000
_MAX_SESSIONS = 1_000
_MAX_POINTS = 20_000


class RequestHandler:
    """The operations. Those that wait are ``command_state``, ``replicas_in`` and ``stacks``."""

    def __init__(self, weaver: Weaver, clock: Callable[[], float], address: str) -> None:
        self._weaver = weaver
        self._clock = clock
        self._address = address
        self._known = weaver.known
        self._calls: dict[str, dict[str, Any]] = {}
        """The call latencies of each session; sessions that reported last come last."""
        self._next_event: asyncio.Future[None] | None = None
        """Done at the next event; made by a request that waits for one."""
        self._commands_done: dict[str, asyncio.Event] = {}
        """An event for each command that callers wait for, set when every replica has acknowledged it."""
        self._operations: dict[str, Callable[[dict[str, Any], float], Any]] = {
            "status": self._status,
            "replicas": self._replicas,
            "replica": self._replica,
            "devices": self._devices,
            "events": self._events,
            "metrics": self._metrics,
            "history": self._history,
            "command": self._command,
            "inject": self._inject,
            "remove_fault": self._remove_fault,
            "goodput": self._goodput,
            "fail_device": self._fail_device,
            "policy": self._policy,
            "policies": self._policies,
            "address": lambda arguments, now: self._address,
            "spawned": weaver.spawned,
            "supervision": weaver.supervision,
            "calls": self._take_calls,
            "note": self._note,
            "numbers": self._numbers,
            "command_state": self._command_state,
            "replicas_in": self._replicas_in,
            "stacks": self._stacks,
        }

    def answer(self, operation: str, arguments: dict[str, Any]) -> Any:
        """Do an operation and return its result; the result of one that waits has to be awaited."""
        found = self._operations.get(operation)
        if found is None:
            known = ", ".join(self._operations)
            raise WrongArguments(f"the weaver knows no operation {operation!r:.80}; it knows {known}")
        return found(arguments, self._clock())

    def notify(self, output: Output) -> None:
        """Wake the operations that wait for what the weaver has committed."""
        for command in output.done:
            if (done := self._commands_done.pop(command.id, None)) is not None:
                done.set()
        if output.events and self._next_event is not None:
            self._next_event.set_result(None)
            self._next_event = None

    def snapshot(self) -> dict[str, Any]:
        """Return the whole current state, for a watcher, which gets every later change as a push."""
        now = self._clock()
        return {
            "status": self._status({}, now),
            "replicas": self._replicas({}, now),
            "devices": self._devices({}, now),
        }

    def _status(self, arguments: dict[str, Any], now: float) -> dict[str, Any]:
        return WeaverStatus(
            weaver=self._weaver.instance,
            started=self._weaver.started,
            time=now,
            replicas={state.value: count for state, count in self._known.states.items() if count},
            devices=len(self._known.devices),
            commands=sum(not command.done for command in self._known.commands),
            event=self._known.events.last,
            reports=self._weaver.reports.taken,
        ).to_body()

    def _replicas(self, arguments: dict[str, Any], now: float) -> list[dict[str, Any]]:
        return [self._info(replica) for replica in self._known.replicas.values()]

    def _replica(self, arguments: dict[str, Any], now: float) -> dict[str, Any]:
        return self._info(self._known.replica(_text(arguments, "id")))

    def _info(self, replica: Replica) -> dict[str, Any]:
        return replica.info(self._known.devices.devices_of(replica.id)).to_body()

    def _devices(self, arguments: dict[str, Any], now: float) -> list[dict[str, Any]]:
        return [self._device(device) for device in self._known.devices]

    def _device(self, device: Device) -> dict[str, Any]:
        devices = self._known.devices
        return DeviceInfo(
            **device.to_body(),
            state=devices.state(device.uuid),
            reason=devices.reason(device.uuid),
            replicas=tuple(devices.replicas_of(device.uuid)),
            status=self._known.device_status.get(device.uuid),
        ).to_body()

    def _events(self, arguments: dict[str, Any], now: float) -> list[dict[str, Any]]:
        after = _count(arguments, "after", 0)
        limit = min(_count(arguments, "limit", 100), _MAX_EVENTS)
        replica, kind = _text_or_none(arguments, "replica"), _text_or_none(arguments, "kind")
        newest = arguments.get("after") is None
        return [event.to_body() for event in self._known.events.after(after, limit, replica, kind, newest)]

    def _metrics(self, arguments: dict[str, Any], now: float) -> list[str]:
        return self._known.history.metrics(self._known.replica(_text(arguments, "replica")).id)

    def _history(self, arguments: dict[str, Any], now: float) -> list[tuple[float, int | None, float]]:
        replica, metric = self._known.replica(_text(arguments, "replica")).id, _text(arguments, "metric")
        known = self._known.history.metrics(replica)
        if metric not in known:
            raise WrongArguments(
                f"replica {replica!r} reports no metric {metric!r:.80}; it reports {', '.join(known)}"
            )
        since, until = _time(arguments, "since", -math.inf), _time(arguments, "until", math.inf)
        points = min(max(1, _count(arguments, "points", 500)), _MAX_POINTS)
        return self._known.history.between(replica, metric, since, until, points)

    def _goodput(self, arguments: dict[str, Any], now: float) -> list[dict[str, Any]]:
        kept, wanted = self._known.goodput, _text_or_none(arguments, "job")
        return [kept.record(job, now).to_body() for job in kept.jobs() if wanted in (None, job)]

    def _command(self, arguments: dict[str, Any], now: float) -> dict[str, Any]:
        kind = CommandKind.read(_text(arguments, "kind"))
        if kind not in USER_COMMANDS:
            raise WrongArguments(
                f"{kind} is not given as a command; choose one of {', '.join(sorted(USER_COMMANDS))}"
            )
        params, target = arguments.get("params") or {}, arguments.get("target", "*")
        return _given(self._weaver.dispatcher.give(kind, params, target, _by(arguments), now))

    def _inject(self, arguments: dict[str, Any], now: float) -> dict[str, Any]:
        target: Any = arguments.get("target")
        params = {
            name: arguments[name] for name in ("fault", "params", "duration") if arguments.get(name) is not None
        }
        return _given(self._weaver.dispatcher.give(CommandKind.INJECT, params, target, _by(arguments), now))

    def _remove_fault(self, arguments: dict[str, Any], now: float) -> dict[str, Any]:
        injection = _text(arguments, "injection")
        return _given(self._weaver.dispatcher.remove_fault(injection, _by(arguments), now))

    def _fail_device(self, arguments: dict[str, Any], now: float) -> dict[str, Any]:
        device, reason = _text(arguments, "device"), _text_or_none(arguments, "reason") or ""
        return self._weaver.dispatcher.fail_device(device, reason, _by(arguments), now).to_body()

    def _policy(self, arguments: dict[str, Any], now: float) -> dict[str, str]:
        self._weaver.set_policy(_text(arguments, "group"), _text(arguments, "action"), _by(arguments), now)
        return self._policies(arguments, now)

    def _policies(self, arguments: dict[str, Any], now: float) -> dict[str, str]:
        return {group: action.value for group, action in self._known.policy}

    def _note(self, arguments: dict[str, Any], now: float) -> int:
        data = arguments.get("data")
        if not isinstance(data, dict) or not {"id", "time", "kind", "replica"}.isdisjoint(data):
            raise WrongArguments(f"data is what an event says beside id, time, kind and replica, not {data!r:.80}")
        kind, replica = _text(arguments, "kind"), _text_or_none(arguments, "replica")
        return self._weaver.note(kind, replica, data, now).id

    def _take_calls(self, arguments: dict[str, Any], now: float) -> None:
        session, counts = _text(arguments, "session"), arguments.get("counts")
        total = _time(arguments, "sum", 0.0)
        if not isinstance(counts, list) or len(counts) != len(BOUNDS) + 1:
            raise WrongArguments(f"counts are {len(BOUNDS) + 1} numbers, not {counts!r:.80}")
        counts = [_count({"a count": count}, "a count", 0) for count in counts]
        self._calls.pop(session, None)  # reinsert it at the end: the first entry is dropped first
        died = _count(arguments, "tasks_died", 0)
        self._calls[session] = {"bounds": list(BOUNDS), "counts": counts, "sum": total, "tasks_died": died}
        if len(self._calls) > _MAX_SESSIONS:
            del self._calls[next(iter(self._calls))]

    def _numbers(self, arguments: dict[str, Any], now: float) -> dict[str, Any]:
        kept = self._known.goodput
        return {
            **self._status(arguments, now),
            "command_latency": self._weaver.dispatcher.latencies.to_dict(),
            "call_latency": self._calls,
            "history_bytes": self._known.history.size,
            "of_replicas": {
                replica.id: {"step": replica.step, "metrics": replica.metrics, "group": replica.group}
                for replica in self._known.replicas.values()
            },
            "of_devices": self._known.device_status,
            "of_jobs": [kept.record(job, now, course=False).to_body() for job in kept.jobs()],
        }

    async def _command_state(self, arguments: dict[str, Any], now: float) -> dict[str, Any]:
        """Return the acknowledgements of a command, once all have come or the time is over."""
        id, timeout = str(arguments.get("id")), _timeout(arguments, 10.0)
        command = self._known.commands.get(id)
        if command is None:
            raise NotFound(f"there is no command {id!r:.80}, or it was done long ago", code="unknown_command")
        if not command.done and timeout > 0:
            done = self._commands_done.setdefault(id, asyncio.Event())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(done.wait(), timeout)
        known = command.acknowledgements | {
            name: Acknowledgement.failed(self._why_waiting(command, name), waiting=True) for name in command.waiting
        }
        return CommandState(id, tuple(known), command.done, known).to_body()

    def _why_waiting(self, command: GivenCommand, id: str) -> str:
        replica = self._known.replicas.get(id)
        state = "gone" if replica is None else replica.state.value
        since = self._clock() - command.time
        hint = "; it is told when it is connected again" if state == ReplicaState.RECOVERING else ""
        return f"replica {id!r} has not applied it in {since:.1f} s; it is {state}{hint}"

    async def _replicas_in(self, arguments: dict[str, Any], now: float) -> list[tuple[int | None, str]]:
        """Return rank and id of the replicas in a mesh, once each of its ``ranks`` has one or the time is over."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _timeout(arguments, 0.0)
        session, procs = _text(arguments, "session"), str(_count(arguments, "procs", 0))
        while True:
            # Ended replicas come first: a living replica of the same rank replaces them in the caller's dict.
            there = sorted(self._known.in_procs(session, procs), key=lambda one: one.state in LIVING)
            left = until - loop.time()
            if left <= 0 or {one.rank for one in there}.issuperset(arguments.get("ranks") or ()):
                return [(one.rank, one.id) for one in there]
            if self._next_event is None:
                self._next_event = loop.create_future()
            await asyncio.wait((self._next_event,), timeout=left)

    def _stacks(self, arguments: dict[str, Any], now: float) -> Awaitable[str]:
        came: asyncio.Queue[str] = asyncio.Queue()
        self._weaver.stacks.want(self._known.replica(str(arguments.get("replica"))), tell=came.put_nowait)
        return came.get()


def _timeout(arguments: dict[str, Any], default: float) -> float:
    """Return the checked ``timeout`` of an operation that waits, in seconds."""
    timeout = _time(arguments, "timeout", default)
    if not 0 <= timeout <= MAX_TIMEOUT:
        raise WrongArguments(f"timeout is from 0 to {MAX_TIMEOUT:g} seconds, not {timeout!r:.80}")
    return timeout


def _given(command: GivenCommand) -> dict[str, Any]:
    return {"id": command.id, "replicas": command.replicas}


def _by(arguments: dict[str, Any]) -> str:
    return _text_or_none(arguments, "by") or "gateway"


def _text(arguments: dict[str, Any], name: str) -> str:
    value = _text_or_none(arguments, name)
    if not value:
        raise WrongArguments(f"{name} is missing")
    return value


def _text_or_none(arguments: dict[str, Any], name: str) -> str | None:
    value = arguments.get(name)
    if value is not None and not isinstance(value, str):
        raise WrongArguments(f"{name} is a text, not {value!r:.80}")
    return value


def _count(arguments: dict[str, Any], name: str, default: int) -> int:
    value = arguments.get(name)
    if value is None:
        return default
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise WrongArguments(f"{name} is a count, not {value!r:.80}")
    return value


def _time(arguments: dict[str, Any], name: str, default: float) -> float:
    value = arguments.get(name)
    if value is None:
        return default
    if type(value) not in (int, float):
        raise WrongArguments(f"{name} is a time in seconds, not {value!r:.80}")
    return float(value)
