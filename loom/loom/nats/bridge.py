"""`Bridge`: the bridge between a gateway and NATS; `Publisher`: its publications for the weaver's pushes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from nats.aio.msg import Msg

from loom.control.commands import Command
from loom.control.reports import DEVICE_NUMBERS
from loom.errors import LoomError, TooLarge, WeaverUnavailable
from loom.nats.bridged_replicas import BridgedReplicas, Screen
from loom.nats.jetstream import RequestStream
from loom.nats.message_counts import MessageTrouble, Tally
from loom.nats.nats_link import NatsAway, NatsLink, NatsLogin, SubjectSubscription
from loom.nats.outside_replica import OutsideReplica
from loom.nats.requests import AWAY, BridgeRequests
from loom.nats.state import BridgeState
from loom.nats.subjects import HEADER, SOURCE, Body, Envelope, EnvelopeKind, Format, is_subject, subjects_of
from loom.rest_client import Gateway

Publication = tuple[EnvelopeKind, Body]
"""A message to publish on NATS: its kind and its body."""

PART = 100  # replicas or devices in one message: a server's default limit is 1 MiB
BEAT_EVERY = 1.0  # seconds between two heartbeats of a replica


class Publisher:
    """A converter of messages of ``/ws/v1/weaver``, or parts of them, to publications."""

    def __init__(self) -> None:
        self._groups: dict[str, str] = {}
        # The last publications of each replica and device, and the time of each replica's heartbeat.
        self._statuses: dict[str, tuple[Any, ...]] = {}
        self._beats: dict[str, float] = {}
        self._devices: dict[str, Body] = {}

    def forget(self) -> None:
        """Forget the published state, so that all of it is published again."""
        self._statuses.clear()
        self._devices.clear()

    def snapshot(self, message: Mapping[str, Any]) -> Iterator[Publication]:
        """Yield messages with all replicas and devices."""
        replicas, devices = message["replicas"], message["devices"]
        self._groups = {replica["id"]: replica["group"] for replica in replicas}
        self._statuses = {id: status for id, status in self._statuses.items() if id in self._groups}
        self._beats = {id: beat for id, beat in self._beats.items() if id in self._groups}
        parts = max(1, -(-len(replicas) // PART), -(-len(devices) // PART))
        for part in range(parts):
            some = slice(part * PART, (part + 1) * PART)
            shown = {"replicas": replicas[some], "devices": devices[some], "part": part + 1, "parts": parts}
            yield _update("snapshot", {"status": message["status"], **shown})
        for replica in replicas:
            yield from self._training_status(replica["id"], replica)
        yield from self.devices(devices)

    def event(self, event: Mapping[str, Any]) -> Iterator[Publication]:
        """Yield the messages about an event."""
        kind = event["kind"]
        if kind == "registered":
            self._groups[event["replica"]] = event["group"]
        if kind == "failed":
            renamed = {"replica_id": "replica", "current_step": "step", "device_uuids": "devices", "event_id": "id"}
            yield EnvelopeKind.REPLICA_FAIL, _picked(event, "reason", "action", "time", **renamed)
        elif kind == "command":
            yield EnvelopeKind.WEAVER_COMMAND, _weaver_command(event)
        elif kind == "config" or (kind in ("applied", "refused") and event["do"] == "update_config"):
            yield EnvelopeKind.CONFIG_INFO, _config_info(event)
        yield self.added(event)

    def added(self, event: Mapping[str, Any]) -> Publication:
        """Return a message that repeats an event with more details."""
        return _update("event", dict(event))

    def delta(self, message: Mapping[str, Any], now: float) -> Iterator[Publication]:
        """Yield messages with the replicas' latest reports."""
        replicas, devices = message["replicas"], message.get("devices", {})
        for id, replica in replicas.items():
            yield from self._training_status(id, replica)
            # Deltas come more often than heartbeats, whose times jitter: allow a tenth less than the interval.
            if replica["connected"] and now >= self._beats.get(id, 0.0) + 0.9 * BEAT_EVERY:
                self._beats[id] = now
                yield EnvelopeKind.HEARTBEAT, {"replica_id": id, **_picked(replica, "phase", current_step="step")}
        for some in _parts(list(replicas.items())):
            yield _update("delta", {"replicas": dict(some)})
        for some in _parts(list(devices.items())):
            yield _update("delta", {"devices": dict(some)})

    def devices(self, devices: Iterable[Mapping[str, Any]]) -> Iterator[Publication]:
        """Yield messages about the devices whose status has changed."""
        before, self._devices = self._devices, {}
        for device in devices:
            status = device["status"] or {}
            body = {
                **_picked(device, "kind", "server", "type", "memory", "state", "reason"),
                **_picked(device, device_uuid="uuid", replica_ids="replicas"),
                **_picked(status, *DEVICE_NUMBERS, "throttled", "error", "xid"),
            }
            # Publish a new measurement even if its values are the same.
            self._devices[device["uuid"]] = {**body, "measured": status.get("time")}
            if before.get(device["uuid"]) != self._devices[device["uuid"]]:
                yield EnvelopeKind.DEVICE_STATUS, body

    def away(self, reason: str) -> Publication:
        """Return a message that the weaver is away."""
        return _update("away", {"reason": reason})

    def _training_status(self, id: str, replica: Mapping[str, Any]) -> Iterator[Publication]:
        status = replica["reported"], replica["state"], replica["step"]
        if self._statuses.get(id) == status:
            return
        self._statuses[id] = status
        body = _picked(
            replica, "state", "epoch", "max_step", "metrics", "status_type", current_step="step", time="reported"
        )
        group = {"group": self._groups[id]} if id in self._groups else {}
        yield EnvelopeKind.TRAINING_STATUS, {"replica_id": id, **group, **body}


def _weaver_command(event: Mapping[str, Any]) -> dict[str, object]:
    target = event["target"]
    targets = [target] if isinstance(target, str) else target
    renamed = {"command_id": "command", "command_type": "do", "event_id": "id"}
    fields = _picked(event, "params", "replicas", "by", "cause", "time", **renamed)
    return {**fields, "target_replica_ids": targets}


def _config_info(event: Mapping[str, Any]) -> dict[str, object]:
    changes = event["changes"]
    renamed = {"replica_id": "replica", "current_step": "step", "command_id": "command", "event_id": "id"}
    fields = _picked(event, "refused", "by", "reason", "time", **renamed)
    fields["config_params"] = {key: change["new"] for key, change in changes.items()}
    fields["old_params"] = {key: change.get("old") for key, change in changes.items()}
    return fields


def _update(type: str, data: Body) -> Publication:
    return EnvelopeKind.UI_UPDATE, {"type": type, "data": data}


def _parts(items: Sequence[tuple[str, Any]]) -> Iterator[Sequence[tuple[str, Any]]]:
    for start in range(0, len(items), PART):
        yield items[start : start + PART]


def _picked(source: Mapping[str, Any], *same: str, **renamed: str) -> dict[str, object]:
    """Return the fields that are not None; ``renamed`` ones have another name in the source."""
    names = {**dict(zip(same, same, strict=True)), **renamed}
    return {name: source[there] for name, there in names.items() if source.get(there) is not None}


logger = logging.getLogger(__name__)

HEADER_SIZE = 128  # bytes of the header at most, which count as payload too
DEVICES_EVERY = 2.0  # seconds between two requests for the devices, whose status the gateway does not push
PAGE = 1000  # events that are read with one request

Push: TypeAlias = Mapping[str, Any]
"""A message of ``/ws/v1/weaver``."""


class Bridge:
    """A bridge that publishes the weaver's events on NATS, and passes commands from NATS to the weaver.

    A bridge ignores the messages of bridges. It publishes events in order. Events that happened while NATS or the
    gateway was away are published afterwards. Reports of failures that come while the gateway is away wait for it;
    commands do not, and their sender gets an error. With ``jetstream``, NATS keeps both until they are done.

    ``messages`` are those of ``/ws/v1/weaver`` without end, and ``away`` with a reason while there are none.
    A ``url`` of NATS or a ``prefix`` of the subjects that makes no sense raises `InvalidAddress`.
    """

    def __init__(
        self,
        gateway: Gateway,
        messages: AsyncIterator[Push],
        url: str,
        login: NatsLogin,
        prefix: str,
        format: Format,
        state: BridgeState,
        jetstream: bool = False,
    ) -> None:
        self.id = state.id
        self._messages = messages
        self._format = format
        self._subjects = subjects_of(prefix)
        self._state = state
        self._tally = Tally()
        self._requests = BridgeRequests(gateway, self._subjects, self._reply)
        self._intake = BridgedReplicas(state, self._tally, self._weaver_address, self._publish_command)
        self._screen = Screen(self.id, self._intake, self._tally, self._subjects, self._reply)
        self._gateway_url = gateway.url
        queue = "loom-bridge-" + hashlib.sha256(gateway.url.encode()).hexdigest()[:16]
        self._pushes: asyncio.Queue[Push] = asyncio.Queue(1000)
        publish_missed = functools.partial(self._pushes.put, {"type": "missed"})
        self._nats = NatsLink(url, login, self._note_loss, publish_missed, self._tally)
        kept = [*self._requests.subjects, self._subjects[EnvelopeKind.REGISTER_DEVICE]] if jetstream else []
        self._nats.subscriptions += [
            one
            for one in (
                *(SubjectSubscription(subject, queue, self._take) for subject in self._requests.subjects),
                *(SubjectSubscription(subject, "", self._screen.take) for subject in self._screen.subjects),
                SubjectSubscription(self._subjects[EnvelopeKind.BRIDGE_METRICS], "", self._tell_counts),
            )
            if one.subject not in kept
        ]
        self._stream: RequestStream | None = None
        if jetstream:
            name = prefix.replace(".", "_")
            self._stream = RequestStream(self._nats, state, self._tally, name, queue, kept, self._take_stored)
        self._publisher = Publisher()
        self._sent: int | None = None
        self._confirmed: int | None = None
        """The last event that NATS has received for certain; `_sent` is the last that was sent."""
        self._is_whole = True
        """True if what was sent and is not confirmed was sent on the connection that there is now."""
        self._is_away = False

    async def open(self) -> None:
        """Connect to both sides, or raise the `LoomError` of the one that does not answer or refuses."""
        await self._requests.check_gateway()
        try:
            status = await self._requests.ask("status")
            # Publish the events from now on, even if the first snapshot comes later.
            self._sent = self._confirmed = status["event"]
        except WeaverUnavailable as error:
            logger.warning("%s", error)
        await self._nats.open()
        if self._stream is not None:
            await self._stream.open()
        logger.info("bridge %s between %s and NATS at %s", self.id, self._gateway_url, self._nats.name)

    async def run(self) -> None:
        """Run the bridge without end."""
        loops = self._receive_pushes, self._publish_pushes, self._poll_devices
        others = self._requests.run, self._intake.run, self._nats.keep
        stored = () if self._stream is None else (self._stream.run,)
        tasks = [asyncio.ensure_future(loop()) for loop in (*loops, *others, *stored)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._screen.close()

    async def close(self) -> None:
        """Disconnect from both sides."""
        self._requests.close()
        await self._nats.close()
        self._state.close()

    async def _weaver_address(self) -> str:
        address: str = await self._requests.ask("address")
        return address

    async def _receive_pushes(self) -> None:
        async for message in self._messages:
            await self._pushes.put(message)

    async def _publish_pushes(self) -> None:
        while True:
            message = await self._pushes.get()
            try:
                await self._publish_push(message)
                if self._pushes.empty() and self._sent != self._confirmed:
                    await self._nats.flush()
                    # A flush on the next connection says nothing of what was sent on the one before.
                    if self._is_whole:
                        self._confirmed = self._sent
            except NatsAway:
                # Messages since the last flush may be lost; the reconnection lets them be published again.
                self._sent = self._confirmed
            except AWAY as error:
                self._sent = self._confirmed
                logger.debug("events are read when the weaver is back: %s", error)

    async def _publish_push(self, message: Push) -> None:
        match message["type"]:
            case "snapshot":
                if self._is_away:
                    logger.info("the weaver is back")
                self._is_away = False
                last = message["status"]["event"]
                if self._confirmed is None or last < self._confirmed:  # the weaver lost its store: ids start over
                    self._sent = self._confirmed = last
                await self._publish(self._publisher.snapshot(message))
                await self._publish_missed()
            case "event":
                event = message["event"]
                if self._sent is not None and event["id"] <= self._sent:
                    # A published event comes again when it was amended, such as with a stack.
                    await self._publish([self._publisher.added(event)])
                elif self._sent is None or event["id"] == self._sent + 1:
                    await self._publish(self._publisher.event(event))
                    self._sent = event["id"]
                else:
                    await self._publish_missed()
            case "delta":
                await self._publish(self._publisher.delta(message, time.monotonic()))
            case "devices":
                await self._publish(self._publisher.devices(message["devices"]))
            case "missed":
                self._is_whole = True
                self._sent = self._confirmed
                self._publisher.forget()
                await self._publish_missed()
            case "away" if not self._is_away:
                self._is_away = True
                logger.warning("the weaver is away (%s); trying again until it is back", message["reason"])
                await self._publish([self._publisher.away(message["reason"])])

    async def _publish_missed(self) -> None:
        """Publish the events after the last published one."""
        more = self._sent is not None
        while more:
            self._nats.check()
            events = await self._requests.ask("events", after=self._sent, limit=PAGE)
            for event in events:
                await self._publish(self._publisher.event(event))
                self._sent = event["id"]
            more = len(events) == PAGE

    def _note_loss(self) -> None:
        self._is_whole = False

    async def _publish(self, publications: Iterable[Publication]) -> None:
        for kind, body in publications:
            if not self._is_whole:  # what may be lost is published before what came later
                raise NatsAway
            try:
                await self._send(self._subjects[kind], kind, body, self._format)
            except LoomError as error:
                logger.warning("not said on %s: %s", self._subjects[kind], error)

    async def _send(self, subject: str, kind: EnvelopeKind, body: Body, format: Format, answers: str = "") -> None:
        """Publish a message, or raise `TooLarge` or `NatsAway`."""
        data = Envelope(kind, body, SOURCE + self.id).encode(format)
        if len(data) + HEADER_SIZE > self._nats.max_payload:
            raise TooLarge(f"the {kind.body} has {len(data)} bytes, more than NATS takes")
        await self._nats.publish(subject, data, {HEADER: self.id}, answers)

    async def _poll_devices(self) -> None:
        while True:
            try:
                devices = await self._requests.ask("devices")
                await self._pushes.put({"type": "devices", "devices": devices})
                await self._requests.report_failures()
            except AWAY as error:
                logger.debug("devices are looked at later: %s", error)
            await asyncio.sleep(DEVICES_EVERY)

    async def _take(self, message: Msg) -> None:
        if not (message.headers and HEADER in message.headers):
            await self._requests.put(message.subject, message.data, message.reply)

    async def _take_stored(self, subject: str, data: bytes, reply: str, id: str, age: float) -> None:
        """Do a request that NATS keeps, and has delivered."""
        if subject in self._requests.subjects:
            await self._requests.carry_out_stored(subject, data, reply, id)
        else:
            await self._screen.pass_on(subject, data, reply, age)

    async def _tell_counts(self, message: Msg) -> None:
        """Answer a request for the bridge's counts."""
        if not self._may_reply(message.reply):
            return
        body = {"bridge": self.id, "replicas": self._intake.connected, **self._tally.to_body()}
        with contextlib.suppress(NatsAway, LoomError):
            await self._send(message.reply, EnvelopeKind.BRIDGE_METRICS, body, self._format)

    async def _publish_command(self, replica: OutsideReplica, command: Command) -> None:
        """Publish a command for a replica without a threadlet; NATS may be away, as it is published again."""
        about = {"command_id": command.id, "command_type": command.kind.value, "params": command.params}
        body = {**about, "target_replica_ids": [replica.id], "target_replica_id": replica.id, "time": time.time()}
        kind, answers = EnvelopeKind.WEAVER_COMMAND, self._subjects[EnvelopeKind.ACKNOWLEDGEMENT]
        with contextlib.suppress(NatsAway):
            await self._send(self._subjects[kind], kind, body, self._format, answers)

    def _may_reply(self, subject: str) -> bool:
        """Return whether a sender may choose a subject for replies, on which it perhaps may not publish itself."""
        return is_subject(subject) and not subject.startswith("$") and subject not in self._subjects.values()

    async def _reply(self, body: Body, format: Format, reply: str) -> None:
        if not reply:
            return
        if not self._may_reply(reply):
            return self._tally.refuse(
                "replies", MessageTrouble.MALFORMED, f"no reply is published on {reply!r:.80}"
            )
        try:
            try:
                await self._send(reply, EnvelopeKind.REPLY, body, format)
            except TooLarge as error:
                why = {"code": error.code, "message": f"done, but {error}"}
                short = {**body, "error": why, "outcomes": {}, "affected": []}
                await self._send(reply, EnvelopeKind.REPLY, short, format)
        except (LoomError, NatsAway) as error:
            logger.warning("no reply could be given: %s", error)
