"""Ports whose receiver is on the laptop.

A port is a Monarch port that the driver opens. Its messages are passed on to the laptop as far as the laptop has
granted credit. The rest stays in Monarch's queue. Small messages in close succession are batched.
"""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from typing import Any

import monarch.actor

from loom.errors import LoomError, OperationFailed, ProtocolMismatch
from loom.process import tasks
from loom.process.threads import keep_going
from loom.wire.bodies import GrantCredit, OpenPort, PortMessage, PortMessages, SendToActors, SendToPort
from loom.wire.messages import Kind, Message
from loom_gateway.driver.handlers.calls import in_its_trace
from loom_gateway.driver.monarch.errors import error_message
from loom_gateway.driver.monarch.port_batching import LaptopPort, PortBatch
from loom_gateway.driver.monarch.receiver import Receiver, open_for_messages
from loom_gateway.driver.session.context import SessionContext
from loom_gateway.driver.session.replies import Handler

MOST_THREADS = 64  # ports that have a reader thread; the event loop reads the others, more slowly
SMALL = 16 << 10  # bytes of the largest message that is batched
GATHERED_MESSAGES = 512  # messages that complete a batch
GATHERED_BYTES = 64 << 10  # bytes that complete a batch
GATHERED_SECONDS = 0.001  # seconds for which consecutive messages are gathered into one batch
LINGER = 0.002  # seconds after which gathered messages are sent even though the expected next one has not come

_NO_RANK = 0xFFFFFFFF


class SessionPorts:
    """The ports of one session."""

    def __init__(self, context: SessionContext) -> None:
        self._context = context
        self._readers: dict[int, _PortReader] = {}
        self._left: list[int] = []  # ports of the client before the present one
        self.handlers: dict[int, Handler] = {
            Kind.PORT_OPEN: self._open,
            Kind.PORT_SEND: self._send,
            Kind.PORT_CREDIT: self._credit,
            Kind.PORT_CLOSE: self._close,
            Kind.SEND: in_its_trace(self._send_to_actors, place=4),
        }

    def port(self, ident: int) -> Any:
        """Return the Monarch port of an id. Raise `ProtocolMismatch` if there is none."""
        port = self._context.meshes.ports.get(ident)
        if port is None:
            raise ProtocolMismatch(f"this session has no port with the id {ident}")
        return port

    def client_gone(self) -> None:
        """Close every receiver, because its client has left. Later messages of actors are dropped."""
        readers, self._readers = self._readers, {}
        for reader in readers.values():
            reader.close()
        # Operations of the client that has just left may still name its ports, so the next one's end drops them.
        for ident in self._left:
            self._context.meshes.ports.pop(ident, None)
        self._left = list(self._context.meshes.ports)

    def _open(self, message: Message, started: float) -> None:
        request = OpenPort.from_body(message.body)
        once = request.once
        receiver = open_for_messages(once)
        port = receiver.port
        self._context.meshes.ports[message.id] = port if once else LaptopPort(port)
        by_thread = not once and sum(reader.by_thread for reader in self._readers.values()) < MOST_THREADS
        reader = _PortReader(self._context, message.id, receiver, request.messages, request.size, once)
        self._readers[message.id] = reader
        reader.start(port if by_thread else None)

    def _send(self, message: Message, started: float) -> None:
        request = SendToPort.from_body(message.body)
        port = self.port(request.port)
        value = self._context.decoder.loads(message.parts, "what was sent to a port")
        if request.is_exception:
            port.exception(value)
        else:
            port.send(value)

    def _send_to_actors(self, message: Message, started: float) -> None:
        request = SendToActors.from_body(message.body)
        endpoint = self._context.meshes.endpoint(request.mesh, request.endpoint)
        args, kwargs = self._context.decoder.loads(message.parts, f"an argument of {request.endpoint!r}")
        port = None if request.port is None else self.port(request.port)
        monarch.actor.send(endpoint, args, kwargs, port, request.selection)
        self._context.broadcasts.note(request.mesh)

    def _credit(self, message: Message, started: float) -> None:
        reader = self._readers.get(message.id)
        if reader is not None:
            reader.grant(GrantCredit.from_body(message.body))

    def _close(self, message: Message, started: float) -> None:
        reader = self._readers.pop(message.id, None)
        if reader is not None:
            reader.close()


class _PortReader:
    """Reads from one Monarch port as much as the laptop has granted credit for."""

    def __init__(
        self, context: SessionContext, ident: int, receiver: Receiver, messages: int, size: int, once: bool
    ) -> None:
        self._context = context
        self._ident = ident
        self._receiver = receiver
        self._once = once
        self._port: Any = None  # set if a thread reads
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        # The remaining credit. A batch that arrives whole may overdraw it.
        self._messages = messages
        self._bytes = size
        self._credit = threading.Condition()  # guards the credit; notified when it grows
        self._more: asyncio.Event | None = None  # set when credit grows, for the event loop
        # The gathered messages.
        self._lock = threading.Lock()  # guards what is gathered
        self._pickles: list[bytes | memoryview] = []
        self._sizes: list[int] = []
        self._ranks: list[int] = []
        self._gathered = 0  # bytes of `_pickles`
        self._sent = 0.0  # time of the last send
        self._armed = False  # whether the loop will flush soon

    @property
    def by_thread(self) -> bool:
        return self._port is not None

    def start(self, port: Any) -> None:
        """Start to read: in a thread, which ends with a message through ``port``; without it, on the loop."""
        self._port = port
        if port is not None:
            threading.Thread(target=keep_going, args=("read a port", self._read), name="port", daemon=True).start()
        else:
            self._context.loop.call_soon_threadsafe(self._start_task)

    def grant(self, credit: GrantCredit) -> None:
        with self._credit:
            self._messages += credit.messages
            self._bytes += credit.size
            self._credit.notify()
        if self._more is not None and self._has_credit():
            self._context.loop.call_soon_threadsafe(self._more.set)

    def close(self) -> None:
        """Stop reading and drop Monarch's receiver. Not on the event loop."""
        with self._credit:
            self._closed = True
            self._credit.notify()
        if self._port is not None:
            self._port.send(None)  # wakes the thread, which waits for a message
        else:
            self._context.loop.call_soon_threadsafe(self._cancel)

    def _has_credit(self) -> bool:
        return self._messages > 0 and self._bytes > 0

    def _read(self) -> None:
        while not self._closed:
            if not self._has_credit():
                self._flush()
                with self._credit:
                    self._credit.wait_for(lambda: self._closed or self._has_credit())
            message = self._receiver.wait()
            if not self._closed:
                self._take(message)

    def _start_task(self) -> None:
        self._more = asyncio.Event()
        if not self._closed:
            self._task = tasks.run_to_end("read a port", self._read_later)

    async def _read_later(self) -> None:
        assert self._more is not None
        while True:
            while not self._has_credit():
                self._flush()
                self._more.clear()
                if not self._has_credit():
                    await self._more.wait()
            self._take(await self._receiver.wait_on_loop())
            if self._once:
                self._flush()
                return

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _take(self, message: Any) -> None:
        rank = self._receiver.rank(message)
        try:
            value = self._receiver.unpickle(message)
        except BaseException as error:  # noqa: BLE001 - sent as one, or impossible to unpickle: raised there
            self._pass_on_error(error, rank)
            return
        if type(value) is PortBatch:
            self._pass_on(
                PortMessages(value.sizes, b"").message(self._ident, [value.pickles]), len(value.sizes) // 4
            )
            return
        try:
            parts = self._context.encoder.dumps(value, "a message to a port")
        except BaseException as error:  # noqa: BLE001 - a user's __reduce__ may raise anything
            self._pass_on_error(error, rank)
            return
        if len(parts) == 1 and len(parts[0]) <= SMALL:
            self._gather(parts[0], rank)
        else:
            self._pass_on(PortMessage(rank, None).message(self._ident, parts))

    def _pass_on_error(self, error: BaseException, rank: int | None) -> None:
        failure = error_message(self._ident, error, 0.0, self._context.encoder)
        code = failure.body[1]
        if code == OperationFailed.code and not isinstance(error, LoomError):  # Python's, or a user's
            code = "exception"
            failure = error_message(self._ident, monarch.actor.ActorError(error, ""), 0.0, self._context.encoder)
        self._pass_on(PortMessage(rank, code).message(self._ident, failure.parts))

    def _pass_on(self, message: Message, count: int = 1) -> None:
        """Send ``count`` messages outside the batch, after the gathered ones."""
        with self._lock:
            self._send_gathered()
            self._spend(count, message.size)
            self._context.send(message, key=self._ident)

    def _gather(self, pickled: Any, rank: int | None) -> None:
        size = len(pickled)
        with self._lock:
            self._pickles.append(pickled)
            self._sizes.append(size)
            self._ranks.append(_NO_RANK if rank is None else rank)
            self._gathered += size
            self._spend(1, size)
            now = time.perf_counter()
            full = self._gathered >= GATHERED_BYTES or len(self._sizes) >= GATHERED_MESSAGES
            if full or now - self._sent > GATHERED_SECONDS:
                self._send_gathered()
                self._sent = now
            elif not self._armed:
                self._armed = True
                self._context.loop.call_soon_threadsafe(self._context.loop.call_later, LINGER, self._late)

    def _spend(self, messages: int, size: int) -> None:
        with self._credit:
            self._messages -= messages
            self._bytes -= size

    def _late(self) -> None:
        self._armed = False
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            self._send_gathered()

    def _send_gathered(self) -> None:
        """Send the gathered messages. The caller holds the lock."""
        if not self._sizes:
            return
        count = len(self._sizes)
        ranks = b"" if min(self._ranks) == _NO_RANK else struct.pack(f">{count}I", *self._ranks)
        body = PortMessages(struct.pack(f">{count}I", *self._sizes), ranks)
        pickles = b"".join(self._pickles)
        self._pickles, self._sizes, self._ranks, self._gathered = [], [], [], 0
        self._context.send(body.message(self._ident, [pickles]), key=self._ident)
