"""The receiving end of a port: what is sent to it comes here without being asked for.

It comes as far as this side has granted credit, and waits in the `PortReceiver`.
"""

from __future__ import annotations

import struct
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from loom.errors import ActorError, LoomError, OncePortUsed, PortClosed
from loom.wire.bodies import ClosePort, GrantCredit, OperationError, PortMessage, PortMessages
from loom.wire.messages import Buffer, Kind, Message
from loom.wire.mux import BARRIER
from loom_proxy.futures.future import FutureProxy
from loom_proxy.futures.results import Raise, error_of
from loom_proxy.ports.port import CREDIT_BYTES, CREDIT_MESSAGES, PortLink
from loom_proxy.session.caller import Caller

R = TypeVar("R")

_NO_RANK = 0xFFFFFFFF


class _Delivered(NamedTuple):
    """A message that has not been unpickled yet."""

    rank: int | None
    size: int
    code: str | None
    parts: tuple[Buffer, ...]


class _PortInbox:
    """What has come to a port. Its receivers and their futures share it; when it is garbage, nobody receives."""

    def __init__(self, ports: Ports, wire: PortLink) -> None:
        self.wire = wire
        self.caller = wire.caller
        self._close_port = ports.close
        self.lock = threading.Lock()
        self._messages: deque[_Delivered] = deque()
        self._waiting: OrderedDict[_Received[Any], None] = OrderedDict()
        self._over: LoomError | None = None
        self._spent_messages = 0
        self._spent_bytes = 0
        self._given = 0
        ports.inboxes[wire.ident] = self
        weakref.finalize(self, ports.let_go, wire.ident).atexit = False

    def deliver(self, messages: list[_Delivered]) -> None:
        """Take messages in, and wake who waits for them."""
        callbacks: list[Callable[[], None]] = []
        with self.lock:
            if self._over is not None:
                return
            self._messages.extend(messages)
            while self._waiting and self._messages:
                callbacks += self._give(self._waiting.popitem(last=False)[0])
        for callback in callbacks:
            callback()

    def end(self, error: LoomError) -> None:
        """Have whoever waits now, or wants more than has come, fail with an error."""
        callbacks: list[Callable[[], None]] = []
        with self.lock:
            self._over = self._over or error
            while self._waiting:
                callbacks += self._waiting.popitem(last=False)[0]._bind(Raise(error))
        for callback in callbacks:
            callback()

    def close(self) -> None:
        """Receive no more. What has come and was not received is dropped."""
        self.end(PortClosed("the receiver of this port was closed"))
        with self.lock:
            self._messages.clear()
        self._close_port(self.wire.ident)

    def claim(self, received: _Received[Any]) -> None:
        """Give a future the next message, or an error if there will be none. With the lock held."""
        if received._unpack is not None or received in self._waiting:
            return
        if self._messages:
            self._give(received)
        elif self.wire.once and self._given:
            received._bind(Raise(OncePortUsed("this port takes one message, and it has been received already")))
        elif self._over is not None:
            received._bind(Raise(self._over))

    def wait(self, received: _Received[Any]) -> None:
        """Give a future the next message that comes. With the lock held."""
        self.claim(received)
        if received._unpack is None:
            self._waiting[received] = None

    def withdraw(self, received: _Received[Any]) -> None:
        """Undo `wait` for a future that nobody waits for any more. With the lock held."""
        self._waiting.pop(received, None)

    def put_back(self, message: _Delivered) -> list[Callable[[], None]]:
        """Undo `_give`: the future of a message was given up before anybody looked. With the lock held."""
        self._given -= 1
        self._messages.appendleft(message)
        self._spent_messages -= 1
        self._spent_bytes -= message.size
        return self._give(self._waiting.popitem(last=False)[0]) if self._waiting else []

    def _give(self, received: _Received[Any]) -> list[Callable[[], None]]:
        message = self._messages.popleft()
        self._given += 1
        self._spent_messages += 1
        self._spent_bytes += message.size
        if self._spent_messages > CREDIT_MESSAGES // 4 or self._spent_bytes > CREDIT_BYTES // 4:
            self.caller.tell(GrantCredit(self._spent_messages, self._spent_bytes), self.wire.ident, None)
            self._spent_messages = self._spent_bytes = 0
        received._message = message
        return received._bind(_Open(self.caller, received._ranked, message))


class Ports:
    """The ports of one connection."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.inboxes: weakref.WeakValueDictionary[int, _PortInbox] = weakref.WeakValueDictionary()
        self._let_go: deque[int] = deque()

    def let_go(self, ident: int) -> None:
        """Close a port with the next chance: this is called in the middle of anything, so nothing is sent here."""
        self._let_go.append(ident)

    def close_those_let_go(self) -> None:
        """Tell the driver of the ports that nobody receives from any more."""
        while self._let_go:
            self.close(self._let_go.popleft())

    def close(self, ident: int) -> None:
        """Have the driver receive no more from a port."""
        self.inboxes.pop(ident, None)
        self.caller.tell(ClosePort(), ident, BARRIER)

    def take(self, message: Message) -> None:
        """Take in what came to a port."""
        self.close_those_let_go()
        inbox = self.inboxes.get(message.id)
        if inbox is None:
            return
        if message.kind == Kind.PORT_MESSAGE:
            one = PortMessage.from_body(message.body)
            inbox.deliver([_Delivered(one.rank, message.size, one.code, tuple(message.parts))])
            return
        several = PortMessages.from_body(message.body)
        count = len(several.sizes) // 4
        sizes = struct.unpack(f">{count}I", several.sizes)
        ranks = struct.unpack(f">{count}I", several.ranks) if several.ranks else (_NO_RANK,) * count
        view = memoryview(message.parts[0])
        delivered = []
        position = 0
        for size, rank in zip(sizes, ranks, strict=True):
            pickled = view[position : position + size]
            position += size
            delivered.append(_Delivered(None if rank == _NO_RANK else rank, size, None, (pickled,)))
        inbox.deliver(delivered)

    def end(self, error: LoomError) -> None:
        """Have whoever waits for a message fail, since the connection is over."""
        for inbox in list(self.inboxes.values()):
            inbox.end(error)


class _Open:
    """Unpickles a message, or raises it."""

    def __init__(self, caller: Caller, ranked: bool, message: _Delivered) -> None:
        self._caller = caller
        self._ranked = ranked
        self._message = message

    def __call__(self) -> Any:
        rank, _, code, parts = self._message
        if self._ranked and rank is None:
            raise ValueError("RankedPort receiver got a message without a rank")
        if code is None:
            value = self._caller.decoder.loads(parts, "a message to a port")
            return (rank, value) if self._ranked else value
        raised = code != "exception"
        body = OperationError(0.0, code if raised else ActorError.code)
        error = error_of(self._caller.decoder, body.message(parts=parts))
        if not raised:
            assert isinstance(error, ActorError)
            raise error.exception
        raise error


class _Received(FutureProxy[R]):
    """A message that comes, or has come, to a port.

    A message is taken from the receiver only when someone waits for it, and goes back if the wait was given up
    before anyone looked at it. So no message is lost with a future that timed out.
    """

    def __init__(self, inbox: _PortInbox, ranked: bool) -> None:
        super().__init__(inbox.caller)
        self._inbox = inbox
        self._ranked = ranked
        self._message: _Delivered | None = None
        self._woken: list[Callable[[], None]] = []
        self._woken_in_vain = False

    def _bind(self, unpack: Callable[[], R]) -> list[Callable[[], None]]:
        """Complete, but leave it to the caller to call back. With the inbox's lock held."""
        with self._lock:
            self._finished = time.perf_counter()
            self._unpack = unpack
            self._woken, self._callbacks = self._callbacks, []
        self._connection.read_loop.awaits_no_more(self)
        return self._woken

    def _read(self, seconds: float) -> bool | None:
        return None  # a message comes to whoever waits in the inbox

    def _add(self, callback: Callable[[], None]) -> bool:
        with self._inbox.lock:
            self._inbox.wait(self)
            return super()._add(callback)

    def _drop(self, callback: Callable[[], None]) -> None:
        with self._inbox.lock, self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)
                if not self._callbacks:
                    self._connection.read_loop.awaits_no_more(self)
                    if self._unpack is None:
                        self._inbox.withdraw(self)
            else:
                self._woken_in_vain = self._woken == [callback]

    def _give_back(self) -> None:
        """Leave what has come to the next who waits, if it was only for a wait that was given up."""
        callbacks: list[Callable[[], None]] = []
        with self._inbox.lock:
            with self._lock:
                message = self._message
                if message is None or not self._woken_in_vain or not isinstance(self._unpack, _Open):
                    return
                self._unpack = self._message = None
                self._woken_in_vain = False
            callbacks = self._inbox.put_back(message)
        for callback in callbacks:
            callback()

    def done(self) -> bool:
        """Whether there is a message for this future; if so, it keeps it."""
        if self._unpack is None:
            with self._inbox.lock:
                self._inbox.claim(self)
        return self._unpack is not None

    def _wait(self, timeout: float | None) -> None:
        if self.done():
            return
        try:
            super()._wait(timeout)
        except BaseException:
            self._give_back()
            raise

    async def _await(self) -> R:
        try:
            return await super()._await()
        except BaseException:
            self._give_back()
            raise


class PortReceiver(Generic[R]):
    """The receiving end of a port. As ``monarch.actor.PortReceiver``.

    Messages of one sender come in the order in which they were sent. At most `CREDIT_MESSAGES` messages or
    `CREDIT_BYTES` bytes of them wait here; more wait in the cluster. The port is closed when its receivers are
    garbage, or with `close`; what is sent to it after that is dropped.
    """

    _ranked = False

    def __init__(self, inbox: _PortInbox) -> None:
        self._inbox = inbox

    def recv(self) -> FutureProxy[R]:
        """The next message, for whoever waits first.

        A wait that times out or is cancelled takes no message. An exception that was sent is raised; one that an
        endpoint raised under `loom.send` is an `ActorError`. The future of a closed port raises `PortClosed`, a
        second one of a port for one message `OncePortUsed`.
        """
        return _Received(self._inbox, self._ranked)

    def ranked(self) -> RankedPortReceiver[R]:
        """Return this receiver with its messages as ``(rank, message)``."""
        return RankedPortReceiver(self._inbox)

    def close(self) -> None:
        """Receive no more: what has come is dropped, whoever waits gets a `PortClosed`."""
        self._inbox.close()

    def __iter__(self) -> Iterator[R]:
        """Each message as it comes, until the receiver is closed."""
        while True:
            try:
                message = self.recv().get()
            except PortClosed:
                return
            yield message

    async def __aiter__(self) -> AsyncIterator[R]:
        while True:
            try:
                message = await self.recv()
            except PortClosed:
                return
            yield message

    def __repr__(self) -> str:
        session = self._inbox.caller.welcome.session
        return f"<{type(self).__name__} {self._inbox.wire.ident} of session {session!r}>"


class RankedPortReceiver(PortReceiver[tuple[int, R]]):
    """A receiver whose messages are ``(rank, message)``, with the rank of the actor that replied.

    Replies to `loom.send` have a rank; what an actor sends to a port that it was passed has none, and raises a
    ``ValueError``, as with Monarch.
    """

    _ranked = True


def receiver(ports: Ports, wire: PortLink) -> PortReceiver[Any]:
    """Make the receiving end of a port that has just been opened."""
    return PortReceiver(_PortInbox(ports, wire))
