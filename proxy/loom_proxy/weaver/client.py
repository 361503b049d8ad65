"""`Job.weaver`: every replica and device, what happened to them, and telling them what to do.

::

    job.weaver.replicas()
    job.weaver.update_config("train_*", learning_rate=0.002).get(timeout=10)

A command is on its way when the call returns, and gives a `CommandProxy` to wait for, in ordinary code with ``get``
and in a coroutine with ``await``. Everything else returns what it asked for; in a coroutine its twin of the same
name in ``job.weaver.aio`` does not hold the event loop up, and neither do the commands' twins there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from loom.control.commands import Acknowledgement
from loom.errors import LoomError, WaitTimeout, WeaverUnavailable
from loom.rest import Gateway, quoted
from loom.weaver.views import (
    DeviceInfo,
    GoodputRecord,
    MetricPoint,
    ReplicaInfo,
    Snapshot,
    WeaverEvent,
    WeaverUpdate,
)
from loom_proxy.futures.timeouts import check_timeout
from loom_proxy.session.handshake import TRANSIENT
from loom_proxy.transport.websocket import NoUpgrade
from loom_proxy.weaver.polling import poll

if TYPE_CHECKING:
    from loom_proxy.weaver.watch import WeaverWatch

__all__ = ["AsyncWeaverProxy", "CommandProxy", "InjectionProxy", "WeaverProxy"]

logger = logging.getLogger("loom")

ASK_FOR = 5.0
"""Seconds that one question waits for acknowledgements at most: who is interrupted is held up no longer."""

AWAY = 600.0
"""Seconds for which who waits for acknowledgements asks a weaver or a gateway that is away again and again."""

ASK_AGAIN = 0.5
"""Seconds between two such attempts at most."""

PAGE = 1000
"""Events that are read at once."""

V = TypeVar("V")

_ANY: Mapping[str, Any] = {}

Target = str | Sequence[str]
"""A replica's id, a group, a glob over both, ``"*"`` for all, or several ids."""


class _Absence(NamedTuple):
    """The weaver, or the gateway, does not answer."""

    since: float
    error: LoomError


class CommandProxy:
    """A command that was given to replicas.

    It goes on whatever becomes of this program, and is told to replicas that are away as soon as they are back.
    """

    def __init__(self, gateway: Gateway, answer: dict[str, Any]) -> None:
        self._gateway = gateway
        self.id: str = answer["id"]
        """By which others find it; see `WeaverProxy.command_of`."""
        self.replicas: tuple[str, ...] = tuple(answer["replicas"])
        """Whom it is for. May be empty: nobody lives whom the target names."""
        self._away: _Absence | None = None
        self._take(answer)

    def _take(self, answer: dict[str, Any]) -> None:
        self._done: bool = answer["done"]
        self._outcomes = {id: Acknowledgement.from_body(one) for id, one in answer["outcomes"].items()}

    def done(self) -> bool:
        """Whether every replica has answered, as far as is known here; asks nobody."""
        return self._done

    def outcomes(self) -> dict[str, Acknowledgement]:
        """What each replica has made of it by now; of one that has not answered, one that is ``waiting``."""
        if not self._done:
            self._ask(0.0)
        return dict(self._outcomes)

    def get(self, timeout: float | None = None) -> dict[str, Acknowledgement]:
        """Wait until every replica has applied or refused it, or cannot any more; what each made of it, by its id.

        Args:
            timeout: seconds to wait at most; None waits for ever, but for `AWAY` seconds at most while the weaver
                or the gateway is away.

        Raises:
            WaitTimeout: not all have answered. `outcomes` has those that did.
            WeaverUnavailable, GatewayUnreachable: it was away when the time was over.
        """
        check_timeout(timeout)
        until = None if timeout is None else time.monotonic() + timeout
        while not self._done:
            left = ASK_FOR if until is None else max(0.0, min(ASK_FOR, until - time.monotonic()))
            self._ask_patiently(left)
            if until is not None and time.monotonic() >= until:
                break
        if self._done:
            return dict(self._outcomes)
        raise self._late(timeout) if self._away is None else self._away.error

    def __await__(self) -> Generator[Any, None, dict[str, Acknowledgement]]:
        return self._await().__await__()

    async def _await(self) -> dict[str, Acknowledgement]:
        while not self._done:
            await asyncio.to_thread(self._ask_patiently, ASK_FOR)
        return dict(self._outcomes)

    def _ask_patiently(self, wait: float) -> None:
        """Ask; where nobody answers, return a moment later all the same, unless that has been so for `AWAY`."""
        try:
            self._ask(wait)
        except (WeaverUnavailable, *TRANSIENT) as error:
            now = time.monotonic()
            self._away = _Absence(now if self._away is None else self._away.since, error)
            if now - self._away.since >= AWAY:
                raise
            time.sleep(min(wait, ASK_AGAIN))
            return
        self._away = None

    def _ask(self, wait: float) -> None:
        path = f"commands/{quoted(self.id)}"
        self._take(self._gateway.weaver(path, "outcomes", patience=wait, wait=wait))

    def _late(self, timeout: float | None) -> WaitTimeout:
        late = [id for id, one in self._outcomes.items() if one.waiting]
        shown = ", ".join(late[:5]) + (f" and {len(late) - 5} more" if len(late) > 5 else "")
        why = self._outcomes[late[0]].reason
        return WaitTimeout(f"within {timeout:g} s no acknowledgement from {shown}: {why}")

    def __repr__(self) -> str:
        state = "done" if self._done else "waiting"
        return f"<CommandProxy {self.id} to {len(self.replicas)} replicas, {state}>"


class InjectionProxy(CommandProxy):
    """A fault that was injected. ``get`` waits until each replica that it strikes has told of it."""

    def __init__(self, gateway: Gateway, answer: dict[str, Any]) -> None:
        super().__init__(gateway, answer)
        self._piece: dict[str, Any] = answer.get("evidence") or {}

    @property
    def evidence(self) -> dict[str, Mapping[str, Any]]:
        """What shows that the fault is there, by replica; for a piece of Loom under the empty name."""
        found = {id: one.evidence for id, one in self.outcomes().items() if one.ok}
        return {"": self._piece, **found} if self._piece else found

    def remove(self) -> CommandProxy:
        """Have it removed before its time is over. Done when one of those who are told has answered that it is.

        Raises:
            UnknownReplica: nobody who lives could do it.
        """
        return CommandProxy(self._gateway, self._gateway.remove_fault(self.id))


class WeaverProxy:
    """The weaver of a gateway.

    Every method raises `WeaverUnavailable` while the weaver is away, `ScopeError` where the token is not for it
    (commands need ``operate``), and what a `Gateway` raises.

    Args:
        url: of the gateway.
        token: to show.
        ca: as `loom.tls.client_context`.
        transport: how `watch` and `events` learn of what is new: ``"websocket"``; ``"http"``, which asks every
            second; or ``"auto"``: HTTP where there is no WebSocket.
    """

    def __init__(self, url: str, token: str | None, ca: str | None = None, transport: str = "auto") -> None:
        self._gateway = Gateway(url, token, ca=ca)
        self._url, self._token, self._ca = url, token, ca
        self._transport = transport

    @property
    def aio(self) -> AsyncWeaverProxy:
        """The same for coroutines."""
        return AsyncWeaverProxy(self)

    # -- looking ------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The weaver at a glance: replicas by state, how many devices, commands under way, and more."""
        return self._gateway.weaver("status", "weaver")

    def address(self) -> str:
        """The value of ``LOOM_WEAVER`` for training processes that Loom does not spawn. Needs scope ``operate``.

        It has the key that lets them in: keep it as you keep a token.
        """
        return str(self._gateway.weaver("address", "address")["address"])

    def replicas(self) -> dict[str, ReplicaInfo]:
        """Every replica by its id, those that have failed or finished too."""
        found = self._gateway.weaver("replicas", "replicas")["replicas"]
        return {one["id"]: ReplicaInfo.from_body(one) for one in found}

    def replica(self, id: str) -> ReplicaInfo:
        """A replica.

        Raises:
            UnknownReplica: none has the id.
        """
        return ReplicaInfo.from_body(self._gateway.weaver(f"replicas/{quoted(id)}", "state"))

    def devices(self) -> dict[str, DeviceInfo]:
        """Every device by its uuid, with the replicas on it and how it is."""
        found = self._gateway.weaver("devices", "devices")["devices"]
        return {one["uuid"]: DeviceInfo.from_body(one) for one in found}

    def events(
        self,
        after: int | None = None,
        follow: bool = False,
        *,
        limit: int = 100,
        kind: str | None = None,
        replica: str | None = None,
    ) -> Iterator[WeaverEvent]:
        """What happened, the oldest first.

        Args:
            after: begin after the event with this id, 0 for the oldest that is kept. None: with the newest.
            follow: go on with new ones as they happen, for ever. None is missed, also where the connection is lost.
            limit: how many of the newest, where ``after`` is None.
            kind: only those of this kind.
            replica: only those about this replica.
        """
        wanted = {"kind": kind, "replica": replica}
        last = 0 if after is None else after
        if after is None:
            for event in self._events(after=None, limit=limit, **wanted):
                last = event.id
                yield event
        else:
            for event in self._events_after(after, wanted):
                last = event.id
                yield event
        if not follow:
            return
        for update in self.watch():
            if isinstance(update, Snapshot):
                for event in self._events_after(last, wanted):
                    last = event.id
                    yield event
            elif isinstance(update, WeaverEvent) and update.id > last:
                last = update.id
                if kind in (None, update.kind) and replica in (None, update.replica):
                    yield update

    def _events_after(self, after: int, wanted: Mapping[str, Any] = _ANY) -> Iterator[WeaverEvent]:
        while page := self._events(after=after, limit=PAGE, **wanted):
            yield from page
            after = page[-1].id
            if len(page) < PAGE:
                return

    def _events(self, **wanted: Any) -> list[WeaverEvent]:
        return [WeaverEvent.from_body(one) for one in self._gateway.weaver("events", "events", **wanted)["events"]]

    def watch(self, timeout: float | None = None) -> Iterator[WeaverUpdate]:
        """A `Snapshot` of all that there is; then each `WeaverEvent`, and now and then a `Delta` of what replicas
        have reported; `Away` while there is nobody to ask, and then a `Snapshot` again.

        An event with an id that came before is that event with something added to it, such as a stack.

        Args:
            timeout: stop after so many seconds in which nothing comes; None goes on for ever.
        """
        if self._transport != "http":
            try:
                yield from self._watch().updates(timeout)
                return
            except NoUpgrade:  # which only the first connection raises
                if self._transport != "auto":
                    raise
        yield from poll(self._look, self._events_after, timeout)

    def _look(self) -> Snapshot:
        return Snapshot(self.status(), self.replicas(), self.devices())

    def _watch(self) -> WeaverWatch:
        from loom_proxy.weaver.watch import WeaverWatch  # which few programs need, and takes a while

        return WeaverWatch(self._url, self._token, self._ca)

    def metrics(self, replica: str) -> list[str]:
        """The names of the metrics that a replica reports.

        Raises:
            UnknownReplica: none has the id.
        """
        found: list[str] = self._gateway.weaver(f"replicas/{quoted(replica)}/metrics", "metrics")["metrics"]
        return found

    def history(
        self,
        replica: str,
        metric: str,
        since: float | None = None,
        until: float | None = None,
        points: int = 500,
    ) -> list[MetricPoint]:
        """The history of a metric, the oldest first.

        Args:
            replica: its id.
            metric: its name.
            since: seconds since the epoch; None: from the beginning.
            until: likewise; None: until now.
            points: how many at most; they are means where there are more.

        Raises:
            UnknownReplica, WrongArguments: there is no such replica, or it reports no such metric.
        """
        path = f"replicas/{quoted(replica)}/metrics/{quoted(metric)}"
        found = self._gateway.weaver(path, "points", since=since, until=until, points=points)["points"]
        return [MetricPoint(at, step, float(value)) for at, step, value in found]

    def goodput(self, job: str | None = None) -> dict[str, GoodputRecord]:
        """Where the time of each job went, by its name: the replicas' group, ``GROUP@SESSION`` of a session's.

        Args:
            job: only this one, if there is one of the name.
        """
        return {
            one["job"]: GoodputRecord.from_body(one)
            for one in self._gateway.weaver("goodput", "jobs", job=job)["jobs"]
        }

    def stacks(self, replica: str) -> str:
        """Where the threads of a replica are in their code, as text.

        Raises:
            UnknownReplica: none has the id.
        """
        return self._gateway.stacks(replica)

    def policies(self) -> dict[str, str]:
        """What is done with replicas when a device of theirs fails, for each group that has a policy."""
        found: dict[str, str] = self._gateway.weaver("policies", "policies")["policies"]
        return found

    # -- changing -----------------------------------------------------------------------------------------------

    def command(self, kind: str, params: dict[str, Any] | None = None, target: Target = "*") -> CommandProxy:
        """Tell replicas to do something.

        Args:
            kind: ``update_config``, ``pause``, ``resume``, ``stop``, ``drain``, ``deactivate_device`` or
                ``reactivate``.
            params: of the command.
            target: whom.

        Raises:
            WrongArguments: it makes no sense.
        """
        order = {"kind": kind, "params": params or {}, "target": target if isinstance(target, str) else [*target]}
        return CommandProxy(self._gateway, self._gateway.weaver("commands", "outcomes", order))

    def command_of(self, id: str) -> CommandProxy:
        """A command that was given earlier, or by another program.

        Raises:
            UnknownCommand: there is none with the id, or it was done long ago.
        """
        return CommandProxy(self._gateway, self._gateway.weaver(f"commands/{quoted(id)}", "outcomes"))

    def update_config(self, target: Target = "*", **config: Any) -> CommandProxy:
        """Give keys of the configuration new values, which each replica takes at its next step boundary.

        A key named ``target`` goes through `command`.
        """
        return self.command("update_config", config, target)

    def pause(self, target: Target = "*") -> CommandProxy:
        """Have replicas wait at their next step boundary."""
        return self.command("pause", target=target)

    def resume(self, target: Target = "*") -> CommandProxy:
        """Have paused replicas go on."""
        return self.command("resume", target=target)

    def stop(self, target: Target = "*") -> CommandProxy:
        """Have replicas end their training at the next step boundary."""
        return self.command("stop", target=target)

    def drain(self, target: Target = "*") -> CommandProxy:
        """Have replicas finish what they do, and leave."""
        return self.command("drain", target=target)

    def deactivate_device(self, device_uuid: str, target: Target | None = None) -> CommandProxy:
        """Take a device out of use, and tell replicas; those on it unless ``target`` names others.

        Raises:
            UnknownDevice: no replica has registered it.
        """
        return self._device_command("deactivate_device", device_uuid, target)

    def reactivate(self, device_uuid: str, target: Target | None = None) -> CommandProxy:
        """Put a device into use again, and tell replicas; those on it unless ``target`` names others.

        Raises:
            UnknownDevice: no replica has registered it.
        """
        return self._device_command("reactivate", device_uuid, target)

    def _device_command(self, kind: str, device: str, target: Target | None) -> CommandProxy:
        if target is None:
            found = self.devices().get(device)
            target = [] if found is None else found.replicas
        return self.command(kind, {"device": device}, target)

    def report_device_failure(self, device_uuid: str, reason: str = "") -> WeaverEvent:
        """Say that a device has failed. Its replicas are told, and their groups' policies say what else is done.

        Returns:
            The event that shows it: ``data`` has the ``device``, the ``replicas``, and what was done with each.

        Raises:
            UnknownDevice: no replica has registered it.
        """
        body = {"reason": reason}
        return WeaverEvent.from_body(self._gateway.weaver(f"devices/{quoted(device_uuid)}/failure", "id", body))

    def inject(
        self, fault: str, target: Target, duration: float | None = None, params: dict[str, Any] | None = None
    ) -> InjectionProxy:
        """Inject a fault on purpose into replicas, or a piece of Loom, that are marked as injectable.

        Args:
            fault: one of `loom.chaos.FAULTS`.
            target: whom: replicas as for a command; for ``dead_driver`` a session; ``"*"`` for the gateway and the
                weaver.
            duration: seconds until it is removed; None: as long as its kind lasts.
            params: of the fault.

        Raises:
            WrongArguments: it makes no sense.
            UnknownReplica, UnknownSession: the target names nobody who lives.
            NotInjectable: somebody whom it names is not marked as injectable.
        """
        whom = target if isinstance(target, str) else [*target]
        order = {"fault": fault, "target": whom, "duration": duration, "params": params or {}}
        return InjectionProxy(self._gateway, self._gateway.weaver("inject", "outcomes", order))

    def remove_injection(self, id: str) -> CommandProxy:
        """Have a fault removed before its time is over, also one that another program injected.

        Raises:
            UnknownInjection: none was injected with the id.
            UnknownReplica: nobody who lives could remove it.
        """
        return CommandProxy(self._gateway, self._gateway.remove_fault(id))

    def set_policy(self, group: str, action: str) -> dict[str, str]:
        """Choose what is done with the replicas of a group when a device of theirs fails.

        Args:
            group: a group, or a glob; ``"*"`` for all.
            action: ``notify`` (which they are in any case), ``pause``, ``stop`` or ``respawn``.

        Returns:
            As `policies`.
        """
        found: dict[str, str] = self._gateway.weaver("policies", "policies", {"group": group, "action": action})[
            "policies"
        ]
        return found

    def on_respawn(self, callback: Callable[[WeaverEvent], object]) -> Callable[[], None]:
        """Have a function called for each replica that has to be put elsewhere, where its group's policy says so.

        It is told the event ``respawn_wanted``: ``data`` has ``session``, ``procs``, ``rank`` and ``group`` of the
        replica, the ``reason``, and the ``device`` that failed, if that was it. It runs on a thread of its own, and
        what it raises is logged. Only what happens from now on counts.

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

    def __repr__(self) -> str:
        return f"<WeaverProxy of {self._url}>"


class AsyncWeaverProxy:
    """The weaver of a gateway, for coroutines: as `WeaverProxy`, but every method is awaited or iterated over.

    Commands give what their replicas made of them, not a `CommandProxy`; bound the wait with `asyncio.wait_for`.
    """

    def __init__(self, weaver: WeaverProxy) -> None:
        self._weaver = weaver

    async def status(self) -> dict[str, Any]:
        """As `WeaverProxy.status`."""
        return await _apart(self._weaver.status)

    async def address(self) -> str:
        """As `WeaverProxy.address`."""
        return await _apart(self._weaver.address)

    async def replicas(self) -> dict[str, ReplicaInfo]:
        """As `WeaverProxy.replicas`."""
        return await _apart(self._weaver.replicas)

    async def replica(self, id: str) -> ReplicaInfo:
        """As `WeaverProxy.replica`."""
        return await _apart(self._weaver.replica, id)

    async def devices(self) -> dict[str, DeviceInfo]:
        """As `WeaverProxy.devices`."""
        return await _apart(self._weaver.devices)

    async def events(
        self,
        after: int | None = None,
        follow: bool = False,
        *,
        limit: int = 100,
        kind: str | None = None,
        replica: str | None = None,
    ) -> AsyncIterator[WeaverEvent]:
        """As `WeaverProxy.events`."""
        last = after or 0

        async def past(begin: int | None) -> list[WeaverEvent]:
            found = self._weaver.events(begin, limit=limit, kind=kind, replica=replica)
            return await _apart(list, found)

        for event in await past(after):
            last = event.id
            yield event
        if not follow:
            return
        async for update in self.watch():
            if isinstance(update, Snapshot):
                for event in await past(last):
                    last = event.id
                    yield event
            elif isinstance(update, WeaverEvent) and update.id > last:
                last = update.id
                if kind in (None, update.kind) and replica in (None, update.replica):
                    yield update

    async def watch(self) -> AsyncIterator[WeaverUpdate]:
        """As `WeaverProxy.watch`."""
        weaver = self._weaver
        if weaver._transport != "http":
            try:
                async for update in weaver._watch().updates_async():
                    yield update
                return
            except NoUpgrade:
                if weaver._transport != "auto":
                    raise
        polled = poll(weaver._look, weaver._events_after)
        while (polled_update := await _apart(next, polled, None)) is not None:
            yield polled_update

    async def metrics(self, replica: str) -> list[str]:
        """As `WeaverProxy.metrics`."""
        return await _apart(self._weaver.metrics, replica)

    async def history(
        self,
        replica: str,
        metric: str,
        since: float | None = None,
        until: float | None = None,
        points: int = 500,
    ) -> list[MetricPoint]:
        """As `WeaverProxy.history`."""
        return await _apart(self._weaver.history, replica, metric, since, until, points)

    async def goodput(self, job: str | None = None) -> dict[str, GoodputRecord]:
        """As `WeaverProxy.goodput`."""
        return await _apart(self._weaver.goodput, job)

    async def stacks(self, replica: str) -> str:
        """As `WeaverProxy.stacks`."""
        return await _apart(self._weaver.stacks, replica)

    async def policies(self) -> dict[str, str]:
        """As `WeaverProxy.policies`."""
        return await _apart(self._weaver.policies)

    async def command(
        self, kind: str, params: dict[str, Any] | None = None, target: Target = "*"
    ) -> dict[str, Acknowledgement]:
        """As `WeaverProxy.command`."""
        return await (await _apart(self._weaver.command, kind, params, target))

    async def update_config(self, target: Target = "*", **config: Any) -> dict[str, Acknowledgement]:
        """As `WeaverProxy.update_config`."""
        return await self.command("update_config", config, target)

    async def pause(self, target: Target = "*") -> dict[str, Acknowledgement]:
        """As `WeaverProxy.pause`."""
        return await self.command("pause", target=target)

    async def resume(self, target: Target = "*") -> dict[str, Acknowledgement]:
        """As `WeaverProxy.resume`."""
        return await self.command("resume", target=target)

    async def stop(self, target: Target = "*") -> dict[str, Acknowledgement]:
        """As `WeaverProxy.stop`."""
        return await self.command("stop", target=target)

    async def drain(self, target: Target = "*") -> dict[str, Acknowledgement]:
        """As `WeaverProxy.drain`."""
        return await self.command("drain", target=target)

    async def deactivate_device(self, device_uuid: str, target: Target | None = None) -> dict[str, Acknowledgement]:
        """As `WeaverProxy.deactivate_device`."""
        return await (await _apart(self._weaver.deactivate_device, device_uuid, target))

    async def reactivate(self, device_uuid: str, target: Target | None = None) -> dict[str, Acknowledgement]:
        """As `WeaverProxy.reactivate`."""
        return await (await _apart(self._weaver.reactivate, device_uuid, target))

    async def report_device_failure(self, device_uuid: str, reason: str = "") -> WeaverEvent:
        """As `WeaverProxy.report_device_failure`."""
        return await _apart(self._weaver.report_device_failure, device_uuid, reason)

    async def inject(
        self, fault: str, target: Target, duration: float | None = None, params: dict[str, Any] | None = None
    ) -> InjectionProxy:
        """As `WeaverProxy.inject`; await what it gives for what the replicas made of it."""
        return await _apart(self._weaver.inject, fault, target, duration, params)

    async def set_policy(self, group: str, action: str) -> dict[str, str]:
        """As `WeaverProxy.set_policy`."""
        return await _apart(self._weaver.set_policy, group, action)


async def _apart(work: Callable[..., V], *arguments: Any) -> V:
    """Call a function on a thread of its own."""
    return await asyncio.to_thread(work, *arguments)
