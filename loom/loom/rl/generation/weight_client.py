"""Three ways to order generators to load weights, and how long each order took.

An order that goes over HTTP may wait where completions wait: in the client's pool of connections, in the server's
accept queue, in its event loop. ``queue_ms`` says how long, and `place_of` where.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from loom import tracing
from loom.errors import ActorError, LoomError, Unavailable, WrongArguments
from loom.process.listen import bracketed

if TYPE_CHECKING:
    import httpx

    HttpOrder: TypeAlias = Callable[[httpx.AsyncClient, str, int, str | None, str], Awaitable["UpdateAnswer"]]
    """Orders a server, by its URL, to load the weights of a step from a folder, under a trace id."""

NOTICED_MS = 100.0
"""Waits below this are nowhere in particular."""
PASSES = 10
"""The most times that an order passes the server's event loop."""


class Bottleneck(str, Enum):
    """The place where an order waited."""

    POOL = "the client's pool"
    ACCEPT = "the server's accept queue"
    LOOP = "the server's event loop"
    ENGINE = "the engine"
    NOWHERE = "nowhere"


@dataclass(frozen=True)
class ServingState:
    """The place where requests to a server wait."""

    connections: int
    """Connections that are accepted."""
    accept_queue: int
    """Connections that wait in the kernel to be accepted."""
    late_ms: float
    """The greatest delay of the server's event loop in the last second."""


def place_of(queue_ms: float, rpc_ms: float, state: ServingState) -> Bottleneck:
    """Return where an order waited most.

    Args:
        queue_ms: of the order.
        rpc_ms: of the order.
        state: of the server, while the order waited.
    """
    if max(queue_ms, rpc_ms) < NOTICED_MS:
        return Bottleneck.NOWHERE
    if rpc_ms > queue_ms:
        return Bottleneck.ENGINE
    if state.late_ms * PASSES > queue_ms:
        return Bottleneck.LOOP
    return Bottleneck.ACCEPT if state.accept_queue else Bottleneck.POOL


USER = "loom"
TRACE_HEADER = "x-trace-id"
UPDATE, RELOAD = "/update_weights", "/reload_weights"


def url_with_token(host: str, port: int, token: str) -> str:
    """Return ``http://loom:TOKEN@HOST:PORT``, which most HTTP clients understand."""
    return f"http://{USER}:{quote(token, safe='')}@{bracketed(host)}:{port}"


def without_token(url: str) -> str:
    """Return a URL without user and token, to be shown."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def bearer(url: str) -> tuple[str, dict[str, str]]:
    """Return a URL without its token, and the header that shows the token.

    httpx logs whole URLs at the level INFO, so requests that go this way keep the token out of logs.
    """
    token = unquote(urlsplit(url).password or "")
    return without_token(url), {"authorization": f"Bearer {token}"} if token else {}


POOL = 28_000
"""Connections of the pool that completions and orders share."""
TIMEOUT = 600.0
"""Seconds that an order may take."""


class WeightsVia(str, Enum):
    """The ways to tell generators to load weights."""

    SHARED = "shared"
    """Over the HTTP client of the completions, with one pool of connections."""
    ADMIN = "admin"
    """Over a connection of its own, which is closed after it."""
    LANE = "lane"
    """By an endpoint call, which HTTP has no part in."""


class _UpdateParts(TypedDict, total=False):
    phases: Mapping[str, float]
    """The parts of ``rpc_ms``, if it has any: ``check_ms``, ``pause_ms``, ``load_ms``, ``resume_ms``."""
    pool_ms: float
    """Milliseconds that an HTTP client adds: those that the order waited for one of its connections."""


class UpdateAnswer(_UpdateParts):
    """The answer of a generator that has loaded weights, in the seed's form."""

    status: Literal["ok"]
    rpc_ms: float
    step: int


@dataclass(frozen=True)
class OrderTiming:
    """The duration of an order, in milliseconds."""

    wall_ms: float
    """From the order to its answer."""
    rpc_ms: float
    """Loading, as the generator measured it."""
    queue_ms: float
    """On the way and waiting."""
    trace: str
    """The trace id of the order."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """The parts of ``rpc_ms``, if the engine has any."""


class WeightsClient(ABC):
    """Orders generators to load weights."""

    via: WeightsVia

    async def update(self, generators: Sequence[Any], step: int, path: str | None = None) -> list[OrderTiming]:
        """Order all generators at the same time to load weights; return how long each order took.

        Args:
            generators: the URLs of their servers; for `LaneWeights` the actors, each an actor mesh of one.
            step: the step of the weights.
            path: their folder; None for that of the step in the generator's own folder.

        Raises:
            LoomError: a generator could not load the weights, or does not answer. All orders have ended.
        """
        orders = [self._order(generator, step, path) for generator in generators]
        found = await asyncio.gather(*orders, return_exceptions=True)
        timings = []
        for one in found:
            if isinstance(one, BaseException):
                raise one
            timings.append(one)
        return timings

    async def _order(self, generator: Any, step: int, path: str | None) -> OrderTiming:
        with tracing.trace() as trace:
            sent = tracing.now()
            tracing.event("weights.client.send", url=self._shown(generator), path=path or f"step_{step}", t=sent)
            answer = await self._send(generator, step, path, trace)
            rpc_ms, wall_ms = float(answer["rpc_ms"]), round((tracing.now() - sent) * 1000, 3)
            queue_ms = round(max(0.0, wall_ms - rpc_ms), 3)
            pool_ms = answer.get("pool_ms")
            tracing.event("weights.client.done", wall_ms=wall_ms, rpc_ms=rpc_ms, queue_ms=queue_ms, pool_ms=pool_ms)
            return OrderTiming(wall_ms, rpc_ms, queue_ms, trace, answer.get("phases", {}))

    @abstractmethod
    async def _send(self, generator: Any, step: int, path: str | None, trace: str) -> UpdateAnswer:
        """Order one generator; return its answer."""

    @abstractmethod
    def _shown(self, generator: Any) -> str:
        """Return a generator's name for logs, without secrets."""


class PoolWait:
    """The wait of one request for a connection of its client.

    The request gets ``extensions``, by which httpx tells what becomes of it: nothing before it has a connection.
    """

    def __init__(self) -> None:
        self._asked = time.monotonic()
        self._got: float | None = None
        self.extensions = {"trace": self._note}

    @property
    def ms(self) -> float:
        """The milliseconds until the request had a connection; 0 before."""
        return 0.0 if self._got is None else round((self._got - self._asked) * 1000, 3)

    async def _note(self, what: str, info: object) -> None:
        if self._got is None:
            self._got = time.monotonic()


async def update_over_http(
    client: httpx.AsyncClient, url: str, step: int, path: str | None, trace: str
) -> UpdateAnswer:
    """Order the server of a generator to load weights.

    Raises:
        Unavailable: it does not answer.
        LoomError: it could not load them.
    """
    import httpx

    body = {"step": step, **({} if path is None else {"path": path})}
    bare, headers = bearer(url)
    shown = without_token(url) + UPDATE
    wait = PoolWait()
    try:
        answer = await client.post(
            bare + UPDATE,
            json=body,
            headers={**headers, TRACE_HEADER: trace},
            timeout=TIMEOUT,
            extensions=wait.extensions,
        )
    except httpx.HTTPError as error:
        raise Unavailable(f"{shown} does not answer: {error!r}") from error
    if answer.status_code != 200:
        raise LoomError(f"{shown} answers {answer.status_code}: {answer.text:.500}")
    found: UpdateAnswer = answer.json()
    return {**found, "pool_ms": wait.ms}


class _HttpWeights(WeightsClient):
    def __init__(self, order: HttpOrder) -> None:
        self._order_server = order

    def _shown(self, generator: str) -> str:
        return without_token(generator) + UPDATE


class SharedWeights(_HttpWeights):
    """Orders over the HTTP client of the completions.

    Args:
        client: see `shared_client`.
        order: orders one server.
    """

    via = WeightsVia.SHARED

    def __init__(self, client: httpx.AsyncClient, order: HttpOrder = update_over_http) -> None:
        super().__init__(order)
        self._client = client

    async def _send(self, generator: str, step: int, path: str | None, trace: str) -> UpdateAnswer:
        return await self._order_server(self._client, generator, step, path, trace)


class AdminWeights(_HttpWeights):
    """Orders over a fresh connection each, which is closed after it.

    Args:
        order: orders one server.
    """

    via = WeightsVia.ADMIN

    def __init__(self, order: HttpOrder = update_over_http) -> None:
        super().__init__(order)

    async def _send(self, generator: str, step: int, path: str | None, trace: str) -> UpdateAnswer:
        async with own_client() as client:
            return await self._order_server(client, generator, step, path, trace)


class LaneWeights(WeightsClient):
    """Orders by endpoint calls, on the session's control lane from a laptop, and by Monarch from `job.run`."""

    via = WeightsVia.LANE

    def _shown(self, generator: Any) -> str:
        return "endpoint"

    async def _send(self, generator: Any, step: int, path: str | None, trace: str) -> UpdateAnswer:
        try:
            found: UpdateAnswer = await generator.update_weights.call_one(step, path, trace=trace)
        except ActorError as error:
            if isinstance(error.exception, Unavailable):  # its engine is gone
                raise Unavailable(str(error.exception)) from error
            raise LoomError(f"a generator cannot load the weights of step {step}: {error.exception}") from error
        return found


IDLE = 2.0
"""Seconds after which an idle connection is not used again: before uvicorn, of other engines too, closes it."""


def shared_client(connections: int = POOL) -> httpx.AsyncClient:
    """Return an HTTP client for completions and orders, with one pool of so many connections."""
    return _http_client(connections, connections)


def own_client(keep_alive: int = 0) -> httpx.AsyncClient:
    """Return an HTTP client with one connection of its own.

    Args:
        keep_alive: 1 to use the connection again, 0 for a fresh one for each request.
    """
    return _http_client(1, keep_alive)


def _http_client(connections: int, keep_alive: int) -> httpx.AsyncClient:
    """Return a client that uses no proxy, as generators are near."""
    import httpx

    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=keep_alive, keepalive_expiry=IDLE)
    return httpx.AsyncClient(limits=limits, timeout=TIMEOUT, trust_env=False, verify=_certificates())


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Return what clients check certificates with; reading it for each client would take longer than an order."""
    return ssl.create_default_context()


def weights_client(
    via: WeightsVia | str, client: httpx.AsyncClient | None = None, order: HttpOrder = update_over_http
) -> WeightsClient:
    """Return what orders generators in one of the three ways.

    Args:
        via: the way.
        client: the HTTP client of the completions, for ``shared``.
        order: orders one server over HTTP.

    Raises:
        WrongArguments: there is no such way, or ``shared`` has no client.
    """
    try:
        way = WeightsVia(via)
    except ValueError:
        ways = ", ".join(each.value for each in WeightsVia)
        raise WrongArguments(f"weights_via is one of {ways}, not {via!r:.40}") from None
    if way is WeightsVia.LANE:
        return LaneWeights()
    if way is WeightsVia.ADMIN:
        return AdminWeights(order)
    if client is None:
        raise WrongArguments("weights_via='shared' needs the HTTP client of the completions")
    return SharedWeights(client, order)
