"""`BridgeRequests`: commands and failures from NATS, carried out one after another through the gateway."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from loom.errors import GatewayUnreachable, LoomError, NotAGateway, RateLimited, WeaverUnavailable
from loom.nats.commands import CommandRequest, FailureReport, error_reply, read_request
from loom.nats.envelopes import SOURCE, EnvelopeKind, Format, decode
from loom.nats.screen import Reply
from loom.process.backoff import Backoff
from loom.rest import Gateway

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
        ask = functools.partial(self._gateway.ask, request, **values)
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
            is_full = request.device not in self._failures and len(self._failures) >= MAX_FAILURES
            if reply or is_full or id is not None:
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
            logger.warning("the failure of device %s is not reported: %s", report.device, error)
        if self._failures.get(report.device) is report:
            del self._failures[report.device]

    async def _give(self, request: FailureReport | CommandRequest, id: str | None = None) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._command_pool, request.give, self._gateway, id)
