"""A TLS connection that one thread may read from while others write.

`ssl.SSLSocket` is not made for that. OpenSSL wants one thread at a time on a connection, and CPython does not see
to it: without a lock of its own it has crashed (python/cpython issues 76714 and 151508), and with one, a thread
that waited for data kept the others from sending (137583, in 3.13.6). Here the lock is ours and nobody waits with
it: TLS turns bytes into bytes in memory (`ssl.SSLObject`), and what waits is the plain socket.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time

from loom.wire.messages import Buffer
from loom.wire.sender import try_send

FINISH_TIMEOUT = 1.0
"""Seconds that the rest of a last record has when the connection is closed."""

_RECORD = 16 << 10
"""Bytes in a TLS record at most."""

_CHUNK = 256 << 10
"""Bytes that are encrypted at a time, and received at a time."""


class TlsSocket:
    """The client's end of a TLS connection, with the few methods of a socket that a transport uses.

    Args:
        sock: a connected socket; its timeout is for the handshake.
        context: says whom to trust.
        host: the name that the certificate has to have.

    Raises:
        OSError: the handshake failed; an `ssl.SSLError` says how.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str) -> None:
        self._socket = sock
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._lock = threading.Lock()
        """Held while TLS works, which never waits."""
        self._sending = threading.Lock()
        """Held from encrypting something until it has been sent, so that it leaves in order."""
        self._unsent: Buffer = b""
        """Encrypted, and not taken by the socket. Whoever holds `_sending` may use it."""
        self._finishing: threading.Thread | None = None
        self._handshake()

    def _handshake(self) -> None:
        timeout = self._socket.gettimeout()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                self._tls.do_handshake()
                return
            except ssl.SSLWantReadError:
                self._socket.sendall(self._outgoing.read())
                if deadline is not None:
                    self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                self._feed(self._socket.recv(_CHUNK))
            finally:
                with contextlib.suppress(OSError):  # the last word: that we are done, or what was wrong
                    self._socket.sendall(self._outgoing.read())

    def settimeout(self, timeout: float | None) -> None:
        """Set the plain socket's timeout, in seconds; None waits for ever."""
        self._socket.settimeout(timeout)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """Set an option of the plain socket."""
        self._socket.setsockopt(level, option, value)

    def fileno(self) -> int:
        """The plain socket's. What is readable there may be half a record, which has no data yet."""
        return self._socket.fileno()

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Receive all data that has come, so that nothing stays where `select` does not see it; b"" at the end.

        Args:
            size: bytes to read from the plain socket at most.
            flags: of `socket.socket.recv`.

        Raises:
            BlockingIOError: no data has come, with ``MSG_DONTWAIT`` or after ``SO_RCVTIMEO``.
        """
        while True:
            received = self._socket.recv(size, flags)
            with self._lock:
                self._feed(received)
                data, over = self._decrypt()
            if data or over:
                return data

    def _feed(self, data: bytes) -> None:
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

    def _decrypt(self) -> tuple[bytes, bool]:
        """Return the data that has come, and whether it was the last."""
        pieces = []
        over = True
        try:
            while piece := self._tls.read(_RECORD):
                pieces.append(piece)
        except ssl.SSLWantReadError:
            over = False
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            pass  # it was closed, or cut off, which a WebSocket notices by itself
        return b"".join(pieces), over

    def try_send(self, data: Buffer) -> int:
        """Send without waiting; return how many bytes were taken.

        They go out in whole records. Of the last one the socket may take a part; a thread sends the rest.
        """
        if not self._sending.acquire(blocking=False):
            return 0
        done = 0
        handed_over = False
        try:
            view = memoryview(data)
            while done < len(view) and not self._unsent:
                piece = view[done : done + _RECORD]
                encrypted = self._encrypt(piece)
                done += len(piece)
                self._unsent = memoryview(encrypted)[try_send(self._socket, encrypted) :]
            if self._unsent and done == len(view):
                self._finishing = threading.Thread(target=self._finish, name="loom-tls", daemon=True)
                self._finishing.start()
                handed_over = True
        finally:
            if not handed_over:
                self._sending.release()
        return done

    def _finish(self) -> None:
        """Send what the socket did not take, with the lock that `try_send` has handed over."""
        try:
            with contextlib.suppress(OSError):  # who reads finds that out
                self._send_unsent()
        finally:
            self._sending.release()

    def _send_unsent(self) -> None:
        unsent, self._unsent = self._unsent, b""
        if unsent:
            self._socket.sendall(unsent)

    def sendall(self, data: Buffer) -> None:
        """Send everything, waiting for room."""
        with self._sending:
            self._send_unsent()
            view = memoryview(data)
            for start in range(0, len(view), _CHUNK):
                self._socket.sendall(self._encrypt(view[start : start + _CHUNK]))

    def _encrypt(self, data: Buffer) -> bytes:
        with self._lock:
            self._tls.write(data)
            return self._outgoing.read()

    def shutdown(self, how: int) -> None:
        """Shut the plain socket down, without TLS' own goodbye: a WebSocket has said one."""
        if self._finishing is not None:
            self._finishing.join(FINISH_TIMEOUT)
        self._socket.shutdown(how)

    def close(self) -> None:
        """Close the plain socket."""
        self._socket.close()
