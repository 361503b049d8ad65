"""`BridgeRequests`: commands and failures from NATS, carried out one after another through the gateway's REST.

Requests that make no sense raise `WrongArguments`; a refusal of the gateway raises the errors of `Gateway.ask`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from loom.control.commands import DEVICE_COMMANDS, FAULT_COMMANDS, CommandKind
from loom.control.torchloom_names import ALIASES, translate
from loom.errors import GatewayUnreachable, LoomError, NotAGateway, RateLimited, WeaverUnavailable, WrongArguments
from loom.nats.reports import NatsMessage, Required, Text, names, seconds, short
from loom.nats.subjects import SOURCE, Body, Envelope, EnvelopeKind, Format, Reply, decode, error_reply
from loom.process.backoff import Backoff
from loom.rest_client import Gateway

WAIT = 10.0  # seconds to wait for acknowledgements before a reply

Wait = Annotated[float, seconds(0, 300)]

COMMANDS = tuple(kind for kind in CommandKind if kind not in (CommandKind.DEVICE_FAILED, *FAULT_COMMANDS))
"""The commands that NATS may give. A failed device has a message of its own; NATS cannot inject faults."""

_MAX_REASON = 2000


class FailureReport(NatsMessage):
    """A report that a device has failed."""

    device_uuid: Annotated[Required, AfterValidator(short)]
    reason: Annotated[Text, AfterValidator(lambda text: text[:_MAX_REASON])] = ""

    def give(self, gateway: Gateway, id: str | None = None) -> Body:
        """Report the failure to the weaver; return the body of the reply. The same ``id`` is not reported twice."""
        event = gateway.ask("fail_device", device=self.device_uuid, reason=self.reason, report=id)
        affected = [
            {
                "replica_id": one["replica"],
                **{name: one[name] for name in ("group", "state", "action") if one[name] is not None},
                "command_ids": one["commands"],
            }
            for one in event["replicas"]
        ]
        return {"ok": True, "done": True, "event_id": event["id"], "affected": affected}


@dataclass(frozen=True)
class CommandRequest:
    """A command to replicas."""

    kind: CommandKind
    target: str | None
    """The target; None means the replicas on the device or on the devices of the group."""
    params: Mapping[str, object]
    wait: float
    """Seconds to wait for acknowledgements before the reply."""
    announced: bool = False
    """True if it is news of a configuration, and nobody's command."""

    def give(self, gateway: Gateway, id: str | None = None) -> Any:
        """Give the command; return its state so far. The same ``id`` is not given twice."""
        target: str | list[str] | None = self.target
        if target is None and "device" in self.params:
            devices = gateway.ask("devices")
            found = (device["replicas"] for device in devices if device["uuid"] == self.params["device"])
            target = next(found, [])
        ask = partial(gateway.ask, "command", kind=self.kind.value, target=target, params=self.params, id=id)
        if not self.announced:
            return ask()
        try:
            return ask(announced=True)
        except WrongArguments:
            return ask()  # the gateway is older, and takes commands alone

    def reply(self, command: Mapping[str, Any]) -> Body:
        """Return the body of the reply for a command's state."""
        outcomes = command["outcomes"]
        reply = {
            "ok": command["done"] and all(outcome["ok"] for outcome in outcomes.values()),
            "command_id": command["id"],
            "done": command["done"],
            "outcomes": {
                id: {name: value for name, value in outcome.items() if value is not None}
                for id, outcome in outcomes.items()
            },
        }
        if not outcomes and self.kind not in DEVICE_COMMANDS:
            why = f"no replica that lives is named by {self.target!r:.80}"
            return reply | {"ok": False, "error": {"code": "unknown_replica", "message": why}}
        return reply


class _UiCommand(NatsMessage):
    command_type: Required
    target_id: Text = ""
    params: Mapping[str, object] = Field(default={})
    wait: Wait = WAIT


class _DeviceParams(NatsMessage):
    device: Text = ""
    group: Text = ""


class _ConfigInfo(NatsMessage):
    replica_id: Text = ""
    config_params: Mapping[str, object] = Field(default={})
    wait: Wait = WAIT


def read_request(envelope: Envelope) -> FailureReport | CommandRequest:
    """Return the request in a message."""
    return _READERS[envelope.kind](envelope.body)


def _read_command(body: Body) -> CommandRequest:
    asked = _UiCommand.read(body)
    params = asked.params
    if "device_uuid" in params and "device" not in params:
        params = {name: value for name, value in params.items() if name != "device_uuid"}
        params["device"] = asked.params["device_uuid"]
    name, target, params = translate(asked.command_type, asked.target_id, params)
    if name not in COMMANDS:
        known = ", ".join([*COMMANDS, *ALIASES])
        raise WrongArguments(f"there is no command {asked.command_type!r:.80}; command_type is one of {known}")
    kind = CommandKind(name)
    if kind in DEVICE_COMMANDS:
        about = _DeviceParams.read(params)
        if bool(about.device) == bool(about.group):
            raise WrongArguments(
                f"{kind} needs in params either device_uuid, or group, the name of a group or a replica; there is "
                f"{names(params)}"
            )
        if about.group:
            return CommandRequest(kind, None, {"group": about.group}, asked.wait)
        return CommandRequest(kind, target or None, {"device": about.device}, asked.wait)
    if kind is CommandKind.UPDATE_CONFIG and not params:
        raise WrongArguments("params is missing: the new values, by key")
    if not asked.target_id:
        raise WrongArguments(f"target_id is missing; there is {names(body)}")
    return CommandRequest(kind, asked.target_id, params, asked.wait)


def _read_config(body: Body) -> CommandRequest:
    news = _ConfigInfo.read(body)
    if not news.config_params:
        raise WrongArguments(f"config_params is missing: the new values, by key; there is {names(body)}")
    target = news.replica_id or "*"
    return CommandRequest(CommandKind.UPDATE_CONFIG, target, news.config_params, news.wait, announced=True)


_READERS: dict[EnvelopeKind, Callable[[Body], FailureReport | CommandRequest]] = {
    EnvelopeKind.MONITORED_FAIL: FailureReport.read,
    EnvelopeKind.UI_COMMAND: _read_command,
    EnvelopeKind.CONFIG_INFO: _read_config,
}


logger = logging.getLogger(__name__)

ASK_FOR = 2.0  # seconds that one request waits for acknowledgements
MAX_ASKING = 16  # concurrent requests to the gateway
MAX_MESSAGES = 1000  # messages that wait for the bridge; NATS keeps more, see `nats_link.MAX_UNREAD`
MAX_FAILURES = 1000  # reports of failures that wait while the gateway is away

REQUESTS = (EnvelopeKind.MONITORED_FAIL, EnvelopeKind.UI_COMMAND, EnvelopeKind.CONFIG_INFO)
"""The kinds of messages that are requests."""

AWAY = (GatewayUnreachable, NotAGateway, RateLimited, WeaverUnavailable)
"""The errors of a gateway or a weaver that may be back soon."""

_AGAIN = Backoff(0.2, 2.0, jitter=0.5)  # waits between attempts to carry out a stored request


class BridgeRequests:
    """The requests of one bridge, and the requests to the gateway for it.

    ``subjects`` are those of all kinds, and ``reply`` replies to the sender of a request.
    """

    def __init__(self, gateway: Gateway, subjects: dict[EnvelopeKind, str], reply: Reply) -> None:
        self._gateway = gateway
        self._kinds = {subjects[kind]: kind for kind in REQUESTS}
        self._reply = reply
        self._messages: asyncio.Queue[tuple[str, bytes, str]] = asyncio.Queue(MAX_MESSAGES)
        self._failures: dict[str, FailureReport] = {}  # reports that wait for the weaver, by device
        self._command_pool = ThreadPoolExecutor(1, "commands")  # one thread, so that commands are given in order
        self._request_pool = ThreadPoolExecutor(MAX_ASKING, "requests")
        self._answers: set[asyncio.Task[None]] = set()

    @property
    def subjects(self) -> list[str]:
        """The subjects of the requests."""
        return list(self._kinds)

    async def ask(self, request: str, **values: Any) -> Any:
        """Ask the gateway for an operation of the weaver, on another thread."""
        ask = partial(self._gateway.ask, request, **values)
        return await asyncio.get_running_loop().run_in_executor(self._request_pool, ask)

    async def check_gateway(self) -> None:
        """Raise the `LoomError` of a gateway that does not answer or refuses."""
        await asyncio.get_running_loop().run_in_executor(self._request_pool, self._gateway.status)

    async def put(self, subject: str, data: bytes, reply: str) -> None:
        """Add a message that came on one of the subjects."""
        await self._messages.put((subject, data, reply))

    async def run(self) -> None:
        """Carry out the messages one after another, without end: the order of a pause and a resume matters."""
        try:
            while True:
                subject, data, reply = await self._messages.get()
                try:
                    await self._carry_out(subject, data, reply)
                except LoomError as error:
                    await self._refuse(error, subject, data, reply)
        finally:
            for task in self._answers:
                task.cancel()
            await asyncio.gather(*self._answers, return_exceptions=True)

    async def carry_out_stored(self, subject: str, data: bytes, reply: str, id: str) -> None:
        """Carry out a request that NATS keeps; wait for the gateway and the weaver as long as it takes.

        The weaver does a request with an id that it knows only once.
        """
        for wait in _AGAIN:
            try:
                return await self._carry_out(subject, data, reply, id)
            except AWAY as error:
                logger.debug("a stored request waits for the weaver: %s", error)
            except LoomError as error:
                return await self._refuse(error, subject, data, reply)
            await asyncio.sleep(wait)

    async def report_failures(self) -> None:
        """Report the failures that came while the gateway was away."""
        for report in list(self._failures.values()):
            await self._report_again(report)

    def close(self) -> None:
        """Start no more requests to the gateway."""
        for pool in (self._command_pool, self._request_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _refuse(self, error: LoomError, subject: str, data: bytes, reply: str) -> None:
        logger.warning("not done, as %s asks: %s", subject, error)
        await self._reply(error_reply(error), Format.of(data), reply)

    async def _carry_out(self, subject: str, data: bytes, reply: str, id: str | None = None) -> None:
        envelope = decode(self._kinds[subject], data)
        if envelope.source.startswith(SOURCE):
            return
        request, format = read_request(envelope), Format.of(data)
        if isinstance(request, CommandRequest):
            command = await self._give(request, id)
            if reply:
                answer = asyncio.ensure_future(self._answer(request, command, format, reply))
                self._answers.add(answer)
                answer.add_done_callback(self._answers.discard)
            return
        try:
            await self._reply(await self._give(request, id), format, reply)
        except AWAY as error:
            is_full = request.device_uuid not in self._failures and len(self._failures) >= MAX_FAILURES
            if reply or is_full or id is not None:
                raise
            logger.warning(
                "the failure of device %s is reported when the weaver is back: %s", request.device_uuid, error
            )
            self._failures[request.device_uuid] = request

    async def _answer(
        self, request: CommandRequest, command: Mapping[str, Any], format: Format, reply: str
    ) -> None:
        """Reply when every replica has acknowledged a command, or when the requested wait is over."""
        until = time.monotonic() + request.wait
        try:
            while not command["done"] and (left := until - time.monotonic()) > 0:
                command = await self.ask("command_state", id=command["id"], wait=min(left, ASK_FOR))
        except LoomError as error:
            # The command was given: reply with what is known.
            logger.warning("acknowledgements of command %s are not known: %s", command["id"], error)
        await self._reply(request.reply(command), format, reply)

    async def _report_again(self, report: FailureReport) -> None:
        try:
            await self._give(report)
        except AWAY:
            raise
        except LoomError as error:
            logger.warning("the failure of device %s is not reported: %s", report.device_uuid, error)
        if self._failures.get(report.device_uuid) is report:
            del self._failures[report.device_uuid]

    async def _give(self, request: FailureReport | CommandRequest, id: str | None = None) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._command_pool, request.give, self._gateway, id)
