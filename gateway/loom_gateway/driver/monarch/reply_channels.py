"""Reply channels to single actors: one Monarch port takes the replies of all `call_one` calls to an actor.

Monarch's own ``call_one`` opens a port for each call. A standing port costs less than half as much, and its thread
already waits when a reply comes. An actor handles its messages one at a time and a port delivers in order
("reliable in-order messages", ``monarch.actor.Port``), so the first reply belongs to the first call.

A port does not report the death of its actor. So whenever a reply is late, the channel sends a sentinel after the
calls: a harmless native call that Monarch fails if the actor is dead.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.actor import MethodSpecifier, PythonMessageKind
from monarch._rust_bindings.monarch_hyperactor.buffers import Buffer
from monarch._rust_bindings.monarch_hyperactor.endpoint import ActorEndpoint
from monarch._rust_bindings.monarch_hyperactor.pickle import PendingMessage, PicklingState
from monarch.actor import ActorError, context

from loom.process.threads import keep_going
from loom.tracing.trace_ids import trace_here
from loom.wire.arrays import passing_on
from loom_gateway.driver.monarch.errors import about_endpoint
from loom_gateway.driver.monarch.mesh_table import MeshEntry, MeshTable
from loom_gateway.driver.monarch.receiver import open_for_replies
from loom_gateway.driver.monarch.traced_calls import pickled_in
from loom_gateway.driver.session.replies import Replies, ReplyId

MOST_CHANNELS = 1024  # reply channels of a session; each has a thread and takes about 60 KiB
IDLE = 10.0  # seconds without a call after which a channel may give way to another actor's
STACK_SIZE = 512 << 10  # bytes of address space for the stack of a channel's thread, which only waits and forwards
CHECK_AFTER = 0.1  # seconds without a reply after which the channel checks that the actor lives
LAST_REPLIES = 0.1  # seconds that replies from before an actor's death have to arrive

_SENTINEL = "__sizeof__"


def replies_once(endpoint: Any) -> bool:
    """Return whether an endpoint's calls may use a reply channel: it replies once, before the actor's next message.

    Endpoints that get the port themselves, as concurrent ones do, reply at any time and any number of times.
    """
    return isinstance(endpoint, ActorEndpoint) and isinstance(endpoint._name, MethodSpecifier.ReturnsResponse)


class ReplyChannels:
    """The reply channels of one session, by the ids of their meshes.

    Calls to actors beyond ``most`` channels go Monarch's own way. A channel that was ``idle`` for so many seconds
    gives way to another actor's.
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
        self._channels: OrderedDict[int, ReplyChannel] = OrderedDict()  # ordered by last use, the most recent last

    def to(self, mesh: int, entry: MeshEntry) -> ReplyChannel | None:
        """Return the channel to a mesh of one actor; None if calls have to go Monarch's own way."""
        with self._changing:  # so that a channel that a caller has just received is not closed
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

    def retire(self, meshes: Collection[int]) -> None:
        """Close the channels to meshes that were stopped."""
        with self._changing:
            for mesh in self._channels.keys() & meshes:
                self._channels.pop(mesh).retire()

    def break_off(self, to: Callable[[MeshEntry], bool]) -> None:
        """Stop using the channels to some actors. Monarch's own way reports at once what is wrong with them."""
        for mesh, channel in self._channels.copy().items():
            entry = self._meshes.known(mesh)
            if entry is None or to(entry):
                channel.broken = True


def sentinel(mesh: Any) -> Any:
    """Return an endpoint of a mesh, whatever its class, that does nothing."""
    return mesh._endpoint(MethodSpecifier.ReturnsResponse(_SENTINEL), object.__sizeof__, None)


class ReplyChannel:
    """The reply channel of a mesh of exactly one actor."""

    def __init__(self, mesh: Any, loop: asyncio.AbstractEventLoop, replies: Replies) -> None:
        self._loop = loop
        self._replies = replies
        self._receiver = open_for_replies()
        self._port = self._receiver.port._port_ref  # the address that calls reply to
        self._mesh = mesh._inner  # Monarch's native mesh, for `pass_on`
        self._sender = context().actor_instance
        self._kinds: dict[str, object] = {}  # message kind of each endpoint's calls; None if it uses no channel
        self._alive = sentinel(mesh)
        self._waiting: deque[tuple[ReplyId, str]] = deque()  # calls without a reply, oldest first
        self._received = 0  # replies so far
        self._watched = False  # whether the loop checks for late replies
        self._closed = False
        self._retired = False  # whether the channel closes as soon as it is idle
        self.broken = False  # whether the actor is dead as far as the channel knows; then it takes no calls
        self.used = time.monotonic()  # time of the last use (``time.monotonic``)
        _start_thread(partial(keep_going, "answer from a reply channel", self._receive))

    @property
    def idle(self) -> bool:
        return not self._waiting

    def takes(self, name: str, endpoint: Any) -> bool:
        """Return whether the channel takes a call of an endpoint now; see `replies_once`."""
        if name not in self._kinds:
            kind = (
                PythonMessageKind.CallMethod(endpoint._name, self._port, None) if replies_once(endpoint) else None
            )
            self._kinds[name] = kind
        return self._kinds[name] is not None and not self.broken

    def call(
        self, reply: ReplyId, name: str, endpoint: Any, args: tuple[Any, ...], kwargs: dict[str, object]
    ) -> None:
        """Call an endpoint that the channel `takes`. If it raises, the call was not made. One thread at a time.

        No argument may be a mesh: Monarch makes such a call later or never, and replies would go to the wrong
        calls.
        """
        self._make(reply, name, partial(endpoint._send, args, kwargs, self._port, "all"))

    def pass_on(self, reply: ReplyId, name: str, pickled: bytes) -> None:
        """Call an endpoint with ``(args, kwargs)`` as the client pickled them, without unpickling."""
        buffer = Buffer()
        if (trace := trace_here()) is not None:
            pickled = pickled_in(trace, pickled)
        buffer.write(pickled)
        message = PendingMessage(self._kinds[name], PicklingState(buffer.freeze()))
        # The call that `_send` makes with its message.
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
        """End the thread. The channel cannot be used again, and replies that come later are dropped."""
        if self._closed:
            return
        self._closed = True
        self._receiver.port.send(None)  # the thread waits for a message

    def retire(self) -> None:
        """Close the channel once every call has been answered. On the event loop."""
        self.broken = self._retired = True
        if self.idle:
            self.close()

    def _receive(self) -> None:
        with passing_on():
            while not self._closed:
                self._receive_next()

    def _receive_next(self) -> None:
        # A method of its own, so that a large reply is freed while the thread waits for the next one.
        message = self._receiver.wait()
        if self._closed or not self._waiting:
            return  # this message only wakes the thread, so that it ends
        reply, _ = self._waiting.popleft()
        self._received += 1
        try:
            value, error = self._receiver.unpickle(message), None
        except BaseException as raised:  # noqa: BLE001 - passed on to the laptop
            value, error = None, raised
        self._replies.answer(reply, value, error, False)
        self._replies.gathered(more=bool(self._waiting))

    def _watch(self) -> None:
        self._loop.call_later(CHECK_AFTER, self._check, self._received)

    def _check(self, received_before: int) -> None:
        if self._received != received_before:
            self._watch()
        elif not self._waiting:
            self._watched = False
            if self._retired:
                self.close()
                return
            if self._waiting:  # a call came in between and relied on the watch
                self._watched = True
                self._watch()
        else:
            try:
                done = self._alive.call_one().as_asyncio()
            except Exception as error:  # noqa: BLE001 - Monarch knows already that the actor is dead, or is out of order
                self._judge(error)
            else:
                done.add_done_callback(self._sentinel_back)

    def _sentinel_back(self, done: asyncio.Future[Any]) -> None:
        self._judge(RuntimeError("the question was cancelled") if done.cancelled() else done.exception())

    def _judge(self, error: BaseException | None) -> None:
        """Go on, or take the actor for dead, after a question that was answered or has failed."""
        if error is None or isinstance(error, ActorError):
            self._watch()
        else:
            self.broken = True
            self._loop.call_later(LAST_REPLIES, self._fail, error)

    def _fail(self, error: BaseException) -> None:
        # Replies that arrived meanwhile have removed their calls.
        for reply, name in self._waiting.copy():
            text = about_endpoint(str(error), _SENTINEL, name)
            self._replies.answer(reply, None, type(error)(text), True)
        if self._retired:
            self.close()


_starting = threading.Lock()


def _start_thread(target: Callable[[], None]) -> None:
    with _starting:  # the stack size is global to the process
        before = threading.stack_size(STACK_SIZE)
        try:
            threading.Thread(target=target, name="reply channel", daemon=True).start()
        finally:
            threading.stack_size(before)
