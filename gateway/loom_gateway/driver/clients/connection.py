"""The driver's socket, and its end of each connection of the gateway, which carries one client.

On the socket, each frame follows its length (4 bytes, big endian). The gateway opens one connection for each
client. It names the session in a `Kind.OPEN` frame and relays the client's frames from then on. A connection that
begins with `Kind.DESCRIBE` carries no client, but the gateway's own questions and their answers. Nor does one on
which `Kind.RESTORE` follows `Kind.OPEN`, by which this driver goes on in place of one that has died.

A client may have a second connection for its bulk lane (`loom.wire.stream`). The thread of that connection
assembles large messages and hands them to the thread of the first.

One thread reads each connection and starts the operations that arrive. The threads that produce answers send them.
An event loop in between would add two thread switches to every call, together a quarter of a millisecond.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import select
import socket
import sys
import termios
import threading
from collections.abc import Callable, Iterator

from loom.errors import DriverUnavailable, LoomError, ProtocolMismatch, WrongState
from loom.process import tasks
from loom.process.threads import keep_going
from loom.wire.bodies import Describe, Description, OpenSession, Probe, RestoreSession
from loom.wire.frames import decode_frame
from loom.wire.handshake import Hello, check_protocol, refusal
from loom.wire.length_prefix import LENGTH, MAX_FRAME, behind_length
from loom.wire.lost_frames import GAP, answer_to
from loom.wire.messages import TURN, Buffer, Kind, Message, turns
from loom.wire.sender import try_send
from loom.wire.sockets import Waker
from loom.wire.stream import OutOfStep, unnumbered_frame
from loom_gateway.driver.clients.client import Client, TurnLost
from loom_gateway.driver.lifetime import Lifetime
from loom_gateway.driver.session.session import DrivenSession
from loom_gateway.sessions.state_dir import UnixPeer

logger = logging.getLogger(__name__)

GAP_TIMEOUT = 1.0  # seconds that a client has to take the news that a frame is missing

_WOKEN = b"the waker was woken"  # stands between the frames for a wake-up; compared by identity


class ClientConnection:
    """One connection of the gateway, which is one connection of a client.

    Args:
        open_session: opens the session, or returns it.
        describe: returns a description of the session, given its subject.
        restore: opens the session in place of a driver that has died.
    """

    def __init__(
        self,
        open_session: Callable[[Hello, OpenSession], DrivenSession],
        describe: Callable[[str], bytes],
        restore: Callable[[RestoreSession, OpenSession], None],
        sock: socket.socket,
    ) -> None:
        self._open_session = open_session
        self._describe = describe
        self._restore = restore
        self._socket = sock
        self._session: DrivenSession  # set once the session is open
        self._client: Client | None = None
        self._hello: Hello  # set with the client
        self._over = False  # set by `give_up`
        self._whole = False  # whether the bytes read from the socket and not yet returned contain a whole frame
        self._begun = b""  # beginning of a frame that was read from the socket and not yet returned
        self._waker: Waker | None = None
        self._poll = select.poll()  # waits for the socket and the waker

    @staticmethod
    def encode(frame: bytes) -> bytes:
        """Return a frame unchanged: the driver's socket needs no masking."""
        return frame

    def try_send(self, data: Buffer) -> int:
        return try_send(self._socket, data)

    def send_all(self, data: Buffer) -> None:
        for piece in turns(data):
            self._socket.sendall(piece)

    def run(self) -> None:
        try:
            self._serve(self._frames())
        except OutOfStep as error:
            # Not by a refusal, so that the client connects anew and resumes: its connection has lost frames.
            logger.warning("a connection of a client is given up: %s", error)
            if self._client is None:
                self._refuse(error)
        except LoomError as error:
            logger.warning("refusing the client: %s", error)
            self._refuse(error)
        except OSError:
            pass  # the gateway closed the connection
        finally:
            if self._client is not None:
                self._session.disconnected(self._client, self)
            self._socket.close()

    def give_up(self) -> None:
        self._over = True
        if self._client is not None:
            self._client.sender.detach(self)
            self._client.sender.detach_bulk(self)
            self._client.taken.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _serve(self, frames: Iterator[Buffer]) -> None:
        message = _read_first(frames)
        if message.kind == Kind.DESCRIBE:
            self._serve_questions(message, frames)
            return
        opened = OpenSession.from_body(message.body)
        frame = next(frames, None)
        if frame is None:
            return
        message = _only_message(frame)
        if message.kind == Kind.RESTORE:
            self._restore(RestoreSession.from_body(message.body), opened)
            self._socket.sendall(behind_length(unnumbered_frame(Description().message())))
            return
        if message.kind != Kind.HELLO:
            raise ProtocolMismatch(f"a client begins with HELLO, not with message {message.kind}")
        hello = Hello.from_body(message.body)
        self._session = self._open_session(hello, opened)
        self._hello = hello
        self._client, is_new = self._session.admit(self, hello, opened.guest)
        if hello.lane:
            self._serve_bulk(self._client, hello, frames)
            return
        self._client.take_turn()
        lost_turn = False
        try:
            if self._over:
                return  # a later connection of the client was faster
            welcome = self._session.welcome(self._client, hello)
            self._socket.sendall(behind_length(unnumbered_frame(welcome.message())))
            self._client.sender.attach(self, hello.received, hello.received_bulk)
            if is_new:
                self._session.connected(self._client)
            self._receive(self._client, frames)
        except TurnLost:
            lost_turn = True
        finally:
            if not lost_turn:
                self._client.turn.release()

    def _serve_questions(self, question: Message, frames: Iterator[Buffer]) -> None:
        while True:
            try:
                description = self._describe(Describe.from_body(question.body).subject)
                answer = Description().message(parts=[description])
            except LoomError as error:
                answer = refusal(error)
            # a bug of Loom's: still answer
            except Exception as error:
                logger.exception("the session cannot be described")
                answer = refusal(WrongState(f"the driver cannot describe its session: {error!r:.200}"))
            self._socket.sendall(behind_length(unnumbered_frame(answer)))
            frame = next(frames, None)
            if frame is None:
                return
            question = _only_message(frame)

    def _receive(self, client: Client, frames: Iterator[Buffer]) -> None:
        self._listen_for(client.waker)
        try:
            self._take_arrived(client)
            self._start(client, frames)  # what an earlier connection has left
            for frame in frames:
                self._take(client, frame)
                self._start(client, frames)
        except TurnLost:
            raise
        except BaseException as error:
            if isinstance(error, OutOfStep):
                self._tell_of_gap(client)
            self._start_rest(client)
            raise
        self._start_rest(client)

    def _start_rest(self, client: Client) -> None:
        """Start what has arrived even though the client has left: it was promised that."""
        self._take_arrived(client)
        while client.start_some(self):
            pass

    def _take(self, client: Client, frame: Buffer) -> None:
        if frame is _WOKEN:
            self._take_arrived(client)
            return
        messages = client.stream.receive(frame)
        if messages and messages[0].kind == Kind.PROBE:
            self._answer_probe(client, Probe.from_body(messages[0].body).number)
            return
        client.backlog.add(messages, len(frame))
        client.sender.received()
        if not client.taken.is_set() and not client.stream.holds:
            client.taken.set()

    @staticmethod
    def _answer_probe(client: Client, number: int, bulk: bool = False) -> None:
        client.sender.put_behind(lambda: answer_to(client.stream, number, bulk), bulk)

    def _tell_of_gap(self, client: Client) -> None:
        """Tell the client that a frame is missing: the gateway closes the client's connection only later."""
        if "probes" in self._hello.capabilities:
            self._answer_probe(client, GAP, bulk=bool(self._hello.lane))
            client.sender.drain(GAP_TIMEOUT)

    def _take_arrived(self, client: Client) -> None:
        client.backlog.add(client.stream.arrived(), 0)
        if not client.stream.holds:
            client.taken.set()

    def _start(self, client: Client, frames: Iterator[Buffer]) -> None:
        """Start what has arrived. A client that does not take its results has to wait before it starts more."""
        broken: Exception | None = None
        while client.start_some(self):
            client.sender.wait_for_room(on=self)
            try:
                self._look_ahead(client, frames)
            except (OSError, LoomError) as error:
                broken = error  # start what arrived before the failure all the same
        if broken is not None:
            raise broken
        client.sender.wait_for_room(on=self)

    def _look_ahead(self, client: Client, frames: Iterator[Buffer]) -> None:
        """Read the frames that are complete, to find withdrawals before their operations start."""
        while not client.backlog.full and self._frame_is_here():
            frame = next(frames, None)
            if frame is None:
                return
            self._take(client, frame)

    def _serve_bulk(self, client: Client, hello: Hello, frames: Iterator[Buffer]) -> None:
        with client.bulk_turn:
            if self._over:
                return  # a later connection was faster
            welcome = self._session.welcome(client, hello)
            self._socket.sendall(behind_length(unnumbered_frame(welcome.message())))
            client.sender.attach_bulk(self, hello.received_bulk)
            try:
                for frame in frames:
                    self._take_bulk(client, frame)
            except OutOfStep:
                self._tell_of_gap(client)
                raise
            except LoomError as error:
                logger.warning("refusing the client: %s", error)
                client.say_goodbye(refusal(error))

    def _take_bulk(self, client: Client, frame: Buffer) -> None:
        if client.stream.receive_bulk(frame):
            assert client.waker is not None
            client.waker.wake()
        client.sender.received()
        assert client.stream.bulk is not None
        while client.stream.bulk.probes:
            probe = Probe.from_body(client.stream.bulk.probes.popleft().body)
            self._answer_probe(client, probe.number, bulk=True)
        # A client gets to send more only when its operations are started.
        while True:
            client.taken.clear()
            if self._over or not client.stream.holds:
                return
            client.taken.wait()

    def _frame_is_here(self) -> bool:
        if self._whole:
            return True
        length = self._begun[: LENGTH.size]
        if len(length) < LENGTH.size:
            with contextlib.suppress(BlockingIOError):
                length += self._socket.recv(LENGTH.size - len(length), socket.MSG_PEEK | socket.MSG_DONTWAIT)
            if len(length) < LENGTH.size:
                return False
        here = int.from_bytes(fcntl.ioctl(self._socket, termios.FIONREAD, bytes(4)), sys.byteorder)
        return bool(len(self._begun) + here >= LENGTH.size + LENGTH.unpack(length)[0])

    def _listen_for(self, waker: Waker | None) -> None:
        self._waker = waker
        if waker is not None:
            self._poll.register(self._socket, select.POLLIN)
            self._poll.register(waker, select.POLLIN)

    def _wait_for_waker(self) -> bool:
        """Wait for the socket or the waker. Return whether the waker was woken."""
        waker = self._waker
        if waker is None:
            return False
        for number, _ in self._poll.poll():
            if number == waker.fileno():
                waker.clear()
                return True
        return False

    def _frames(self) -> Iterator[Buffer]:
        """Yield the frames that arrive, and `_WOKEN` each time the waker is woken."""
        head = b""
        while True:
            if self._wait_for_waker():
                yield _WOKEN
                continue
            data = self._socket.recv(TURN)
            if not data:
                return
            if not head and len(data) >= 4 and LENGTH.unpack_from(data)[0] == len(data) - 4:
                yield data[4:]  # small frames usually arrive whole
                continue
            data = head + data
            position = 0
            while len(data) - position >= LENGTH.size:
                (length,) = LENGTH.unpack_from(data, position)
                if length > MAX_FRAME:
                    raise ProtocolMismatch(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
                position += LENGTH.size
                frame = data[position : position + length]
                position += len(frame)
                self._whole = _begins_with_frame(data, position)
                self._begun = b"" if self._whole else data[position:]
                yield frame if len(frame) == length else self._rest_of(frame, length)
            head = data[position:]

    def _rest_of(self, begun: bytes, length: int) -> Buffer:
        """Receive the rest of a frame straight into its final buffer."""
        frame = bytearray(length)
        frame[: len(begun)] = begun
        view = memoryview(frame)[len(begun) :]
        while view:
            received = self._socket.recv_into(view[:TURN])
            if not received:
                raise ConnectionResetError("the gateway closed the connection in the middle of a frame")
            view = view[received:]
        return frame

    def _refuse(self, error: LoomError) -> None:
        if self._client is not None and self._client.connection is self:
            self._client.say_goodbye(refusal(error))
            return
        with contextlib.suppress(OSError):  # the gateway was faster
            self._socket.sendall(behind_length(unnumbered_frame(refusal(error))))
        self.give_up()


def _begins_with_frame(data: bytes, position: int) -> bool:
    left = len(data) - position
    return left >= LENGTH.size and left >= LENGTH.size + LENGTH.unpack_from(data, position)[0]


def _read_first(frames: Iterator[Buffer]) -> Message:
    frame = next(frames, None)
    if frame is None:
        raise ConnectionResetError("a gateway that only looked who listens here")
    message = _only_message(frame)
    if message.kind not in (Kind.OPEN, Kind.DESCRIBE):
        raise ProtocolMismatch(f"a connection to a driver begins with OPEN, not with message {message.kind}")
    return message


def _only_message(frame: Buffer) -> Message:
    """Return the message of a frame outside a client's stream."""
    messages = decode_frame(frame).messages
    if len(messages) != 1:
        raise ProtocolMismatch(f"a gateway sends one message in a frame of its own, not {len(messages)}")
    return messages[0]


class DriverServer:
    """Serves one session to its clients.

    It is created on the driver's event loop, which does everything that is not on the path of a call.

    Args:
        new_session: opens the session that a gateway names. Called on the first client's thread.
        gateway_uid: the user id of the gateway, whose connections alone are accepted.
    """

    def __init__(
        self,
        listener: socket.socket,
        lifetime: Lifetime,
        new_session: Callable[[OpenSession], DrivenSession],
        gateway_uid: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._gateway_uid = gateway_uid
        self._lifetime = lifetime
        self._new_session = new_session
        self._session: DrivenSession | None = None
        self._opening = threading.Lock()  # held while the first client opens the session
        self._ending: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()  # set when the session is over and its meshes have been stopped
        lifetime.start(self._loop, self._end)
        accepting = "accept clients", self._accept
        threading.Thread(target=keep_going, args=accepting, name="accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return  # the listener was closed
                raise  # such as too many open files, which passes
            peer = UnixPeer.of(sock)
            if peer.uid != self._gateway_uid:
                logger.warning("process %d of user id %d is no gateway, and is sent away", peer.pid, peer.uid)
                sock.close()
                continue
            connection = ClientConnection(self._open, self._describe, self._restore, sock)
            threading.Thread(target=connection.run, name="client", daemon=True).start()

    def _open(self, hello: Hello, opening: OpenSession) -> DrivenSession:
        """Return the session. Attach to the workers first if this is the first client. On a client's thread."""
        check_protocol(hello.protocol, ours="driver", theirs="client")
        self._lifetime.check_goes_on(opening.session)
        with self._opening:
            if self._session is None:
                self._session = self._new_session(opening)
            self._session.weaver.key = opening.weaver_key
            return self._session

    def _restore(self, request: RestoreSession, opening: OpenSession) -> None:
        """Open the session in place of a driver that has died. On a connection's thread."""
        with self._opening:
            if self._session is not None:
                raise WrongState("this driver has a session already")
            session = self._new_session(opening)
            session.restore(request)
            self._session = session
        self._lifetime.client_left(request)  # from now on it lives as long as something goes on in it

    def _describe(self, subject: str) -> bytes:
        """Return a description of the session as JSON. On a connection's thread."""
        session = self._session
        if session is None:
            raise DriverUnavailable("the session is starting")
        return session.describe(subject)

    def _end(self, reason: str) -> None:
        """Stop the session's meshes, tell the clients, and set `ended`. On the event loop."""
        if self._ending is None:
            self._lifetime.ends(reason)
            self._ending = tasks.run("end the session", self._close(reason))

    async def _close(self, reason: str) -> None:
        try:
            if self._session is not None:
                await self._session.close(reason)
        finally:  # whatever goes wrong, the process ends
            self._listener.close()
            self.ended.set()
