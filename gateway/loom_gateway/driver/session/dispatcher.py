"""The dispatcher, which runs a session's operations in the order in which the client made them.

Monarch's own calls return at once and deliver in order. So the thread that receives an operation *starts* it in
order, and its answer follows when its future resolves; see `loom_gateway.driver.session.replies`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from loom.errors import LimitReached, ProtocolMismatch, ReadOnlySession
from loom.wire.messages import READING, Kind, Message
from loom_gateway.driver.clients.unclaimed import UnclaimedResults
from loom_gateway.driver.handlers.calls import Calls
from loom_gateway.driver.handlers.hosts import HostWatcher
from loom_gateway.driver.handlers.logs import Logs
from loom_gateway.driver.handlers.meshes import MeshOperations
from loom_gateway.driver.handlers.ports import Ports
from loom_gateway.driver.handlers.processes import Processes
from loom_gateway.driver.handlers.runs import Runs
from loom_gateway.driver.handlers.sync import Syncs
from loom_gateway.driver.handlers.weaver import WeaverOperations
from loom_gateway.driver.output.spool import LogSpool
from loom_gateway.driver.session.context import Context
from loom_gateway.driver.session.large_calls import LARGE, LargeCalls
from loom_gateway.driver.session.local_api import LocalSession
from loom_gateway.driver.session.replies import LIMITED, Handler

WEAVER_TIMEOUT = 1.0
"""Seconds to report stopped processes to the weaver when the session ends."""


class Dispatcher:
    """Starts the operations of one session.

    Args:
        context: the session's state.
        end: called on the event loop, with the reason, when the client ends the session.
        log_spool: the file that keeps the session's log, or None.
        max_in_flight: the maximum number of unanswered operations; 0 for no limit.
    """

    def __init__(
        self,
        context: Context,
        end: Callable[[str], object],
        log_spool: LogSpool | None = None,
        max_in_flight: int = 0,
    ) -> None:
        self._context = context
        self._end = end
        self._replies = context.replies
        self._max_in_flight = max_in_flight
        self._highest_id = 0  # the highest id that any client has used
        self._closed = False
        self._large_calls = LargeCalls(self._start, context.meshes.root)
        logs = Logs(context, log_spool)
        self._logs = logs.collector
        self._ports = Ports(context)
        self._runs = Runs(context, self._logs)
        self._unclaimed = UnclaimedResults(context)
        self._syncs = Syncs(context)
        self._meshes = MeshOperations(context, self._syncs)
        self.processes = Processes(context)
        self.hosts = HostWatcher(context, on_gone=[self._syncs.host_gone], on_back=[self._syncs.host_back])
        self.local_session = LocalSession(context, self._syncs)
        context.failures.on_process_gone += [self.processes.gone, self.local_session.gone]
        self._handlers: dict[int, Handler] = {
            Kind.END: self._end_session,
            **Calls(context).handlers,
            **self._meshes.handlers,
            **self._ports.handlers,
            **self._runs.handlers,
            **self._unclaimed.handlers,
            **self._syncs.handlers,
            **self.hosts.handlers,
            **logs.handlers,
            **WeaverOperations(context).handlers,
        }

    @property
    def next_id(self) -> int:
        """The first id that no client has used."""
        return self._highest_id + 1

    def start(self, message: Message) -> None:
        """Start an operation, or queue it as a large call. Operations that it depends on are started first."""
        if message.id > self._highest_id:
            self._highest_id = message.id
        large_calls = self._large_calls
        if (large_calls.under_way or message.size >= LARGE) and large_calls.take(message):
            return
        self._start(message)

    def read(self, message: Message) -> None:
        """Start an operation of a watching client. Safe on any thread."""
        if message.kind in READING:
            self._start(message)
        else:
            text = "this client watches the session: attach with mode='drive' to change something"
            self._replies.fail(message.id, time.perf_counter(), ReadOnlySession(text))

    def _start(self, message: Message) -> None:
        started = time.perf_counter()
        if self._closed:
            return
        try:
            handler = self._handlers.get(message.kind)
            if handler is None:
                raise ProtocolMismatch(f"this driver knows no operation {message.kind}")
            if self._max_in_flight and message.kind in LIMITED:
                self._check_in_flight()
            handler(message, started)
        except Exception as error:  # noqa: BLE001 - a user's __reduce__ or Monarch may raise anything
            self._replies.fail(message.id, started, error)

    def _check_in_flight(self) -> None:
        in_flight = self._replies.in_flight
        if in_flight >= self._max_in_flight:
            raise LimitReached(
                f"{in_flight} operations of this session have not been answered, as many as the gateway's "
                f"--max-in-flight allows: wait for some. This one was not begun"
            )

    def _end_session(self, message: Message, started: float) -> None:
        self._context.loop.call_soon_threadsafe(self._end, "the client closed it")

    def client_left(self, unsent: Sequence[Message]) -> None:
        """Note that the driving client was disconnected, and which messages it had not received."""
        self._runs.new_client()
        self._ports.client_gone()
        self._unclaimed.client_left(unsent)

    def unclaimed(self, message: Message) -> None:
        """Keep an answer to a disconnected client."""
        self._unclaimed.take(message)

    def process_started(self, procs: int, rank: int) -> None:
        """Note that a process has started."""
        self.processes.started(procs, rank)

    def process_gone(self, procs: int, rank: int) -> None:
        """Note that a process is gone."""
        self._context.failures.process_gone(procs, rank)

    async def process_prints(
        self, procs: int, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Collect the output of a process."""
        await self._logs.serve(procs, rank, reader, writer)

    async def weaver_address(self) -> str:
        """Return the weaver's address, or an empty string if there is no weaver."""
        return await self._context.weaver.address()

    async def close(self) -> None:
        """Stop accepting operations, stop the session's meshes, and collect the last of their output."""
        self._closed = True
        await self._meshes.stop_all()
        await self._logs.end()
        await self._context.weaver.flush(WEAVER_TIMEOUT)
