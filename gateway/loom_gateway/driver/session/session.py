"""An open session: its clients, its operations, and its end."""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from loom.driver_api import enter
from loom.errors import SessionRestarted, WorkersSilent
from loom.process import tasks
from loom.wire.bodies import RestoreSession, SessionEnded
from loom.wire.handshake import CAPABILITIES, Hello, Welcome
from loom_gateway.driver.clients.client import Carrier, Client
from loom_gateway.driver.clients.registry import Clients
from loom_gateway.driver.clients.unread_results import StoredResults
from loom_gateway.driver.lifetime import Lifetime
from loom_gateway.driver.monarch import native_calls
from loom_gateway.driver.monarch.errors import replace_fault_hook
from loom_gateway.driver.monarch.process_bootstrap import FIRST_NATIVE, tie_native_procs
from loom_gateway.driver.monarch.root_client import address_towards, attach, probe, spawn_weaver_mesh
from loom_gateway.driver.output.spool import LogSpool
from loom_gateway.driver.process_link.deaths import Watchers
from loom_gateway.driver.process_link.server import Printer, ProcessLink, ProcessLinkServer
from loom_gateway.driver.runs.output import current_processes
from loom_gateway.driver.runs.restart_file import RestartFile
from loom_gateway.driver.session.context import SessionContext
from loom_gateway.driver.session.dispatcher import OperationDispatcher
from loom_gateway.driver.session.replies import notice
from loom_gateway.driver.weaver_link import DriverWeaverLink
from loom_gateway.workers.sources import WorkerList

logger = logging.getLogger(__name__)


class DrivenSession:
    """The session of a driver. Attaches to the workers, on a client's thread while the event loop runs on another.

    Raises:
        LoomError: the workers cannot be reached.
    """

    def __init__(
        self,
        weaver: DriverWeaverLink,
        workers: Sequence[str],
        workers_file: str | None,
        loop: asyncio.AbstractEventLoop,
        lifetime: Lifetime,
        log_spool: LogSpool,
        max_message: int,
        max_in_flight: int,
        patience: float,
        results: StoredResults,
        restart_file: RestartFile,
    ) -> None:
        self.name = weaver.session
        self.weaver = weaver
        self._workers_file = workers_file
        self._workers = self._read_workers() or WorkerList(list(workers))
        self._loop = loop
        self._lifetime = lifetime
        self._clients = Clients(max_message, results)
        host_mesh = _attach(self._workers.addresses, self.name)
        self._watchers = Watchers()
        self._links = ProcessLinkServer(address_towards(self._workers.addresses), patience, self._watchers)
        self._context = SessionContext(
            host_mesh,
            self._workers.addresses,
            self._links.address,
            weaver,
            loop,
            self._clients.send,
            self._clients.flush,
            self._clients.has_room,
            results,
        )
        self._context.dead.end_of = self._links.end_of
        self._context.drives_for = self._clients.drives_for
        self._context.guest_of = self._clients.guest_of
        self._context.caller_is_gone = self._clients.caller_is_gone
        self._dispatcher = OperationDispatcher(self._context, lifetime, log_spool, max_in_flight, restart_file)
        lifetime.under_way = self._dispatcher.under_way
        lifetime.operations = lambda: self._dispatcher.begun
        lifetime.warn = self._warn_of_end
        replace_fault_hook(self._context.failures.report)
        enter(self._dispatcher.local_session)
        tie_native_procs(self._links.address, _note_native_procs)
        native_calls.ask_by(self._report_gone)
        spawn_weaver_mesh()
        asyncio.run_coroutine_threadsafe(self._start(), loop).result()

    def _warn_of_end(self, seconds: float) -> None:
        logger.warning("nothing happens in the session, which ends in %.0f s", seconds)
        self._context.send(notice("session_idle", {"seconds": round(seconds, 1)}))

    def _worker_addresses(self) -> list[str]:
        return list((self._read_workers() or self._workers).addresses)

    def _read_workers(self) -> WorkerList | None:
        return None if self._workers_file is None else WorkerList.read(self._workers_file)

    async def _start(self) -> None:
        self._context.failures.on_process_gone += [self._links.give_up, self._fail_calls_later]
        await self._links.start(
            self._process_gone,
            self._process_started,
            self._printer,
            self._context.weaver.address,
            self._dispatcher.processes.was_stopped,
            self._dispatcher.hosts.leaving,
        )
        self._dispatcher.hosts.start(self._read_workers, self._links.connected)
        weaver, latencies = self.weaver, self._context.replies.latencies
        limits = self._dispatcher.limits
        tasks.keep_running(
            "report to the weaver",
            lambda: weaver.report_calls(latencies, self._worker_addresses, limits, self._replicas),
        )

    def _replicas(self, idle: float | None) -> None:
        if idle is not None or self._dispatcher.processes.any_alive:
            self._lifetime.replicas(idle)

    def _process_started(self, procs: int, rank: int) -> None:
        if procs < FIRST_NATIVE:
            self._dispatcher.processes.started(procs, rank)

    def _printer(self, line: ProcessLink) -> Printer | None:
        return self._dispatcher.logs.printer(line) if line.procs < FIRST_NATIVE else None

    def _process_gone(self, procs: int, rank: int) -> None:
        if procs < FIRST_NATIVE:
            self._context.failures.process_gone(procs, rank)
        else:
            self._fail_calls_later(procs, rank)

    def _fail_calls_later(self, procs: int, rank: int) -> None:
        """Fail the cluster's calls that wait for a process, unless Monarch does it in time. On the event loop."""
        known = self._context.meshes.known(procs) is not None
        stopped = known and self._dispatcher.processes.was_stopped(procs, rank)
        self._loop.call_later(native_calls.GRACE, self._fail_calls, procs, rank, stopped)

    def _fail_calls(self, procs: int, rank: int, stopped: bool) -> None:
        native_calls.lose(procs, rank)
        self._watchers.lose(procs, rank, later=not stopped)

    def _report_gone(self, procs: int) -> None:
        """Fail this process's calls that wait for processes which were gone before."""

        def report() -> None:
            for rank in self._watchers.gone(procs):
                native_calls.lose(procs, rank)

        self._loop.call_soon_threadsafe(report)

    def admit(self, connection: Carrier, hello: Hello, guest: str | None) -> tuple[Client, bool]:
        """Return the greeting client, and whether it is new. Raise `LoomError` if it is refused.

        Args:
            guest: the client's user, if the session is another user's.
        """
        admitted = self._clients.admit(connection, hello, self._dispatcher, guest)
        if not hello.lane:  # the second connection of a client does not keep a session alive
            self._lifetime.client_came(connection)
        return admitted

    def welcome(self, client: Client, hello: Hello) -> Welcome:
        hosts = self._context.hosts
        return Welcome(
            session=self.name,
            workers=hosts.addresses[: hosts.first],
            joined=hosts.addresses[hosts.first :],
            meshes=(self._read_workers() or self._workers).meshes,
            capabilities=[name for name in hello.capabilities if name in CAPABILITIES],
            versions=_versions(),
            next_id=client.first_id,
            linger=self._lifetime.opened(hello.persist and client.guest is None),
            most=self._lifetime.left,
            mode=client.mode,
            stream=client.name,
            received=client.stream.received,
            max_message=client.max_message,
            may_end=client.guest is None,
            received_bulk=0 if client.stream.bulk is None else client.stream.bulk.received,
        )

    def restore(self, request: RestoreSession) -> None:
        """Go on with the session of a driver that has died. On a connection's thread."""
        self._lifetime.opened(request.persist, request.age)
        self._clients.restarted = SessionRestarted(
            f"session {self.name!r} goes on with another driver: the one before {request.why}, and its meshes and "
            f"what was not answered are gone. Its functions with restarts were started again; attach to it with "
            f"loom.connect(session={self.name!r})"
        )
        self._dispatcher.restore()

    def describe(self, subject: str) -> bytes:
        """Return a description of the session as JSON. Safe on any thread."""
        return self._dispatcher.describe(subject)

    def connected(self, client: Client) -> None:
        """Send a new client the notices about processes that earlier clients got."""
        send = functools.partial(self._clients.send_to, client)
        self._loop.call_soon_threadsafe(self._dispatcher.processes.send_all, send)

    def disconnected(self, client: Client, connection: Carrier) -> None:
        self._clients.disconnected(client, connection)
        self._lifetime.client_left(connection)

    async def close(self, reason: str) -> None:
        """Stop the session's meshes and tell the clients. On the event loop."""
        await self._dispatcher.close(reason)
        await self._loop.run_in_executor(None, self._clients.say_goodbye, SessionEnded(reason).message())


def _note_native_procs(mesh: Any) -> None:
    """Note that the function that runs in this thread has spawned a proc mesh with Monarch's own call."""
    if (processes := current_processes()) is not None:
        processes.native.append(mesh)


def _attach(workers: Sequence[str], session: str) -> Any:
    """Return a host mesh of the workers once they have answered."""
    probe(workers)
    # No session can report faults yet, but they must not end the process.
    replace_fault_hook(lambda mesh, report: logger.warning("failure of %s: %s", mesh, report))
    host_mesh = attach(workers, session)
    try:
        host_mesh.initialized.get()
    except RuntimeError as error:
        reason = str(error).partition("\n\n")[0]
        raise WorkersSilent(
            f"the workers accept connections but do not answer: {reason}. Look at their output; an overloaded "
            f"worker may answer later, but never one with another minor version of torchmonarch than the "
            f"gateway's, which is {version('torchmonarch')}."
        ) from error
    return host_mesh


def _versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for package in ("monarch-loom", "torchmonarch", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
