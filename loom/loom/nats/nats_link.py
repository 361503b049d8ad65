"""A connection to NATS that reconnects for as long as it takes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from loom.errors import AuthenticationError, InvalidAddress, LoomError, NatsUnreachable
from loom.nats.tally import MessageTrouble, Tally
from loom.process.backoff import Backoff
from loom.tls import client_context

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 5  # seconds that a server may take to accept a connection

OPEN_TIMEOUT, CLOSE_TIMEOUT = 15.0, 2.0
"""Seconds that connecting and closing may take."""

PING_EVERY = 10
"""Seconds between pings. A server that leaves two unanswered counts as away."""

LOOK_EVERY = 0.5
"""Seconds between two looks whether the client has closed its connection."""

MAX_UNREAD = 10_000  # messages of a subject that wait for the bridge; further ones are dropped
AGAIN = Backoff(0.05, 5.0, jitter=0.5, at_once=True)  # the waits between attempts to reconnect

_SCHEMES = ("nats", "tls", "ws", "wss")

_REFUSED = ("authorization", "authentication")  # words in the errors of NATS for a client that it refuses

FAILURES = (OSError, nats.errors.Error, asyncio.TimeoutError)
"""The errors of a server that is away, or that refuses something."""


class NatsAway(Exception):
    """There is no connection to NATS at the moment."""


@contextlib.contextmanager
def _away() -> Iterator[None]:
    try:
        yield
    except FAILURES as error:
        raise NatsAway(str(error)) from error


@dataclass(frozen=True)
class NatsLogin:
    """The bridge's credentials for NATS, named as its client names them; those that are not needed stay None."""

    user: str | None = None
    password: str | None = None
    token: str | None = None
    user_credentials: str | None = None
    """A file with a JWT and an NKEY seed."""
    ca: str | None = None
    """The file of a certificate authority for ``tls://``; see `loom.tls.client_context`."""


@dataclass(frozen=True)
class SubjectSubscription:
    """The wish for the messages on a subject."""

    subject: str
    queue: str
    """The queue group, of whose members one gets each message; "" for each message."""
    take: Callable[[Msg], Awaitable[None]]


class NatsLink:
    """A connection to a server or cluster of NATS.

    ``came`` is called after each reconnect. A ``url`` that is not one of NATS raises `InvalidAddress`.
    """

    def __init__(self, url: str, login: NatsLogin, came: Callable[[], Awaitable[None]], tally: Tally) -> None:
        self.name = _without_password(url)
        self.subscriptions: list[SubjectSubscription] = []
        """The messages that each connection is to bring; complete before `open`."""
        self._url = url
        self._on_reconnect = came
        self._tally = tally
        self._options = _login_options(login, url)
        self._client: Client | None = None
        self._lost = asyncio.Event()
        self._connected = asyncio.Event()
        self._last_error: Exception | None = None

    async def open(self) -> None:
        """Connect, or raise `NatsUnreachable`, or `AuthenticationError` if the server refuses the credentials."""
        self._lost = asyncio.Event()
        client = Client()
        self._last_error = None
        try:
            connecting = client.connect(
                self._url,
                error_cb=self._note,
                closed_cb=self._note_loss,
                name="loom bridge",
                # `keep` reconnects instead, with log lines and increasing waits.
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=CONNECT_TIMEOUT,
                ping_interval=PING_EVERY,
                no_echo=True,
                **self._options,
            )
            # With a server whose certificate is not trusted, the client would wait for ever.
            await asyncio.wait_for(connecting, OPEN_TIMEOUT)
            for one in self.subscriptions:
                await client.subscribe(one.subject, one.queue, cb=one.take, pending_msgs_limit=MAX_UNREAD)
            await flush(client, CONNECT_TIMEOUT)
        except (*FAILURES, ValueError) as error:
            raise await self._not_opened(client, error) from error
        self._client = client
        self._connected.set()

    async def connected(self) -> Client:
        """Wait until there is a connection; return its client."""
        while self._client is None:
            await self._connected.wait()
        return self._client

    async def lost(self) -> None:
        """Wait until the connection that there is now is lost."""
        await self._lost.wait()

    async def keep(self) -> None:
        """Reconnect whenever the connection is lost, without end."""
        while True:
            await self._until_closed(await self.connected())
            self._client = None
            self._connected.clear()
            logger.warning("NATS at %s is away (%s); trying again until it is back", self.name, self._why())
            for wait in AGAIN:
                await asyncio.sleep(wait)
                try:
                    await self.open()
                    break
                except LoomError as error:
                    logger.debug("%s", error)
            logger.info("NATS at %s is back", self.name)
            await self._on_reconnect()

    async def _until_closed(self, client: Client) -> None:
        # The client does not call back if the data that it still had to send could not be sent.
        while not (self._lost.is_set() or client.is_closed):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._lost.wait(), LOOK_EVERY)
        self._lost.set()

    def check(self) -> Client:
        """Return the connected client, or raise `NatsAway`, as the methods below do."""
        if self._client is None or not self._client.is_connected:
            raise NatsAway
        return self._client

    @property
    def max_payload(self) -> int:
        """Bytes that a message may have."""
        return self.check().max_payload

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str], reply: str = "") -> None:
        """Publish a message. It has arrived once `flush` returns."""
        with _away():
            await self.check().publish(subject, data, reply, dict(headers))

    async def flush(self) -> None:
        """Wait until the server has received every published message."""
        with _away():
            await flush(self.check(), CONNECT_TIMEOUT)

    async def close(self) -> None:
        """Send the remaining messages, and disconnect."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(*FAILURES):
                await flush(client, 1)
            with contextlib.suppress(*FAILURES):
                await asyncio.wait_for(client.close(), CLOSE_TIMEOUT)

    async def _note(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            return self._tally.refuse(error.subject, MessageTrouble.BEHIND, f"{MAX_UNREAD} messages wait already")
        self._last_error = error
        if self._client is not None:
            logger.warning("NATS at %s: %s", self.name, error or type(error).__name__)

    async def _note_loss(self) -> None:
        self._lost.set()

    def _why(self) -> str:
        error = self._last_error
        return (str(error) or type(error).__name__) if error is not None else "it has closed the connection"

    async def _not_opened(self, client: Client, error: Exception) -> LoomError:
        why = error if str(error) and not isinstance(error, nats.errors.NoServersError) else self._last_error
        with contextlib.suppress(*FAILURES):
            await asyncio.wait_for(client.close(), CLOSE_TIMEOUT)
        text = str(why or error).removeprefix("nats: ").strip("'") or type(why or error).__name__
        if any(word in text.lower() for word in _REFUSED):
            return AuthenticationError(
                f"NATS at {self.name} does not let the bridge in ({text}): give --nats-user and "
                f"--nats-password, --nats-token or --nats-creds"
            )
        return NatsUnreachable(f"no NATS at {self.name} ({text}): check the address and that the server runs")


async def flush(client: Client, timeout: int) -> None:
    """Wait until the server has received everything that a client has sent and subscribed to so far.

    One flush is not enough: ``Client.flush`` writes its PING at once, before the data that waits for the client's
    own flusher. That data is written by the time the PONG comes, and so lies before a second PING.
    """
    await client.flush(timeout)
    await client.flush(timeout)


def _without_password(url: str) -> str:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or parts.scheme not in _SCHEMES:
        raise InvalidAddress(f"{url!r} is not a URL of NATS: write nats://HOST:4222")
    return f"{parts.scheme}://{host}:{port or 4222}"


def _login_options(login: NatsLogin, url: str) -> dict[str, Any]:
    options = {name: value for name, value in vars(login).items() if name != "ca" and value is not None}
    if login.ca is not None or urlsplit(url).scheme in ("tls", "wss"):
        options["tls"] = client_context(login.ca)
    return options
