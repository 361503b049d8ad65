"""A TLS connection that one thread may read from while others write.

`ssl.SSLSocket` does not allow that. OpenSSL wants one thread at a time on a connection, and CPython does not ensure
it. Without a lock, CPython has crashed (python/cpython issues 76714 and 151508); with one, a thread that waited for
data kept the others from sending (137583, in 3.13.6). Here TLS turns bytes into bytes in memory (`ssl.SSLObject`)
under a lock of Loom's, and threads wait only on the plain socket, without the lock.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time

from loom.wire.messages import Buffer
from loom.wire.sender import try_send

FINISH_TIMEOUT = 1.0  # seconds for sending the rest of a last record when the connection is closed

_RECORD = 16 << 10

_CHUNK = 256 << 10  # bytes that are encrypted at a time, and received at a time


class TlsSocket:
    """The client's end of a TLS connection, with the few methods of a socket that a transport uses.

    The plain socket's timeout is for the handshake, which raises `OSError`; an `ssl.SSLError` says how it failed.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str) -> None:
        self._socket = sock
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._lock = threading.Lock()  # held while TLS encrypts or decrypts, which never waits
        self._sending = threading.Lock()
        """Held from encrypting a record until it has been sent, so that records leave in order."""
        self._unsent: Buffer = b""
        """Encrypted bytes that the socket did not take. Only the holder of `_sending` may use them."""
        self._over = False  # whether the other side has said that no more comes; only the reading thread uses it
        self._finishing: threading.Thread | None = None  # the thread that sends `_unsent` after a `try_send`
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
                with contextlib.suppress(OSError):  # the end of the handshake, or the alert that says what failed
                    self._socket.sendall(self._outgoing.read())

    def settimeout(self, timeout: float | None) -> None:
        self._socket.settimeout(timeout)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        self._socket.setsockopt(level, option, value)

    def fileno(self) -> int:
        """Return the plain socket's descriptor. It may be readable with half a record, which has no data yet."""
        return self._socket.fileno()

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Receive all data that has come, since `select` would not show what stayed here; b"" at the end."""
        while not self._over:
            received = self._socket.recv(size, flags)
            with self._lock:
                self._feed(received)
                data = self._decrypt()
            if data:
                return data
        return b""

    def _feed(self, data: bytes) -> None:
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

    def _decrypt(self) -> bytes:
        """Return the data that has come; notice whether it was the last."""
        pieces = []
        try:
            while piece := self._tls.read(_RECORD):
                pieces.append(piece)
            self._over = True
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            self._over = True  # closed or cut off: the WebSocket above tells these apart
        return b"".join(pieces)

    def try_send(self, data: Buffer) -> int:
        """Send without waiting; return how many bytes were taken.

        The bytes leave in whole records. If the socket takes only a part of the last one, a thread sends the rest.
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
        """Send the bytes that the socket did not take, holding the lock that `try_send` has handed over."""
        try:
            with contextlib.suppress(OSError):  # the reading thread meets the same error
                self._send_unsent()
        finally:
            self._sending.release()

    def _send_unsent(self) -> None:
        unsent, self._unsent = self._unsent, b""
        if unsent:
            self._socket.sendall(unsent)

    def sendall(self, data: Buffer) -> None:
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
        """Shut the plain socket down without a TLS close_notify: the WebSocket has sent its own close."""
        if self._finishing is not None:
            self._finishing.join(FINISH_TIMEOUT)
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()
