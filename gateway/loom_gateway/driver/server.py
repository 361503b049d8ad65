"""The driver's socket: opens the session for the first client, and serves its clients until the session ends."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Sequence
from typing import Any

from loom.errors import WorkersSilent
from loom.wire.handshake import Hello, check_protocol
from loom.wire.mux import MAX_MESSAGE
from loom_gateway.driver.clients.connection import ClientConnection
from loom_gateway.driver.lifetime import Lifetime
from loom_gateway.driver.monarch.errors import replace_fault_hook
from loom_gateway.driver.monarch.root_client import attach, probe
from loom_gateway.driver.output.spool import LogSpool
from loom_gateway.driver.session.session import Session
from loom_gateway.workers.sources import WorkerList

logger = logging.getLogger(__name__)


class DriverServer:
    """Serves one session to its clients.

    It is created on the driver's event loop, which does everything that is not on the path of a call.
    """

    def __init__(
        self,
        workers: Sequence[str],
        listener: socket.socket,
        log_spool: LogSpool,
        lifetime: Lifetime,
        max_message: int = MAX_MESSAGE,
        max_in_flight: int = 0,
        weaver_folder: str | None = None,
        workers_file: str | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._workers = WorkerList(list(workers))
        self._workers_file = workers_file
        self._listener = listener
        self._log_spool = log_spool
        self._lifetime = lifetime
        self._max_message = max_message
        self._max_in_flight = max_in_flight
        self._weaver_folder = weaver_folder
        self._session: Session | None = None
        self._opening = threading.Lock()  # held while the first client opens the session
        self._ending: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()
        """Set when the session is over and its meshes have been stopped."""
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # the listener was closed
            connection = ClientConnection(self, sock)
            threading.Thread(target=connection.run, name="client", daemon=True).start()

    def open(self, hello: Hello, session: str) -> Session:
        """Return the session. Attach to the workers first if this is the first client. On a client's thread.

        Raises:
            LoomError: the session cannot be opened, or is ending.
        """
        check_protocol(hello.protocol, ours="driver", theirs="client")
        self._lifetime.check_goes_on(session)
        with self._opening:
            if self._session is None:
                workers = self._read_workers() or self._workers
                self._session = Session(
                    session,
                    _attach(workers.addresses, session),
                    workers,
                    self._read_workers,
                    self._loop,
                    self._lifetime,
                    self.end,
                    self._weaver_folder,
                    self._log_spool,
                    self._max_message,
                    self._max_in_flight,
                )
            return self._session

    def _read_workers(self) -> WorkerList | None:
        """Return the gateway's current list, which covers at least this session's hosts; None if there is none."""
        return None if self._workers_file is None else WorkerList.read(self._workers_file)

    def end(self, reason: str) -> None:
        """Stop the session's meshes, tell the clients, and set `ended`. On the event loop."""
        if self._ending is None:
            self._lifetime.ends(reason)
            self._ending = self._loop.create_task(self._end(reason))

    async def _end(self, reason: str) -> None:
        if self._session is not None:
            await self._session.close(reason)
        self._listener.close()
        self.ended.set()


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
            f"worker may answer later."
        ) from error
    return host_mesh
