"""`Bridge`: the bridge between a gateway and NATS."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nats.aio.msg import Msg

from loom.bridge.commands import CommandRequest, FailureReport, error_reply, read_request
from loom.bridge.envelopes import SOURCE, Envelope, EnvelopeKind, Format, decode, subjects_of
from loom.bridge.nats_link import NatsAway, NatsLink, NatsLogin
from loom.bridge.publisher import Publication, Publisher
from loom.errors import GatewayUnreachable, LoomError, NotAGateway, RateLimited, WeaverUnavailable
from loom.rest import Gateway

logger = logging.getLogger(__name__)

HEADER = "Loom-Bridge"  # the header of every message that a bridge sends; bridges ignore messages with it
HEADER_SIZE = 128  # bytes of the header at most, which count as payload too
DEVICES_EVERY = 2.0  # seconds between two requests for the devices, whose status the gateway does not push
PAGE = 1000  # events that are read with one request
ASK_FOR = 2.0  # seconds that one request waits for acknowledgements
MAX_ASKING = 16  # concurrent requests to the gateway
MAX_MESSAGES = 1000  # messages that wait for the bridge; NATS keeps more, see `nats_link.MAX_UNREAD`
MAX_FAILURES = 1000  # reports of failures that wait while the gateway is away

TAKEN = (EnvelopeKind.MONITORED_FAIL, EnvelopeKind.UI_COMMAND, EnvelopeKind.CONFIG_INFO)

_AWAY = (GatewayUnreachable, NotAGateway, RateLimited, WeaverUnavailable)


class Bridge:
    """A bridge that publishes the weaver's events on NATS, and passes commands from NATS to the weaver.

    A bridge ignores the messages of bridges. It publishes events in request. Events that happened while NATS or the
    gateway was away are published afterwards. Reports of failures that come while the gateway is away wait for it;
    commands do not, and their sender gets an error.

    ``messages`` are those of ``/ws/v1/weaver`` without end, and ``away`` with a reason while there are none.
    A ``url`` of NATS or a ``prefix`` of the subjects that makes no sense raises `InvalidAddress`.
    """

    def __init__(
        self,
        gateway: Gateway,
        messages: AsyncIterator[dict[str, Any]],
        url: str,
        login: NatsLogin,
        prefix: str,
        format: Format,
    ) -> None:
        self.id = uuid.uuid4().hex
        self._gateway = gateway
        self._messages = messages
        self._format = format
        self._subjects = subjects_of(prefix)
        self._kinds = {self._subjects[kind]: kind for kind in TAKEN}
        queue = "loom-bridge-" + hashlib.sha256(gateway.url.encode()).hexdigest()[:16]
        self._pushes: asyncio.Queue[dict[str, Any]] = asyncio.Queue(1000)
        publish_missed = functools.partial(self._pushes.put, {"type": "missed"})
        self._nats = NatsLink(url, login, list(self._kinds), queue, self._take, publish_missed)
        self._publisher = Publisher()
        self._messages_in: asyncio.Queue[tuple[EnvelopeKind, bytes, str]] = asyncio.Queue(MAX_MESSAGES)
        self._failures: dict[str, FailureReport] = {}  # reports that wait for the weaver, by device
        self._sent: int | None = None
        self._confirmed: int | None = None
        """The last event that NATS has received for certain; `_sent` is the last that was sent."""
        self._is_away = False
        self._command_pool = ThreadPoolExecutor(1, "commands")  # one thread, so that commands are given in order
        self._request_pool = ThreadPoolExecutor(MAX_ASKING, "requests")
        self._answers: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Connect to both sides, or raise the `LoomError` of the one that does not answer or refuses."""
        await asyncio.get_running_loop().run_in_executor(self._request_pool, self._gateway.status)
        try:
            status = await self._ask("status")
            # Publish the events from now on, even if the first snapshot comes later.
            self._sent = self._confirmed = status["event"]
        except WeaverUnavailable as error:
            logger.warning("%s", error)
        await self._nats.open()
        logger.info("bridge %s between %s and NATS at %s", self.id, self._gateway.url, self._nats.name)

    async def run(self) -> None:
        """Run the bridge without end."""
        loops = self._receive_pushes, self._publish_pushes, self._poll_devices, self._carry_out_messages
        tasks = [asyncio.ensure_future(loop()) for loop in (*loops, self._nats.keep)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in [*tasks, *self._answers]:
                task.cancel()
            await asyncio.gather(*tasks, *self._answers, return_exceptions=True)

    async def close(self) -> None:
        """Disconnect from both sides."""
        for pool in (self._command_pool, self._request_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        await self._nats.close()

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
                    self._confirmed = self._sent
            except NatsAway:
                # Messages since the last flush may be lost; the reconnection lets them be published again.
                self._sent = self._confirmed
            except _AWAY as error:
                self._sent = self._confirmed
                logger.debug("events are read when the weaver is back: %s", error)

    async def _publish_push(self, message: dict[str, Any]) -> None:
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
            events = await self._ask("events", after=self._sent, limit=PAGE)
            for event in events:
                await self._publish(self._publisher.event(event))
                self._sent = event["id"]
            more = len(events) == PAGE

    async def _publish(self, publications: Iterable[Publication]) -> None:
        for kind, body in publications:
            subject = self._subjects[kind]
            try:
                data = Envelope(kind, body, SOURCE + self.id).encode(self._format)
            except LoomError as error:
                logger.warning("not said on %s: %s", subject, error)
                continue
            if len(data) + HEADER_SIZE > self._nats.max_payload:
                logger.warning("not said on %s: %d bytes are more than NATS takes", subject, len(data))
                continue
            await self._nats.publish(subject, data, {HEADER: self.id})

    async def _poll_devices(self) -> None:
        while True:
            try:
                devices = await self._ask("devices")
                await self._pushes.put({"type": "devices", "devices": devices})
                for report in list(self._failures.values()):
                    await self._report_again(report)
            except _AWAY as error:
                logger.debug("devices are looked at later: %s", error)
            await asyncio.sleep(DEVICES_EVERY)

    async def _take(self, message: Msg) -> None:
        if message.headers and HEADER in message.headers:
            return
        await self._messages_in.put((self._kinds[message.subject], message.data, message.reply))

    async def _carry_out_messages(self) -> None:
        """Carry out the commands one after another: the order of a pause and a resume matters."""
        while True:
            kind, data, reply = await self._messages_in.get()
            try:
                envelope = decode(kind, data)
                if not envelope.source.startswith(SOURCE):
                    await self._carry_out(read_request(envelope), Format.of(data), reply)
            except LoomError as error:
                logger.warning("not done, as %s asks: %s", self._subjects[kind], error)
                await self._reply(error_reply(error), Format.of(data), reply)

    async def _carry_out(self, request: FailureReport | CommandRequest, format: Format, reply: str) -> None:
        if isinstance(request, CommandRequest):
            command = await self._give(request)
            if reply:
                answer = asyncio.ensure_future(self._answer(request, command, format, reply))
                self._answers.add(answer)
                answer.add_done_callback(self._answers.discard)
            return
        try:
            await self._reply(await self._give(request), format, reply)
        except _AWAY as error:
            is_full = request.device not in self._failures and len(self._failures) >= MAX_FAILURES
            if reply or is_full:
                raise
            logger.warning(
                "the failure of device %s is reported when the weaver is back: %s", request.device, error
            )
            self._failures[request.device] = request

    async def _answer(self, request: CommandRequest, command: dict[str, Any], format: Format, reply: str) -> None:
        """Reply when every replica has acknowledged a command, or when the requested wait is over."""
        until = time.monotonic() + request.wait
        try:
            while not command["done"] and (left := until - time.monotonic()) > 0:
                command = await self._ask("command_state", id=command["id"], wait=min(left, ASK_FOR))
        except LoomError as error:
            # The command was given: reply with what is known.
            logger.warning("acknowledgements of command %s are not known: %s", command["id"], error)
        await self._reply(request.reply(command), format, reply)

    async def _reply(self, body: dict[str, Any], format: Format, reply: str) -> None:
        if not reply:
            return
        try:
            data = Envelope(EnvelopeKind.REPLY, body, SOURCE + self.id).encode(format)
            if len(data) + HEADER_SIZE > self._nats.max_payload:
                text = f"done, but the reply has {len(data)} bytes, more than NATS takes"
                short = {**body, "error": {"code": "too_large", "message": text}, "outcomes": {}, "affected": []}
                data = Envelope(EnvelopeKind.REPLY, short, SOURCE + self.id).encode(format)
            await self._nats.publish(reply, data, {HEADER: self.id})
        except (LoomError, NatsAway) as error:
            logger.warning("no reply could be given: %s", error)

    async def _report_again(self, report: FailureReport) -> None:
        try:
            await self._give(report)
        except _AWAY:
            raise
        except LoomError as error:
            logger.warning("the failure of device %s is not reported: %s", report.device, error)
        if self._failures.get(report.device) is report:
            del self._failures[report.device]

    async def _ask(self, request: str, **values: Any) -> Any:
        ask = functools.partial(self._gateway.ask, request, **values)
        return await asyncio.get_running_loop().run_in_executor(self._request_pool, ask)

    async def _give(self, request: FailureReport | CommandRequest) -> dict[str, Any]:
        return await asyncio.get_running_loop().run_in_executor(self._command_pool, request.give, self._gateway)
