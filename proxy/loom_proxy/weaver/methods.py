"""`WeaverMethods`: views of every replica and device, their events, and commands, by whatever way."""

from __future__ import annotations

import asyncio
import fnmatch
import functools
import json
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from loom.control.arguments import MOST_EVENTS
from loom.control.commands import former_values
from loom.control.operations import Ask
from loom.control.profiles import DEFAULT_SECONDS
from loom.errors import LoomError, NotFound, WrongArguments
from loom.weaver.run_views import RunDetails, RunRecord
from loom.weaver.views import (
    DeviceInfo,
    GoodputRecord,
    MetricPoint,
    NewPoints,
    ProfileInfo,
    QueryResult,
    ReplicaInfo,
    Snapshot,
    WeaverEvent,
    WeaverUpdate,
)
from loom.wire.plain import number, plain, shortened
from loom_proxy.weaver.alerts import AlertRules
from loom_proxy.weaver.command import CommandProxy, InjectionProxy
from loom_proxy.weaver.runs import TrainingRun, TrainingRuns
from loom_proxy.weaver.watch import WeaverFeed

if TYPE_CHECKING:
    from loom_proxy.weaver.watch import WeaverWatch


class AsyncWeaverProxy:
    """The weaver of a gateway, for coroutines: every method of `WeaverProxy`, awaited or iterated over.

    Commands return their replicas' acknowledgements, not a `CommandProxy`; bound the wait with `asyncio.wait_for`.
    ``inject`` returns an `InjectionProxy`, which can be awaited.
    """

    def __init__(self, weaver: object, feed: WeaverFeed) -> None:
        self._weaver = weaver
        self._feed = feed

    def events(
        self,
        after: int | None = None,
        follow: bool = False,
        *,
        limit: int = 100,
        kind: str | None = None,
        replica: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> AsyncIterator[WeaverEvent]:
        """Read events, the oldest first; see `WeaverProxy.events`."""
        wanted: dict[str, Any] = {"kind": kind, "replica": replica, "since": since, "until": until}
        return self._feed.events_async(after, follow, limit=limit, **wanted)

    def watch(self, timeout: float | None = None) -> AsyncIterator[WeaverUpdate]:
        """Read the present state, then each change as it happens; see `WeaverProxy.watch`."""
        return self._feed.watch_async(timeout)

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = None if name.startswith("_") else getattr(self._weaver, name, None)
        if not callable(method):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        @functools.wraps(method)
        async def twin(*args: Any, **kwargs: Any) -> Any:
            found = await asyncio.to_thread(method, *args, **kwargs)
            return await found if type(found) is CommandProxy else found

        return twin

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name for name in dir(self._weaver) if name[0] != "_" and name != "aio")]


Target = str | Sequence[str]
"""A replica's id, a group, a glob over both, ``"*"`` for all, or several ids."""


logger = logging.getLogger("loom")


class WeaverMethods:
    """The methods of a weaver.

    Args:
        ask: does an operation of the weaver.
        transport: transport of updates; see `WeaverProxy`.
        socket: returns a watch over the weaver's WebSocket; None if there is only ``ask``.
        user: the user whose replicas everything is about, if not the caller; ``"*"`` for everyone's lists.
    """

    def __init__(
        self,
        ask: Ask,
        transport: str = "http",
        socket: Callable[[], WeaverWatch] | None = None,
        user: str | None = None,
    ) -> None:
        def ask_plainly(operation: str, **arguments: Any) -> Any:
            return ask(operation, **{name: plain(value, name) for name, value in arguments.items()})

        self._ask: Ask = ask_plainly
        self._user = user
        self._feed = WeaverFeed(transport, self._ask, self._look, socket)

    def _environment(self) -> Mapping[str, str]:
        """Return the environment variables by which a program started here finds the same gateway."""
        return {}

    @property
    def aio(self) -> AsyncWeaverProxy:
        """The same methods for coroutines."""
        return AsyncWeaverProxy(self, self._feed)

    def status(self) -> dict[str, Any]:
        """Return the weaver at a glance: replicas by state, how many devices, commands under way, and more."""
        return dict(self._ask("status"))

    def address(self) -> str:
        """Return the value of ``LOOM_WEAVER`` for training processes that Loom does not spawn.

        It needs scope ``operate``. The value contains the key that lets them in: keep it as you keep a token.
        """
        return str(self._ask("address"))

    def replicas(self) -> dict[str, ReplicaInfo]:
        """Return every replica by its id, also those that have failed or finished."""
        found = self._ask("replicas")
        return {self._name(one, "id"): ReplicaInfo.from_body(one) for one in found}

    def replica(self, id: str) -> ReplicaInfo:
        """Return a replica.

        Raises:
            UnknownReplica: none has the id.
        """
        return ReplicaInfo.from_body(self._ask("replica", id=id))

    def devices(self) -> dict[str, DeviceInfo]:
        """Return every device by its uuid, with its replicas and its state."""
        found = self._ask("devices")
        return {self._name(one, "uuid"): DeviceInfo.from_body(one) for one in found}

    def _name(self, one: Mapping[str, str], key: str) -> str:
        return f"{one['user']}/{one[key]}" if self._user == "*" else one[key]

    def events(
        self,
        after: int | None = None,
        follow: bool = False,
        *,
        limit: int = 100,
        kind: str | None = None,
        replica: str | None = None,
        since: float | None = None,
        until: float | None = None,
    ) -> Iterator[WeaverEvent]:
        """Read events, the oldest first.

        Args:
            after: begin after the event with this id; 0 begins with the oldest event that is kept. None reads the
                newest events.
            follow: go on with new events as they happen, for ever, without a gap if the connection is lost.
            limit: number of the newest events, if ``after`` is None.
            kind: read only events of this kind.
            replica: read only events about this replica.
            since: read only events at this time or later, in seconds since the epoch, by the weaver's clock.
            until: read only events at this time or earlier; new ones, with ``follow``, come all the same.
        """
        wanted: dict[str, Any] = {"kind": kind, "replica": replica, "since": since, "until": until}
        return self._feed.events(after, follow, limit=limit, **wanted)

    def watch(self, timeout: float | None = None) -> Iterator[WeaverUpdate]:
        """Read a `Snapshot` of every replica and device, then each change as it happens.

        A change is a `WeaverEvent`, a `Delta` of the replicas' reports, or `Away` if the weaver or the gateway does
        not answer. A new `Snapshot` follows each `Away`.

        An event may come again with the same id and more data, such as a stack.

        Args:
            timeout: stop after so many seconds without a change; None goes on for ever.
        """
        return self._feed.watch(timeout)

    def _look(self) -> Snapshot:
        return Snapshot(self.status(), self.replicas(), self.devices())

    def metrics(self, replica: str) -> list[str]:
        """Return the names of the metrics that a replica reports.

        Raises:
            UnknownReplica: none has the id.
        """
        return list(self._ask("metrics", replica=replica))

    def history(
        self,
        replica: str,
        metric: str,
        since: float | None = None,
        until: float | None = None,
        points: int = 500,
    ) -> list[MetricPoint]:
        """Return the history of a metric, the oldest first.

        Args:
            replica: id of the replica.
            metric: name of the metric.
            since: start in seconds since the epoch; None: from the beginning.
            until: end in seconds since the epoch; None: until now.
            points: number of points at most; a longer history is averaged.

        Raises:
            UnknownReplica, WrongArguments: there is no such replica, or it reports no such metric.
        """
        found = self._ask("history", replica=replica, metric=metric, since=since, until=until, points=points)
        return [MetricPoint(at, step, float(value)) for at, step, value in found]

    def points(self, replica: str, cursor: str = "", since: float | None = None, limit: int = 5000) -> NewPoints:
        """Return the points of all of a replica's metrics after a cursor, each in one answer of a chain of cursors.

        Args:
            replica: id of the replica.
            cursor: that of the answer before; empty to begin with the oldest points.
            since: the time of the last point so far, in seconds since the epoch: of points averaged before
                they were asked for, only later ones come.
            limit: number of points in the answer, about.

        Raises:
            UnknownReplica, WrongArguments: there is no such replica, or it is no cursor.
            Unavailable: the weaver can store nothing now.
        """
        return NewPoints.from_body(self._ask("points", replica=replica, cursor=cursor, since=since, limit=limit))

    def link(self, replica: str, tracker: str, url: str = "") -> dict[str, str]:
        """Show the address of a replica's run in a tracker with the replica; return all its links, by tracker.

        Args:
            replica: id of the replica.
            tracker: name of the tracker.
            url: the address, of http or https; an empty one takes the link away.

        Raises:
            UnknownReplica, WrongArguments: there is no such replica, or it is no such address.
        """
        return dict(self._ask("link", replica=replica, tracker=tracker, url=url))

    def query(self, sql: str) -> QueryResult:
        """Return the result of a SELECT statement over the history of your replicas, in SQLite's words.

        Args:
            sql: the statement. It reads the tables ``replicas``, ``metrics``, ``steps``, ``events``,
                ``config_changes`` and ``commands``.

        Raises:
            WrongArguments: it makes no sense, or does not only read those tables.
            LimitReached: it takes too long, its result is too large, or too many queries run.
        """
        return QueryResult.from_body(self._ask("query", sql=sql))

    def goodput(self, job: str | None = None) -> dict[str, GoodputRecord]:
        """Return the time accounting of each job, by the job's name: its group, or ``GROUP@SESSION`` in a session.

        Args:
            job: name of the only job to return, if there is one of the name.
        """
        return {one["job"]: GoodputRecord.from_body(one) for one in self._ask("goodput", job=job)}

    def stacks(self, replica: str) -> str:
        """Return the stacks of a replica's threads, as text.

        Raises:
            UnknownReplica: none has the id.
        """
        return str(self._ask("stacks", replica=replica))

    def profile(self, replica: str, seconds: float = DEFAULT_SECONDS) -> ProfileInfo:
        """Return how often each stack of a replica's busy threads is seen, at a hundred looks a second.

        Args:
            replica: its id, or its short name.
            seconds: how long, from 1 to 30.

        Raises:
            UnknownReplica: none has the id.
            ProfileFailed: its process went away or does not answer, or another profile of it is being taken.
            LimitReached: too many profiles are being taken.
        """
        return ProfileInfo.from_body(self._ask("profile", replica=replica, seconds=number(seconds, "seconds")))

    def policies(self) -> dict[str, str]:
        """Return the action that a failed device causes, for each group of replicas that has a policy."""
        return dict(self._ask("policies"))

    def command(
        self, kind: str, params: Mapping[str, Any] | None = None, target: Target = "*", *, wait: float = 0.0
    ) -> CommandProxy:
        """Give a command to replicas.

        Args:
            kind: ``update_config``, ``pause``, ``resume``, ``stop``, ``drain``, ``save``, ``evaluate``,
                ``deactivate_device`` or ``reactivate``.
            params: parameters of the command.
            target: the replicas.
            wait: seconds that the call itself waits for acknowledgements, which may save a later request.

        Raises:
            WrongArguments: the kind, a parameter or the target makes no sense.
        """
        command = {"kind": kind, "params": _params(params), "target": _named(target)}
        return CommandProxy(self._ask, self._ask("command", **command, wait=number(wait, "wait")))

    def command_of(self, id: str) -> CommandProxy:
        """Return a command that was given earlier, or by another program.

        Raises:
            UnknownCommand: there is no command with the id, or it was done long ago.
        """
        return CommandProxy(self._ask, self._ask("command_state", id=id))

    def update_config(self, target: Target = "*", **config: Any) -> CommandProxy:
        """Give keys of the configuration new values, which each replica takes at its next step boundary.

        Values are numbers, texts, booleans, None, and lists and dicts of them, of 1 MiB together. Numpy's numbers,
        paths and members of an Enum get their plain form. A key named ``target`` goes through `command`.

        Raises:
            WrongArguments: a value has no plain form; the error names its path, such as ``config.lr.schedule[2]``.
        """
        return self.command("update_config", plain(config, "config"), target)

    def take_back(self, target: Target = "*", command: str | None = None) -> list[CommandProxy]:
        """Give replicas the values that they had before an update, or the schedule that had set them.

        Args:
            target: the replicas.
            command: id of the update; None takes the last one that some of the replicas have applied.

        Returns:
            The commands given, one for all replicas that had the same values.

        Raises:
            NotFound: the replicas have applied no such update of late.
            WrongArguments: of none of its values is known what was before.
        """
        names = [target] if isinstance(target, str) else list(target)
        groups = {one.id: one.group for one in self.replicas().values()}
        changed: dict[str, Mapping[str, Any]] = {}
        for event in reversed(list(self.events(kind="applied", limit=MOST_EVENTS))):
            of, id = event.replica or "", str(event.data.get("command"))
            if (
                not event.data.get("changes")
                or event.data.get("do") != "update_config"
                or command not in (None, id)
            ):
                continue
            called = of, of.partition("@")[0], groups.get(of) or of  # a session adds its name to its replicas
            if any(fnmatch.fnmatchcase(one, name) for name in names for one in called):
                command, changed[of] = id, event.data["changes"]
        if not changed:
            what = "update" if command is None else f"update {command!r:.80}"
            raise NotFound(f"{', '.join(names)} have applied no {what} of late")
        alike: dict[str, list[str]] = {}
        for replica, changes in changed.items():
            if former := former_values(changes):
                alike.setdefault(json.dumps(former), []).append(replica)
        if not alike:
            raise WrongArguments(
                f"update {command!r} has changed values of which is not known what they were before"
            )
        return [self.command("update_config", json.loads(text), replicas) for text, replicas in alike.items()]

    def pause(self, target: Target = "*") -> CommandProxy:
        """Make replicas wait at their next step boundary."""
        return self.command("pause", target=target)

    def resume(self, target: Target = "*") -> CommandProxy:
        """Make paused replicas go on."""
        return self.command("resume", target=target)

    def stop(self, target: Target = "*") -> CommandProxy:
        """Make replicas end their training at the next step boundary."""
        return self.command("stop", target=target)

    def drain(self, target: Target = "*") -> CommandProxy:
        """Make replicas finish their present work, and leave."""
        return self.command("drain", target=target)

    def save(self, target: Target = "*") -> CommandProxy:
        """Make replicas save a checkpoint. The acknowledgement says that it is saved, and at which step.

        Replicas that offer no way to save refuse.
        """
        return self.command("save", target=target)

    def evaluate(self, target: Target = "*") -> CommandProxy:
        """Make replicas evaluate their model. The acknowledgement says that they have, and at which step.

        Replicas that offer no way to evaluate refuse.
        """
        return self.command("evaluate", target=target)

    def deactivate(self, device: str | None = None, group: str | None = None) -> CommandProxy:
        """Take a device out of use, or all devices that the replicas of a group use, and notify the replicas there.

        `loom.train` on GPUs moves its groups off, and starts none there before a `reactivate`. Other replicas hear
        of it by ``@t.on_device_change``; those without such a function refuse.

        Args:
            device: uuid of the device.
            group: name of the group, or of one replica.

        Raises:
            WrongArguments: both are given, or neither.
            UnknownDevice: no replica has registered the device.
            UnknownReplica: no replica of the group lives on a device.
        """
        return self._change_use("deactivate_device", device, group, None)

    def deactivate_device(self, device_uuid: str, target: Target | None = None) -> CommandProxy:
        """Take a device out of use, and notify replicas: those on it, unless ``target`` names others.

        Raises:
            UnknownDevice: no replica has registered it.
        """
        return self._change_use("deactivate_device", device_uuid, None, target)

    def reactivate(
        self, device: str | None = None, group: str | None = None, *, target: Target | None = None
    ) -> CommandProxy:
        """Put a device into use again, or all that a group was on when they failed or were deactivated.

        Args:
            device: uuid of the device.
            group: name of the group, or of one replica.
            target: the replicas to notify of a device; None for those on it.

        Raises:
            WrongArguments: both a device and a group are given, or neither.
            UnknownDevice: no replica has registered the device, or no device of the group is out of use.
        """
        return self._change_use("reactivate", device, group, target)

    def _change_use(self, kind: str, device: str | None, group: str | None, target: Target | None) -> CommandProxy:
        device, group = plain(device, "device"), plain(group, "group")
        if group is not None and device is None:
            return self.command(kind, {"group": group}, [])
        if device is None or group is not None:
            raise WrongArguments("give the uuid of a device or the name of a group, and not both")
        if target is None:
            found = self.devices().get(str(device))
            target = [] if found is None else found.replicas
        return self.command(kind, {"device": device}, target)

    def report_device_failure(self, device_uuid: str, reason: str = "") -> WeaverEvent:
        """Report that a device has failed. Its replicas are notified; their groups' policies may do more.

        Returns:
            The event of the failure: ``data`` has the ``device``, the ``replicas``, and the action for each.

        Raises:
            UnknownDevice: no replica has registered it.
        """
        return WeaverEvent.from_body(self._ask("fail_device", device=device_uuid, reason=reason))

    def inject(
        self,
        fault: str,
        target: Target,
        duration: float | None = None,
        params: Mapping[str, Any] | None = None,
        id: str | None = None,
    ) -> InjectionProxy:
        """Inject a fault on purpose into replicas, or a process of Loom, that are marked as injectable.

        Args:
            fault: one of `loom.chaos.FAULTS`.
            target: replicas as for a command; for ``dead_driver`` a session; ``"*"`` for the gateway and the
                weaver.
            duration: seconds until the fault is removed; None: as long as its kind lasts.
            params: parameters of the fault.
            id: an id of the caller's choice, with which `remove_injection` removes the fault even if the answer to
                this request was lost; 8 to 64 letters, digits, ``-`` and ``_``.

        Raises:
            WrongArguments: the fault, its duration or a parameter makes no sense.
            UnknownReplica, UnknownSession: the target names none that lives.
            NotInjectable: the target is not marked as injectable.
        """
        wanted = {
            "fault": fault,
            "target": _named(target),
            "duration": duration,
            "params": _params(params),
            "id": id,
        }
        return InjectionProxy(self._ask, self._ask("inject", **wanted))

    def remove_injection(self, id: str) -> CommandProxy:
        """Remove a fault before its time is over, even if another program injected it.

        Raises:
            UnknownInjection: no fault was injected with the id.
            UnknownReplica: no replica that lives could remove it.
        """
        return CommandProxy(self._ask, self._ask("remove_fault", injection=id))

    def set_policy(self, group: str, action: str) -> dict[str, str]:
        """Choose the action for the replicas of a group when one of their devices fails.

        Args:
            group: a group, or a glob; ``"*"`` for all.
            action: ``notify`` (the default), ``pause``, ``stop`` or ``respawn``.

        Returns:
            The action of each group that has a policy.
        """
        return dict(self._ask("policy", group=group, action=action))

    def on_respawn(self, callback: Callable[[WeaverEvent], object]) -> Callable[[], None]:
        """Call a function for each replica that needs another place because its group's policy is ``respawn``.

        The function gets each later event ``respawn_wanted``: ``data`` has ``session``, ``procs``, ``rank`` and
        ``group`` of the replica, the ``reason``, and the ``device`` if that has failed. The function runs on a
        thread of its own, and its exceptions are logged.

        Returns:
            A function that removes the callback.
        """
        removed = threading.Event()
        last = self.status()["event"]

        def call() -> None:
            try:
                for event in self.events(last, follow=True, kind="respawn_wanted"):
                    if removed.is_set():
                        return
                    try:
                        callback(event)
                    except Exception:
                        logger.exception("the callback for replica %s raised", event.replica)
            except LoomError:
                logger.exception("no callback is called any more for replicas that have to be put elsewhere")

        threading.Thread(target=call, name="loom-respawn", daemon=True).start()
        return removed.set

    def runs(
        self,
        run: str | None = None,
        *,
        state: str | None = None,
        tag: str | None = None,
        since: float | None = None,
        until: float | None = None,
        archived: bool = False,
        sort: str = "-began",
        limit: int = 100,
    ) -> TrainingRuns:
        """Return runs of trainings, the latest first; the arguments are those of `loom.runs`."""
        wanted = {
            "run": run,
            "state": state,
            "tag": tag,
            "since": since,
            "until": until,
            "archived": archived or None,
        }
        found = self._ask("runs", **wanted, sort=sort, limit=limit)
        return TrainingRuns(TrainingRun(self._ask, RunRecord.from_body(one), self._environment) for one in found)

    def run(self, run: str) -> TrainingRun:
        """Return a run by its id, the beginning of its id, or its name: then the latest one.

        Raises:
            UnknownRun: there is none.
        """
        return TrainingRun(self._ask, RunDetails.from_body(self._ask("run", id=run)), self._environment)

    def alerts(self) -> AlertRules:
        """Return the rules of alerts, with methods that add, remove and test them, and that read what was sent."""
        return AlertRules(self._ask)


def _params(params: Mapping[str, Any] | None) -> dict[str, Any]:
    named = {} if params is None else plain(params, "params")
    if not isinstance(named, dict):
        raise WrongArguments(f"params: names and values have to be given, not {shortened(params)}")
    return named


def _named(target: Target) -> str | list[str]:
    named = plain(target, "target")
    if isinstance(named, str) or (isinstance(named, list) and all(isinstance(one, str) for one in named)):
        return named
    raise WrongArguments(f"target: replicas are named by a text or a list of texts, not by {shortened(target)}")
