"""Reply channels to single actors: one Monarch port that takes the replies of every `call_one` to an actor.

Monarch's own ``call_one`` opens a port for each call. A port that stands costs less than half as much, and its
thread is already waiting when a reply comes. An actor handles its messages one at a time and a port delivers in
order ("reliable in-order messages", ``monarch.actor.Port``), so the first reply is the first call's.

A port does not tell that the actor has died. So whenever a reply is long in coming, a sentinel is sent after the
calls: a native call of something harmless, which Monarch fails when the actor dies.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.actor import MethodSpecifier, PythonMessageKind
from monarch._rust_bindings.monarch_hyperactor.buffers import Buffer
from monarch._rust_bindings.monarch_hyperactor.endpoint import ActorEndpoint
from monarch._rust_bindings.monarch_hyperactor.pickle import PendingMessage, PicklingState
from monarch.actor import ActorError, context

from loom.wire.arrays import passing_on
from loom_gateway.driver.monarch.mesh_table import Entry, MeshTable
from loom_gateway.driver.monarch.receiver import Receiver
from loom_gateway.driver.monarch.reports import about_endpoint
from loom_gateway.driver.session.replies import Replies, ReplyId

MOST_CHANNELS = 1024
"""Reply channels of a session. Each has a thread, and takes about 60 KiB."""

IDLE = 10.0
"""Seconds without a call after which a channel may give way to another actor's."""

STACK_SIZE = 512 << 10
"""Bytes of address space for the stack of a channel's thread, which only waits and passes on."""

UNEASY = 0.1
"""Seconds without a reply after which the channel asks whether the actor lives."""

LAST_REPLIES = 0.1
"""Seconds that replies sent before an actor died have to arrive."""

_SENTINEL = "__sizeof__"


def replies_once(endpoint: Any) -> bool:
    """Whether an endpoint's calls may use a reply channel: it replies once, before the actor's next message.

    Endpoints that are given their port, as concurrent ones are, reply as often and whenever they like.
    """
    return isinstance(endpoint, ActorEndpoint) and isinstance(endpoint._name, MethodSpecifier.ReturnsResponse)


class ReplyChannels:
    """The reply channels of one session, by the ids of the meshes that they lead to.

    Args:
        loop: the driver's event loop.
        replies: takes what comes.
        meshes: the session's.
        most: channels at most; actors that are called after that are called in Monarch's own way.
        idle: seconds without a call after which a channel gives way to another actor's, if there are ``most``.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        replies: Replies,
        meshes: MeshTable,
        most: int = MOST_CHANNELS,
        idle: float = IDLE,
    ) -> None:
        self._most = most
        self._idle = idle
        self._loop = loop
        self._replies = replies
        self._meshes = meshes
        self._changing = threading.Lock()
        self._channels: OrderedDict[int, ReplyChannel] = OrderedDict()
        """Those that were used last come last."""

    def to(self, mesh: int, entry: Entry) -> ReplyChannel | None:
        """Return the channel to a mesh of one actor; None if it has to be called in Monarch's own way."""
        with self._changing:  # a channel that somebody has just been given is not closed
            channel = self._channels.get(mesh)
            if channel is not None:
                channel.used = time.monotonic()
                self._channels.move_to_end(mesh)
            elif len(entry.ranks) == 1 and entry.kind == "actors" and self._has_room():
                channel = self._channels[mesh] = ReplyChannel(entry.mesh, self._loop, self._replies)
            return channel

    def _has_room(self) -> bool:
        if len(self._channels) < self._most:
            return True
        mesh, oldest = next(iter(self._channels.items()))
        if not oldest.idle or time.monotonic() - oldest.used < self._idle:
            return False
        del self._channels[mesh]
        oldest.close()
        return True

    def break_off(self, to: Callable[[Entry], bool]) -> None:
        """Call some actors in Monarch's own way from now on: it tells at once what is wrong with them."""
        for mesh, channel in self._channels.copy().items():
            entry = self._meshes.known(mesh)
            if entry is None or to(entry):
                channel.broken = True


class ReplyChannel:
    """The reply channel of one actor.

    Args:
        mesh: an actor mesh of exactly one actor.
        loop: the driver's event loop, which watches the sentinels.
        replies: takes each outcome, on the channel's thread or the event loop's.
    """

    def __init__(self, mesh: Any, loop: asyncio.AbstractEventLoop, replies: Replies) -> None:
        self._loop = loop
        self._replies = replies
        self._receiver = Receiver()
        self._port = self._receiver.port._port_ref
        self._mesh = mesh._inner
        self._sender = context().actor_instance
        self._kinds: dict[str, Any] = {}
        """By endpoint, what a message that calls it says of itself; None if its calls may not use a channel."""
        self._alive = mesh._endpoint(MethodSpecifier.ReturnsResponse(_SENTINEL), object.__sizeof__, None)
        self._waiting: deque[tuple[ReplyId, str]] = deque()
        self._received = 0
        self._watched = False
        self._closed = False
        self.broken = False
        """Whether the actor is dead, as far as the channel knows; it takes no more calls then."""
        self.used = time.monotonic()
        """When it was used last."""
        _start_thread(self._receive)

    @property
    def idle(self) -> bool:
        """Whether no reply is expected."""
        return not self._waiting

    def takes(self, name: str, endpoint: Any) -> bool:
        """Whether the channel takes a call of an endpoint now; see `replies_once`."""
        if name not in self._kinds:
            kind = (
                PythonMessageKind.CallMethod(endpoint._name, self._port, None) if replies_once(endpoint) else None
            )
            self._kinds[name] = kind
        return self._kinds[name] is not None and not self.broken

    def call(self, reply: ReplyId, name: str, endpoint: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call an endpoint that the channel `takes`. By one thread at a time.

        No argument may be a mesh: Monarch makes such a call later, or never, and the replies would be mixed up.

        Raises:
            Exception: whatever Monarch raises if it does not take the call, which was then not made.
        """
        self._make(reply, name, partial(endpoint._send, args, kwargs, self._port, "all"))

    def pass_on(self, reply: ReplyId, name: str, pickled: bytes) -> None:
        """Call an endpoint with ``(args, kwargs)`` as the client pickled them: nothing is unpickled here."""
        buffer = Buffer()
        buffer.write(pickled)
        message = PendingMessage(self._kinds[name], PicklingState(buffer.freeze()))
        # What `_send` does with the message that it makes.
        self._make(reply, name, partial(self._mesh.cast_unresolved, message, "all", self._sender))

    def _make(self, reply: ReplyId, name: str, send: Callable[[], None]) -> None:
        waiting = (reply, name)
        self._waiting.append(waiting)
        try:
            send()
        except BaseException:
            self._waiting.remove(waiting)
            raise
        if not self._watched:
            self._watched = True
            self._loop.call_soon_threadsafe(self._watch)

    def close(self) -> None:
        """End the thread. Only while the channel is `idle`, and never used again."""
        self._closed = True
        self._receiver.port.send(None)  # the thread waits for a message

    def _receive(self) -> None:
        with passing_on():
            while not self._closed:
                self._receive_next()

    def _receive_next(self) -> None:
        # A method of its own: what it holds, perhaps a gigabyte, is let go of while the next reply is waited for.
        message = self._receiver.wait()
        if not self._waiting:
            return  # what ends the thread
        reply, _ = self._waiting.popleft()
        self._received += 1
        try:
            value, error = self._receiver.unpickle(message), None
        except BaseException as raised:  # noqa: BLE001 - passed on to the laptop
            value, error = None, raised
        self._replies.answer(reply, value, error, False)
        self._replies.gathered(more=bool(self._waiting))

    def _watch(self) -> None:
        self._loop.call_later(UNEASY, self._look, self._received)

    def _look(self, received_before: int) -> None:
        if self._received != received_before:
            self._watch()
        elif not self._waiting:
            self._watched = False
            if self._waiting:  # a call came in between and relied on being watched
                self._watched = True
                self._watch()
        else:
            self._alive.call_one().as_asyncio().add_done_callback(self._sentinel_back)

    def _sentinel_back(self, done: asyncio.Future[Any]) -> None:
        error = done.exception()
        if error is None or isinstance(error, ActorError):
            self._watch()
        else:
            self.broken = True
            self._loop.call_later(LAST_REPLIES, self._fail, error)

    def _fail(self, error: BaseException) -> None:
        # Those that were answered meanwhile are not answered again.
        for reply, name in self._waiting.copy():
            text = about_endpoint(str(error), _SENTINEL, name)
            self._replies.answer(reply, None, type(error)(text), True)


_starting = threading.Lock()


def _start_thread(target: Callable[[], None]) -> None:
    with _starting:  # the size is everybody's
        before = threading.stack_size(STACK_SIZE)
        try:
            threading.Thread(target=target, name="reply channel", daemon=True).start()
        finally:
            threading.stack_size(before)
