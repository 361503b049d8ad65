"""Ports: whoever has the one end sends, this program receives from the other.

A port is opened in the driver, as Monarch's own. Its `Port` can be an argument of endpoints, constructors and
`loom.send`, and arrives as a real Monarch port. What is sent to it comes here without being asked for, as far as
this side has granted credit, and waits in the `PortReceiver`.
"""

from __future__ import annotations

import struct
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from loom.errors import (
    ActorError,
    LoomError,
    NoOpenJob,
    NoSuchMesh,
    OncePortUsed,
    PortClosed,
    UnpicklableError,
    WrongArguments,
)
from loom.wire.messages import Buffer, Kind, Message
from loom.wire.mux import BARRIER
from loom_proxy.futures.future import FutureProxy
from loom_proxy.futures.results import Raise

if TYPE_CHECKING:
    from loom_proxy.job import Job
    from loom_proxy.session.connection import Connection

__all__ = ["Channel", "Port", "PortReceiver", "RankedPortReceiver"]

R = TypeVar("R")

CREDIT_MESSAGES = 16384
"""Messages that may wait in a receiver, or be on their way to it."""

CREDIT_BYTES = 16 << 20
"""Bytes of messages that may wait in a receiver, or be on their way to it; one message may be larger."""

_NO_RANK = 0xFFFFFFFF

open_jobs: weakref.WeakSet[Job] = weakref.WeakSet()
"""Every job of this program that may be open."""


class _Delivered(NamedTuple):
    """A message that has not been unpickled yet."""

    rank: int | None
    size: int
    code: str | None
    parts: tuple[Buffer, ...]


class _Wire:
    """A port of the session, and how many hold on to it."""

    def __init__(self, connection: Connection, once: bool) -> None:
        self.connection = connection
        self.once = once
        self.ident = connection.send(Kind.PORT_OPEN, (once, CREDIT_MESSAGES, CREDIT_BYTES))
        self.lock = threading.Lock()
        self.used = False
        """Whether this program has sent to a port that takes one message."""
        weakref.finalize(self, connection.forget, self.ident).atexit = False


class _Inbox:
    """What has come to a port. Its receivers and their futures share it; when it is garbage, nobody receives."""

    def __init__(self, wire: _Wire) -> None:
        self.wire = wire
        self.connection = wire.connection
        self.lock = threading.Lock()
        self._messages: deque[_Delivered] = deque()
        self._waiting: OrderedDict[_Received[Any], None] = OrderedDict()
        self._over: LoomError | None = None
        self._spent_messages = 0
        self._spent_bytes = 0
        self._given = 0
        wire.connection.ports.inboxes[wire.ident] = self
        weakref.finalize(self, wire.connection.ports.let_go, wire.ident).atexit = False

    # -- by whoever reads from the connection --------------------------------------------------------------------

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

    # -- on the program's -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Receive no more. What has come and was not received is dropped."""
        self.end(PortClosed("the receiver of this port was closed"))
        with self.lock:
            self._messages.clear()
        self.connection.ports.close(self.wire.ident)

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
            self.connection.tell(Kind.PORT_CREDIT, self.wire.ident, (self._spent_messages, self._spent_bytes), None)
            self._spent_messages = self._spent_bytes = 0
        received._message = message
        return received._bind(_Open(self.connection, received._ranked, message))


class Ports:
    """The ports of one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection = weakref.proxy(connection)
        self.inboxes: weakref.WeakValueDictionary[int, _Inbox] = weakref.WeakValueDictionary()
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
        self._connection.tell(Kind.PORT_CLOSE, ident, (), BARRIER)

    def take(self, message: Message) -> None:
        """Take in what came to a port."""
        self.close_those_let_go()
        inbox = self.inboxes.get(message.id)
        if inbox is None:
            return
        if message.kind == Kind.PORT_MESSAGE:
            rank, code = message.body
            inbox.deliver([_Delivered(rank, message.size, code, tuple(message.parts))])
            return
        packed_sizes, packed_ranks = message.body
        count = len(packed_sizes) // 4
        sizes = struct.unpack(f">{count}I", packed_sizes)
        ranks = struct.unpack(f">{count}I", packed_ranks) if packed_ranks else (_NO_RANK,) * count
        view = memoryview(message.parts[0])
        delivered = []
        position = 0
        for size, rank in zip(sizes, ranks, strict=True):
            pickled = view[position : position + size]
            position += size
            delivered.append(_Delivered(None if rank == _NO_RANK else rank, size, None, (pickled,)))
        inbox.deliver(delivered)

    def end(self, error: LoomError) -> None:
        """The connection is over."""
        for inbox in list(self.inboxes.values()):
            inbox.end(error)


class _Open:
    """Unpickles a message, or raises it."""

    def __init__(self, connection: Connection, ranked: bool, message: _Delivered) -> None:
        self._connection = connection
        self._ranked = ranked
        self._message = message

    def __call__(self) -> Any:
        rank, _, code, parts = self._message
        if self._ranked and rank is None:
            raise ValueError("RankedPort receiver got a message without a rank")
        if code is None:
            value = self._connection.decoder.loads(parts, "a message to a port")
            return (rank, value) if self._ranked else value
        raised = code != "exception"
        error = self._connection.error_of(code if raised else ActorError.code, parts)
        if not raised:
            assert isinstance(error, ActorError)
            raise error.exception
        raise error


class _Received(FutureProxy[R]):
    """A message that comes, or has come, to a port.

    It is only when somebody waits that a message is taken from the receiver, and one that nobody looked at because
    the wait was given up goes back: so no message is lost with a future that timed out.
    """

    def __init__(self, inbox: _Inbox, ranked: bool) -> None:
        super().__init__(inbox.connection)
        self._inbox = inbox
        self._ranked = ranked
        self._message: _Delivered | None = None
        self._told: list[Callable[[], None]] = []
        self._told_in_vain = False

    def _bind(self, unpack: Callable[[], R]) -> list[Callable[[], None]]:
        """Complete, but leave it to the caller to call back. With the inbox's lock held."""
        with self._lock:
            self._finished = time.perf_counter()
            self._unpack = unpack
            self._told, self._callbacks = self._callbacks, []
        self._connection.reading.awaits_no_more(self)
        return self._told

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
                    self._connection.reading.awaits_no_more(self)
                    if self._unpack is None:
                        self._inbox.withdraw(self)
            else:
                self._told_in_vain = self._told == [callback]

    def _give_back(self) -> None:
        """Leave what has come to the next who waits, if it was only for a wait that was given up."""
        callbacks: list[Callable[[], None]] = []
        with self._inbox.lock:
            with self._lock:
                message = self._message
                if message is None or not self._told_in_vain or not isinstance(self._unpack, _Open):
                    return
                self._unpack = self._message = None
                self._told_in_vain = False
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


class Port(Generic[R]):
    """The sending end of a port. As ``monarch.actor.Port``, which it arrives as wherever it is passed to."""

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire

    def send(self, obj: R) -> None:
        """Send an object to the receiver.

        Raises:
            OncePortUsed: the port takes one message, and this program has sent one.
            UnpicklableError: the object cannot be pickled.
        """
        self._put(obj, False)

    def exception(self, obj: Exception) -> None:
        """Send an exception, which is raised by the receiver's ``recv().get()``.

        Raises:
            WrongArguments: the object is not an exception.
        """
        if not isinstance(obj, BaseException):
            raise WrongArguments(f"exception() sends an exception, not {obj!r:.80}")
        self._put(obj, True)

    def _put(self, obj: Any, is_exception: bool) -> None:
        wire = self._wire
        connection = wire.connection
        connection.check_open()
        parts = connection.encoder.dumps(obj, "what is sent to the port")
        with wire.lock:
            if wire.once and wire.used:
                raise OncePortUsed("this port takes one message, and it has been sent already")
            wire.used = True
        connection.send(Kind.PORT_SEND, (wire.ident, is_exception), parts, wire.ident)

    def __loom_reference__(self, session: object) -> int:
        connection = self._wire.connection
        if session is not connection:
            raise NoSuchMesh(
                f"{self!r} belongs to session {connection.welcome.session!r} and can be passed inside that one only"
            )
        connection.check_open()
        return self._wire.ident

    def __reduce__(self) -> Any:
        raise UnpicklableError(
            "a Port means something only in its own session: pass it to an endpoint, a constructor, loom.send or "
            "job.run, where it arrives as a Monarch port"
        )

    def __repr__(self) -> str:
        return f"<Port {self._wire.ident} of session {self._wire.connection.welcome.session!r}>"


class PortReceiver(Generic[R]):
    """The receiving end of a port. As ``monarch.actor.PortReceiver``.

    Messages of one sender come in the order in which they were sent. At most `CREDIT_MESSAGES` messages or
    `CREDIT_BYTES` bytes of them wait here; more wait in the cluster. The port is closed when its receivers are
    garbage, or with `close`; what is sent to it after that is dropped.
    """

    _ranked = False

    def __init__(self, inbox: _Inbox) -> None:
        self._inbox = inbox

    def recv(self) -> FutureProxy[R]:
        """The next message, for whoever waits first.

        A wait that times out or is cancelled takes no message. An exception that was sent is raised; one that an
        endpoint raised under `loom.send` is an `ActorError`. The future of a closed port raises `PortClosed`, a
        second one of a port for one message `OncePortUsed`.
        """
        return _Received(self._inbox, self._ranked)

    def ranked(self) -> RankedPortReceiver[R]:
        """The same receiver, with messages as ``(rank, message)``."""
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
        session = self._inbox.connection.welcome.session
        return f"<{type(self).__name__} {self._inbox.wire.ident} of session {session!r}>"


class RankedPortReceiver(PortReceiver[tuple[int, R]]):
    """A receiver whose messages are ``(rank, message)``, with the rank of the actor that replied.

    Replies to `loom.send` have a rank; what an actor sends to a port that it was passed has none, and raises a
    ``ValueError``, as with Monarch.
    """

    _ranked = True


class Channel(Generic[R]):
    """Opens ports. As ``monarch.actor.Channel``."""

    @staticmethod
    def open(once: bool = False, *, job: Job | None = None) -> tuple[Port[R], PortReceiver[R]]:
        """Open a port whose messages come to this program.

        Args:
            once: it takes one message only.
            job: the session that it is for; may be left out where the program has one open job. Inside an actor
                or a function of `Job.run` this opens a port there, as Monarch's does.

        Raises:
            NoOpenJob: no job was given, and the program has none open, or several.
        """
        if job is None and in_cluster():
            return monarchs().Channel.open(once)  # type: ignore[no-any-return]
        connection = _connection(job)
        connection.ports.close_those_let_go()
        wire = _Wire(connection, once)
        return Port(wire), PortReceiver(_Inbox(wire))

    @staticmethod
    def open_ranked(once: bool = False, *, job: Job | None = None) -> tuple[Port[R], RankedPortReceiver[R]]:
        """As `open`; messages are received as ``(rank, message)``."""
        if job is None and in_cluster():
            return monarchs().Channel.open_ranked(once)  # type: ignore[no-any-return]
        port, receiver = Channel[R].open(once, job=job)
        return port, receiver.ranked()


def in_cluster() -> bool:
    """Whether this process is a driver or an actor's, rather than a program that holds a job."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return getattr(spec, "name", "").startswith(("loom_gateway.driver", "monarch._src.actor."))


def monarchs() -> Any:
    """The module ``monarch.actor``. In the cluster only."""
    from loom.actor import monarch_actor  # which imports Monarch where it is installed

    return monarch_actor()


def _connection(job: Job | None) -> Connection:
    if job is None:
        found = [job for job in open_jobs if not job.closed]
        if not found:
            raise NoOpenJob("a channel needs an open job: call loom.local() or loom.connect() first")
        if len(found) > 1:
            names = ", ".join(sorted(repr(job.session) for job in found))
            raise NoOpenJob(f"this program has several open jobs ({names}): say which, with job.channel() or job=…")
        (job,) = found
    job._connection.check_open()
    return job._connection
