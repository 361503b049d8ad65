"""The WebSocket ``/ws/v1/weaver``: a snapshot of the weaver's state, then its changes, and commands to it, as JSON.

::

    {"type": "snapshot", "status": {…}, "replicas": […], "devices": […]}
    {"type": "event", "event": {"id", "time", "kind", "replica", …}}
    {"type": "delta", "replicas": {id: {"state", "step", "metrics", …}}, "devices": {uuid: {"utilization", …}}}
    {"type": "away", "reason": "…"}

It is about the caller's replicas and devices; an admin may name another user with ``?user=NAME``.
A snapshot comes first, and again after the weaver was away. An event whose id has come before is the same event
with an addition, such as a stack. A reader that is too slow is disconnected, and may reconnect.

A client with ``?form=torchloom`` gets the same in torchLoom's form: see
`loom_gateway.weaver_socket.torchloom_form`.

A page, which offers the subprotocol ``loom.page`` or has ``?page=1`` in its address, gets more, but of replicas'
reports only what it subscribes to: see `loom_gateway.weaver_socket.page_feed` and
`loom.weaver.server.pushes`. The messages of clients are in `loom_gateway.weaver_socket.commands`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from loom.errors import LimitReached, LoomError, WeaverUnavailable, WrongArguments
from loom.process import tasks
from loom.process.tasks import Turns
from loom.token_file import SCOPES
from loom.weaver.client import WeaverClient, WeaverPushes
from loom.weaver.keys import EVERYONE
from loom.wire.plain import exact_json
from loom_gateway.access.control import AccessControl
from loom_gateway.access.credentials import PAGE_PROTOCOL
from loom_gateway.access.sessions import Principal
from loom_gateway.relay.endpoint import CLOSE_REFUSED, DISCONNECT_TIMEOUT
from loom_gateway.rest.weaver_changes import WeaverChanges, whose
from loom_gateway.weaver_socket.commands import SocketCommands
from loom_gateway.weaver_socket.page_feed import GatewayFeed, PageFeed, PageReader
from loom_gateway.weaver_socket.subscribers import FeedReader, Since, SubscribingReader
from loom_gateway.weaver_socket.torchloom_form import FormReader, TorchloomForm, away

MAX_READERS = 64  # readers of one user at the same time
BETWEEN_WATCHES = 0.2  # the shortest pause in seconds between two watches of the weaver for one user

LINGER = 60.0
"""Seconds for which a feed goes on without a page, so that a page whose socket was lost can resume."""


class WeaverWatches:
    """The watches of all watched users."""

    def __init__(self, weaver: WeaverClient) -> None:
        self._weaver = weaver
        self._watches: dict[str, _SharedWatch] = {}
        self._readers: Counter[str] = Counter()  # by the user who reads

    @contextmanager
    def reading(self, by: str, user: str, reader: FeedReader) -> Iterator[None]:
        """Give a reader a snapshot of a user's replicas and devices, or what it has missed, and then each change.

        Raises:
            LimitReached: ``by`` has as many readers as a user may have.
        """
        if self._readers[by] >= MAX_READERS:
            raise LimitReached(
                f"{MAX_READERS} programs watch the weaver as {by!r} already: close one of them first"
            )
        self._readers[by] += 1
        watch = self._watches.get(user)
        if watch is None:
            watch = self._watches[user] = _SharedWatch(self._weaver, user, lambda: self._watches.pop(user, None))
        watch.join(reader)
        try:
            yield
        finally:
            watch.leave(reader)
            self._readers[by] -= 1
            if not self._readers[by]:
                del self._readers[by]


class _SharedWatch:
    """One watch, and its readers. Each message is encoded once, or twice if pages get more than others.

    Args:
        ended: called when the watch has ended, after which no reader may join.
    """

    def __init__(self, weaver: WeaverClient, user: str, ended: Callable[[], object]) -> None:
        self._weaver = weaver
        self._user = user
        self._on_end = ended
        self._readers: dict[FeedReader, None] = {}
        """The readers that have a snapshot, apart from pages."""
        self._feed = PageFeed()
        self._form = TorchloomForm()
        self._new: dict[FeedReader, None] = {}  # readers that have no snapshot yet
        self._watch: WeaverPushes | None = None
        self._asked = 0  # snapshots that are on their way
        self._full = False  # whether the last of them, and the changes after it, are full
        self._task: asyncio.Task[Any] | None = None
        self._lingering: asyncio.TimerHandle | None = None

    def join(self, reader: FeedReader) -> None:
        if isinstance(reader, SubscribingReader):
            self._linger(False)
            if self._feed.begun and self._feed.resume(reader):
                return
        self._new[reader] = None
        if self._task is None:
            self._task = tasks.run_to_end("watch the weaver", self._run)
        elif self._watch is not None and (not self._asked or self._lacks_full):
            self._ask(self._watch)

    def leave(self, reader: FeedReader) -> None:
        """Forget a reader. The watch ends with the last one, or some time after the last page."""
        self._readers.pop(reader, None)
        self._new.pop(reader, None)
        if isinstance(reader, SubscribingReader):
            self._feed.leave(reader)
            self._linger(not self._has_pages and self._feed.begun)
        if isinstance(reader, FormReader):
            self._form.leave(reader)
        self._end_if_unused()

    @property
    def _all(self) -> list[FeedReader]:
        return [*self._readers, *self._feed.readers, *self._form.readers, *self._new]

    @property
    def _has_pages(self) -> bool:
        return any(isinstance(reader, SubscribingReader) for reader in self._all)

    @property
    def _lacks_full(self) -> bool:
        """True if somebody needs a full snapshot, but none was asked for."""
        needs = (SubscribingReader, FormReader)
        return not self._full and any(isinstance(reader, needs) for reader in self._all)

    def _linger(self, lingers: bool) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        if lingers:
            self._lingering = asyncio.get_running_loop().call_later(LINGER, self._end_feed)

    def _end_feed(self) -> None:
        """Begin a new feed, which the next snapshot fills; the pages of this one need a snapshot."""
        self._linger(False)
        self._new |= dict.fromkeys(self._feed.close())
        self._feed = PageFeed()
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if not self._all and self._lingering is None and self._task is not None:
            self._task.cancel()
            self._end()

    def _end(self) -> None:
        self._task = None
        self._linger(False)
        self._feed.close()
        self._form.close()
        self._on_end()

    def _ask(self, watch: WeaverPushes) -> None:
        """Ask for another snapshot."""
        self._asked += 1
        self._full = self._full or self._lacks_full
        with contextlib.suppress(WeaverUnavailable):  # the next watch begins with a snapshot
            watch.refresh(self._full)

    async def _run(self) -> None:
        while True:
            try:
                self._full = False
                self._full = self._lacks_full
                async with self._weaver.watch(self._user, self._full) as self._watch:
                    self._asked = 1
                    self._new |= self._readers
                    self._readers = {}
                    if self._lacks_full:  # one came while the watch was opened
                        self._ask(self._watch)
                    turns = Turns()
                    while True:
                        await self._pass_on(*await self._watch.next())
                        await turns.rest()
            except WeaverUnavailable as error:
                text = exact_json({"type": "away", "reason": str(error)})
                for reader in self._all:
                    reader.add(away() if isinstance(reader, FormReader) else text)
                self._new |= dict.fromkeys(self._form.close())
                self._end_feed()
            except LoomError as error:
                for reader in self._all:
                    reader.fail(error)
                self._end()
                return
            finally:
                self._watch = None
            await asyncio.sleep(BETWEEN_WATCHES)
            await self._weaver.available()

    async def _pass_on(self, kind: str, body: Mapping[str, Any]) -> None:
        more = body.get("more", {})
        body = {name: value for name, value in body.items() if name != "more"}
        if kind == "snapshot":
            await self._pass_snapshot(body, more)
            return
        if self._readers and _says_anything(body):
            text = exact_json(_message(body))
            for reader in self._readers:
                reader.add(text)
        if self._form.readers:
            self._form.take(body, more)
        if self._feed.begun:
            await self._feed.take(body, more)

    async def _pass_snapshot(self, body: Mapping[str, Any], more: Mapping[str, Any]) -> None:
        self._asked -= 1
        feed = self._feed
        plain = [reader for reader in self._new if not isinstance(reader, SubscribingReader | FormReader)]
        # Later comers wait for the next snapshot.
        is_full = bool(more) or not self._asked
        forms = [reader for reader in self._new if isinstance(reader, FormReader) and is_full]
        pages = [one for one in self._new if isinstance(one, SubscribingReader) and is_full]
        for_pages = await feed.take_snapshot(body["replicas"]) if pages or feed.begun else ""
        if forms or self._form.readers:
            for form in forms:
                del self._new[form]
            await self._form.begin(body, forms)
        if not plain and not pages:
            return
        pieces = await _encode({"type": "snapshot", **body})
        text = _object(pieces) if plain else ""
        for reader in plain:
            if reader in self._new:  # it may have left meanwhile
                del self._new[reader]
                reader.add(text, is_snapshot=True)
                self._readers[reader] = None
        rest = _object(await _encode(more)) if pages else ""
        turns = Turns()
        for page in pages:
            await turns.rest()
            if page in self._new:
                del self._new[page]
                own = exact_json(page.own_part())
                feed.begin_for(page, _object(pieces, rest, for_pages, own))


def _says_anything(body: Mapping[str, Any]) -> bool:
    """Return whether a push has anything for readers that are no pages."""
    return "event" in body or any(body["changes"].values())


def _message(body: Mapping[str, Any]) -> Mapping[str, Any]:
    if "event" in body:
        return {"type": "event", "event": body["event"]}
    return {"type": "delta", **body["changes"]}


async def _encode(values: Mapping[str, Any]) -> list[str]:
    """Return the JSON of an object in pieces, without its braces.

    It is encoded in turns, because this loop relays every session's calls. To join the pieces takes long, too.
    """
    turns, pieces = Turns(), list[str]()
    for name, value in values.items():
        pieces.append(f"{', ' if pieces else ''}{exact_json(name)}: ")
        if not value or not isinstance(value, (list, dict)):
            pieces.append(exact_json(value))
            continue
        is_list = isinstance(value, list)
        before = "[" if is_list else "{"
        for item in value:
            pieces.append(before + (exact_json(item) if is_list else exact_json({item: value[item]})[1:-1]))
            before = ", "
            await turns.rest()
        pieces.append("]" if is_list else "}")
    return pieces


def _object(pieces: list[str], *more: str) -> str:
    """Return the JSON of an object from pieces and from the JSON of other objects, which are not decoded."""
    others = [f", {one[1:-1]}" for one in more if one != "{}"]
    return "".join(["{", *pieces, *others, "}"])


MAX_FRAME = 1 << 20
"""Bytes of a message from a client at which the connection is closed before the message is read."""

MAX_VIEW_FRAME = 64 << 10
"""The same for a client that only looks: it sends pings and subscriptions."""


FORMS = ("loom", "torchloom")
"""The forms of pushes that a client may ask for."""


class WeaverSocket:
    """The ASGI application of the path ``/ws/v1/weaver``."""

    def __init__(
        self, weaver: WeaverClient, access: AccessControl, changes: WeaverChanges, gateway: GatewayFeed
    ) -> None:
        self._weaver = weaver
        self._access = access
        self._changes = changes
        self._gateway = gateway
        self._watches = WeaverWatches(weaver)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        principal: Principal = scope["loom.principal"]
        scope["loom.socket"].limit_messages(MAX_VIEW_FRAME if principal.token.scope == SCOPES[0] else MAX_FRAME)
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        offered = PAGE_PROTOCOL in scope.get("subprotocols", ())
        await send({"type": "websocket.accept", **({"subprotocol": PAGE_PROTOCOL} if offered else {})})
        is_page = offered or query.get("page") == ["1"]
        since = Since.read(query.get("since", [None])[0])
        form = query.get("form", [None])[0]
        reader = self._gateway.reader(principal, since) if is_page else _reader(form)
        disconnected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ends: list[asyncio.Future[Any]] = [disconnected, reader.failed, asyncio.ensure_future(reader.send_to(send))]
        commands: SocketCommands | None = None

        async def disconnect(error: LoomError) -> None:
            if not disconnected.done():
                disconnected.set_exception(error)

        async def send_answer(message: Mapping[str, object]) -> None:
            await send({"type": "websocket.send", "text": exact_json(message)})

        try:
            self._access.require(principal, "view", "to watch replicas")
            if form not in (None, *FORMS):
                raise WrongArguments(f"form is one of {', '.join(FORMS)}, not {form!r:.80}")
            named = query.get("user", [None])[0]
            of = await whose(principal, named, None, "view", self._access, self._weaver)
            if of["user"] == EVERYONE:
                raise WrongArguments("a watch is of one user: name that user")
            if isinstance(reader, PageReader):
                await self._gateway.look_at_sessions(principal)
            subscribe = reader.subscribe if isinstance(reader, PageReader) else None
            commands = SocketCommands(
                self._changes, self._weaver, self._access, principal, of, scope["path"], send_answer, subscribe
            )
            left = asyncio.ensure_future(_answer_until_disconnected(receive, commands))
            ends.append(left)
            with contextlib.ExitStack() as held:
                held.enter_context(self._access.budgets.watchers.held(principal.user))
                held.enter_context(self._access.connected(principal, disconnect))
                held.enter_context(self._watches.reading(principal.user, of["user"], reader))
                if isinstance(reader, PageReader):
                    held.enter_context(self._gateway.reading(reader))
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not left.done() or left.exception() is not None:
                for end in ends:
                    if end.done():
                        end.result()
        except LoomError as error:
            await _end(commands, ends)
            await _disconnect(error, scope, send)
        finally:
            await _end(commands, ends)


def _reader(form: str | None) -> FeedReader:
    return FormReader() if form == "torchloom" else FeedReader()


async def _answer_until_disconnected(receive: Receive, commands: SocketCommands) -> None:
    while (message := await receive())["type"] != "websocket.disconnect":
        await commands.answer(message.get("text"))


async def _end(commands: SocketCommands | None, ends: list[asyncio.Future[Any]]) -> None:
    """Send nothing more."""
    for end in ends:
        end.cancel()
    await asyncio.gather(*ends, return_exceptions=True)
    if commands is not None:
        await commands.close()


async def _disconnect(error: LoomError, scope: Scope, send: Send) -> None:
    goodbye = {"type": "websocket.close", "code": CLOSE_REFUSED, "reason": error.code}
    try:
        with contextlib.suppress(RuntimeError):  # the connection closed meanwhile
            await asyncio.wait_for(send(goodbye), DISCONNECT_TIMEOUT)
    except asyncio.TimeoutError:  # the reader does not even receive the reason
        scope["loom.socket"].abort()
