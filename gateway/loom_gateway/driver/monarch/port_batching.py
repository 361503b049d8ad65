"""The laptop's ports in the process of an actor: Monarch's port with a batcher in front.

Each message to a Monarch port costs its sender and its receiver some tens of microseconds. So messages in close
succession are batched: small plain values, after `RUSH` of them came in a row, for at most `PATIENCE` seconds. They
are pickled here and unpickled on the laptop only.

Order is kept: an actor's reply leaves after the messages that it sent to ports before.
"""

from __future__ import annotations

import logging
import queue
import struct
import threading
import time
import weakref
from pickle import dumps
from typing import Any, NamedTuple

from monarch._rust_bindings.monarch_hyperactor.pickle import _current_receiver_instance
from monarch._src.actor.actor_mesh import _Actor
from monarch.actor import Port, context

from loom.process.threads import keep_going
from loom.wire.codec import _is_plain

logger = logging.getLogger(__name__)

RUSH = 8  # number of messages in close succession that leave one by one before batching starts
CLOSE = 0.001  # seconds between two messages that still count as close succession
PATIENCE = 0.001  # seconds that a message waits for others to join its batch
MOST_MESSAGES = 512  # messages that complete a batch
MOST_BYTES = 64 << 10  # bytes that complete a batch


class PortBatch(NamedTuple):
    """Messages that are sent together."""

    sizes: bytes  # size of each pickle, four bytes big endian
    pickles: bytes  # pickles, back to back


class LaptopPort:
    """A Monarch port to a laptop. ``isinstance`` takes it for a ``monarch.actor.Port``."""

    __slots__ = ("_batcher", "_native")

    def __init__(self, native: Any, batcher: PortBatcher | None = None) -> None:
        self._native = native
        self._batcher = batcher

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # Port cannot be subclassed
        return Port  # type: ignore[no-any-return]

    def send(self, obj: Any) -> None:
        batcher = self._batcher
        if batcher is None:
            self._native.send(obj)
        else:
            batcher.send(self._native, obj)

    def exception(self, obj: Exception) -> None:
        """Send an exception, after the gathered messages; see ``monarch.actor.Port.exception``."""
        if self._batcher is not None:
            self._batcher.flush()
        self._native.exception(obj)

    @property
    def return_undeliverable(self) -> bool:
        """True if undeliverable messages come back; see ``monarch.actor.Port.return_undeliverable``."""
        return bool(self._native.return_undeliverable)

    @return_undeliverable.setter
    def return_undeliverable(self, value: bool) -> None:
        self._native.return_undeliverable = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def __reduce__(self) -> Any:
        return _arrive, (self._native,)

    def __repr__(self) -> str:
        return f"<Port to a laptop, {self._native._port_ref}>"


class _ReplyPort(LaptopPort):
    """The port for an actor's reply, which flushes all earlier messages to laptops first."""

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._native.__class__  # type: ignore[no-any-return]

    def send(self, obj: Any) -> None:
        _batchers.flush()
        self._native.send(obj)

    def exception(self, obj: Exception) -> None:
        _batchers.flush()
        self._native.exception(obj)

    def _resolve_and_send(self, result: object) -> Any:
        _batchers.flush()
        return self._native._resolve_and_send(result)

    def _resolve_and_send_blocking(self, result: object) -> None:
        _batchers.flush()
        self._native._resolve_and_send_blocking(result)

    def __reduce__(self) -> Any:
        return self._native.__reduce__()


class PortBatcher:
    """The batcher of one actor in front of one port. All of the actor's references to the port share it."""

    def __init__(self, native: Any, actor: str) -> None:
        self._native = native
        self._actor = actor
        self._lock = threading.Lock()
        self._pickles: list[bytes] = []
        self._bytes = 0  # of `_pickles`
        self._last = 0.0  # time of the last message
        self._rush = 0  # messages in close succession so far

    def send(self, native: Any, obj: Any) -> None:
        """Send an object through ``native``, or gather it for a batch."""
        now = time.perf_counter()
        with self._lock:
            self._rush = self._rush + 1 if now - self._last < CLOSE else 0
            self._last = now
            gather = self._rush >= RUSH and self._actor in _batchers.kept_behind
            if not gather or native._rank is not None or not _is_plain(obj):
                self._send_gathered()
                native.send(obj)
                return
            pickled = dumps(obj, 5)
            self._pickles.append(pickled)
            self._bytes += len(pickled)
            if len(self._pickles) == 1:
                _batchers.waiting.add(self)
                _batchers.woken.put(self)
            elif self._bytes >= MOST_BYTES or len(self._pickles) >= MOST_MESSAGES:
                self._send_gathered()

    def flush(self) -> None:
        with self._lock:
            self._send_gathered()

    def _send_gathered(self) -> None:
        if not self._pickles:
            return
        pickles, self._pickles, self._bytes = self._pickles, [], 0
        _batchers.waiting.discard(self)
        sizes = struct.pack(f">{len(pickles)}I", *map(len, pickles))
        self._native.send(PortBatch(sizes, b"".join(pickles)))


class _Batchers:
    """The batchers of this process."""

    def __init__(self) -> None:
        self.batchers: weakref.WeakValueDictionary[tuple[str, str], PortBatcher] = weakref.WeakValueDictionary()
        self.waiting: set[PortBatcher] = set()
        self.kept_behind: set[str] = set()
        """Actors whose replies leave after their own messages. An actor joins with its first message after the
        patch."""
        self.woken: queue.SimpleQueue[PortBatcher] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = False  # whether Monarch is patched and the flushing thread runs

    def batcher(self, native: Any) -> PortBatcher:
        actor = str(context().actor_instance.actor_id)
        key = (str(native._port_ref), actor)
        with self._lock:
            if not self._started:
                self._started = True
                _keep_replies_behind()
                flushing = "flush ports", self._flush_in_time
                threading.Thread(target=keep_going, args=flushing, name="batchers", daemon=True).start()
            batcher = self.batchers.get(key)
            if batcher is None:
                batcher = self.batchers[key] = PortBatcher(native, actor)
            return batcher

    def flush(self) -> None:
        for batcher in self.waiting.copy():
            batcher.flush()

    def _flush_in_time(self) -> None:
        while True:
            batcher = self.woken.get()
            time.sleep(PATIENCE)
            try:
                batcher.flush()
            except Exception:
                logger.exception("what was sent to a port of the laptop is lost")
            del batcher  # the loop's variable would keep it alive


_batchers = _Batchers()


def _arrive(native: Any) -> Any:
    if _current_receiver_instance() is not None or native._rank is not None:
        return native  # the port is in a reply, on a thread that belongs to no actor
    return LaptopPort(native, _batchers.batcher(native))


def _keep_replies_behind() -> None:
    """Patch Monarch to send an actor's replies after the messages that the actor itself sent to laptops."""
    original = _Actor._prepare

    def prepare(
        self: Any,
        ctx: Any,
        method: Any,
        message: Any,
        local_state: list[Any],
        mesh_references: list[Any],
        response_port: Any,
    ) -> Any:
        if _batchers.waiting:
            _batchers.flush()
        _batchers.kept_behind.add(str(ctx.actor_instance.actor_id))
        prepared = original(self, ctx, method, message, local_state, mesh_references, response_port)
        if prepared is None:
            return None
        args, kwargs, reply_to = prepared
        if reply_to is response_port:
            return args, kwargs, _ReplyPort(response_port)
        # an endpoint with an explicit port gets it as its first argument
        return (_ReplyPort(response_port), *args[1:]), kwargs, reply_to

    _Actor._prepare = prepare
