"""`Line`, an authenticated and encrypted connection between a gateway and a session host.

Both know a key. A host makes its TLS certificate when it starts, and each side proves that it knows the key and
which certificate it sees, so that nobody can stand between them. A frame is behind its length, as on a driver's
socket. The gateway's first frame says what the line is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import logging
import os
import socket
import ssl
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from loom.errors import ConnectionLost, Denied, LoomError, ProtocolMismatch, SessionHostUnreachable, TokenFileError
from loom.mutual_auth import Exchange, Purpose, Side, checked_nonce, new_nonce
from loom.process import tasks
from loom.process.listen import Strangers
from loom.wire.frames import decode_frame
from loom.wire.handshake import PROTOCOL, check_protocol, error_from_refusal, refusal
from loom.wire.messages import Buffer, Kind
from loom.wire.stream import unnumbered_frame
from loom_gateway.relay.links import MAX_DRIVER_FRAME, DriverLink
from loom_gateway.sessions.session import Traffic
from loom_gateway.workers.sources import parse_worker_address

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 5.0  # seconds that a host has to accept a line, and either side for its part of the proof

SHORTEST_KEY = 32
"""Characters of a key, at least."""

MOST_STRANGERS = 256
"""Lines that have not shown the key. Beyond them, the oldest is cut off."""

MAX_STRANGE = 64 << 10
"""Bytes of a frame of who has not shown the key."""

MAX_CONTROL = 32 << 20
"""Bytes of a frame on a control line: a description of a session has 8 MiB at most."""

T = TypeVar("T")

AT_ONCE = 16 << 10
"""Bytes of pieces that are joined before they are encrypted, as many as TLS takes at once."""

_SILENCE = 20_000  # milliseconds without an answer of the other machine after which a line is cut
_LIFETIME = datetime.timedelta(days=3650)


def read_key(path: Path) -> str:
    """Return the key in a file of one line. Raise `TokenFileError` if it has none, or others could replace it."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            key = file.read(4096).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TokenFileError(f"cannot read the key of session hosts from {path}: {error}") from error
    if mode & 0o022:
        raise TokenFileError(f"others may write to {path}, the key of session hosts: chmod 600 it")
    if len(key) < SHORTEST_KEY or not key.isprintable() or " " in key:
        raise TokenFileError(
            f"{path} has no key of session hosts: one line of {SHORTEST_KEY} characters at least, as of "
            f"`openssl rand -hex 32`"
        )
    return key


class Line(DriverLink):
    """One end of a line, which passes frames on as a link to a driver does."""

    def __init__(self, traffic: Traffic | None = None, made: Callable[[Line], object] | None = None) -> None:
        super().__init__(Traffic() if traffic is None else traffic)
        self._made = made
        self.peer = ""
        """The address of the other side."""
        self.max_frame = MAX_STRANGE
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.peer = str((transport.get_extra_info("peername") or [""])[0])
        _keep_alive(transport.get_extra_info("socket"))
        if self._made is not None:
            self._made(self)

    def trust(self, request: Request) -> None:
        """Take larger frames from now on: the other side knows the key."""
        self.max_frame = MAX_CONTROL if request.line in ("control", "peer") else MAX_DRIVER_FRAME

    @property
    def their_certificate(self) -> str:
        """The digest of the host's certificate, at the gateway's end."""
        shown = self._transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return hashlib.sha256(shown).hexdigest()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writable.clear()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._writable.set()

    def _send(self, *pieces: Buffer) -> None:
        if sum(map(len, pieces)) <= AT_ONCE:
            self._transport.write(b"".join(pieces))  # each piece would be encrypted, and read, by itself
        else:
            super()._send(*pieces)

    async def drained(self) -> None:
        """Wait until the other side has taken most of what was sent, or has gone."""
        await self._writable.wait()

    def abort(self) -> None:
        """Close at once, and drop what waits to be sent."""
        self._transport.abort()

    def send(self, body: object) -> None:
        """Send a value of msgpack as a frame."""
        self.write(msgpack.packb(body))

    def refuse(self, error: LoomError) -> None:
        """Send an error as the last word, and close."""
        self.write(*unnumbered_frame(refusal(error)))
        self.close()

    async def take(self, within: float | None = None) -> Any:
        """Return the value of the next frame.

        Raises:
            ConnectionLost: the line is closed, or nothing has come within the seconds.
            ProtocolMismatch: the frame is none of a line.
            LoomError: the other side has refused.
        """
        try:
            frame = await asyncio.wait_for(self.next(), within)
        except asyncio.TimeoutError:
            raise ConnectionLost(f"nothing has come from {self.peer} within {within:g} s") from None
        if frame is None:
            raise self.error or ConnectionLost(f"{self.peer} has closed the line")
        return read_frame(frame)


@dataclass(frozen=True)
class LinkSink:
    """A link as the other side of another one."""

    link: DriverLink

    def send_frame(self, *pieces: Buffer) -> None:
        self.link.write(*pieces)

    def pause_receiving(self) -> None:
        self.link.pause_reading()

    def resume_receiving(self) -> None:
        self.link.resume_reading()


def read_frame(frame: bytes) -> Any:
    """Return the value in a frame of a line. Raise the error that it refuses with, or `ProtocolMismatch`."""
    try:
        return msgpack.unpackb(frame, strict_map_key=False)
    except ValueError:
        pass
    try:
        (message,) = decode_frame(frame).messages
    except (LoomError, ValueError):
        raise ProtocolMismatch("a line between gateway and session host has a frame that says nothing") from None
    if message.kind != Kind.REFUSE:
        raise ProtocolMismatch(f"a message {message.kind} came where a line has none")
    raise error_from_refusal(message)


def _keep_alive(sock: Any) -> None:
    """Have the kernel find out within seconds that the other machine is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("IDLE", 5), ("INTVL", 5), ("CNT", 3)):
        if hasattr(socket, f"TCP_KEEP{name}"):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}"), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE)


@dataclass(frozen=True)
class Request:
    """What a gateway wants of a session host with a new line."""

    line: str
    """``control``, ``attach`` or ``logs`` of a gateway, ``peer`` of another session host."""
    about: Mapping[str, Any]
    protocol: tuple[int, int] = PROTOCOL


def field_of(about: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """Return a field of a request. Raise `ProtocolMismatch`, which names it, unless it is there and of a kind."""
    found = about[name] if isinstance(about, Mapping) and name in about else ...
    if not isinstance(found, kinds):
        what = "is missing" if found is ... else f"is {found!r:.40}"
        raise ProtocolMismatch(f"a request makes no sense to this session host: its field {name!r} {what}")
    return found


def known_fields(kind: type[T], told: Mapping[str, Any]) -> T:
    """Return a dataclass of what the other side tells, without the fields that only a newer version of it knows."""
    return kind(**{one.name: told[one.name] for one in fields(kind) if one.name in told})  # type: ignore[arg-type]


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the proof is over the certificate
    return context


async def open_line(address: str, key: str, request: Request, traffic: Traffic | None = None) -> Line:
    """Open a line to the session host at ``tcp://HOST:PORT``.

    Raises:
        SessionHostUnreachable: nobody answers there, or not in time.
        Denied: who answers knows another key, or none.
        ProtocolMismatch: the host is of another version of Loom.
    """
    host, port = parse_worker_address(address)
    loop = asyncio.get_running_loop()
    try:
        _, line = await asyncio.wait_for(
            loop.create_connection(lambda: Line(traffic), host, port, ssl=_context()), CONNECT_TIMEOUT
        )
    except (OSError, asyncio.TimeoutError) as error:
        why = str(error) or f"no answer within {CONNECT_TIMEOUT:g} s"
        raise SessionHostUnreachable(f"the session host {address} does not answer: {why}") from error
    try:
        await _prove(line, key, request)
    except BaseException as error:
        line.abort()
        if isinstance(error, Denied):
            raise Denied(f"the session host {address} has another --host-key: {error}") from error
        if isinstance(error, LoomError) and not isinstance(error, ProtocolMismatch):
            # It has not proven itself, and may be anybody: nothing may be believed that it says of a session.
            raise SessionHostUnreachable(f"no session host of this key answers at {address}: {error}") from error
        raise
    return line


async def _prove(line: Line, key: str, request: Request) -> None:
    challenge = await line.take(CONNECT_TIMEOUT)
    if not isinstance(challenge, Mapping):
        raise ProtocolMismatch("a session host begins with a challenge; this one began with something else")
    exchange = Exchange(Purpose.SESSION_HOST, key, new_nonce(), checked_nonce(str(challenge.get("nonce"))))
    wanted, seen = msgpack.packb(asdict(request)), line.their_certificate
    line.send(
        {
            "nonce": exchange.asking,
            "wanted": wanted,
            "proof": exchange.proof(Side.ASKS, seen, hashlib.sha256(wanted).hexdigest()),
        }
    )
    answer = await line.take(CONNECT_TIMEOUT)
    if not isinstance(answer, Mapping) or not exchange.proves(str(answer.get("proof")), Side.ANSWERS, seen):
        raise Denied("it does not prove that it knows the key")
    line.trust(request)


class LineServer:
    """Accepts lines at a session host.

    Args:
        serve: serves a line whose gateway has proven itself. A `LoomError` that it raises is the line's last word.
    """

    def __init__(self, key: str, serve: Callable[[Line, Request], Awaitable[None]]) -> None:
        self._key = key
        self._serve_line = serve
        self._strangers: Strangers[Line] = Strangers(MOST_STRANGERS, Line.abort)
        self._lines: set[Line] = set()
        self._server: asyncio.Server | None = None
        self._certificate = ""

    async def start(self, listener: socket.socket) -> None:
        """Listen on a socket from now on."""
        context, self._certificate = _new_certificate()
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Line(made=self._accept), sock=listener, ssl=context, ssl_handshake_timeout=CONNECT_TIMEOUT
        )

    def close(self) -> None:
        """Stop listening, and close all lines."""
        if self._server is not None:
            self._server.close()
        for line in list(self._lines):
            line.close()

    async def finish(self) -> None:
        """Do as `close`, and wait until the other sides have what was sent to them, for 5 s at most."""
        lines = list(self._lines)
        self.close()
        if lines:
            await asyncio.wait([line.closed for line in lines], timeout=CONNECT_TIMEOUT)

    def _accept(self, line: Line) -> None:
        self._strangers.add(line)
        self._lines.add(line)
        tasks.run("serve a line", self._serve(line))

    async def _serve(self, line: Line) -> None:
        try:
            request = await self._admit(line)
            await self._serve_line(line, request)
        except ConnectionLost:
            pass
        except LoomError as error:
            line.refuse(error)
        finally:
            self._strangers.discard(line)
            self._lines.discard(line)
            line.close()

    async def _admit(self, line: Line) -> Request:
        nonce = new_nonce()
        line.send({"nonce": nonce})
        shown = await line.take(CONNECT_TIMEOUT)
        try:
            wanted, proof = bytes(shown["wanted"]), str(shown["proof"])
            exchange = Exchange(Purpose.SESSION_HOST, self._key, checked_nonce(str(shown["nonce"])), nonce)
            if not exchange.proves(proof, Side.ASKS, self._certificate, hashlib.sha256(wanted).hexdigest()):
                logger.warning("refused a line from %s, which does not know the key", line.peer)
                raise Denied("the other side does not prove that it knows the key")
            asked = msgpack.unpackb(wanted)
            request = Request(str(asked["line"]), asked["about"], tuple(asked["protocol"]))
        except (TypeError, KeyError, ValueError) as error:
            raise ProtocolMismatch("a gateway begins with a proof; this one began with something else") from error
        check_protocol(request.protocol, ours="session host", theirs="gateway")
        self._strangers.discard(line)
        line.trust(request)
        line.send({"proof": exchange.proof(Side.ANSWERS, self._certificate)})
        return request


def _new_certificate() -> tuple[ssl.SSLContext, str]:
    """Return a server's context with a certificate of its own, and the certificate's digest."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "loom session host")])
    began = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=1)  # clocks differ
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(began)
        .not_valid_after(began + _LIFETIME)
        .sign(key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with _private_file(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        + made.public_bytes(serialization.Encoding.PEM)
    ) as path:
        context.load_cert_chain(path)
    return context, hashlib.sha256(made.public_bytes(serialization.Encoding.DER)).hexdigest()


@contextlib.contextmanager
def _private_file(content: bytes) -> Iterator[str]:
    """Yield the path of a file that only this user can read; OpenSSL takes keys from nowhere else."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        yield file.name
