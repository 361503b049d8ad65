"""The receiving end of a port. The driver sends messages unasked, as far as this side has granted credit.

A `Channel` opens ports: an actor sends to the one end, this program receives from the other. The driver opens a
real Monarch port. Its `Port` can be an argument of endpoints, constructors and `loom.send`, and arrives there as
the Monarch port.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from loom.errors import ActorError, LoomError, OncePortUsed, PortClosed, WrongState
from loom.in_cluster import Counterpart, in_cluster, monarchs
from loom.wire.bodies import ClosePort, GrantCredit, OperationError, PortMessage, PortMessages
from loom.wire.codec import Decoder
from loom.wire.messages import Buffer, Kind, Message
from loom.wire.mux import BARRIER
from loom_proxy.futures.future import FutureProxy
from loom_proxy.futures.results import error_of, raise_error
from loom_proxy.port import CREDIT_BYTES, CREDIT_MESSAGES, Port, PortLink
from loom_proxy.session.calls import Calls

R = TypeVar("R")

_NO_RANK = 0xFFFFFFFF


class _Delivered(NamedTuple):
    """A message that has not been unpickled yet."""

    rank: int | None
    size: int
    code: str | None
    parts: tuple[Buffer, ...]


class _PortInbox:
    """The messages that have come to a port, shared by its receivers and their futures; closes it when garbage."""

    def __init__(self, ports: Ports, link: PortLink) -> None:
        self.link = link
        self.caller = link.caller
        self._close_port = ports.close
        self.lock = threading.Lock()
        self._messages: deque[_Delivered] = deque()  # messages that no future has been given
        self._waiting: OrderedDict[_Received[Any], None] = OrderedDict()  # futures, the oldest first
        self._over: LoomError | None = None  # the error that ended the port, if it is over
        self._spent_messages = 0  # messages given to futures since the last grant of credit
        self._spent_bytes = 0
        self._given = 0  # messages given to futures since the port was opened
        ports.inboxes[link.ident] = self
        # The garbage collector may do this in the middle of any other code, so that nothing is sent.
        weakref.finalize(self, ports.released.append, link.ident).atexit = False

    def deliver(self, messages: list[_Delivered]) -> None:
        """Take messages in, and give them to the futures that wait."""
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
        """Fail the futures that wait, and later ones for which no message is left, with an error."""
        callbacks: list[Callable[[], None]] = []
        with self.lock:
            self._over = self._over or error
            while self._waiting:
                callbacks += self._waiting.popitem(last=False)[0]._bind(partial(raise_error, error))
        for callback in callbacks:
            callback()

    def let_go(self, error: LoomError) -> None:
        """Fail in a forked child what waits, as `end` does, but without the parent's locks and callbacks."""
        self.lock = threading.Lock()
        self._over = error
        while self._waiting:
            self._waiting.popitem()[0]._fail_in_child(partial(raise_error, error))

    def close(self) -> None:
        """Stop receiving, and drop the messages that were not received."""
        self.end(PortClosed("the receiver of this port was closed"))
        with self.lock:
            self._messages.clear()
        self._close_port(self.link.ident)

    def claim(self, received: _Received[Any]) -> None:
        """Give a future the next message, or an error if there will be none. With the lock held."""
        if received._unpack is not None or received in self._waiting:
            return
        if self._messages:
            self._give(received)
        elif self.link.once and self._given:
            used = OncePortUsed("this port takes one message, and it has been received already")
            received._bind(partial(raise_error, used))
        elif self._over is not None:
            received._bind(partial(raise_error, self._over))

    def wait(self, received: _Received[Any]) -> None:
        """Give a future the next message that comes. With the lock held."""
        self.claim(received)
        if received._unpack is None:
            self._waiting[received] = None

    def withdraw(self, received: _Received[Any]) -> None:
        """Undo `wait` for a future whose wait was given up. With the lock held."""
        self._waiting.pop(received, None)

    def put_back(self, message: _Delivered) -> list[Callable[[], None]]:
        """Undo `_give` for a message whose future was given up unread. With the lock held."""
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
            self.caller.tell(GrantCredit(self._spent_messages, self._spent_bytes), self.link.ident, None)
            self._spent_messages = self._spent_bytes = 0
        received._message = message
        return received._bind(_Open(self.caller.decoder, received._ranked, message))


class Ports:
    """The ports of one connection."""

    def __init__(self, caller: Calls) -> None:
        self.caller = caller
        self.inboxes: weakref.WeakValueDictionary[int, _PortInbox] = weakref.WeakValueDictionary()
        self.released: deque[int] = deque()  # ports to close at the next chance

    def open(self, once: bool) -> tuple[Port[Any], PortReceiver[Any]]:
        """Open a port; return its two ends."""
        self.close_released()
        link = PortLink(self.caller, once)
        return Port(link), PortReceiver(_PortInbox(self, link))

    def close_released(self) -> None:
        while self.released:
            self.close(self.released.popleft())

    def close(self, ident: int) -> None:
        """Ask the driver to stop forwarding a port's messages."""
        self.inboxes.pop(ident, None)
        self.caller.tell(ClosePort(), ident, BARRIER)

    def receive(self, message: Message) -> None:
        """Take in the messages that came to a port."""
        self.close_released()
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

    def let_go(self, error: LoomError) -> None:
        """Fail all futures of messages, in a forked child of the process to which the ports belong."""
        for inbox in list(self.inboxes.values()):
            inbox.let_go(error)

    def end(self, error: LoomError) -> None:
        """Fail all futures of messages, since the connection is over."""
        for inbox in list(self.inboxes.values()):
            inbox.end(error)


@dataclass
class _Open:
    """A callable that unpickles a message, and raises it if it is an exception."""

    decoder: Decoder
    ranked: bool
    message: _Delivered

    def __call__(self) -> Any:
        rank, _, code, parts = self.message
        if self.ranked and rank is None:
            raise ValueError("RankedPort receiver got a message without a rank")
        if code is None:
            value = self.decoder.loads(parts, "a message to a port")
            return (rank, value) if self.ranked else value
        raised = code != "exception"
        body = OperationError(0.0, code if raised else ActorError.code)
        error = error_of(self.decoder, body.message(parts=parts))
        if not raised:
            assert isinstance(error, ActorError)
            raise error.exception
        raise error


class _Received(FutureProxy[R]):
    """The future of a message to a port.

    The future takes a message from the inbox only while a thread or coroutine waits for it. The message goes back
    if that wait was given up before it was read, so that no message is lost with a future that timed out.
    """

    def __init__(self, inbox: _PortInbox, ranked: bool) -> None:
        super().__init__(inbox.caller)
        self._inbox = inbox
        self._ranked = ranked
        self._message: _Delivered | None = None
        self._woken: list[Callable[[], None]] = []  # the callbacks of the waits that the message ended
        self._woken_in_vain = False  # whether the message ended one wait, given up at the same moment

    def _bind(self, unpack: Callable[[], R]) -> list[Callable[[], None]]:
        """Complete, and return the callbacks for the caller to call. With the inbox's lock held."""
        with self._lock:
            self._finished = time.perf_counter()
            self._unpack = unpack
            self._woken, self._callbacks = self._callbacks, []
        self._connection.read_loop.remove_waiter(self)
        return self._woken

    def _read(self, seconds: float) -> bool | None:
        return None  # a message that is read goes to the inbox's first future, which may be another

    def _add(self, callback: Callable[[], None]) -> bool:
        with self._inbox.lock:
            self._inbox.wait(self)
            return super()._add(callback)

    def _drop(self, callback: Callable[[], None]) -> None:
        with self._inbox.lock, self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)
                if not self._callbacks:
                    self._connection.read_loop.remove_waiter(self)
                    if self._unpack is None:
                        self._inbox.withdraw(self)
            else:
                self._woken_in_vain = self._woken == [callback]

    def _give_back(self) -> None:
        """Give the message to the next future that waits, if it came only for a wait that was given up."""
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
        """Return whether the future has a message. It takes the next one that has come, and keeps it."""
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


class PortReceiver(Generic[R], metaclass=Counterpart):
    """The receiving end of a port; the counterpart of ``monarch.actor.PortReceiver``.

    Messages of one sender come in the order in which they were sent. At most `CREDIT_MESSAGES` messages or
    `CREDIT_BYTES` bytes of them wait here; more wait in the cluster. `close` closes the port, and so does the
    garbage collector when it collects the receivers. Messages sent after that are dropped.
    """

    _ranked = False

    def __init__(self, inbox: _PortInbox) -> None:
        self._inbox = inbox

    def recv(self) -> FutureProxy[R]:
        """Return the future of the next message. If several wait, the first one gets it.

        A wait that times out or is cancelled takes no message. The future raises an exception that was sent, and an
        `ActorError` for one that an endpoint raised under `loom.send`. It raises `PortClosed` if the port is
        closed, and `OncePortUsed` if the port takes one message, which was received.
        """
        return _Received(self._inbox, self._ranked)

    def ranked(self) -> RankedPortReceiver[R]:
        """Return this receiver with its messages as ``(rank, message)``."""
        return RankedPortReceiver(self._inbox)

    def close(self) -> None:
        """Stop receiving: drop the messages that wait, and raise `PortClosed` in the futures that wait."""
        self._inbox.close()

    def __iter__(self) -> Iterator[R]:
        """Yield each message as it comes, until the receiver is closed."""
        with contextlib.suppress(PortClosed):
            while True:
                yield self.recv().get()

    async def __aiter__(self) -> AsyncIterator[R]:
        with contextlib.suppress(PortClosed):
            while True:
                yield await self.recv()

    def __repr__(self) -> str:
        session = self._inbox.caller.welcome.session
        return f"<{type(self).__name__} {self._inbox.link.ident} of session {session!r}>"


class RankedPortReceiver(PortReceiver[tuple[int, R]]):
    """A receiver whose messages are ``(rank, message)``, with the rank of the actor that replied.

    Replies to `loom.send` have a rank. A message that an actor sends to a port which it was passed has none; its
    future raises a ``ValueError``, as Monarch's does.
    """

    _ranked = True


class HasPorts(Protocol):
    """A job, whose session has ports."""

    session: str
    _ports: Ports

    @property
    def closed(self) -> bool:
        """True if the job's connection to its session is over."""


open_jobs: weakref.WeakSet[HasPorts] = weakref.WeakSet()  # every job of this program that may be open


class Channel(Generic[R]):
    """A factory of ports; the counterpart of ``monarch.actor.Channel``."""

    @staticmethod
    def open(once: bool = False, *, job: HasPorts | None = None) -> tuple[Port[R], PortReceiver[R]]:
        """Open a port whose messages come to this program.

        Args:
            once: the port takes one message only.
            job: the job whose session gets the port; may be left out if the program has one open job. Without it,
                inside an actor or a function of `Job.run`, Monarch's own ``Channel`` opens the port.

        Raises:
            NoOpenJob: no job was given, and the program has none open, or several.
        """
        if job is None and in_cluster():
            return monarchs().Channel.open(once)  # type: ignore[no-any-return]
        return _ports_of(job).open(once)

    @staticmethod
    def open_ranked(once: bool = False, *, job: HasPorts | None = None) -> tuple[Port[R], RankedPortReceiver[R]]:
        """Open a port, as `open` does, whose messages are received as ``(rank, message)``."""
        if job is None and in_cluster():
            return monarchs().Channel.open_ranked(once)  # type: ignore[no-any-return]
        port, receiver = Channel[R].open(once, job=job)
        return port, receiver.ranked()


def _ports_of(job: HasPorts | None) -> Ports:
    if job is None:
        found = [one for one in open_jobs if not one.closed]
        if not found:
            raise WrongState(
                "a channel needs an open job: call loom.local() or loom.connect() first", code="no_open_job"
            )
        if len(found) > 1:
            names = ", ".join(sorted(repr(one.session) for one in found))
            raise WrongState(
                f"this program has several open jobs ({names}): say which, with job.channel() or job=…",
                code="no_open_job",
            )
        (job,) = found
    job._ports.caller.check_open()
    return job._ports
