"""The second connection of a client, for the bulk lane of its stream (see `loom.wire.stream`).

It is made in the background and made again when it is lost. While there is none, because a network or a gateway
allows one connection only, say, the first one carries everything.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from loom.errors import LoomError
from loom.process.backoff import Backoff
from loom.wire.sender import FrameSender
from loom.wire.stream import Stream
from loom.wire.waker import Bell
from loom_proxy.session.handshake import Dialled
from loom_proxy.transport.transports import PING_AFTER, SILENCE, Transport

logger = logging.getLogger(__name__)

BACKOFF = Backoff(0.1, 30.0, jitter=0.5)
"""Seconds before it is tried again: after it was lost, and after it was refused time and again."""


class BulkConnection:
    """The second connection, from one loss to the next.

    Args:
        stream: the stream whose bulk lane it carries.
        sender: the stream's sender.
        dial: makes the connection and says hello on it; raises `LoomError`.
        broken: called when what came on it makes no sense, which ends the whole.
    """

    def __init__(
        self,
        stream: Stream,
        sender: FrameSender,
        dial: Callable[[], Dialled],
        broken: Callable[[LoomError], None],
    ) -> None:
        self._stream = stream
        self._sender = sender
        self._dial = dial
        self._broken = broken
        self.bell = Bell()
        """Rung when large messages have come, for the thread that receives from the first connection."""
        self._lock = threading.Lock()
        self._transport: Transport | None = None
        self._closed = False
        self._allowed = True
        self._now = threading.Event()

    def start(self) -> None:
        """Begin, in the background."""
        threading.Thread(target=self._run, name="loom-bulk", daemon=True).start()

    def allow(self, allowed: bool) -> None:
        """Have it, or be without: the thread that is to hear the bell can do so on some transports only."""
        with self._lock:
            self._allowed = allowed
            if not allowed and self._transport is not None:
                self._transport.close()
        if allowed:
            self._now.set()

    def close(self) -> None:
        """End it for good."""
        with self._lock:
            self._closed = True
            if self._transport is not None:
                self._transport.close()
        self._now.set()

    def _run(self) -> None:
        pauses = iter(BACKOFF)
        while not self._closed:
            began = time.monotonic()
            if self._allowed:
                self._try()
            if time.monotonic() - began > BACKOFF.most:
                pauses = iter(BACKOFF)
            if self._now.wait(next(pauses)) and not self._closed:
                self._now.clear()
                pauses = iter(BACKOFF)

    def _try(self) -> None:
        try:
            dialled = self._dial()
        except LoomError as error:
            logger.debug("no second connection: %s", error)
        else:
            self._serve(dialled)

    def _serve(self, dialled: Dialled) -> None:
        transport = dialled.transport
        with self._lock:
            if self._closed or not self._allowed:
                transport.close()
                return
            self._transport = transport
        transport.send_control = self._sender.put_raw_bulk  # type: ignore[method-assign]
        try:
            self._sender.attach_bulk(transport, dialled.welcome.received_bulk)
            self._take(dialled.frames)
            self._receive(transport)
        except LoomError as error:
            self._broken(error)
            self._closed = True
        finally:
            self._sender.detach_bulk(transport)
            with self._lock:
                self._transport = None
                transport.close()

    def _receive(self, transport: Transport) -> None:
        assert self._stream.bulk is not None
        # While bulk goes out, a ping and its answer are behind it. Then that it goes out is a sign of life.
        heard, pinged = time.monotonic(), False
        progress = self._stream.bulk.progress
        while (frames := transport.receive()) is not None:
            if frames or progress != self._stream.bulk.progress:
                heard, pinged = time.monotonic(), False
                progress = self._stream.bulk.progress
                self._take(frames)
                continue
            silence = time.monotonic() - heard
            if silence > SILENCE:
                return
            if silence > PING_AFTER and not pinged:
                pinged = True
                transport.ping()

    def _take(self, frames: list[bytes]) -> None:
        for data in frames:
            if self._stream.receive_bulk(data):
                self.bell.ring()
        self._sender.received()
