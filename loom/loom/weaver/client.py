"""`WeaverClient`: the client of the weaver, for the gateway and the drivers.

A request made while the weaver is away waits a moment, because a weaver that died is restarted at once. A read
whose answer was lost is sent again. A command is not, because it might be given twice. Large answers are decoded in
turns, so that the event loop does other things too.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from itertools import islice
from typing import Any
from weakref import WeakValueDictionary

import msgpack

from loom.control.frame import pack, refuse_extension, unpack
from loom.control.operations import (
    OPERATIONS,
    AsJson,
    DoInSession,
    GetUsers,
    Operation,
    WatchFully,
    known_operation,
    takes,
)
from loom.errors import LimitReached, LoomError, ProtocolMismatch, WeaverUnavailable, WrongArguments, error_for_code
from loom.process import tasks
from loom.process.backoff import Backoff
from loom.process.listen import host_and_port, notice_loss
from loom.process.tasks import Turns
from loom.weaver.connection import SILENCE, FrameConnection
from loom.weaver.keys import EVERYONE
from loom.wire.plain import exact_json, plain

LARGE = 64 << 10
"""Bytes of a frame that takes too long to be decoded at once."""

_DEPTH = 5
"""Levels whose parts are decoded one by one: those of a snapshot down to the fields of one replica."""

_MANY = 64
"""Parts of a value on a deeper level that is decoded part by part, too."""

_PIECE = 64 << 10  # bytes that are read at once

_BYTES, _TEXT = 0xC6, 0xDB  # the types of msgpack whose length has 32 bits

_AT_ONCE = 16
"""Parts that are decoded between two looks at the clock."""

BETWEEN_ATTEMPTS = Backoff(0.02, 0.5)  # between attempts to connect to a weaver that is said to be up
LEAST_ATTEMPT = 0.5  # seconds that an attempt to connect over TCP has
PATIENCE = 3.0  # seconds that a request waits for a weaver that is away

MAX_QUESTIONS = 2
"""Large reads about one user that are under way at once. The others wait, so that other users' come in between."""

MANY = 256
"""Values in a question's arguments from which on their conversion is left to a thread."""

ANSWER_TIMEOUT = 30.0
"""Seconds that the weaver has to answer, in addition to those that the caller asked it to wait."""


class WeaverClient:
    """A client of the weaver, with one connection for requests, which wait until `came`, and one for each watch.

    Args:
        place: the path of the weaver's socket, or its ``HOST:PORT``, whose name is looked up anew each time.
        key: returns the gateway's key, or a session's, which begins each connection.
    """

    def __init__(self, place: str, key: Callable[[], str], patience: float = PATIENCE) -> None:
        self.place = place
        self._key = key
        self._patience = patience
        self._closed = False
        self._up = asyncio.Event()
        self._why_away = "the weaver is away: it has not come up yet"
        self._last: OSError | None = None  # the failure of the last attempt to connect
        self._connecting = asyncio.Lock()
        self._turns: WeakValueDictionary[str | None, asyncio.Semaphore] = WeakValueDictionary()
        """The places of each user for reads under way, while there are some."""
        self._link: _Link | None = None  # the connection for requests; a lost one is replaced by the next request
        self._watching: set[_Link] = set()

    def came(self) -> None:
        self._up.set()

    def went(self, why: str) -> None:
        """Refuse requests from now on, after a moment, with this sentence."""
        self._up.clear()
        self._why_away = why

    def close(self) -> None:
        """Close every connection and refuse further requests."""
        self._closed = True
        self.went("the weaver is away: the gateway is ending")
        for link in self._links:
            link.transport.abort()

    @property
    def _links(self) -> list[_Link]:
        return [*self._watching, *([self._link] if self._link else [])]

    def descriptors(self) -> list[int]:
        """Return the descriptors of the open connections."""
        return [link.transport.get_extra_info("socket").fileno() for link in self._links if not link.lost]

    async def do(self, operation: str, by: str, /, user: str | None = None, **arguments: Any) -> Any:
        """Do one of `OPERATIONS`, and return its result, as `Ask` describes it.

        ``by`` is the name of the asking token or session. The gateway names the ``user`` that it acts for.
        """
        if operation not in OPERATIONS:
            raise WrongArguments(
                f"the weaver knows no operation {operation!r:.80}; it knows {', '.join(OPERATIONS)}"
            )
        within, wait = ANSWER_TIMEOUT + takes(operation, arguments), arguments.pop("wait", 0.0)
        if OPERATIONS[operation].gives:
            given = await self.ask(operation, user=user, by=by, **arguments)
            operation, arguments = "command_state", {"id": given["id"]}
        return await self.ask(operation, within, user=user, **{"by": by, **_waiting(operation, arguments, wait)})

    async def do_json(self, operation: str, by: str, /, user: str | None = None, **arguments: Any) -> bytes:
        """Do as `do`, for an operation that reads, and return its result as JSON that the weaver has written."""
        within, wait = ANSWER_TIMEOUT + takes(operation, arguments), arguments.pop("wait", 0.0)
        # An operation that reads may have an argument of that name, as the curves of a run do.
        return await self.ask_json(
            operation, within, user=user, **{"by": by, **_waiting(operation, arguments, wait)}
        )

    async def ask_for(self, asked: Operation, within: float = ANSWER_TIMEOUT, user: str | None = None) -> Any:
        """Return the result of an operation of Loom's own processes. Raise as `ask` does."""
        return await self.ask(asked.name, within, user=user, **asked.given())

    async def ask(
        self, operation: str, within: float = ANSWER_TIMEOUT, /, user: str | None = None, **arguments: Any
    ) -> Any:
        """Return the result of an operation. A weaver that goes away before it answers may have done it.

        With the argument ``in_session``, the operation reaches the replicas of that session only.

        Raises:
            LimitReached: `MAX_QUESTIONS` reads about the user were under way for as long as an answer may take.
        """
        asked = known_operation(_innermost(operation, arguments))
        large, reads = asked is not None and asked.large, asked is not None and asked.reads()
        do, given = _in_session(operation, arguments)
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience
        while True:
            link = await self._connected(until)
            try:
                async with self._turn(user, within) if large else nullcontext():
                    return await asyncio.wait_for(link.ask(user, do, given), within)
            except asyncio.TimeoutError:
                raise WeaverUnavailable(f"the weaver did not answer within {within:g} s") from None
            except WeaverUnavailable:
                if self._closed or not reads or loop.time() > until:
                    raise
                await asyncio.sleep(BETWEEN_ATTEMPTS.first)

    async def ask_json(
        self, operation: str, within: float = ANSWER_TIMEOUT, /, user: str | None = None, **arguments: Any
    ) -> bytes:
        """Return the result of an operation as JSON that the weaver has written. Raise as `ask` does."""
        try:
            return bytes(await self.ask_for(AsJson(*_in_session(operation, arguments)), within, user))
        except WrongArguments as error:
            if "no operation 'as_json'" not in str(error):
                raise
        answer = await self.ask(operation, within, user=user, **arguments)  # of a weaver that is older
        return exact_json(answer).encode(errors="replace")

    @asynccontextmanager
    async def _turn(self, user: str | None, within: float) -> AsyncIterator[None]:
        """Wait for one of the `MAX_QUESTIONS` places of a user, and have it for as long as the context lasts."""
        turn = self._turns.setdefault(user, asyncio.Semaphore(MAX_QUESTIONS))
        try:
            await asyncio.wait_for(turn.acquire(), within)
        except asyncio.TimeoutError:
            raise LimitReached(
                f"{MAX_QUESTIONS} questions about replicas of {user!r} went on for {within:g} s: ask again later"
            ) from None
        try:
            yield
        finally:
            turn.release()

    @asynccontextmanager
    async def watch(self, user: str | None = None, full: bool = False) -> AsyncIterator[WeaverPushes]:
        """Watch a user's replicas and devices by an own connection; ``full`` as for `WeaverPushes.refresh`."""
        link = await self._open(asyncio.get_running_loop().time() + self._patience)
        self._watching.add(link)
        try:
            yield WeaverPushes(link, user, full)
        finally:
            self._watching.discard(link)
            link.transport.abort()

    async def available(self) -> None:
        await self._up.wait()

    async def _available(self, until: float) -> None:
        if self._up.is_set():
            return
        try:
            await asyncio.wait_for(self._up.wait(), until - asyncio.get_running_loop().time())
        except asyncio.TimeoutError:
            raise WeaverUnavailable(f"{self._why_away}; replicas go on meanwhile") from None

    async def stay_connected(self, within: float, came: Callable[[], object]) -> None:
        """Connect, whatever was said of the weaver, call ``came`` once it answers, and return when it goes away.

        Raises:
            LoomError, OSError: it does not answer within so many seconds, or refuses this client.
        """
        link = await self._dial(within)
        self._watching.add(link)
        try:
            await asyncio.wait_for(link.ask(EVERYONE, GetUsers.name, {}), within)
            came()
            await link.over.wait()
        except asyncio.TimeoutError:
            raise WeaverUnavailable(f"it did not answer within {within:g} s") from None
        finally:
            self._watching.discard(link)
            link.transport.abort()

    async def _connected(self, until: float) -> _Link:
        async with self._connecting:
            if self._link is None or self._link.lost:
                self._link = await self._open(until)
            return self._link

    async def _open(self, until: float) -> _Link:
        """Connect. While the weaver is away, try until a time of the loop's clock."""
        loop = asyncio.get_running_loop()
        for wait in BETWEEN_ATTEMPTS:
            await self._available(until)
            try:
                # Of those who have waited for one attempt, all hear of its failure, and not each of another's.
                if self._last is not None and loop.time() > until:
                    raise self._last
                link = await self._dial(max(until - loop.time(), LEAST_ATTEMPT))
                self._last = None
                return link
            except OSError as error:
                self._last = error
                if loop.time() > until:
                    text = f"the weaver is away: {error.strerror or error}; replicas go on meanwhile"
                    raise WeaverUnavailable(text) from error
                await asyncio.sleep(wait)  # the weaver died, and its supervisor will notice soon
        raise AssertionError("the attempts do not end")

    async def _dial(self, within: float) -> _Link:
        """Connect once. Raise `OSError` if nobody takes the connection within so many seconds."""
        loop = asyncio.get_running_loop()
        if "/" in self.place:
            _, link = await loop.create_unix_connection(_Link, self.place)
        else:
            host, port = host_and_port(self.place, "the address of a weaver: write HOST:PORT")
            try:
                _, link = await asyncio.wait_for(loop.create_connection(_Link, host, port), within)
            except asyncio.TimeoutError:
                raise OSError(f"nobody takes a connection at {self.place} within {within:g} s") from None
            notice_loss(link.transport.get_extra_info("socket"), SILENCE)
        link.send(["hello", self._key()])
        return link


class WeaverPushes:
    """The pushes of one watch."""

    def __init__(self, link: _Link, user: str | None, full: bool) -> None:
        self._link = link
        self._user = user
        self.refresh(full)

    def refresh(self, full: bool = False) -> None:
        """Ask for a snapshot, which comes among the pushes when they have come that far.

        Args:
            full: whether the snapshot and all later pushes have a part ``more``, with policies, goodput, the newest
                events, devices' states, handlers and configurations. A full watch stays one. An older weaver has no
                such part.
        """
        if full:
            self._link.send(["ask", 0, self._user, WatchFully.name, {}])
        self._link.watch(self._user)

    async def next(self) -> tuple[str, Mapping[str, Any]]:
        """Return the next push: ``("snapshot", …)`` first, and then ``("event", …)`` for each change."""
        return await self._link.next_push()


class _Link(FrameConnection):
    """A connection to the weaver."""

    def __init__(self) -> None:
        super().__init__()
        self.over = asyncio.Event()
        """Set when the connection is lost."""
        self._refusal: LoomError | None = None
        """Why the weaver refuses this connection."""
        self._number = 0
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._watches = False
        self._pushes: asyncio.Queue[tuple[str, Mapping[str, Any]] | bytes | None] = asyncio.Queue()
        """Pushes that the watcher has not read; one that is large is not decoded yet; None after the last."""

    @property
    def lost(self) -> bool:
        return self.over.is_set()

    def data_received(self, data: bytes) -> None:
        try:
            for body in self.splitter.feed(data):
                if len(body) < LARGE:
                    self._take(unpack(body))
                elif self._watches:
                    self._pushes.put_nowait(body)
                else:
                    tasks.run("decode an answer", self._take_large(body))
        except ProtocolMismatch:
            self.transport.abort()

    async def _take_large(self, body: bytes) -> None:
        try:
            self._take(await unpack_in_turns(body))
        except ProtocolMismatch:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.over.set()
        asked, self._pending = self._pending, {}
        text = "the weaver went away before it had answered; it may have done it all the same"
        for future in asked.values():
            if not future.done():
                future.set_exception(self._refusal or WeaverUnavailable(text))
        self._pushes.put_nowait(None)

    async def ask(self, user: str | None, operation: str, arguments: Mapping[str, Any]) -> Any:
        # A value that the weaver cannot read would end the connection, and with it all other requests.
        # Of a large configuration it takes tens of milliseconds, in which a gateway's loop would relay nothing.
        many = _has_many(arguments)
        arguments = await asyncio.to_thread(plain, arguments, "") if many else plain(arguments, "")
        self._number += 1
        number = self._number
        self.send(["ask", number, user, operation, arguments])
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            return await answer
        finally:
            self._pending.pop(number, None)

    def watch(self, user: str | None) -> None:
        self._watches = True
        self.send(["watch", 1, user])

    async def next_push(self) -> tuple[str, Mapping[str, Any]]:
        push = await self._pushes.get()
        if push is None:
            raise self._refusal or WeaverUnavailable("the weaver went away")
        if isinstance(push, bytes):
            try:
                match await unpack_in_turns(push):
                    case [str(kind), int(), dict(body)]:
                        return kind, body
                raise ProtocolMismatch("not a push of the weaver")
            except ProtocolMismatch as error:
                raise WeaverUnavailable(f"the weaver is not understood: {error}") from error
        return push

    def send(self, frame: list[Any]) -> None:
        if self.lost:
            raise WeaverUnavailable("the weaver went away")
        try:
            self.transport.write(pack(frame))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            if isinstance(error, LoomError):
                raise
            raise WrongArguments(f"the weaver cannot be told of this: {error}") from error

    def _take(self, frame: list[Any]) -> None:
        match frame:
            case ["answer", int(number), value]:
                future = self._pending.get(number)
                if future is not None and not future.done():  # the caller may have given up
                    future.set_result(value)
            case ["error", int(number), str(code), str(text)]:
                future = self._pending.get(number)
                if future is not None and not future.done():
                    future.set_exception(error_for_code(code, text))
            case ["refuse", str(code), str(text)]:
                self._refusal = error_for_code(code, text)
            case ["snapshot" | "event" as kind, int(), dict(body)]:
                self._pushes.put_nowait((kind, body))
            case _:
                raise ProtocolMismatch(f"not an answer of the weaver: {frame!r:.80}")


def _waiting(operation: str, arguments: Mapping[str, Any], wait: float) -> Mapping[str, Any]:
    """Return the arguments of an operation, with the seconds to wait if it waits for them."""
    if operation == "command_state":
        return {**arguments, "timeout": wait}
    return {**arguments, "wait": wait} if wait and OPERATIONS[operation].waits else arguments


def _in_session(operation: str, arguments: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return an operation and its arguments; within a session, if they name one, that of `DoInSession`.

    That is an operation of its own, so that an older weaver does not do it without the limit.
    """
    rest = dict(arguments)
    session = rest.pop("in_session", None)
    return (
        (operation, arguments)
        if session is None
        else (DoInSession.name, DoInSession(session, operation, rest).given())
    )


def _innermost(operation: str, arguments: Mapping[str, Any]) -> str:
    """Return the operation that another one does in a session, or as JSON."""
    while "do" in arguments and isinstance(arguments.get("arguments"), dict):
        operation, arguments = arguments["do"], arguments["arguments"]
    return operation


def _has_many(value: Any) -> bool:
    """Return whether a value has `MANY` values inside it, after a look at no more than those."""
    found, unseen = 0, [value]
    while unseen and found < MANY:
        one = unseen.pop()
        if isinstance(one, (dict, list, tuple)):
            found += len(one)
            unseen.extend(islice(one.values() if isinstance(one, dict) else one, MANY))
    return found >= MANY


async def unpack_in_turns(body: bytes) -> list[Any]:
    """Return the frame with a body, as `unpack` does. Raise `ProtocolMismatch` if it is none."""
    decoding = _Decoding(body)
    try:
        frame = await decoding.value(0)
        if decoding.at != len(body):
            raise ValueError("something follows it")
    except (ValueError, TypeError, IndexError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolMismatch(f"not a frame of the weaver's link: {error}") from error
    if type(frame) is not list or not frame or type(frame[0]) is not str:
        raise ProtocolMismatch(f"not a frame of the weaver's link: {frame!r:.80}")
    return frame


class _Decoding:
    """The decoding of one body."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._go_on(0)
        self._turns = Turns()
        self._parts = 0

    async def value(self, depth: int) -> Any:
        """Return the next value, which is on this level."""
        self._parts += 1
        if self._parts % _AT_ONCE == 0:
            await self._turns.rest()
        at = self.at
        kind, count = _header(self._body, at)
        if kind is bytes:
            start, end = at + 5, at + 5 + count
            found = self._body[start:end]
            if len(found) < count:
                raise msgpack.OutOfData
            self._go_on(end)
            return found.decode() if self._body[at] == _TEXT else found
        if kind is None or (depth >= _DEPTH and count < _MANY):
            return self._unpacker.unpack()
        if kind is list:
            return [await self.value(depth + 1) for _ in range(self._unpacker.read_array_header())]
        values = {}
        for _ in range(self._unpacker.read_map_header()):
            name = self._unpacker.unpack()
            if type(name) not in (str, bytes):
                raise ValueError(f"a key is no text: {name!r:.40}")
            values[name] = await self.value(depth + 1)
        return values

    @property
    def at(self) -> int:
        """The beginning of the next value."""
        return self._from + int(self._unpacker.tell())

    def _go_on(self, at: int) -> None:
        """Go on at a place. The body is read in pieces, since a copy of all of it takes long, too."""
        stream = io.BytesIO(self._body)
        stream.seek(at)
        self._from = at
        self._unpacker = msgpack.Unpacker(stream, read_size=_PIECE, ext_hook=refuse_extension)


def _header(body: bytes, at: int) -> tuple[type | None, int]:
    """Return whether the value at a place is a list, a dict or long bytes (or a text), and how much is in it."""
    first = body[at]
    if first in (_BYTES, _TEXT):
        return bytes, int.from_bytes(body[at + 1 : at + 5], "big")
    if 0x80 <= first <= 0x8F:
        return dict, first & 15
    if 0x90 <= first <= 0x9F:
        return list, first & 15
    if 0xDC <= first <= 0xDF:
        width = 2 if first in (0xDC, 0xDE) else 4
        return (list if first < 0xDE else dict), int.from_bytes(body[at + 1 : at + 1 + width], "big")
    return None, 0
