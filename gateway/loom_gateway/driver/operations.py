"""Runs a session's operations, in the order in which the client made them.

Monarch's own calls return at once and deliver in order, so an operation is *started* in order, by the thread that
receives it, and answered when its future resolves. `loom_gateway.driver.answers` waits for the futures.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from loom.errors import LoomError, OperationFailed, ProtocolMismatch, SupervisionError
from loom.signatures import endpoints
from loom.wire.codec import Decoder, Encoder
from loom.wire.messages import ADVERBS, Kind, Message
from loom_gateway.driver.answers import Answers, Gatherer, Key
from loom_gateway.driver.faults import error_message
from loom_gateway.driver.lifeline import bootstrap_on
from loom_gateway.driver.lines import MOST_LINES, Line, takes_lines
from loom_gateway.driver.meshes import HOST_MESH, Entry, Meshes

__all__ = ["Operations"]

logger = logging.getLogger(__name__)

GRACE = 0.6
"""Seconds that Monarch has to say how a process died before its calls fail without that."""

STOP_TIMEOUT = 5.0
"""Seconds that stopping a mesh may take when the session ends; after that the workers kill what is left."""

_ADVERB_OF = {kind: adverb for adverb, kind in ADVERBS.items()}
_SPAWNS = {Kind.SPAWN_PROCS: "procs", Kind.SPAWN_ACTORS: "actors"}


class Send(Protocol):
    """Takes a message for the client; one that is not eager may wait for the next flush."""

    def __call__(self, message: Message, eager: bool = True) -> None: ...


class _Pending(NamedTuple):
    """A call that has not been answered."""

    started: float
    entry: Entry | None
    """The mesh that was called."""
    convert: Callable[[Any], Any] | None
    """Makes what travels of what Monarch's future gives."""


class Operations:
    """The operations of one session. `start` is called by one thread at a time, the client's.

    Args:
        host_mesh: the Monarch host mesh of the session's workers.
        lifeline: host and port that every process of the session holds on to; see `process_gone`.
        loop: the driver's event loop.
        send: takes a message for the client.
        flush: sends the messages that were not eager.
    """

    def __init__(
        self,
        host_mesh: Any,
        lifeline: tuple[str, int],
        loop: asyncio.AbstractEventLoop,
        send: Send,
        flush: Callable[[], None],
    ) -> None:
        self._lifeline = lifeline
        self._loop = loop
        self._send = send
        self._meshes = Meshes()
        hosts = Entry("hosts", "hosts", host_mesh, HOST_MESH, ranks=tuple(range(len(host_mesh))))
        self._meshes.add(HOST_MESH, hosts)
        self._decoder = Decoder(self._meshes.resolve)
        self._encoder = Encoder()
        self._gatherer = Gatherer(loop, flush)
        self._answers = Answers(loop, self._answer, self._gatherer)
        self._lines: dict[int, Line] = {}
        self._pending: dict[Key, _Pending] = {}
        self._gone: set[tuple[int, int]] = set()
        self._lost_hosts: set[int] = set()
        self._run_threads = ThreadPoolExecutor(32, "run")
        self.highest_id = 0
        """The highest id that a client has used."""
        self._handlers: dict[int, Callable[[Message, float], None]] = {
            Kind.SPAWN_PROCS: self._spawn_procs,
            Kind.SPAWN_ACTORS: self._spawn_actors,
            Kind.VIEW: self._view,
            Kind.STOP: self._stop,
            Kind.INITIALIZED: self._initialized,
            Kind.CALL: self._call,
            Kind.CALL_ONE: self._call_one,
            Kind.CHOOSE: self._call,
            Kind.STREAM: self._stream,
            Kind.BROADCAST: self._broadcast,
            Kind.RUN: self._run,
            Kind.MESHES: self._list_meshes,
        }

    def start(self, message: Message) -> None:
        """Start an operation; those before it have been started."""
        if message.id > self.highest_id:
            self.highest_id = message.id
        started = time.perf_counter()
        try:
            handler = self._handlers.get(message.kind)
            if handler is None:
                raise ProtocolMismatch(f"this driver knows no operation {message.kind}")
            handler(message, started)
        except Exception as error:  # noqa: BLE001 - whatever a user's __reduce__ or Monarch raised
            if message.kind in _SPAWNS:
                kind = _SPAWNS[Kind(message.kind)]
                self._meshes.fail(message.id, kind, str(message.body[1]), _as_loom_error(error))
            self._fail(message.id, started, error)

    # -- answers --------------------------------------------------------------------------------------------

    def _fail(
        self, ident: int, started: float, error: BaseException, index: int | None = None, eager: bool = True
    ) -> None:
        self._send(error_message(ident, error, _since(started), self._encoder, index), eager)

    def _succeed(
        self, ident: int, started: float, value: Any, index: int | None = None, eager: bool = True
    ) -> None:
        rpc_ms = _since(started)
        try:
            parts = self._encoder.dumps(value, "the result")
        except LoomError as error:
            self._fail(ident, started, error, index, eager)
            return
        self._send(Message(Kind.RESULT, ident, [rpc_ms] if index is None else [rpc_ms, index], parts), eager)

    def _expect(
        self,
        message: Message,
        started: float,
        entry: Entry | None = None,
        index: int | None = None,
        convert: Callable[[Any], Any] | None = None,
    ) -> Key:
        """Note that an operation will be answered, or fail when a process of ``entry`` is gone."""
        key = (message.id, index)
        pending = self._pending[key] = _Pending(started, entry, convert)
        if entry is not None and self._gone and self._death(entry) is not None:
            self._loop.call_soon_threadsafe(
                self._loop.call_later, GRACE, self._fail_if_pending, key, pending, entry
            )
        return key

    def _answer(self, key: Key, value: Any, error: BaseException | None, eager: bool) -> None:
        """Answer an operation; on any thread."""
        pending = self._pending.pop(key, None)
        if pending is None:  # it was failed because a process is gone
            return
        ident, index = key
        if error is not None:
            self._fail(ident, pending.started, error, index, eager)
            return
        if pending.convert is not None:
            value = pending.convert(value)
        self._succeed(ident, pending.started, value, index, eager)

    # -- processes that are gone ----------------------------------------------------------------------------

    def process_gone(self, procs: int, rank: int) -> None:
        """Note that a process is gone; fail the calls that wait for it unless Monarch does so within `GRACE`.

        On the event loop.
        """
        self._gone.add((procs, rank))
        self._break_lines(lambda entry: entry.procs == procs and rank in entry.ranks)
        for key, pending in self._pending.copy().items():
            entry = pending.entry
            if entry is not None and entry.procs == procs and rank in entry.ranks:
                self._loop.call_later(GRACE, self._fail_if_pending, key, pending, entry)

    def host_gone(self, host: int) -> None:
        """Note that a worker host is gone, and with it each process on it, also those that were being spawned."""
        self._lost_hosts.add(host)
        for procs, entry in self._meshes.whole("procs"):
            self._processes_gone_with(procs, entry, host)

    def _processes_gone_with(self, procs: int, entry: Entry, host: int) -> None:
        for rank in entry.ranks:
            if entry.hosts[rank] == host:
                self.process_gone(procs, rank)

    def _death(self, entry: Entry) -> int | None:
        """A rank of a mesh whose process is gone."""
        gone = self._gone.copy()
        return next((rank for procs, rank in gone if procs == entry.procs and rank in entry.ranks), None)

    def _fail_if_pending(self, key: Key, pending: _Pending, entry: Entry) -> None:
        if self._pending.get(key) is not pending:
            return
        procs = self._meshes.entry(entry.procs)
        how = "was stopped" if procs.stopped else "is gone: it died, or its host did, or the network between"
        text = f"process {self._death(entry)} of proc mesh {procs.name!r} {how}"
        self._answer(key, None, SupervisionError(text), eager=True)

    # -- operations -----------------------------------------------------------------------------------------

    def _spawn_procs(self, message: Message, started: float) -> None:
        hosts, name, per_host = message.body
        bootstrap = self._decoder.loads(message.parts, "the bootstrap function")
        bootstrap = bootstrap_on(self._lifeline, message.id, bootstrap)
        on = self._meshes.entry(hosts)
        mesh = on.mesh.spawn_procs(per_host=dict(per_host), bootstrap=bootstrap, name=name)
        ranks = tuple(range(len(mesh)))
        host_of = tuple(host for host in on.ranks for _ in range(len(mesh) // len(on.ranks)))
        entry = Entry("procs", name, mesh, message.id, procs=message.id, ranks=ranks, hosts=host_of)
        self._meshes.add(message.id, entry)
        for host in self._lost_hosts.copy():
            self._loop.call_soon_threadsafe(self._processes_gone_with, message.id, entry, host)

    def _spawn_actors(self, message: Message, started: float) -> None:
        procs, name = message.body
        on = self._meshes.entry(procs)
        cls, args, kwargs = self._decoder.loads(message.parts, f"the class or an argument of {name!r}")
        actors = on.mesh.spawn(name, cls, *args, **kwargs)
        entry = Entry("actors", name, actors, message.id, procs=on.procs, ranks=on.ranks, cls=cls)
        self._meshes.add(message.id, entry)

    def _view(self, message: Message, started: float) -> None:
        of, labels, offset, sizes, strides = message.body
        try:
            self._meshes.add_view(message.id, of, labels, offset, sizes, strides)
        except Exception as error:  # noqa: BLE001 - the whole mesh's failure, or Monarch's refusal of the shape
            self._meshes.fail(message.id, "view", "", _as_loom_error(error))

    def _call(self, message: Message, started: float) -> None:
        mesh, endpoint = message.body
        adverb = _ADVERB_OF[Kind(message.kind)]
        bound = getattr(self._meshes.endpoint(mesh, endpoint), adverb)
        args, kwargs = self._decoder.loads(message.parts, f"an argument of {endpoint!r}")
        convert = _values if message.kind == Kind.CALL else None
        key = self._expect(message, started, self._meshes.entry(mesh), convert=convert)
        try:
            self._answers.soon(key, bound(*args, **kwargs))
        except BaseException:
            del self._pending[key]
            raise

    def _call_one(self, message: Message, started: float) -> None:
        mesh, name = message.body
        entry = self._meshes.entry(mesh)
        line = self._lines.get(mesh) or self._new_line(mesh, entry)
        endpoint = self._meshes.endpoint(mesh, name)
        resolved = self._meshes.resolved
        args, kwargs = self._decoder.loads(message.parts, f"an argument of {name!r}")
        key = self._expect(message, started, entry)
        try:
            if line is None or line.broken or self._meshes.resolved > resolved or not takes_lines(endpoint):
                self._answers.soon(key, endpoint.call_one(*args, **kwargs))
            else:
                line.call(key, name, endpoint, args, kwargs)
        except BaseException:
            del self._pending[key]
            raise

    def _new_line(self, mesh: int, entry: Entry) -> Line | None:
        if len(self._lines) >= MOST_LINES or len(entry.ranks) != 1 or entry.kind != "actors":
            return None
        line = self._lines[mesh] = Line(entry.mesh, self._loop, self._answer, self._gatherer)
        return line

    def _break_lines(self, to: Callable[[Entry], bool]) -> None:
        """Have some actors called in Monarch's own way from now on: it tells at once what is wrong with them."""
        for mesh, line in self._lines.copy().items():
            if to(self._meshes.entry(mesh)):
                line.broken = True

    def _stream(self, message: Message, started: float) -> None:
        mesh, endpoint = message.body
        bound = self._meshes.endpoint(mesh, endpoint).stream
        args, kwargs = self._decoder.loads(message.parts, f"an argument of {endpoint!r}")
        for index, future in enumerate(bound(*args, **kwargs)):
            key = self._expect(message, started, self._meshes.entry(mesh), index)
            self._answers.whenever(key, future)

    def _broadcast(self, message: Message, started: float) -> None:
        mesh, endpoint = message.body
        bound = self._meshes.endpoint(mesh, endpoint).broadcast
        args, kwargs = self._decoder.loads(message.parts, f"an argument of {endpoint!r}")
        bound(*args, **kwargs)

    def _initialized(self, message: Message, started: float) -> None:
        (mesh,) = message.body
        future = self._meshes.mesh(mesh).initialized
        self._answers.whenever(self._expect(message, started, convert=lambda _: True), future)

    def _stop(self, message: Message, started: float) -> None:
        mesh, reason = message.body
        entry = self._meshes.entry(mesh)
        entry.stopped = True
        self._break_lines(lambda called: mesh in (called.root, called.procs))
        future = entry.mesh.stop(reason)
        self._answers.whenever(self._expect(message, started, convert=lambda _: None), future)

    def _list_meshes(self, message: Message, started: float) -> None:
        listed = []
        for ident, entry in self._meshes.whole():
            if entry.kind == "hosts":
                continue
            described = None
            if entry.cls is not None:
                described = {name: sig.parameters for name, sig in endpoints(entry.cls).items()}
            class_name = entry.cls.__name__ if entry.cls is not None else ""
            mesh, slice_ = entry.mesh, entry.mesh._ndslice
            shape = (tuple(mesh._labels), slice_.offset, tuple(slice_.sizes), tuple(slice_.strides))
            listed.append((ident, entry.kind, entry.name, shape, class_name, described, entry.stopped))
        self._succeed(message.id, started, listed)

    def _run(self, message: Message, started: float) -> None:
        fn, args, kwargs = self._decoder.loads(message.parts, "the function or an argument of run()")

        key = self._expect(message, started)

        def run() -> None:
            try:
                result = fn(*args, **kwargs)
                if inspect.iscoroutine(result):
                    result = asyncio.run(result)
            except BaseException as error:  # noqa: BLE001 - raised again on the laptop
                self._answer(key, None, error, eager=True)
            else:
                self._answer(key, result, None, eager=True)

        self._run_threads.submit(run)

    # -- the end --------------------------------------------------------------------------------------------

    async def stop_meshes(self) -> None:
        """Stop every proc mesh of the session, newest first, each within `STOP_TIMEOUT` seconds."""
        running = [entry for _, entry in self._meshes.whole("procs") if not entry.stopped]
        stops = [self._stop_mesh(entry) for entry in reversed(running)]
        await asyncio.gather(*stops)

    async def _stop_mesh(self, entry: Entry) -> None:
        try:
            await asyncio.wait_for(entry.mesh.stop("the session has ended").as_asyncio(), STOP_TIMEOUT)
        except Exception as error:  # noqa: BLE001 - dead ranks cannot be stopped; the workers reap what is left
            logger.warning("stopping proc mesh %s: %s", entry.name, str(error)[:500])


def _values(value_mesh: Any) -> Sequence[Any]:
    return list(value_mesh.values())


def _since(started: float) -> float:
    return (time.perf_counter() - started) * 1000


def _as_loom_error(error: Exception) -> LoomError:
    if isinstance(error, LoomError):
        return error
    return OperationFailed(f"{type(error).__name__}: {error}")
