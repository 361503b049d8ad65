"""The weaver's server: threadlets connect over TCP, the gateway over a unix socket.

Input goes to `loom.weaver.weaver.Weaver` at once. Output leaves after a commit, which happens every 100 ms while
there is something to store, and right away if a peer or a caller waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import psutil

from loom.control.commands import Acknowledgement
from loom.control.frame import Frame
from loom.control.framing import pack
from loom.errors import UnknownCommand
from loom.weaver.commands import GivenCommand
from loom.weaver.outbox import Output
from loom.weaver.replicas import Replica
from loom.weaver.serving.processes import is_alive, py_spy
from loom.weaver.serving.request_connection import RequestConnection
from loom.weaver.serving.requests import RequestHandler, timeout_of
from loom.weaver.serving.threadlet_link import ThreadletLink
from loom.weaver.states import ReplicaState
from loom.weaver.views import CommandState
from loom.weaver.weaver import Weaver

_log = logging.getLogger(__name__)

COMMIT_EVERY = 0.1
SOONEST_COMMIT = 0.005
"""Seconds between two commits at least, so that many urgent changes share one."""

STACK_WITHIN = 15.0

CHANGES_EVERY = 0.5
"""Seconds between two pushes of replicas' reports to watchers."""


class Server:
    """A server of a weaver on two listening sockets.

    Args:
        weaver: the weaver.
        clock: returns the time in seconds since the epoch, and never goes back.
        address: where threadlets find the weaver, for clients that ask for it.
        linger: seconds without a gateway, a driver or a threadlet after which the server ends.
    """

    def __init__(
        self,
        weaver: Weaver,
        clock: Callable[[], float],
        address: str = "",
        linger: float = math.inf,
    ) -> None:
        self.weaver = weaver
        self.clock = clock
        self.requests = RequestHandler(weaver, address)
        self.waits: Mapping[str, Callable[[dict[str, Any]], Awaitable[Any]]] = {
            "command_state": self._command_state,
            "replicas_in": self._replicas_in,
            "stacks": self._stack,
        }
        self.ended = asyncio.Event()
        """Set when the store is broken, nothing has been connected for ``linger`` seconds, or `stop` was called."""
        self.failure: Exception | None = None
        """The error that ended the server; None if it ended as requested."""
        self.callers: set[RequestConnection] = set()
        self.watchers: set[RequestConnection] = set()
        self._linger = linger
        self._last_peer_at = clock()
        """When a peer was last connected."""
        self._listeners: list[asyncio.AbstractServer] = []
        self._links: set[ThreadletLink] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_event: asyncio.Future[None] | None = None
        """Done at the next event; made by a request that waits for one."""
        self._commands_done: dict[str, asyncio.Event] = {}
        """An event for each command that callers wait for, set when every replica has acknowledged it."""
        self._committed = 0.0
        """When the last commit was, by the event loop's clock."""
        self._planned: asyncio.TimerHandle | None = None
        self._planned_soon = False
        """Whether the planned commit is an urgent one."""
        self._py_spies = asyncio.Semaphore(2)
        """Limits the processes of py-spy that run at once."""

    async def start(self, tcp: socket.socket, unix: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._listeners = [
            await loop.create_server(lambda: ThreadletLink(self), sock=tcp, backlog=4096),
            await loop.create_unix_server(lambda: RequestConnection(self), sock=unix),
        ]
        self.run(self._run_ticks())
        self.plan_commit()

    async def stop(self) -> None:
        """Commit what has come in, and close everything."""
        for listener in self._listeners:
            listener.close()
        if self.failure is None:
            self.commit()
        for task in list(self._tasks):
            task.cancel()
        for connection in [*self._links, *self.callers]:
            connection.close()
        self.ended.set()

    def run(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def plan_commit(self) -> None:
        """Plan a commit: soon if a peer or a caller waits for it, else in the usual time."""
        urgent = self.weaver.urgent
        if self._planned is not None:
            if self._planned_soon or not urgent:
                return
            self._planned.cancel()
        self._planned_soon = urgent
        loop = asyncio.get_running_loop()
        at = self._committed + (SOONEST_COMMIT if urgent else COMMIT_EVERY)
        self._planned = loop.call_at(max(at, loop.time()), self.commit)

    def commit(self) -> None:
        """Store the changes, and send the output."""
        if self._planned is not None:
            self._planned.cancel()
            self._planned = None
        if self.failure is not None:
            return
        self._committed = asyncio.get_running_loop().time()
        try:
            output = self.weaver.commit(self.clock())
        except sqlite3.Error as error:
            # Without a store no report can be acknowledged. Threadlets keep unstored reports for the next weaver.
            _log.error("cannot store what replicas report: %s", error)
            self.failure = error
            self.ended.set()
            return
        self._send_output(output)
        if self.weaver.urgent:
            self.plan_commit()

    def add_link(self, link: ThreadletLink) -> None:
        self._links.add(link)

    def drop_link(self, link: ThreadletLink, replica: Replica | None, process: psutil.Process | None) -> None:
        """Note that a link is gone; check whether its process is gone too, if the process is on this host."""
        self._links.discard(link)
        self.weaver.lost(link, self.clock())
        if replica is not None and process is not None:
            self.run(self._report_if_dead(replica, replica.instance, process))
        self.plan_commit()

    async def _stack(self, arguments: dict[str, Any]) -> str:
        replica = self.weaver.known.replica(str(arguments.get("replica")))
        came: asyncio.Queue[str] = asyncio.Queue()
        self.weaver.stacks.want(replica, tell=came.put_nowait)
        self.plan_commit()
        return await came.get()

    async def _command_state(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the acknowledgements of a command, once all have come or the time is over."""
        id, timeout = str(arguments.get("id")), timeout_of(arguments, 10.0)
        command = self.weaver.known.commands.get(id)
        if command is None:
            raise UnknownCommand(f"there is no command {id!r:.80}, or it was done long ago")
        if not command.done and timeout > 0:
            done = self._commands_done.setdefault(id, asyncio.Event())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(done.wait(), timeout)
        known = command.acknowledgements | {
            name: Acknowledgement.failed(self._why_waiting(command, name), waiting=True) for name in command.waiting
        }
        return CommandState(id, tuple(known), command.done, known).to_body()

    async def _replicas_in(self, arguments: dict[str, Any]) -> list[tuple[int | None, str]]:
        """Return rank and id of the replicas in a mesh, once each of its ``ranks`` has one or the time is over."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_of(arguments, 0.0)
        while True:
            found = self.requests.replicas_in(arguments)
            left = until - loop.time()
            if left <= 0 or {rank for rank, _ in found}.issuperset(arguments.get("ranks") or ()):
                return found
            if self._next_event is None:
                self._next_event = loop.create_future()
            await asyncio.wait((self._next_event,), timeout=left)

    def _why_waiting(self, command: GivenCommand, id: str) -> str:
        replica = self.weaver.known.replicas.get(id)
        state = "gone" if replica is None else replica.state.value
        since = self.clock() - command.time
        hint = "; it is told when it is connected again" if state == ReplicaState.RECOVERING else ""
        return f"replica {id!r} has not applied it in {since:.1f} s; it is {state}{hint}"

    def _send_output(self, output: Output) -> None:
        last: Frame | None = None
        data = b""
        for peer, frame in output.frames:
            assert isinstance(peer, ThreadletLink)
            if frame is None:
                peer.close()
                continue
            if frame is not last:
                last, data = frame, pack(frame.to_body())
            peer.write(data)
        for command in output.done:
            if (done := self._commands_done.pop(command.id, None)) is not None:
                done.set()
        for id, replica in output.stacks:
            self.run(self._get_stack(id, replica))
        if output.events and self._next_event is not None:
            self._next_event.set_result(None)
            self._next_event = None
        if output.events and self.watchers:
            for event in output.events:
                self._push({"event": event.to_body()})
        for caller in list(self.callers):
            caller.flush()

    def _push(self, update: dict[str, Any]) -> None:
        for watcher in list(self.watchers):
            watcher.push(update)

    async def _get_stack(self, id: str, replica: Replica) -> None:
        link = replica.link
        text = None
        if isinstance(link, ThreadletLink) and link.process is not None and is_alive(link.process):
            async with self._py_spies:
                text = await py_spy(replica.pid)
        if text is None and self.weaver.stacks.ask_threadlet(id):
            self.plan_commit()
            await asyncio.sleep(STACK_WITHIN)
            text = "its threadlet did not answer: the interpreter may be held by native code"
        self.weaver.stacks.take(id, text or "it is not connected")
        self.plan_commit()

    async def _report_if_dead(self, replica: Replica, instance: str, process: psutil.Process) -> None:
        """Report a process's death.

        The check is repeated, because a process closes its sockets before it is gone.
        """
        for wait in (0.0, 0.02, 0.1, 0.3, 0.5):
            await asyncio.sleep(wait)
            if not is_alive(process):
                self.weaver.died(replica, instance, f"its process {process.pid} is gone", self.clock())
                self.plan_commit()
                return

    async def _run_ticks(self) -> None:
        changed = 0.0
        while True:
            await asyncio.sleep(COMMIT_EVERY)
            now = self.clock()
            self.weaver.tick(now)
            self.weaver.known.watching = bool(self.watchers)
            if self.watchers and now >= changed + CHANGES_EVERY:
                changed = now
                changes = self.weaver.known.take_changes()
                if any(changes.values()):
                    self._push({"changes": changes})
            self.plan_commit()
            if self.callers or self._links:
                self._last_peer_at = now
            elif now > self._last_peer_at + self._linger:
                _log.info("nobody has been here for %g s", self._linger)
                self.ended.set()


def monotonic_clock() -> Callable[[], float]:
    """Return a clock of seconds since the epoch that changes of the system's time do not affect."""
    start = time.time() - time.monotonic()
    return lambda: start + time.monotonic()
