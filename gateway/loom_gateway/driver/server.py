"""The driver's end of the unix socket: one gateway, one client at a time.

On the socket a frame is preceded by its length (4 bytes, big endian). The gateway opens a connection for each
client, says with an `Kind.OPEN` frame which session this is, and relays the client's frames from then on.

A thread reads each connection and starts the operations that come; answers are sent by the threads that have them.
An event loop in between would add two thread switches to every call, a quarter of a millisecond together.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import socket
import struct
import sys
import termios
import threading
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from loom.errors import LoomError, ProtocolMismatch, SessionInUse, WorkersSilent
from loom.sender import FrameSender, try_send
from loom.wire.frames import MAX_FRAME
from loom.wire.handshake import CAPABILITIES, Hello, Welcome, check_protocol, refusal
from loom.wire.messages import ADVERBS, Buffer, Kind, Message
from loom.wire.mux import OrderKey
from loom.wire.stream import Stream, unnumbered_frame
from loom.wire.texts import pack_texts
from loom_gateway.driver.backlog import Backlog
from loom_gateway.driver.faults import replace_fault_hook
from loom_gateway.driver.lifeline import LifelineServer, watch_host
from loom_gateway.driver.log_spool import LogSpool
from loom_gateway.driver.operations import Operations
from loom_gateway.driver.root_client import address_towards, attach, probe, use_transport
from loom_gateway.workers import parse_worker_address

__all__ = ["DriverServer", "prepare"]

logger = logging.getLogger(__name__)

GOODBYE_TIMEOUT = 5.0
"""Seconds that the client has to take what is still to be sent when the session ends."""

_LENGTH = struct.Struct(">I")
_RECEIVE = 256 << 10
_PASSED_ON = frozenset(ADVERBS.values())


class DriverServer:
    """A session's driver: attaches to the workers when the first client comes, serves until it is ended.

    Made on the event loop, which lives for as long as the driver and does what is not on the path of a call.
    """

    def __init__(self, workers: Sequence[str], listener: socket.socket, log_spool: LogSpool | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._workers = list(workers)
        self._listener = listener
        self._lifeline = LifelineServer(
            address_towards(workers), self._process_gone, self._process_started, self._process_prints
        )
        self._log_spool = log_spool
        self._operations: Operations | None = None
        self._opening = threading.Lock()
        self._client: ClientConnection | None = None
        self._ending: asyncio.Task[None] | None = None
        self._watches: list[asyncio.Task[None]] = []
        self.ended = asyncio.Event()
        """Set when the session is over and its meshes have been stopped."""
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # the listener was closed
            connection = ClientConnection(self, sock)
            threading.Thread(target=connection.run, name="client", daemon=True).start()

    # -- the session ----------------------------------------------------------------------------------------

    def _open(self, session: str) -> Operations:
        """Attach to the workers, the first time. Raises `WorkerUnreachable`."""
        with self._opening:
            if self._operations is None:
                probe(self._workers)
                replace_fault_hook(self._event)
                host_mesh = attach(self._workers, session)
                try:
                    host_mesh.initialized.get()
                except RuntimeError as error:
                    reason = str(error).partition("\n\n")[0]
                    raise WorkersSilent(
                        f"the workers accept connections but do not answer: {reason}. Look at their output; an "
                        f"overloaded worker may answer later."
                    ) from error
                lifeline = self._on_loop(self._lifeline.start())
                self._operations = Operations(
                    host_mesh, lifeline, self._loop, self._send, self._flush, self._log_spool
                )
                self._loop.call_soon_threadsafe(self._watch_hosts)
            return self._operations

    def _on_loop(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _watch_hosts(self) -> None:
        self._watches = [
            self._loop.create_task(self._watch_host(number, address))
            for number, address in enumerate(self._workers)
        ]

    async def _watch_host(self, number: int, address: str) -> None:
        await watch_host(parse_worker_address(address))
        if self._operations is not None:
            self._operations.host_gone(number)
            self._event("host_lost", {"host": number, "address": address})

    def _process_started(self, procs: int, rank: int) -> None:
        if self._operations is not None:
            self._operations.processes.started(procs, rank)

    async def _process_prints(
        self, procs: int, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._operations is not None:
            await self._operations.logs.serve(procs, rank, reader, writer)

    def _process_gone(self, procs: int, rank: int) -> None:
        if self._operations is not None:
            self._operations.process_gone(procs, rank)

    def _send(self, message: Message, eager: bool = True, key: OrderKey = None) -> None:
        client = self._client
        if client is not None and eager:
            client.sender.put(message, key)
        elif client is not None:
            client.sender.gather(message)

    def _flush(self) -> None:
        client = self._client
        if client is not None:
            client.sender.flush()

    def _event(self, name: str, details: dict[str, Any]) -> None:
        logger.warning("%s: %s", name, details)
        self._send(Message(Kind.EVENT, 0, [name], [pack_texts(details)]))

    # -- clients --------------------------------------------------------------------------------------------

    def welcome(self, connection: ClientConnection, hello: Hello, session: str) -> Welcome:
        """Open the session for a client that has said hello.

        Raises:
            SessionInUse: the session has a client already.
            LoomError: the session cannot be opened, or the client speaks another protocol.
        """
        check_protocol(hello.protocol, ours="driver", theirs="client")
        operations = self._open(session)
        if self._client is not None:
            raise SessionInUse(
                f"another client is connected to session {session!r}; close or detach it there first"
            )
        operations.runs.new_client()
        return Welcome(
            session=session,
            workers=self._workers,
            capabilities=[name for name in hello.capabilities if name in CAPABILITIES],
            versions=_versions(),
            next_id=operations.highest_id + 1,
        )

    def connected(self, connection: ClientConnection) -> None:
        """Make a welcomed connection the session's client."""
        self._client = connection
        if self._operations is not None:
            self._loop.call_soon_threadsafe(self._operations.processes.tell_everything)

    def receive(self, message: Message) -> None:
        """Take an operation from the client."""
        if message.kind == Kind.END:
            self._loop.call_soon_threadsafe(self.end, "the client closed it")
        elif self._operations is not None and self._ending is None:
            self._operations.start(message)

    def disconnected(self, connection: ClientConnection) -> None:
        """Note that a connection is gone; the session goes on."""
        if self._client is connection:
            self._client = None
            if self._operations is not None:
                self._operations.ports.client_gone()

    def end(self, reason: str) -> None:
        """Stop the session's meshes, tell the client, and set `ended`. On the event loop."""
        if self._ending is None:
            self._ending = self._loop.create_task(self._end(reason))

    async def _end(self, reason: str) -> None:
        if self._operations is not None:
            await self._operations.stop_meshes()
            await self._operations.logs.end()
        client = self._client
        if client is not None:
            await self._loop.run_in_executor(None, client.say_goodbye, Message(Kind.ENDED, 0, [reason]))
        self._listener.close()
        self.ended.set()


class ClientConnection:
    """One connection of the gateway, which is one connection of a client."""

    def __init__(self, server: DriverServer, sock: socket.socket) -> None:
        self._server = server
        self._socket = sock
        self._stream = Stream(in_pieces=_PASSED_ON)
        self._unread: bool | None = None
        """Whether what was read of the socket and not yet returned has a whole frame; None: there is nothing."""
        self.sender = FrameSender(self._stream, self, "client-writer")

    # -- what the sender sends over -------------------------------------------------------------------------

    @staticmethod
    def encode(frame: Sequence[Buffer]) -> bytes:
        """A frame behind its length."""
        return b"".join([_LENGTH.pack(sum(map(len, frame))), *frame])

    def try_send(self, data: Buffer) -> int:
        """Send without waiting; return how many bytes went out."""
        return try_send(self._socket, data)

    def send_all(self, data: Buffer) -> None:
        """Send, waiting for room."""
        self._socket.sendall(data)

    # -- receiving ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve the connection until it ends."""
        try:
            self._serve(self._frames())
        except LoomError as error:
            logger.warning("refusing the client: %s", error)
            self.say_goodbye(refusal(error))
        except OSError:
            pass  # the gateway is gone
        finally:
            self._server.disconnected(self)
            self.sender.close()
            self._socket.close()

    def _serve(self, frames: Iterator[Buffer]) -> None:
        session = _read_open(frames)
        frame = next(frames, None)
        if frame is None:
            return
        (message,) = self._stream.receive(frame)
        if message.kind != Kind.HELLO:
            raise ProtocolMismatch(f"a client begins with HELLO, not with message {message.kind}")
        welcome = self._server.welcome(self, Hello.from_body(message.body), session)
        self._socket.sendall(self.encode(unnumbered_frame(welcome.message())))
        self._server.connected(self)
        backlog = Backlog(self._server.receive, self._stream.expects, self.sender.put)
        broken: Exception | None = None
        for frame in frames:
            backlog.add(self._stream.receive(frame), len(frame))
            while backlog.start_some():
                # A client that does not take its results does not get to ask for more.
                self.sender.wait_for_room()
                try:
                    self._look_ahead(frames, backlog)
                except (OSError, LoomError) as error:
                    broken = error  # and what came before is started all the same
            if broken is not None:
                raise broken
            self.sender.wait_for_room()

    def _look_ahead(self, frames: Iterator[Buffer], backlog: Backlog) -> None:
        """Read what has come whole, to find what the client takes back before it is started."""
        while not backlog.full and self._frame_is_here():
            frame = next(frames, None)
            if frame is None:
                return
            backlog.add(self._stream.receive(frame), len(frame))

    def _frame_is_here(self) -> bool:
        """Whether the next frame can be had without waiting."""
        if self._unread is not None:
            return self._unread
        length = b""
        with contextlib.suppress(BlockingIOError):
            length = self._socket.recv(_LENGTH.size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        if len(length) < _LENGTH.size:
            return False
        here = int.from_bytes(fcntl.ioctl(self._socket, termios.FIONREAD, bytes(4)), sys.byteorder)
        return bool(here >= _LENGTH.size + _LENGTH.unpack(length)[0])

    def _frames(self) -> Iterator[Buffer]:
        head = b""
        while data := self._socket.recv(_RECEIVE):
            if not head and len(data) >= 4 and _LENGTH.unpack_from(data)[0] == len(data) - 4:
                yield data[4:]  # one frame that came whole, as small ones do
                continue
            data = head + data
            position = 0
            while len(data) - position >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(data, position)
                if length > MAX_FRAME:
                    raise ProtocolMismatch(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
                position += _LENGTH.size
                frame = data[position : position + length]
                position += len(frame)
                self._unread = _begins_with_frame(data, position)
                yield frame if len(frame) == length else self._rest_of(frame, length)
            head = data[position:]

    def _rest_of(self, begun: bytes, length: int) -> Buffer:
        """A frame of which the rest is still to come, straight to its place."""
        frame = bytearray(length)
        frame[: len(begun)] = begun
        view = memoryview(frame)[len(begun) :]
        while view:
            received = self._socket.recv_into(view)
            if not received:
                raise ConnectionResetError("the gateway closed the connection in the middle of a frame")
            view = view[received:]
        return frame

    def say_goodbye(self, message: Message) -> None:
        """Send what is queued, then a last message, and close."""
        self.sender.drain(GOODBYE_TIMEOUT)
        self.sender.put_raw(self.encode(unnumbered_frame(message)))
        self.sender.drain(GOODBYE_TIMEOUT)
        with contextlib.suppress(OSError):  # the gateway was faster
            self._socket.shutdown(socket.SHUT_RDWR)


def _begins_with_frame(data: bytes, position: int) -> bool | None:
    """Whether a whole frame is at that place, or the beginning of one; None at the end."""
    left = len(data) - position
    if not left:
        return None
    return left >= _LENGTH.size and left >= _LENGTH.size + _LENGTH.unpack_from(data, position)[0]


def _read_open(frames: Iterator[Buffer]) -> str:
    frame = next(frames, None)
    if frame is None:
        raise ProtocolMismatch("a connection to a driver begins with OPEN; this one ended before it")
    (message,) = Stream().receive(frame)
    if message.kind != Kind.OPEN:
        raise ProtocolMismatch(f"a connection to a driver begins with OPEN, not with message {message.kind}")
    return str(message.body[0])


def _versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for package in ("monarch-loom", "torchmonarch", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def prepare(workers: Sequence[str], port: int) -> None:
    """Do what a spare driver can do before it has a session: import Monarch and start the root client.

    Args:
        port: what Monarch is to listen on, see `loom_gateway.fresh_ports`.
    """
    import monarch.actor

    use_transport(address_towards(workers), port)
    monarch.actor.context()
    _keep_source_loaders_out()


def _keep_source_loaders_out() -> None:
    """Undo Monarch's patch that has functions by value ask their root client for their source.

    The source is on the laptop, not here, so there is nothing to answer with; and the answer, coming in while an
    actor imports torch, breaks that import (torchmonarch 0.7: ``partially initialized module 'torch'``).
    """
    import cloudpickle
    from monarch._src.actor import pickle as monarch_pickle

    original = getattr(monarch_pickle, "_orig_function_getstate", None)
    if original is not None:
        cloudpickle.cloudpickle._function_getstate = original
