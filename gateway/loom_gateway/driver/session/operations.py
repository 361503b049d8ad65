"""Runs a session's operations, in the order in which the client made them.

Monarch's own calls return at once and deliver in order, so an operation is *started* in order, by the thread that
receives it, and answered when its future resolves. `loom_gateway.driver.monarch.futures` waits for the futures.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from loom.errors import LimitReached, LoomError, ProtocolMismatch, SupervisionError
from loom.latencies import Latencies
from loom.wire.codec import Decoder, Encoder
from loom.wire.messages import ADVERBS, Kind, Message
from loom.wire.mux import OrderKey
from loom.wire.texts import pack_texts
from loom_gateway.driver.clients.unclaimed import Undelivered
from loom_gateway.driver.handlers.calls import Calls
from loom_gateway.driver.handlers.hosts import Hosts
from loom_gateway.driver.handlers.logs import Logs
from loom_gateway.driver.handlers.meshes import Spawns
from loom_gateway.driver.handlers.ports import Ports
from loom_gateway.driver.handlers.processes import Processes
from loom_gateway.driver.handlers.reconfigure import Reconfigure
from loom_gateway.driver.handlers.runs import Runs
from loom_gateway.driver.handlers.sync import Syncs
from loom_gateway.driver.monarch.errors import as_loom_error, error_message
from loom_gateway.driver.monarch.futures import Answers, Gatherer, Key
from loom_gateway.driver.monarch.mesh_table import HOST_MESH, Entry, Meshes
from loom_gateway.driver.monarch.returned_meshes import MadeMeshes
from loom_gateway.driver.monarch.translations import TRANSLATIONS
from loom_gateway.driver.output.spool import LogSpool
from loom_gateway.driver.session.failures import Fault, Losses
from loom_gateway.driver.session.large_calls import LargeStarts
from loom_gateway.driver.session.local_api import Beside
from loom_gateway.driver.weaver_link import WeaverLink

__all__ = ["Asked", "Handler", "Operations"]

logger = logging.getLogger(__name__)

GRACE = 0.6
"""Seconds that Monarch has to say how a process died before its calls fail without that."""

STOP_TIMEOUT = 5.0
"""Seconds that stopping a mesh may take when the session ends; after that the workers kill what is left."""

Handler: TypeAlias = Callable[[Message, float], None]
"""Starts an operation, given its message and when it came (``time.perf_counter``)."""

_LIMITED = frozenset(ADVERBS.values()) - {Kind.BROADCAST}
"""What counts as in flight until it is answered, and may come in any number."""

_SPAWNS = {Kind.SPAWN_PROCS: "procs", Kind.SPAWN_ACTORS: "actors"}


Asked: TypeAlias = tuple[int, Sequence[Any]]
"""Kind and body of the message that asked for an operation."""

REMEMBERED = 1 << 14
"""Operations whose answers have been sent that are remembered, for clients that may not have received them."""


class Send(Protocol):
    """Takes a message for the client; one that is not eager may wait for the next flush."""

    def __call__(self, message: Message, eager: bool = True, key: OrderKey = None) -> None: ...


class _Pending(NamedTuple):
    """A call that has not been answered."""

    started: float
    entry: Entry | None
    """The mesh that was called."""
    convert: Callable[[Any], Any] | None
    """Makes what travels of what Monarch's future gives."""
    asked: Asked


class Operations:
    """The operations of one session. `start` is called by one thread at a time, the client's.

    Args:
        host_mesh: the Monarch host mesh of the session's workers.
        workers: addresses of its hosts.
        lifeline: host and port that every process of the session holds on to; see `process_gone`.
        weaver: tells the weaver of the processes, and them of it.
        loop: the driver's event loop.
        send: takes a message for the client.
        flush: sends the messages that were not eager.
        log_spool: where the session's log is written.
        has_room: whether lines that are printed may be added to what waits for the client.
        max_in_flight: operations that may be unanswered at once; 0: any number.
    """

    def __init__(
        self,
        host_mesh: Any,
        workers: Sequence[str],
        lifeline: tuple[str, int],
        weaver: WeaverLink,
        loop: asyncio.AbstractEventLoop,
        send: Send,
        flush: Callable[[], None],
        log_spool: LogSpool | None = None,
        has_room: Callable[[], bool] = lambda: True,
        max_in_flight: int = 0,
    ) -> None:
        self._max_in_flight = max_in_flight or sys.maxsize
        self.lifeline = lifeline
        self.weaver = weaver
        self.loop = loop
        self.send = send
        self.has_room = has_room
        self.meshes = Meshes()
        hosts = Entry("hosts", "hosts", host_mesh, HOST_MESH, ranks=tuple(range(len(host_mesh))))
        self.meshes.add(HOST_MESH, hosts)
        self.decoder = Decoder(self.meshes.resolve)
        self.passing_decoder = Decoder(self.meshes.resolve, passing_on=True)
        """For arguments that only pass through: arrays and tensors are not put together here."""
        self.encoder = Encoder(swaps={**MadeMeshes(self.meshes).swaps, **TRANSLATIONS})
        self.gatherer = Gatherer(loop, flush)
        self.answers = Answers(loop, self.answer, self.gatherer)
        self.latencies = Latencies()
        """How long calls took, from their arrival to their answers."""
        self._pending: dict[Key, _Pending] = {}
        self._answered: deque[tuple[int, Asked]] = deque(maxlen=REMEMBERED)
        self._losses = Losses(self.meshes)
        self.lost_hosts: set[int] = set()
        """Numbers of the worker hosts that are gone."""
        self.highest_id = 0
        """The highest id that a client has used."""
        self._large_starts = LargeStarts(self._start, self.meshes.root)
        self.calls = Calls(self)
        self.ports = Ports(self)
        self.processes = Processes(self)
        logs = Logs(self, log_spool)
        self.logs = logs.collector
        """Takes what is printed."""
        self.runs = Runs(self)
        self.hosts = Hosts(self, workers)
        self.syncs = Syncs(self)
        self.undelivered = Undelivered(self)
        self.beside = Beside(self)
        self._handlers: dict[int, Handler] = {
            **self.syncs.handlers,
            **Spawns(self).handlers,
            **self.ports.handlers,
            **self.calls.handlers,
            **logs.handlers,
            **self.runs.handlers,
            **self.undelivered.handlers,
            **self.hosts.handlers,
            **Reconfigure(self).handlers,
        }

    def start(self, message: Message) -> None:
        """Start an operation, or have it started; those before it that it depends on have been started."""
        if message.id > self.highest_id:
            self.highest_id = message.id
        if not self._large_starts.take(message):
            self._start(message)

    def read(self, message: Message) -> None:
        """Start an operation of a client that only watches. By any thread."""
        self._start(message)

    def _start(self, message: Message) -> None:
        started = time.perf_counter()
        try:
            handler = self._handlers.get(message.kind)
            if handler is None:
                raise ProtocolMismatch(f"this driver knows no operation {message.kind}")
            if len(self._pending) >= self._max_in_flight and message.kind in _LIMITED:
                raise LimitReached(
                    f"{len(self._pending)} operations of this session have not been answered, as many as the "
                    f"gateway's --max-in-flight allows: wait for some. This one was not begun"
                )
            handler(message, started)
        except Exception as error:  # noqa: BLE001 - whatever a user's __reduce__ or Monarch raised
            if message.kind in _SPAWNS:
                kind = _SPAWNS[Kind(message.kind)]
                self.meshes.fail(message.id, kind, str(message.body[1]), as_loom_error(error))
            self.fail(message.id, started, error)

    # -- answers --------------------------------------------------------------------------------------------

    def fail(
        self, ident: int, started: float, error: BaseException, index: int | None = None, eager: bool = True
    ) -> None:
        """Tell the client that an operation, or one answer of several, failed."""
        self.send(error_message(ident, error, _since(started), self.encoder, index), eager)

    def succeed(self, ident: int, started: float, value: Any, index: int | None = None, eager: bool = True) -> None:
        rpc_ms = _since(started)
        try:
            parts = self.encoder.dumps(value, "the result")
        except LoomError as error:
            self.fail(ident, started, error, index, eager)
            return
        self.send(Message(Kind.RESULT, ident, [rpc_ms] if index is None else [rpc_ms, index], parts), eager)

    def expect(
        self,
        message: Message,
        started: float,
        entry: Entry | None = None,
        index: int | None = None,
        convert: Callable[[Any], Any] | None = None,
    ) -> Key:
        """Note that an operation will be answered, or fail when a process of ``entry`` is gone."""
        key = (message.id, index)
        pending = self._pending[key] = _Pending(started, entry, convert, (message.kind, message.body))
        if entry is not None and self._losses.why_silent(entry) is not None:
            self.loop.call_soon_threadsafe(self.loop.call_later, GRACE, self._fail_if_pending, key, pending, entry)
        return key

    def forget(self, key: Key) -> None:
        """Take back what `expect` noted, for an operation that could not be started."""
        self._pending.pop(key, None)

    def answer(self, key: Key, value: Any, error: BaseException | None, eager: bool) -> None:
        """Answer an operation; on any thread."""
        pending = self._pending.pop(key, None)
        if pending is None:  # it was failed because a process is gone
            return
        ident, index = key
        self._answered.append((ident, pending.asked))
        if pending.asked[0] in _LIMITED:
            self.latencies.add(time.perf_counter() - pending.started)
        if error is not None:
            self.fail(ident, pending.started, error, index, eager)
            return
        try:
            if pending.convert is not None:
                value = pending.convert(value)
            self.succeed(ident, pending.started, value, index, eager)
        except Exception as broken:  # of ours: somebody waits, and this thread has others to answer
            logger.exception("the answer to operation %d could not be given", ident)
            self.fail(ident, pending.started, broken, index, eager)

    def note_asked(self, ident: int, asked: Asked) -> None:
        """Remember an operation whose answers are sent."""
        self._answered.append((ident, asked))

    def answered(self) -> dict[int, Asked]:
        """The operations of which some answer has been sent, as far back as they are remembered."""
        return dict(self._answered.copy())

    def pending(self) -> dict[Key, Asked]:
        """Every answer that is expected."""
        return {key: pending.asked for key, pending in self._pending.copy().items()}

    def client_left(self, unsent: Sequence[Message]) -> None:
        """Note that a client has been let go of, and what it has not received."""
        self.runs.new_client()
        self.ports.client_gone()
        self.undelivered.client_left(unsent)

    # -- processes that are gone ----------------------------------------------------------------------------

    def process_gone(self, procs: int, rank: int) -> None:
        """Note that a process is gone; fail the calls that wait for it unless Monarch does so within `GRACE`.

        On the event loop.
        """
        self._losses.add_process(procs, rank)
        self.processes.gone(procs, rank)
        self.beside.gone(procs, rank)
        self._fail_calls(lambda entry: entry.procs == procs and rank in entry.ranks)

    async def fault(self, fault: Fault) -> None:
        """Note actors that Monarch has stopped unasked; fail the calls on them as `process_gone` does."""
        lost = await self._losses.add_actors(fault)
        if lost is None:
            return
        ident, whole, ranks = lost
        details = {"mesh": whole.name, "id": ident, "ranks": ranks, "report": fault.why}
        self.send(Message(Kind.EVENT, 0, ["actors_lost"], [pack_texts(details)]))
        self._fail_calls(lambda entry: entry.root == ident and not set(ranks).isdisjoint(entry.ranks))

    def _fail_calls(self, on: Callable[[Entry], bool]) -> None:
        """Fail the calls that wait for meshes that will not answer, unless Monarch does so within `GRACE`."""
        self.calls.break_lines(on)
        for key, pending in self._pending.copy().items():
            if pending.entry is not None and on(pending.entry):
                self.loop.call_later(GRACE, self._fail_if_pending, key, pending, pending.entry)

    def host_gone(self, host: int) -> None:
        """Note that a worker host is gone, and with it each process on it, also those that were being spawned."""
        self.lost_hosts.add(host)
        self.syncs.host_gone(host)
        for procs, entry in self.meshes.whole("procs"):
            self.processes_gone_with(procs, entry, host)

    def processes_gone_with(self, procs: int, entry: Entry, host: int) -> None:
        """Note that the processes of a proc mesh on a lost host are gone. On the event loop."""
        for rank in entry.ranks:
            if entry.hosts[rank] == host:
                self.process_gone(procs, rank)

    def _fail_if_pending(self, key: Key, pending: _Pending, entry: Entry) -> None:
        if self._pending.get(key) is pending:
            self.answer(key, None, SupervisionError(self._losses.why_silent(entry) or "it is gone"), eager=True)

    # -- the end --------------------------------------------------------------------------------------------

    async def stop_meshes(self) -> None:
        """Stop every proc mesh of the session, newest first, each within `STOP_TIMEOUT` seconds."""
        running = [entry for _, entry in self.meshes.whole("procs") if not entry.stopped]
        stops = [self._stop_mesh(entry) for entry in reversed(running)]
        await asyncio.gather(self.syncs.stop(), *stops)

    async def _stop_mesh(self, entry: Entry) -> None:
        entry.stopped = True
        try:
            await asyncio.wait_for(entry.mesh.stop("the session has ended").as_asyncio(), STOP_TIMEOUT)
        except Exception as error:  # noqa: BLE001 - dead ranks cannot be stopped; the workers reap what is left
            logger.warning("stopping proc mesh %s: %s", entry.name, str(error)[:500])


def _since(started: float) -> float:
    return (time.perf_counter() - started) * 1000
