"""The second connection of a client, for the bulk lane of its stream (see `loom.wire.stream`).

A background thread makes the connection, and makes it again when it is lost. Without it, for example because a
network or a gateway allows one connection only, the first connection carries both lanes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from loom.errors import LoomError
from loom.process.backoff import Backoff
from loom.process.threads import keep_going
from loom.wire.bodies import Probed
from loom.wire.lost_frames import ConnectionWatch
from loom.wire.sender import FrameSender
from loom.wire.sockets import Waker
from loom.wire.stream import OutOfStep, Stream
from loom_proxy.session.transport_and_handshake import Handshake
from loom_proxy.transport.base import Transport

logger = logging.getLogger(__name__)

BACKOFF = Backoff(0.1, 30.0, jitter=0.5)  # seconds between attempts to connect, which grow while attempts fail


class BulkConnection:
    """The bulk lane's connection, from one loss to the next.

    ``connect`` connects and performs the handshake. ``broken`` is called with the error of a frame that makes no
    sense, which ends the session's connection, too. With ``watched``, the driver answers `loom.wire.lost_frames`.
    """

    def __init__(
        self,
        stream: Stream,
        sender: FrameSender,
        connect: Callable[[], Handshake],
        broken: Callable[[LoomError], None],
        watched: bool = False,
    ) -> None:
        self._stream = stream
        self._sender = sender
        self._connect = connect
        self._broken = broken
        self._watch = ConnectionWatch(stream, bulk=True) if watched else None
        self.waker = Waker()
        """Wakes the thread that receives from the first connection when large messages have come."""
        self._lock = threading.Lock()
        self._transport: Transport | None = None
        self._closed = False
        self._allowed = True  # whether the first connection's transport allows a second one; see `allow`
        self._retry_now = threading.Event()  # set to try again at once, or to notice `close`

    def start(self) -> None:
        connecting = "keep the second connection", self._run
        threading.Thread(target=keep_going, args=connecting, name="loom-bulk", daemon=True).start()

    def allow(self, allowed: bool) -> None:
        """Allow the connection, or close it: it needs a first transport that can be polled with the `waker`."""
        with self._lock:
            self._allowed = allowed
            if not allowed and self._transport is not None:
                self._transport.close()
        if allowed:
            self._retry_now.set()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._transport is not None:
                self._transport.close()
        self._retry_now.set()

    def let_go(self) -> None:
        """Leave the connection to the parent process, whose forked child this is."""
        self._closed = True
        self.waker.let_go()
        if self._transport is not None:
            self._transport.let_go()

    def _run(self) -> None:
        pauses = iter(BACKOFF)
        while not self._closed:
            began = time.monotonic()
            if self._allowed:
                try:
                    self._serve(self._connect())
                except LoomError as error:
                    logger.debug("no second connection: %s", error)
            if time.monotonic() - began > BACKOFF.most:
                pauses = iter(BACKOFF)
            if self._retry_now.wait(next(pauses)) and not self._closed:
                self._retry_now.clear()
                pauses = iter(BACKOFF)

    def _serve(self, handshake: Handshake) -> None:
        transport = handshake.transport
        with self._lock:
            if self._closed or not self._allowed:
                transport.close()
                return
            self._transport = transport
        transport.send_control = self._sender.put_raw_bulk  # type: ignore[method-assign]
        try:
            if self._watch is not None:
                self._watch.connected(time.monotonic(), 0, handshake.welcome.received_bulk)
            self._sender.attach_bulk(transport, handshake.welcome.received_bulk)
            self._take(handshake.frames)
            self._receive(transport)
        except OutOfStep as error:
            logger.warning("the second connection is made anew: %s", error)
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
        # A ping is queued behind outgoing bulk, and so is its answer. So bulk that moves counts as a sign of life.
        moved = time.monotonic()
        progress = self._stream.bulk.progress
        while (frames := transport.receive()) is not None:
            self._take(frames)
            if progress != self._stream.bulk.progress:
                moved = time.monotonic()
                progress = self._stream.bulk.progress
            if not transport.is_alive(moved):
                return
            if self._watch is not None:
                self._look_after(self._watch, transport)

    def _look_after(self, watch: ConnectionWatch, transport: Transport) -> None:
        assert self._stream.bulk is not None
        while self._stream.bulk.probes:
            watch.answered(Probed.from_body(self._stream.bulk.probes.popleft().body))
        now = time.monotonic()
        watch.check(now, transport.heard)
        if watch.due(now):
            self._sender.put_behind(lambda: watch.question(now), bulk=True)

    def _take(self, frames: list[bytes]) -> None:
        for data in frames:
            if self._stream.receive_bulk(data):
                self.waker.wake()
        self._sender.received()
